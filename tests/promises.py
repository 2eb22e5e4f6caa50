"""What the package promises, the test that holds it, and what it must notice.

Each row names a promise of README.md or of a guide, a test of the default run,
and a mutant: one change of one file, after which the package still runs and
gives a wrong number, hangs or loses something, and with which that test fails.
`python -m tests.programs.mutation_check` applies the mutants one by one. When a
file is rewritten, its rows are replaced, never dropped.
"""

from typing import NamedTuple


class Promise(NamedTuple):
    """A row.

    Attributes:
      text: The promise.
      test: The id of the test.
      file: The file that the mutant changes, below tf_xshard/.
      old: Text that occurs once in that file.
      new: What the mutant has in its place.
      cluster: Whether the test starts several processes; such rows are checked
        one at a time.
    """

    text: str
    test: str
    file: str
    old: str
    new: str
    cluster: bool = False


C = "tests/conformance/"
O = "tests/optimizers/"  # noqa: E741
V = "tests/compat/v1/"
K = "tests/tf_keras/aggregation_test.py::"
_EQUAL = C + "equality_with_one_device_test.py::test_equal_to_one_device"
_ORACLE = C + "oracle_test.py::"
_NESTING = C + "nesting_test.py::"
_CONTEXTS = C + "contexts_test.py::"
_AGN = O + "agn_optimizer_test.py::"
_COMMIT = O + "commit_test.py::"
_PARTIAL = O + "partial_steps_test.py::"
_NOT_REDUCED = (
    "optimizers/cross_shard.py",
    "batch, carry = reduce(batch, site, groups, self._reduction, carry)",
    "batch = batch.multiplied()",
)
_ALL_MEMBERS = (
    "collectives/subgroups.py",
    "self._members = tuple(groups)[groups.group_of(site.replica_id)]",
    "self._members = tuple(range(groups.num_replicas))",
)
_NOT_UNDONE = (
    "optimizers/stack.py",
    "            return site.num_replicas\n        return 1",
    "            return 1\n        return 1",
)
_NO_PRE_HOOK = (
    "optimizers/cross_shard.py",
    "        batch = self._pre_hook(batch, inner.scale_loss)\n",
    "",
)
_ONE_CENTER = (
    "optimizers/agn.py",
    "        groups = plan.groups(self, site)\n        self._seen",
    "        groups = plan.groups(self, "
    "site).single(site.num_replicas)\n"
    "        self._seen",
)
_A_WHOLE_PERIOD = (
    "optimizers/agn.py",
    "                pending,\n"
    "                optimizer_state.indices_of(self, var_list)",
    "                self._period,\n"
    "                optimizer_state.indices_of(self, var_list)",
)
_HALF_OF_UPDATE = (
    "optimizers/agn.py",
    "            total = self._center_pairs.change_here(index)",
    "            total = 0.5 * self._center_pairs.change_here(index)",
)
_NO_GATE = (
    "optimizers/commit.py",
    "return tf.control_dependencies([tf.group(*flat)])",
    "return contextlib.nullcontext()",
)
_OWN_ARRIVAL = (
    "optimizers/commit.py",
    "return [_merged(own, lambda every: tf.group(*every))]",
    "return [own]",
)


COLLECTIVES_AND_REDUCTION: list[Promise] = [
    Promise(
        "group_reduce on a TPU reduces each group apart",
        "tests/reduction/group_reduce_test.py::test_nested_value"
        "s[tpu-True-mean]",
        "collectives/__init__.py",
        "    if channel.groups.num_groups == 1:\n",
        "    if channel.groups.num_groups:\n",
    ),
    Promise(
        "a TPU's groups do not mix",
        "tests/reduction/group_reduce_test.py::test_nested_value"
        "s[tpu-True-mean]",
        "collectives/cross_replica_sum.py",
        "group_assignment=self.channel.groups.to_list()",
        "group_assignment=[sum(self.channel.groups.to_list(), [])]",
    ),
    Promise(
        "groups of a TPU whose numbering is not the strategy's do not mix",
        "tests/reduction/group_reduce_test.py::test_nested_value"
        "s[tpu_permuted-True-sum]",
        "collectives/one_hot.py",
        "return [tf.gather(total, index) for total in sums]",
        "return [tf.gather(total, 0) for total in sums]",
    ),
    Promise(
        "an overflow stays in its group, in eager steps of several workers",
        "tests/reduction/group_reduce_test.py::test_nested_value"
        "s[multi_worker-False-mean]",
        "collectives/one_hot.py",
        "return tf.where(slots, tensor[tf.newaxis], tf.zeros_like(tensor))",
        "return tf.cast(slots, tensor.dtype) * tensor[tf.newaxis]",
    ),
    Promise(
        "groups do not mix in eager steps",
        "tests/reduction/group_reduce_test.py::test_nested_value"
        "s[mirrored-False-sum]",
        "collectives/merge_call.py",
        "combined[self.groups.group_of(replica_id)]",
        "combined[0]",
    ),
    Promise(
        "8-bit sums work in eager steps",
        "tests/conformance/quantized_test.py::test_nothing_is_lost[eager]",
        "collectives/merge_call.py",
        "return [stack[:, position] for stack in stacks]",
        "return [stack[:, 0] for stack in stacks]",
    ),
    Promise(
        "groups do not mix in a tf.function",
        "tests/reduction/group_reduce_test.py::test_nested_value"
        "s[mirrored-True-mean]",
        "collectives/subgroups.py",
        "self._members = tuple(groups)[groups.group_of(site.replica_id)]",
        "self._members = tuple(range(groups.num_replicas))",
    ),
    Promise(
        "replicas may have different numbers of sparse rows",
        "tests/collectives/subgroups_test.py::test_ranks_are_positions[graph]",
        "collectives/subgroups.py",
        "gathered.append(tf.boolean_mask(blocks, is_row))",
        "gathered.append(blocks)",
    ),
    Promise(
        "large groups of one process exchange the right rows",
        "tests/collectives/subgroups_test.py::test_ranks_are_positions[twelve]",
        "collectives/subgroups.py",
        "                tf.gather(rows, indices),\n",
        "                rows[: len(indices)],\n",
    ),
    Promise(
        "NCCL is used for whole GPUs only",
        "tests/collectives/subgroups_test.py::test_nccl_is_for_w"
        "hole_gpus[mirrored-/job:localhost/replica:0/task:0/devi"
        "ce:GPU:1-gpus2-auto]",
        "collectives/subgroups.py",
        'return "auto" if site_lib.has_split_gpus() else "nccl"',
        'return "nccl"',
    ),
    Promise(
        "an overflow on one replica makes the replicas of all groups skip",
        "tests/reduction/loss_scaling_test.py::test_an_overflow_"
        "on_one_replica[two_groups-mirrored]",
        "collectives/transport.py",
        "        return dataclasses.replace(self, groups=groups)\n",
        "        return self\n",
    ),
    Promise(
        "each replica updates its own shard on a TPU",
        "tests/optimizers/sharded_update_test.py::test_settings_"
        "are_one_devices[ema_tpu]",
        "collectives/transport.py",
        "return [tf.gather(total, position) for total in self.sum(rows)]",
        "return [tf.gather(total, 0) for total in self.sum(rows)]",
    ),
    Promise(
        "the ledger counts what runs",
        "tests/communication_test.py::test_what_runs_is_counted",
        "collectives/counters.py",
        "value=tf.convert_to_tensor([1, *cost], tf.int64)",
        "value=tf.convert_to_tensor([2, *cost], tf.int64)",
    ),
    Promise(
        "counters start at zero",
        "tests/communication_test.py::test_what_runs_is_counted",
        "collectives/runtime_variables.py",
        "value=tf.zeros(shape, dtype)",
        "value=tf.ones(shape, dtype)",
    ),
    Promise(
        "an all-reduce sends 2 (g - 1) / g of its bytes",
        "tests/communication_test.py::test_what_runs_is_counted",
        "collectives/recorder.py",
        "passes = 2 if operation == ALL_REDUCE else 1",
        "passes = 1",
    ),
    Promise(
        "processes get each round's texts",
        "tests/collectives/rendezvous_test.py::test_texts_of_each_round",
        "collectives/process_gather.py",
        "            _rounds[what] = number + 1\n",
        "            _rounds[what] = number\n",
    ),
    Promise(
        "processes get each other's whole state",
        "tests/collectives/rendezvous_test.py::test_payloads_of_any_length",
        "collectives/process_gather.py",
        "row.tobytes()[:size]",
        "row.tobytes()",
    ),
    Promise(
        "an error names the worker that the others wait for",
        "tests/collectives/rendezvous_test.py::test_workers_that"
        "_do_not_wait_are_named",
        "collectives/silent_workers.py",
        "                found.append(rank)\n",
        "                found.append(0)\n",
    ),
    Promise(
        "buckets keep the order of variables of one shape",
        "tests/communication_test.py::test_buckets[45-1]",
        "reduction/buckets.py",
        "parts = _unpacked(total, shapes, num_zeros(pack))",
        "parts = _unpacked(total, shapes, num_zeros(pack))[::-1]",
    ),
    Promise(
        "16-bit sums become the variable's type again",
        "tests/communication_test.py::test_what_a_transport_gets"
        "[16-bfloat16-True]",
        "reduction/buckets.py",
        "            total = tf.cast(total, tensors[pack[0]].dtype)\n"
        "            shapes",
        "            shapes",
    ),
    Promise(
        "clip_by_global_norm clips all gradients together",
        "tests/reduction/gradients_test.py::test_the_reduced_gra"
        "dient_is_clipped",
        "reduction/clipping.py",
        "tf.linalg.global_norm(present)",
        "tf.linalg.global_norm(present[:1])",
    ),
    Promise(
        "clip_by_value does not hide an overflow",
        "tests/reduction/loss_scaling_test.py::test_clipped_valu"
        "es_that_are_not_finite_stay",
        "reduction/clipping.py",
        "return tf.where(tf.math.is_finite(x), clipped, x)",
        "return clipped",
    ),
    Promise(
        "rounding errors are added to the next gradient",
        "tests/conformance/quantized_test.py::test_nothing_is_lost[eager]",
        "reduction/error_feedback.py",
        "        + "
        "tf.cast(carry[replica_variables.key(variable)], gradient.dtype)\n",
        "        + tf.zeros_like(gradient)\n",
    ),
    Promise(
        "a changing loss scale does not change rounding errors",
        "tests/conformance/quantized_test.py::test_neither_scale"
        "_nor_overflow_changes_anything",
        "reduction/error_feedback.py",
        "name: value / tf.cast(unit, value.dtype)",
        "name: value",
    ),
    Promise(
        "float64 keeps its digits in a mean",
        "tests/reduction/gradients_test.py::test_float64_keeps_a"
        "ll_its_digits[mean]",
        "reduction/gradients.py",
        "    return tf.constant(number, dtype)\n",
        "    return tf.cast(tf.constant(number, tf.float32), dtype)\n",
    ),
    Promise(
        "the gradient of group_reduce is reduced",
        "tests/reduction/group_reduce_test.py::test_its_gradient"
        "_reduces_the_upstream_gradients[tpu-mean]",
        "reduction/group_reduce.py",
        "        of_results = _reduced(\n"
        "            own.with_values(values), site, groups, "
        "reduction, reducers\n"
        "        )\n",
        "        of_results = own.with_values(values)\n",
    ),
    Promise(
        "each tower weighs as much as the items of its loss",
        "tests/reduction/loss_records_test.py::test_each_tower_w"
        "eighs_as_much_as_its_rows[True]",
        "reduction/loss_records.py",
        "common_num_items(records[first : first + size])",
        "common_num_items(records[:size])",
    ),
    Promise(
        "each call of a round weighs as much as the items of its loss",
        "tests/reduction/loss_records_test.py::test_each_tower_w"
        "eighs_as_much_as_its_rows[False]",
        "reduction/loss_records.py",
        "        return numbers[0] if numbers else None\n",
        "        return None\n",
    ),
    Promise(
        "an overflow is voted on by all replicas of a TPU",
        "tests/reduction/loss_scaling_test.py::test_an_overflow_"
        "on_one_replica[two_groups-tpu]",
        "reduction/loss_scaling.py",
        "collectives.transport_for(site, channel.over_all())",
        "collectives.transport_for(site, channel)",
    ),
    Promise(
        "owners send their own variables",
        "tests/optimizers/sharded_update_test.py::test_every_opt"
        "imizer_is_one_device[owned]",
        "reduction/owners.py",
        "[pack.row(sent, position) for pack in packs]",
        "[pack.row(sent, 0) for pack in packs]",
    ),
    Promise(
        "a variable without a gradient in its group stays",
        "tests/optimizers/sharded_update_test.py::test_none_and_"
        "sparse_gradients[WholeSGD-False]",
        "reduction/presence.py",
        "any(pattern[index].kind != NONE for pattern in group)",
        "any(pattern[index].kind != NONE for pattern in patterns)",
    ),
    Promise(
        "a rounding error of a quantized sum is kept once",
        "tests/conformance/quantized_test.py::test_nothing_is_lost[eager]",
        "reduction/quantization.py",
        "own = tf.one_hot(transport.position(), group_size)[:, tf.newaxis]",
        "own = tf.ones([group_size, 1])",
    ),
    Promise(
        "stochastic rounding is right on average",
        "tests/conformance/quantized_test.py::test_rounding_at_r"
        "andom_is_right_on_average",
        "reduction/quantization.py",
        "tf.floor(ratios + noise)",
        "tf.floor(ratios + 0.5)",
    ),
    Promise(
        "group_reduce returns each row once",
        "tests/reduction/group_reduce_test.py::test_nested_value"
        "s[multi_worker-True-sum]",
        "reduction/reducer.py",
        "        indexed_slices.unique(\n            tf.IndexedSlices(",
        "        (lambda one: one)(\n            tf.IndexedSlices(",
    ),
    Promise(
        "gradients are sent in the type of Communication",
        "tests/communication_test.py::test_the_error_on_eight_re"
        "plicas[tpu-float16]",
        "reduction/wire.py",
        "    return tf.cast(tensor, dtype)\n",
        "    return tensor\n",
    ),
    Promise(
        "error feedback brings bfloat16 closer to float32",
        "tests/conformance/quantized_test.py::test_feedback_brin"
        "gs_it_closer_to_float32[bfloat16-WholeSGD-0.6]",
        "reduction/wire.py",
        "        tensor - tf.cast(one, tensor.dtype)\n",
        "        tf.zeros_like(tensor)\n",
    ),
]

CROSS_SHARD: list[Promise] = [
    Promise(
        "shard_update=True: Lamb sees whole variables",
        "tests/optimizers/sharded_update_test.py::test_every_opt"
        "imizer_is_one_device[owned]",
        "optimizers/update/kinds.py",
        "is_owned = kind in _PER_VARIABLE or _PER_VARIABLE_MARK in vars(kind)",
        "is_owned = kind in _PER_VARIABLE[1:] or "
        "_PER_VARIABLE_MARK in vars(kind)",
    ),
    Promise(
        "shard_update=True refuses unknown optimizers",
        "tests/optimizers/sharded_state_test.py::test_what_can_n"
        "ot_be_sharded_is_refused_when_it_is_wrapped[<lambda>-Unknown]",
        "optimizers/update/kinds.py",
        "if of in known or any(mark in vars(of) for mark in marks):",
        "if True:",
    ),
    Promise(
        "shard_update=True clips by the norm of whole gradients",
        "tests/optimizers/sharded_update_test.py::test_settings_"
        "are_one_devices[clipnorm]",
        "optimizers/update/sharded.py",
        "    return total[:count]\n",
        "    return squares\n",
    ),
    Promise(
        "shard_update=True gathers weights in the step that changes them",
        "tests/optimizers/sharded_update_test.py::test_settings_"
        "are_one_devices[accumulation_tpu]",
        "optimizers/update/sharded.py",
        "(optimizer_state.num_calls(one) + 1) % steps == 0",
        "optimizer_state.num_calls(one) % steps == 0",
    ),
    Promise(
        "shard_update=True constrains whole variables",
        "tests/optimizers/sharded_update_test.py::test_constrain"
        "ts_are_of_whole_variables",
        "optimizers/update/sharded.py",
        "            if constraint is not None and "
        "_key(variable) in has_gradient:\n",
        "            if False:\n",
    ),
    Promise(
        "a skipped step constrains nothing",
        "tests/optimizers/sharded_update_test.py::test_an_overfl"
        "ow_on_one_replica_is_skipped_by_all",
        "optimizers/update/sharded.py",
        "                    if is_applied is None\n",
        "                    if True\n",
    ),
    Promise(
        "set_weights takes whole slots",
        "tests/optimizers/sharded_state_test.py::test_set_weight"
        "s_and_assign[muon]",
        "optimizers/update/slots.py",
        "held = layout.stored(copy, whole, layout.position_of(r))",
        "held = layout.stored(copy, whole, 0)",
    ),
    Promise(
        "GroupState has each group's own slots",
        "tests/optimizers/sharded_state_test.py::test_group_stat"
        "e_of_whole_slots[muon]",
        "optimizers/update/slots.py",
        "return [found[layout.groups.group_of(r)] for r in replica_ids]",
        "return [found[min(found)] for r in replica_ids]",
    ),
    Promise(
        "the inner optimizer updates once a step",
        "tests/optimizers/delegation_test.py::test_an_inner_appl"
        "y_gradients_is_called",
        "optimizers/update/whole.py",
        "    with reduction_guard.guarded(optimizer):\n"
        "        apply_gradients(pairs)\n",
        "    with reduction_guard.guarded(optimizer):\n"
        "        apply_gradients(pairs)\n"
        "        apply_gradients(pairs)\n",
    ),
    Promise(
        "shards are joined without their padding",
        "tests/optimizers/sharded_update_test.py::test_every_opt"
        "imizer_is_one_device[by_element]",
        "distribute/shards.py",
        "return tf.reshape(flat[: self.num_elements], self.shape)",
        "return tf.reshape(flat[-self.num_elements :], self.shape)",
    ),
    Promise(
        "on a TPU only the owner's value counts",
        "tests/optimizers/sharded_update_test.py::test_settings_"
        "are_one_devices[ema_tpu]",
        "distribute/ownership.py",
        "        return tf.where(tf.equal(position, owner), "
        "value, tf.zeros_like(value))\n",
        "        return value\n",
    ),
    Promise(
        "owners keep slots apart",
        "tests/optimizers/sharded_update_test.py::test_every_opt"
        "imizer_is_one_device[multi]",
        "distribute/ownership.py",
        "return block[self.offset : self.offset + self.num_elements]",
        "return block[: self.num_elements]",
    ),
    Promise(
        "the update of large variables is divided evenly",
        "tests/optimizers/owned_update_test.py::test_owners_have_similar_costs",
        "distribute/ownership.py",
        "for name in sorted(costs, key=costs.__getitem__, reverse=True):",
        "for name in costs:",
    ),
    Promise(
        "local variables are trained by each replica's own gradient",
        "tests/optimizers/local_variables_test.py::test_oracle[m"
        "irrored-mean-global-options0-0.5]",
        "optimizers/cross_shard.py",
        "                divisor = "
        "self._reduction.of_sum(groups.group_size)\n"
        "        batch",
        "                divisor = 1\n        batch",
    ),
    Promise(
        "local variables are found by a pattern of paths",
        "tests/optimizers/local_variables_test.py::test_saved_with_the_model",
        "optimizers/local_variables.py",
        "            found.update({replica_variables.key(v): "
        "v for v in matches})\n",
        "            found = {replica_variables.key(v): v for v in matches}\n",
    ),
    Promise(
        "weights files hold the state of every optimizer of a stack",
        "tests/conformance/moving_test.py::test_an_open_round_mo"
        "ves_between_towers_and_is_named_elsewhere[weights.h5]",
        "optimizers/saving.py",
        "        levels = levels[:index] + levels[index + 1 :]\n",
        "        levels = levels[index:]\n",
    ),
    Promise(
        "set_weights restores a nested optimizer",
        "tests/conformance/saving_test.py::test_set_weights_of_a"
        "_nested_optimizer",
        "optimizers/base.py",
        "        for variable, weight in zip(self.variables, "
        "weights, strict=True):\n"
        "            variable.assign(weight)\n",
        "        for variable, weight in "
        "zip(self.variables[:4], weights, strict=False):\n"
        "            variable.assign(weight)\n",
    ),
    Promise(
        "tf.train.Checkpoint holds a MultiOptimizer's state",
        "tests/conformance/saving_test.py::test_every_way_keeps_"
        "the_state[multi-built-mirrored]",
        "optimizers/base.py",
        "            for position, leaf in enumerate(stack.children(one)):\n",
        "            for position, leaf in ():\n",
    ),
    Promise(
        "legacy .h5 files hold slots",
        "tests/conformance/saving_test.py::test_every_way_keeps_"
        "the_state[adam-h5-mirrored]",
        "optimizers/base.py",
        "        if not self.built:\n"
        '            self._set_untracked("_pending_weights", weights)\n',
        "        if not self.built:\n"
        '            self._set_untracked("_pending_weights", None)\n',
    ),
    Promise(
        "a save that holds only replica 0 says what it loses",
        "tests/conformance/saving_test.py::test_a_save_that_lose"
        "s_something_says_so_once[_agn-ways2-AGNOptimizer "
        "trains each replica's own variabl]",
        "optimizers/saving.py",
        "        if lost and not self._has_warned:\n",
        "        if lost and self._has_warned:\n",
    ),
    Promise(
        "N replicas clip the gradient of the global batch.",
        _EQUAL + "[global_clipnorm-mirrored-two-True]",
        *_NOT_REDUCED,
    ),
    Promise(
        "N replicas accumulate gradients of the global batch.",
        _EQUAL + "[accumulation-mirrored-two-True]",
        *_NOT_REDUCED,
    ),
    Promise(
        "N replicas average weights, like one device.",
        _EQUAL + "[average-mirrored-two-True]",
        *_NOT_REDUCED,
    ),
    Promise(
        "N replicas update Adam's state like one device.",
        _EQUAL + "[adam-mirrored-two-True]",
        *_NOT_REDUCED,
    ),
    Promise(
        "N replicas scale the loss like one device.",
        _EQUAL + "[loss_scale-mirrored-two-True]",
        *_NOT_REDUCED,
    ),
    Promise(
        "Groups train apart under MirroredStrategy.",
        _EQUAL + "[overwritten-mirrored-pairs-True]",
        *_ALL_MEMBERS,
    ),
    Promise(
        "Groups train apart under MultiWorkerMirroredStrategy.",
        _EQUAL + "[average-multi_worker-pairs-True]",
        *_ALL_MEMBERS,
    ),
    Promise(
        "Groups train apart in eager steps.",
        _EQUAL + "[momentum-mirrored-pairs-False]",
        "collectives/merge_call.py",
        "return tf.identity(combined[self.groups.group_of(replica_id)])",
        "return tf.identity(combined[0])",
    ),
    Promise(
        "Groups train apart under TPUStrategy.",
        _EQUAL + "[average-tpu-pairs-True]",
        "collectives/cross_replica_sum.py",
        "group_assignment=self.channel.groups.to_list()",
        "group_assignment=[sum(self.channel.groups.to_list(), [])]",
    ),
    Promise(
        "Groups train apart on TPUs without a device assignment.",
        _EQUAL + "[average-tpu_permuted-pairs-True]",
        "collectives/one_hot.py",
        "return [tf.gather(total, index) for total in sums]",
        "return [tf.gather(total, 0) for total in sums]",
    ),
    Promise(
        "An overflow of one group does not reach another.",
        C + "equality_with_one_device_test.py::test_another_groups_overflow"
        "_stays_there[multi_worker-False]",
        "collectives/one_hot.py",
        "return tf.where(slots, tensor[tf.newaxis], tf.zeros_like(tensor))",
        "return tf.cast(slots, tensor.dtype) * tensor[tf.newaxis]",
    ),
    Promise(
        '"mean" is the mean over the group.',
        _ORACLE + "test_powers_of_two_are_exact[float16-mean-global-True]",
        "reductions.py",
        "    return count\n\n\ndef _one",
        "    return 1\n\n\ndef _one",
    ),
    Promise(
        '"sum" is the sum over the group.',
        _ORACLE + "test_powers_of_two_are_exact[bfloat16-sum-replica-True]",
        "optimizers/arguments.py",
        "return reductions.checked(reduction)",
        'return reductions.checked("mean")',
    ),
    Promise(
        'loss_normalization="global" undoes 1/N.',
        _ORACLE + "test_powers_of_two_are_exact[float64-mean-global-True]",
        *_NOT_UNDONE,
    ),
    Promise(
        "float64 keeps all of its digits.",
        _NESTING + "test_random_cases[mirrored-1]",
        "reduction/gradients.py",
        "    return tf.constant(number, dtype)",
        "    return tf.cast(tf.constant(number, tf.float32), dtype)",
    ),
    Promise(
        "A group without a gradient of a variable does not update it.",
        _ORACLE
        + "test_none_stays_none_in_a_group_without_a_gradient[multi_worke"
        "r-False]",
        "reduction/presence.py",
        "any(pattern[index].kind != NONE for pattern in group)",
        "any(pattern[index].kind != NONE for pattern in patterns)",
    ),
    Promise(
        "Gradients of equal shapes stay apart in buckets.",
        _ORACLE + "test_several_buckets_keep_their_order",
        "reduction/buckets.py",
        "            parts = _unpacked(total, shapes, num_zeros(pack))\n"
        "            for i, part in zip(pack, parts, strict=True):\n"
        "                result[i] = part",
        "            parts = _unpacked(total, shapes, num_zeros(pack))\n"
        "            for i, part in zip(pack, parts, strict=True):\n"
        "                result[i] = next(p for p in parts if p.shape == "
        "part.shape)",
    ),
    Promise(
        "The inner optimizer gets only the rows that replicas have.",
        _ORACLE + "test_sparse_gradients_stay_sparse[function]",
        "collectives/subgroups.py",
        "gathered.append(tf.boolean_mask(blocks, is_row))",
        "gathered.append(blocks)",
    ),
    Promise(
        "A row that occurs several times is summed first.",
        C + "limits_test.py::test_an_embedding_is_one_hot_rows_and_a_dense_"
        "layer[Adam]",
        "distribute/indexed_slices.py",
        "    values = tf.math.unsorted_segment_sum(\n",
        "    values = tf.math.unsorted_segment_mean(\n",
    ),
    Promise(
        "fit ends with the averages of all replicas in the model.",
        _EQUAL + "[average-mirrored-two-True]",
        "optimizers/base.py",
        "            self.inner_optimizer.finalize_variable_values(var_list)",
        "            pass",
    ),
    Promise(
        "pre_reduce gets each replica's own gradient.",
        _CONTEXTS + "test_clipping_before_and_after[pre_reduce-mirrored]",
        *_NO_PRE_HOOK,
    ),
    Promise(
        "pre_reduce gets each replica's own gradient on a TPU.",
        _CONTEXTS + "test_clipping_before_and_after[pre_reduce-tpu]",
        *_NO_PRE_HOOK,
    ),
    Promise(
        "post_reduce gets the group's gradient.",
        _CONTEXTS + "test_clipping_before_and_after[post_reduce-mirrored]",
        "optimizers/cross_shard.py",
        "        batch = self._post_hook(batch, inner.scale_loss)\n"
        "        if self._sharded",
        "        if self._sharded",
    ),
    Promise(
        "Hooks get gradients without the loss scale.",
        _CONTEXTS + "test_hooks_see_unscaled_gradients[global]",
        "optimizers/hooks.py",
        "return values * (batch.scale / as_dtype(loss_scale, values.dtype))",
        "return values * batch.scale",
    ),
    Promise(
        "What a hook returns is scaled again.",
        _CONTEXTS + "test_hooks_see_unscaled_gradients[global]",
        "optimizers/hooks.py",
        "factor = as_dtype(loss_scale, values.dtype) / batch.scale",
        "factor = as_dtype(loss_scale, values.dtype)",
    ),
    Promise(
        "A local variable gets the gradient of the group's loss.",
        _CONTEXTS
        + "test_a_local_variable_gets_its_own_replicas_gradient[mirrored]",
        "optimizers/cross_shard.py",
        "                divisor = "
        "self._reduction.of_sum(groups.group_size)\n"
        "        batch",
        "                divisor = 1\n        batch",
    ),
    Promise(
        "A local variable's gradient is not reduced.",
        _CONTEXTS + "test_a_local_variable_gets_its_own_replicas_gradient[tpu]",
        "optimizers/local_variables.py",
        "        if variable in self:\n"
        "            return variable_role.UNREDUCED",
        "        if not self:\n            return variable_role.UNREDUCED",
    ),
    Promise(
        "All groups skip a step in which one overflows.",
        _NESTING + "test_an_order_is_right[('cross', 'tower')-0]",
        "optimizers/cross_shard.py",
        "                loss_scaling.nan_unless(finite, reduced.values)",
        "                reduced.values",
    ),
    Promise(
        "Only the outermost wrapper undoes 1/N.",
        _NESTING + "test_wrappers_that_others_make[loaded]",
        "optimizers/stack.py",
        "if wrapper is self.root and self.loss_normalization",
        "if self.loss_normalization",
    ),
    Promise(
        "A tower inside follows the groups around it.",
        _NESTING + "test_wrappers_that_others_make[loaded]",
        "optimizers/stack.py",
        "            return _Part(wrapper, False, around.group_assignment)",
        "            return _Part(wrapper, True, None)",
    ),
    Promise(
        "Wrappers that a MultiOptimizer makes keep their groups.",
        _NESTING + "test_wrappers_that_others_make[groups_in_multi]",
        "optimizers/stack.py",
        "        if wrappers(wrapper.inner_optimizer):\n"
        "            return _Part(wrapper, False, own)",
        "        if wrappers(wrapper.inner_optimizer):\n"
        "            return _Part(wrapper, True, own)",
    ),
    Promise(
        "AGNOptimizer without groups takes the groups around it.",
        _CONTEXTS + "test_an_optimizer_that_was_inside_another_one",
        "optimizers/stack.py",
        "        return _Part(wrapper, True, around.group_assignment)",
        "        return _Part(wrapper, True, own)",
    ),
    Promise(
        "A loaded optimizer has the groups that were saved.",
        _NESTING + "test_wrappers_that_others_make[loaded]",
        "optimizers/base.py",
        '"group_assignment": groups and groups.to_list()',
        '"group_assignment": None',
    ),
    Promise(
        "A Keras file holds the state of all wrappers.",
        _NESTING + "test_a_stack_is_saved_whole",
        "optimizers/saving.py",
        "        store[str(index)] = variable.numpy()",
        "        store[str(index)] = variable.numpy() * 0",
    ),
    Promise(
        "A call outside the strategy is refused and changes nothing.",
        C + "refusals_test.py::test_a_step_in_another_context[cross]",
        "optimizers/base.py",
        "        if own.num_replicas_in_sync > 1 and not "
        "tf.distribute.has_strategy():",
        "        if False:",
    ),
    Promise(
        'loss_normalization="replica" leaves the loss as it is.',
        _ORACLE + "test_powers_of_two_are_exact[bfloat16-sum-replica-True]",
        "optimizers/stack.py",
        'if wrapper is self.root and self.loss_normalization == "global":',
        "if wrapper is self.root:",
    ),
    Promise(
        "Each replica can be a group of its own.",
        _EQUAL + "[global_clipnorm-mirrored-alone-True]",
        "optimizers/cross_shard.py",
        "inner, groups = self.inner_optimizer, plan.groups(self, site)",
        "inner, groups = self.inner_optimizer, plan.groups(self, "
        "site).single(site.num_replicas)",
    ),
    Promise(
        "fit averages the losses of an uneven last batch.",
        C + "equality_with_one_device_test.py::test_fit_with_a_last_batch[1"
        "5-4-mirrored-{}]",
        *_NOT_REDUCED,
    ),
    Promise(
        "fit on a TPU does, where replicas have no rows.",
        C + "equality_with_one_device_test.py::test_fit_with_a_last_batch[9"
        "-1-tpu_permuted-{}]",
        *_NOT_UNDONE,
    ),
    Promise(
        "A hook must keep the order of the variables.",
        C + "refusals_test.py::test_a_hook_that_returns_something_else[reve"
        "rsed]",
        "optimizers/hooks.py",
        "if len(returned) != len(given) or any(",
        "if len(returned) != len(given) and any(",
    ),
]

TOWER_AND_LOSSES: list[Promise] = [
    Promise(
        "k calls of `apply` make one update",
        O + "tower_optimizer_test.py::test_oracle[mean-None-True]",
        "optimizers/tower.py",
        "                count >= self._num_towers, complete",
        "                count > self._num_towers, complete",
    ),
    Promise(
        "towers and replicas train as one device",
        O + "tower_optimizer_test.py::test_equals_one_device[2-mirrored]",
        "optimizers/tower.py",
        "        factor = undo * weight\n",
        "        factor = weight\n",
    ),
    Promise(
        'reduction="sum" applies the sum of the towers',
        O + "tower_optimizer_test.py::test_oracle[sum-None-False]",
        "optimizers/tower.py",
        "        divisor = self._reduction.of_sum(num_towers)\n",
        "        divisor = num_towers\n",
    ),
    Promise(
        "the mean of a round is over the items of all calls",
        O + "global_mean_test.py::test_evaluation_leaves_no_record",
        "optimizers/tower.py",
        "            factor *= num_items\n",
        "            factor *= 1\n",
    ),
    Promise(
        "an open round is completed on another number of replicas",
        O + "open_round_test.py::"
        "test_it_is_completed_on_another_number[tower-sum-3-_by_group_state]",
        "optimizers/tower.py",
        "                    divisor=divisor * weight\n",
        "                    divisor=divisor\n",
    ),
    Promise(
        "an open round is saved with its items",
        O + "open_round_test.py::"
        "test_it_is_completed_on_another_number[global_mean-mean-3-_by_group_"
        "state]",
        "optimizers/tower.py",
        "        if saving.ITEMS in names:\n",
        "        if False:\n",
    ),
    Promise(
        "`reset` discards the open round",
        O + "global_mean_test.py::test_another_loss_after_reset",
        "optimizers/tower.py",
        "        of_round = [self._tower, *self._accumulators, *self._touched"
        "]\n",
        "        of_round = [self._tower]\n",
    ),
    Promise(
        "`apply_towers` refuses an open round",
        O + "tower_optimizer_test.py::test_apply_towers",
        "optimizers/tower.py",
        "            replica_variables.read(self._tower),\n            tf.con"
        "stant(0, tf.int64),\n",
        "            tf.constant(0, tf.int64),\n            tf.constant(0, tf"
        ".int64),\n",
    ),
    Promise(
        "a round of a GlobalMean is not continued with another loss",
        O + "global_mean_test.py::"
        "test_a_round_of_a_global_mean_is_not_continued_with_another_loss",
        "optimizers/tower.py",
        "        before = replica_variables.read(self._items)\n",
        "        before = tf.constant(0.0)\n",
    ),
    Promise(
        "embeddings reach the inner optimizer as IndexedSlices",
        O + "tower_optimizer_test.py::"
        "test_embeddings_reach_the_inner_optimizer_sparse",
        "optimizers/accumulator.py",
        "        return index not in self._dense\n",
        "        return False\n",
    ),
    Promise(
        "the next round starts with sums of 0",
        O + "tower_optimizer_test.py::test_oracle[mean-groups3-False]",
        "optimizers/accumulator.py",
        "            if index in self._seen:\n                _set_to_zero(on"
        "e)\n",
        "            if index in self._seen:\n                pass\n",
    ),
    Promise(
        "a gradient from before a restore is not lost",
        O + "open_round_test.py::"
        "test_a_gradient_from_before_a_restore_is_not_lost[tower-True]",
        "optimizers/accumulator.py",
        "            if rows.any():\n",
        "            if False:\n",
    ),
    Promise(
        "a function that an update does not know of is refused",
        O + "accumulation_order_test.py::"
        "test_functions_that_know_nothing_of_each_other_are_refused[tower]",
        "optimizers/accumulator.py",
        "        if not known and self._has_other_updates():\n",
        "        if False:\n",
    ),
    Promise(
        "frozen layers do not move",
        O + "accumulation_order_test.py::"
        "test_frozen_layers_do_not_move[momentum-_towers]",
        "optimizers/accumulator.py",
        '            is_trainable = getattr(variable, "trainable", True)\n',
        "            is_trainable = True\n",
    ),
    Promise(
        "skipped steps are counted",
        O + "skip_nonfinite_test.py::test_the_sum_overflows",
        "optimizers/skipping.py",
        "            replica_variables.add(self.total, is_skipped)\n",
        "            replica_variables.add(self.total, 2 * is_skipped)\n",
    ),
    Promise(
        "only steps that are skipped in a row count for the limit",
        O + "skip_nonfinite_test.py::test_the_limit_and_what_is_printed",
        "optimizers/skipping.py",
        "        in_a_row = is_skipped * (replica_variables.read(self.in_a_ro"
        "w) + 1)\n",
        "        in_a_row = is_skipped + replica_variables.read(self.in_a_row"
        ")\n",
    ),
    Promise(
        "the variable with the bad gradient is printed",
        O + "skip_nonfinite_test.py::test_the_limit_and_what_is_printed",
        "optimizers/skipping.py",
        "tf.argmin(tf.cast(flags",
        "tf.argmax(tf.cast(flags",
    ),
    Promise(
        "a sum that overflows is skipped",
        O + "skip_nonfinite_test.py::test_the_sum_overflows",
        "optimizers/cross_shard.py",
        "        return tf.equal(num_arrived + num_reduced, 0)\n",
        "        return tf.equal(num_arrived, 0)\n",
    ),
    Promise(
        "a skipped step does not change residuals",
        O + "skip_nonfinite_test.py::"
        "test_a_run_with_bad_steps_ends_as_the_run_without[residuals_hook-2-m"
        "irrored]",
        "optimizers/cross_shard.py",
        "                self._error_feedback.keep(carry, finite)\n",
        "                self._error_feedback.keep(carry, None)\n",
    ),
    Promise(
        "all groups skip the same steps",
        O + "skip_nonfinite_test.py::"
        "test_a_run_with_bad_steps_ends_as_the_run_without[groups-4-tpu_permu"
        "ted]",
        "reduction/loss_scaling.py",
        "    transport = collectives.transport_for(site, channel.over_all())"
        '\n    with recorder.labelled("finite vote"',
        "    transport = collectives.transport_for(site, channel)\n    with r"
        'ecorder.labelled("finite vote"',
    ),
    Promise(
        "AGN: a replica with a bad gradient skips its local step",
        O + "skip_nonfinite_test.py::test_agn_skips_local_steps_by_replica",
        "optimizers/agn.py",
        "        replica_variables.cond(finite, local_step)\n",
        "        local_step()\n",
    ),
    Promise(
        "AGN: a sum that overflows skips the exchange",
        O + "skip_nonfinite_test.py::test_agn_skips_an_exchange",
        "optimizers/agn.py",
        "        finite = loss_scaling.all_finite([*own, *totals.values])\n",
        "        finite = loss_scaling.all_finite([*own])\n",
    ),
    Promise(
        "the mean is over the items of all replicas",
        O + "global_mean_test.py::test_equals_one_device[ragged]",
        "optimizers/fit/global_mean.py",
        "        if groups.group_size == 1:\n",
        "        if True:\n",
    ),
    Promise(
        "the mean is over the items of a group (MirroredStrategy)",
        O + "global_mean_test.py::test_equals_one_device[groups]",
        "optimizers/fit/global_mean.py",
        "self._reducers.current().channel(groups).exact()",
        "self._reducers.current().channel(groups).over_all()",
    ),
    Promise(
        "the mean is over the items of a group (TPUStrategy)",
        O + "global_mean_test.py::test_equals_one_device[groups_tpu]",
        "optimizers/fit/global_mean.py",
        "self._reducers.current().channel(groups).exact()",
        "self._reducers.current().channel(groups).over_all()",
    ),
    Promise(
        "a loss that is a sum has no items",
        O + "global_mean_test.py::test_equals_one_device[two_outputs]",
        "optimizers/fit/global_mean.py",
        "                divisor = tf.ones_like(total) if is_sum else num_ite"
        "ms\n",
        "                divisor = num_items\n",
    ),
    Promise(
        "the drawing of uneven_batches.md",
        O + "global_mean_test.py::test_the_drawing_of_the_guide[False-float32]",
        "optimizers/fit/global_mean.py",
        "                value /= site.num_replicas\n",
        "                value /= 1\n",
    ),
    Promise(
        "without items, the loss and its gradient are 0",
        O + "global_mean_test.py::test_without_items_all_is_zero[mirrored]",
        "optimizers/fit/global_mean.py",
        "                value = tf.math.divide_no_nan(total, divisor)\n",
        "                value = total / divisor\n",
    ),
    Promise(
        "a TowerOptimizer inside a CrossShardOptimizer weights by items",
        O + "global_mean_test.py::test_equals_one_device[round_inside]",
        "optimizers/fit/global_mean.py",
        "                    None if is_sum else num_items,\n",
        "                    None,\n",
    ),
    Promise(
        "a TowerOptimizer weights by items on TPUs",
        O + "global_mean_test.py::test_equals_one_device[round_tpu]",
        "optimizers/fit/global_mean.py",
        "                    None if is_sum else num_items,\n",
        "                    None,\n",
    ),
    Promise(
        "a GlobalMean is saved with its groups",
        O + "global_mean_test.py::test_it_is_saved_with_the_model[mse]",
        "optimizers/fit/global_mean.py",
        '            "group_assignment": groups and groups.to_list(),\n',
        '            "group_assignment": None,\n',
    ),
    Promise(
        "rows that pad a batch on a TPU are no items",
        O + "global_mean_test.py::test_fit_with_a_ragged_end[tpu]",
        "private/keras/losses.py",
        "    ones = tf.ones(keras.ops.shape(items), losses.dtype)\n",
        "    ones = tf.ones_like(items, losses.dtype)\n",
    ),
    Promise(
        "classes that a loss ignores are no items",
        O + "global_mean_test.py::test_equals_one_device[towers]",
        "private/keras/losses.py",
        "        setattr(ones, _MASK, mask)\n",
        "        pass\n",
    ),
    Promise(
        "towers are weighted in the order of their gradients",
        O + "global_mean_test.py::"
        "test_apply_towers_with_weights_and_with_records[records]",
        "reduction/loss_records.py",
        "    return None if numbers[0] is None else numbers\n",
        "    return None if numbers[0] is None else numbers[::-1]\n",
    ),
    Promise(
        "a record that no optimizer takes keeps no graph",
        O + "global_mean_test.py::test_no_graph_is_kept[False]",
        "reduction/loss_records.py",
        "            self._records.append(weakref.ref(record))\n",
        "            self._records.append(lambda: record)\n",
    ),
    Promise(
        "a ScalarLoss is divided by the number of replicas (cross)",
        O + "scalar_loss_test.py::"
        "test_wrapped_n_replicas_train_as_one_device[cross]",
        "optimizers/fit/scalar_loss.py",
        "        return keras.ops.reshape(value, (1,))\n",
        "        return value\n",
    ),
    Promise(
        "a ScalarLoss is divided by the number of replicas (agn)",
        O + "scalar_loss_test.py::"
        "test_wrapped_n_replicas_train_as_one_device[agn]",
        "optimizers/fit/scalar_loss.py",
        "        return keras.ops.reshape(value, (1,))\n",
        "        return value\n",
    ),
    Promise(
        "a bare loss of one number is warned of",
        O + "scalar_loss_test.py::"
        "test_a_bare_one_is_warned_of_in_the_first_step[tower-loss1]",
        "optimizers/fit/scalar_loss.py",
        "        if isinstance(loss, ScalarLoss) or not _returns_a_scalar(\n",
        "        if True or not _returns_a_scalar(\n",
    ),
    Promise(
        "a model's own loss that is not divided is warned of",
        O + "scalar_loss_test.py::test_own_losses_that_are_not_divided[mean]",
        "optimizers/fit/scalar_loss.py",
        "    if tf.executing_eagerly() or _is_divided(loss, num_replicas):\n",
        "    if True:\n",
    ),
    Promise(
        "towers of unequal size are weighted by their rows",
        O + "tower_train_step_test.py::"
        "test_the_reduction_of_towers_of_unequal_size[mean]",
        "optimizers/fit/tower_train_step.py",
        "                weights if is_mean else None,\n",
        "                None,\n",
    ),
    Promise(
        "each tower is computed on its device",
        O + "tower_train_step_test.py::test_each_tower_is_on_its_device[1]",
        "optimizers/fit/tower_train_step.py",
        "            with tf.device(names[index % len(names)] if names else N"
        "one):\n",
        "            with tf.device(names[0] if names else None):\n",
    ),
    Promise(
        "towers together have all rows of a batch",
        O + "tower_train_step_test.py::test_any_number_of_rows",
        "optimizers/fit/tower_train_step.py",
        "        start += size\n",
        "        start += 0\n",
    ),
    Promise(
        "a step of towers reports the loss of the whole batch",
        O + "tower_train_step_test.py::test_it_equals_the_whole_batch[masked]",
        "optimizers/fit/tower_train_step.py",
        "    divisor = gradients_lib.as_dtype(sum(weights), total.dtype)\n",
        "    divisor = gradients_lib.as_dtype(len(weights), total.dtype)\n",
    ),
    Promise(
        "towers of replicas are weighted by their items",
        O + "global_mean_test.py::test_equals_one_device[towers]",
        "optimizers/fit/tower_train_step.py",
        "                loss_records.num_items_of_towers(records, len(parts)"
        ") or shares\n",
        "                shares\n",
    ),
    Promise(
        "hooks get unscaled gradients",
        O + "tower_optimizer_test.py::"
        "test_hooks_get_the_unscaled_gradient_of_a_round",
        "optimizers/hooks.py",
        "            return values * (batch.scale / as_dtype(loss_scale, valu"
        "es.dtype))\n",
        "            return values * batch.scale\n",
    ),
    Promise(
        "an unknown loss_normalization is refused",
        O + "tower_optimizer_test.py::test_refusals[--loss_normalization]",
        "optimizers/arguments.py",
        "    if value not in (None, *LOSS_NORMALIZATIONS):\n",
        "    if False:\n",
    ),
]

AGN_AND_STEPS: list[Promise] = [
    Promise(
        "An exchange divides by the steps of its period.",
        _AGN + "test_oracle[mirrored]",
        "optimizers/agn.py",
        "            divisor = divisor * num_steps",
        "            divisor = divisor",
    ),
    Promise(
        "All replicas go on from the center.",
        _AGN + "test_oracle[tpu]",
        "optimizers/agn.py",
        "            self._center_pairs.adopt_here()\n",
        "            pass\n",
    ),
    Promise(
        "Each group has its own center (tpu_permuted).",
        _AGN + "test_oracle[permuted]",
        *_ONE_CENTER,
    ),
    Promise(
        "Each group has its own center (MultiWorkerMirroredStrategy).",
        _AGN + "test_oracle[workers]",
        *_ONE_CENTER,
    ),
    Promise(
        "Nothing crosses between exchanges.",
        _AGN + "test_nothing_crosses_between_exchanges[agn]",
        "optimizers/agn.py",
        "replica_variables.cond(pending + 1 >= self._period, exchange)",
        "replica_variables.cond(pending + 1 >= 1, exchange)",
    ),
    Promise(
        "fit ends with an early exchange (mirrored).",
        _AGN + "test_the_end_of_fit[mirrored]",
        *_A_WHOLE_PERIOD,
    ),
    Promise(
        "fit ends with an early exchange (tpu).",
        _AGN + "test_the_end_of_fit[tpu]",
        *_A_WHOLE_PERIOD,
    ),
    Promise(
        "Updates and SGD are local SGD.",
        _AGN + "test_oracle[local_sgd]",
        *_HALF_OF_UPDATE,
    ),
    Promise(
        "Updates and Nesterov's momentum are DiLoCo.",
        _AGN + "test_oracle[diloco]",
        *_HALF_OF_UPDATE,
    ),
    Promise(
        "learning_rate is the local optimizer's.",
        _AGN + "test_learning_rates",
        "optimizers/agn.py",
        "        self.local_optimizer.learning_rate = value",
        "        self.inner_optimizer.learning_rate = value",
    ),
    Promise(
        "show_center puts the center into the model.",
        _AGN + "test_the_model_shows_the_center_until_training_goes_on",
        "optimizers/agn.py",
        "            self._center_pairs.show(shown)",
        "            pass",
    ),
    Promise(
        "A config holds AGNOptimizer's settings.",
        _AGN + "test_config",
        "optimizers/agn.py",
        '"accumulate": self._accumulate,',
        '"accumulate": "gradients",',
    ),
    Promise(
        "reset starts a period from the center.",
        _PARTIAL + "test_reset_starts_a_period_from_the_center",
        "optimizers/agn.py",
        "        self._center_pairs.copy_into_model()\n        of_period",
        "        of_period",
    ),
    Promise(
        "Writes wait for gradients and reductions.",
        _COMMIT + "test_writes_wait_for_all_replicas[tower]",
        *_NO_GATE,
    ),
    Promise(
        "Writes wait for the reductions of their call.",
        _COMMIT
        + "test_writes_wait_for_all_replicas[hooks, clip, decay, averages]",
        "optimizers/commit.py",
        "self._waits_for = (*before, *values)",
        "self._waits_for = before",
    ),
    Promise(
        "A tower's call that fails on one replica changes none.",
        _COMMIT + "test_writes_wait_for_all_replicas[tower]",
        *_OWN_ARRIVAL,
    ),
    Promise(
        "An AGN step that fails on one replica changes none.",
        _COMMIT + "test_writes_wait_for_all_replicas[AGN, groups]",
        *_OWN_ARRIVAL,
    ),
    Promise(
        "A step whose data ends on one replica changes none.",
        _PARTIAL + "test_next_in_the_step[cross]",
        *_NO_GATE,
    ),
    Promise(
        "A wrapper's own writes wait, too.",
        _COMMIT
        + "test_writes_wait_for_all_replicas[hooks, clip, decay, averages]",
        "optimizers/base.py",
        "            with plan.commit.writing():\n                update()",
        "            with contextlib.nullcontext():\n                update()",
    ),
    Promise(
        "Replicas with different counts do not step.",
        _PARTIAL + "test_different_counts_are_refused[cross]",
        "optimizers/commit.py",
        "tf.reduce_all(tf.equal(values, expected))",
        "tf.constant(True)",
    ),
    Promise(
        "Rounds that differ by replica do not step.",
        _PARTIAL + "test_different_counts_are_refused[agn]",
        "optimizers/base.py",
        "            *(one for w in stack.wrappers(self) for one in "
        "w._counts()),\n",
        "",
    ),
    Promise(
        "fit on data of unknown size counts the batches.",
        _PARTIAL + "test_fit_on_data_of_unknown_size[averages-none-{}]",
        *_NO_GATE,
    ),
]

COMPAT_AND_TF_KERAS: list[Promise] = [
    Promise(
        "TF1's CrossShardOptimizer sums over the groups of `shard`.",
        f"{V}cross_shard_optimizer_test.py::test_oracle_in_shard[unsorted]",
        "compat/v1/sharding/sums.py",
        "(of_groups[groups.group_of(i)], all_exist)",
        "(of_groups[0], all_exist)",
    ),
    Promise(
        "TF1's MEAN divides by the size of the group.",
        f"{V}cross_shard_optimizer_test.py::test_oracle_in_shard[unsorted]",
        "compat/v1/optimizers/cross_shard.py",
        "self._reduction.of_sum(groups.group_size)",
        "self._reduction.of_sum(where.num_shards)",
    ),
    Promise(
        "TF1's CrossShardOptimizer sums over a strategy's groups.",
        f"{V}cross_shard_optimizer_test.py::test_oracle_under_a_strategy[tpu]",
        "compat/v1/sharding/sums.py",
        "            self._site,\n            groups,\n",
        "            self._site,\n            self.groups(None),\n",
    ),
    Promise(
        "Under a strategy, TF1's inner optimizer does not sum again.",
        f"{V}cross_shard_optimizer_test.py::"
        "test_oracle_under_a_strategy[mirrored]",
        "compat/v1/optimizers/inner_optimizers.py",
        "tensorflow_v1.take_out_the_sum(self.optimizer)",
        "pass",
    ),
    Promise(
        "TF1's CrossShardOptimizer trains with a Keras optimizer inside.",
        f"{V}cross_shard_optimizer_test.py::"
        "test_oracle_under_a_strategy[keras]",
        "compat/v1/optimizers/inner_optimizers.py",
        "whole.make_local(self.optimizer)",
        "pass",
    ),
    Promise(
        "On a TPU, TF1's CrossShardOptimizer builds the original's graph.",
        f"{V}cross_shard_optimizer_test.py::"
        "test_the_originals_graph_on_a_tpu[unsorted]",
        "compat/v1/sharding/sums.py",
        "                        gradient, groups\n",
        "                        gradient, None\n",
    ),
    Promise(
        "An update of TF1's wrappers waits for all gradients of the step.",
        f"{V}step_writes_test.py::"
        "test_writes_wait_for_all_gradients[one shard]",
        "compat/v1/optimizers/base.py",
        "with commit.gate(values):",
        "with commit.gate([]):",
    ),
    Promise(
        "`shard` splits each input along its own axis.",
        f"{V}shard_test.py::test_inputs_are_split_and_outputs_joined",
        "compat/v1/sharding/shard.py",
        "tf.split(x, num_shards, axis=axis)",
        "tf.split(x, num_shards, axis=0)",
    ),
    Promise(
        "Reading one output of `shard` runs all shards.",
        f"{V}shard_test.py::test_all_shards_train_whatever_is_read[False]",
        "compat/v1/sharding/shard.py",
        "with tf.control_dependencies(everything):",
        "with tf.control_dependencies([]):",
    ),
    Promise(
        "A shard's copies start with shard 0's values.",
        f"{V}shard_test.py::test_copies_start_from_shard_0",
        "compat/v1/sharding/traced_shards.py",
        "variable.assign(original.read_value()).op,",
        "variable.assign(tf.zeros_like(original.read_value())).op,",
    ),
    Promise(
        "Shards do not share the state of one Adam.",
        f"{V}shard_test.py::test_calls_share_variables_and_one_adam[adam]",
        "compat/v1/sharding/copies.py",
        "self._owners.setdefault(id(optimizer), (optimizer, index))[1]",
        "index",
    ),
    Promise(
        "A variable that all shards share is assigned once a step.",
        f"{V}shard_test.py::test_a_global_step_is_incremented_once[assign_add]",
        "compat/v1/sharding/shared_variables.py",
        "if shard and after:",
        "if not shard:",
    ),
    Promise(
        "`cross_replica_sum` sums over the groups of `shard`.",
        f"{V}cross_replica_sum_test.py::test_groups",
        "compat/v1/sharding/cross_replica_sum.py",
        "tf.add_n([parts[m] for m in members])",
        "tf.add_n(parts)",
    ),
    Promise(
        "The gradient of `cross_replica_sum` is the sum of the gradients.",
        f"{V}cross_replica_sum_test.py::test_value_and_gradient[inside]",
        "compat/v1/sharding/sums.py",
        'return _marked(gradient, mark.get_attr("message").decode())',
        "return gradient",
    ),
    Promise(
        "TF1's AGNOptimizer applies the mean of the period to the center.",
        f"{V}agn_optimizer_test.py::test_oracle[adagrad-2-False-True]",
        "compat/v1/optimizers/agn.py",
        "/ tf.cast(self._period, of.accumulator.dtype.base_dtype)",
        "/ tf.cast(1, of.accumulator.dtype.base_dtype)",
    ),
    Promise(
        "A worker of TF1's AGNOptimizer that was lost adopts the center.",
        f"{V}agn_cluster_test.py::"
        "test_workers_train_one_center_and_one_that_was_lost_adopts_it",
        "compat/v1/optimizers/agn.py",
        "        session.run(self._init_op)",
        "        pass",
    ),
    Promise(
        "AGNCustomGetter's accumulators start at zero.",
        f"{V}agn_optimizer_test.py::test_accumulators_start_at_zero[kwargs0]",
        "compat/v1/optimizers/agn_custom_getter.py",
        "tf.zeros_like(tf.convert_to_tensor(value))",
        "tf.convert_to_tensor(value)",
    ),
    Promise(
        "TF1's TowerOptimizer adds up the gradients of all towers.",
        f"{V}tower_optimizer_test.py::test_oracle[4-adagrad-weighted_mean]",
        "compat/v1/towers/tower.py",
        "indexed_slices.added(gradients, variable)",
        "indexed_slices.added(gradients[:1], variable)",
    ),
    Promise(
        "With SUM, towers' losses are not averaged.",
        f"{V}tower_optimizer_test.py::test_oracle[2-adam-weighted_sum]",
        "compat/v1/towers/build_state.py",
        "self.num_towers > 1 and self.loss_reduction != Reduction.SUM",
        "self.num_towers > 1",
    ),
    Promise(
        "Metrics of `replicate_model_fn` are of all towers' examples.",
        f"{V}tower_optimizer_test.py::"
        "test_metrics_predictions_and_exports_are_of_all_towers"
        "[4-weighted_mean]",
        "compat/v1/towers/replicate_model_fn.py",
        "target.assign_add(tf.add_n(values))",
        "target.assign_add(0 * tf.add_n(values))",
    ),
    Promise(
        "With MEAN, towers' losses are averaged.",
        f"{V}tower_optimizer_test.py::test_oracle[4-adagrad-weighted_mean]",
        "compat/v1/towers/tower.py",
        "tf.divide(x, float(num_towers)",
        "tf.divide(x, 1.0",
    ),
    Promise(
        "Predictions of `replicate_model_fn` are of all towers' examples.",
        f"{V}tower_optimizer_test.py::"
        "test_metrics_predictions_and_exports_are_of_all_towers"
        "[4-weighted_mean]",
        "compat/v1/towers/replicate_model_fn.py",
        "tf.concat(parts, 0)",
        "tf.concat(parts[::-1], 0)",
    ),
    Promise(
        "AGNOptimizer's swapping_saver stores the center under plain names.",
        f"{V}agn_optimizer_test.py::test_the_saver_and_going_on",
        "compat/v1/optimizers/agn.py",
        "key.removeprefix(prefix): value for",
        "key: value for",
    ),
    Promise(
        "`load_into_keras` takes AGNOptimizer's center, not a worker's copy.",
        f"{V}load_into_keras_test.py::"
        "test_the_center_is_taken_where_the_local_copies_were_saved_too",
        "compat/v1/load_into_keras.py",
        "reader.get_tensor(name)\n",
        "reader.get_tensor(\n"
        "            short if (short := name.removeprefix(prefix)) in names"
        " else name)\n",
    ),
    Promise(
        "`load_into_keras` scales TF1's momentum by the learning rate.",
        f"{V}load_into_keras_test.py::"
        "test_momentum_and_the_center_under_a_strategy",
        "compat/v1/load_into_keras.py",
        "value = -rate * value",
        "value = rate * value",
    ),
    Promise(
        "`load_into_keras` counts updates by Adam's beta powers.",
        f"{V}load_into_keras_test.py::"
        "test_iterations_and_names_of_slots[powers]",
        "compat/v1/load_into_keras.py",
        "round(math.log(power) / math.log(beta)) - 1",
        "round(math.log(power) / math.log(beta))",
    ),
    Promise(
        "TPUEstimator updates all metrics with each batch.",
        f"{V}tpu_estimator_test.py::test_shards_train_as_one_device",
        "compat/v1/estimator/tpu_estimator.py",
        "update in metrics.values()]",
        "update in list(metrics.values())[:1]]",
    ),
    Promise(
        "`max_steps` of TPUEstimator counts the steps of earlier calls.",
        f"{V}tpu_estimator_test.py::test_shards_train_as_one_device",
        "compat/v1/estimator/model_directory.py",
        'return int(tf.train.load_variable(path, "global_step"))',
        "return 0",
    ),
    Promise(
        "TPUEstimator gives a model_fn the batch size of a shard.",
        f"{V}tpu_estimator_test.py::test_shards_train_as_one_device",
        "compat/v1/estimator/model_calls.py",
        "size // num_shards",
        "size",
    ),
    Promise(
        "TPUEstimator runs a host_call once a step.",
        f"{V}tpu_estimator_hooks_test.py::test_calls_on_the_host",
        "compat/v1/estimator/estimator_spec.py",
        "tf.group(train_op, *after)",
        "tf.group(train_op)",
    ),
    Promise(
        "TPUEstimator saves after the last step.",
        f"{V}tpu_estimator_hooks_test.py::test_saving_listeners",
        "compat/v1/estimator/sessions.py",
        "if step != self._saved:",
        "if step == self._saved:",
    ),
    Promise(
        "TPUEstimator stops training when a saving listener asks for it.",
        f"{V}tpu_estimator_hooks_test.py::test_saving_listeners",
        "compat/v1/estimator/sessions.py",
        "run_context.request_stop()",
        "pass",
    ),
    Promise(
        "PER_SHARD_V1 is refused, since input_fn is called once.",
        f"{V}tpu_estimator_refusals_test.py::test_refused_arguments",
        "compat/v1/estimator/tpu_config.py",
        "if per_host is not True and",
        "if per_host is None and",
    ),
    Promise(
        "A TPU script's CrossShardOptimizer is tf_xshard's.",
        f"{V}tpu_scripts_test.py::test_the_module_with_the_old_names",
        "compat/v1/tensorflow.py",
        '_of_v1("CrossShardOptimizer", "cross_replica_sum", "shard")',
        '_of_v1("cross_replica_sum", "shard")',
    ),
    Promise(
        "A new optimizer of tf_keras combines gradients in groups.",
        f"{K}test_is_one_device[tpu-adam]",
        "tf_keras/aggregation.py",
        "            self._group_assignment,\n            site.num_replicas,",
        "            None,\n            site.num_replicas,",
    ),
    Promise(
        "A legacy optimizer of tf_keras sums gradients in groups.",
        f"{K}test_is_one_device[tpu-legacy_sgd]",
        "tf_keras/aggregation.py",
        "batch, site, groups, self._reduction, carry\n",
        'batch, site, groups, reductions.checked("mean"), carry\n',
    ),
    Promise(
        "loss_normalization='replica' leaves tf_keras's gradients as they are.",
        f"{K}test_is_one_device[tpu-replica]",
        "tf_keras/aggregation.py",
        'loss_normalization != "replica"',
        'loss_normalization != "global"',
    ),
    Promise(
        "An overflow in one group makes all groups of tf_keras skip the step.",
        f"{K}test_is_one_device[workers-adam scaled]",
        "tf_keras/aggregation.py",
        "loss_scaling.nan_unless(finite, batch.values)",
        "batch.values",
    ),
    Promise(
        "Without a LossScaleOptimizer's aggregator, groups do not skip apart.",
        f"{K}test_refuses_a_loss_scale_optimizer_that_it_does_not_know[legacy]",
        "tf_keras/aggregation.py",
        "if self._needs_vote and not self._has_loss_scale:",
        "if False:",
    ),
    Promise(
        "tf_keras's residuals are those of Keras 3.",
        f"{K}test_small_gradients_and_residuals_are_those_of_keras_3[mirrored]",
        "tf_keras/aggregation.py",
        "self._residuals.keep(carry, finite)",
        "del carry, finite",
    ),
    Promise(
        "A checkpoint of tf_keras's optimizer has its residuals.",
        f"{K}test_residuals_are_saved_by_a_checkpoint_that_was_used_before"
        "[new]",
        "private/tf_keras/optimizers.py",
        'vars(optimizer).pop("_coalesced_children", None)',
        "pass",
    ),
    Promise(
        "tf_keras's ledger logs each epoch's bytes.",
        f"{K}test_fit_is_one_device_and_its_ledger_has_the_planned_bytes",
        "tf_keras/ledger.py",
        "on_epoch_begin=ledger.on_epoch_begin,",
        "on_epoch_begin=None,",
    ),
]

_WORKERS = "tests/multi_worker/"
_COLLECTIVES = "tests/collectives/"

MULTI_WORKER: list[Promise] = [
    Promise(
        "Every process gets the addresses in the order of ranks.",
        _WORKERS + "engines_test.py::test_addresses_are_in_the_order_of_ranks",
        "multi_worker/exchange.py",
        "in_order = [peers[rank] for rank in sorted(peers)]",
        "in_order = [peers[rank] for rank in sorted(peers, reverse=True)]",
    ),
    Promise(
        "Processes of another job, or other programs, do not join.",
        _WORKERS + "engines_test.py::test_strangers_are_not_answered",
        "multi_worker/exchange.py",
        "if hello is None or hello.token != own.token:",
        "if hello is None:",
    ),
    Promise(
        "An error names a rank that two processes have.",
        _WORKERS + "engines_test.py::test_all_say_what_is_wrong[twice 2]",
        "multi_worker/exchange.py",
        "if other.rank == 0 or is_twice:",
        "if other.rank == 0:",
    ),
    Promise(
        "An error says that the processes were given different sizes.",
        _WORKERS + "engines_test.py::test_all_say_what_is_wrong[sizes]",
        "multi_worker/exchange.py",
        "if other.size != own.size:",
        "if other.size < own.size:",
    ),
    Promise(
        "An error names the ranks that are missing.",
        _WORKERS + "engines_test.py::test_all_say_what_is_wrong[missing]",
        "multi_worker/exchange.py",
        "missing = [rank for rank in range(1, size) if rank not in here]",
        "missing = [rank for rank in range(1, size) if rank in here]",
    ),
    Promise(
        "A process that was started again takes its place.",
        _WORKERS + "engines_test.py::test_a_process_that_was_started_again",
        "multi_worker/exchange.py",
        "is_twice = peer is not None and not peer.has_left()",
        "is_twice = peer is not None",
    ),
    Promise(
        "connect() gives TF_CONFIG this process's rank.",
        _WORKERS
        + "engines_test.py::test_connect_joins_the_engine_s_processes[1]",
        "multi_worker/connect.py",
        "[one.address for one in members], place.rank",
        "[one.address for one in members], 0",
    ),
    Promise(
        "connect() leaves the variables that a user has set.",
        _WORKERS
        + "engines_test.py::test_connect_joins_the_engine_s_processes[0]",
        "multi_worker/connect.py",
        "**{k: v for k, v in threads.items() if k not in os.environ},",
        '**threads,\n        "TF_NUM_INTRAOP_THREADS": "1",',
    ),
    Promise(
        "Processes on one machine share its cores.",
        _WORKERS
        + "engines_test.py::test_processes_share_a_machine_s_cores[one host]",
        "multi_worker/connect.py",
        "threads = local_cluster.threads(num_sharing)",
        "threads = local_cluster.threads(2)",
    ),
    Promise(
        "Processes that an engine has bound to cores keep them.",
        _WORKERS
        + "engines_test.py::test_processes_share_a_machine_s_cores[bound]",
        "multi_worker/connect.py",
        "one.host == own.host and not set(own.cores).isdisjoint(one.cores)",
        "one.host == own.host",
    ),
    Promise(
        "SageMaker's ranks follow the sorted hosts.",
        _WORKERS + "engines_test.py::test_places[SageMaker21]",
        "distribute/engines.py",
        'hosts = sorted(json.loads(variables["SM_HOSTS"]))',
        'hosts = json.loads(variables["SM_HOSTS"])',
    ),
    Promise(
        "Slurm's rank 0 is on the first host of the step.",
        _WORKERS + "engines_test.py::test_places[Slurm4]",
        "distribute/engines.py",
        '_first_host(variables["SLURM_STEP_NODELIST"])',
        'variables["SLURM_STEP_NODELIST"].split(",")[-1]',
    ),
    Promise(
        "torchrun's own store and rank 0 have different ports.",
        _WORKERS + "engines_test.py::test_places[torchrun10]",
        "distribute/engines.py",
        "_integer(variables, port) + taken if port in variables else None",
        "_integer(variables, port) if port in variables else None",
    ),
    Promise(
        "Kubernetes' rank 0 is the Job's first pod.",
        _WORKERS + "engines_test.py::test_places[Kubernetes20]",
        "distribute/engines.py",
        "f\"{match[1]}-0{match[2] or ''}\"",
        "f\"{match[1]}-1{match[2] or ''}\"",
    ),
    Promise(
        "On several hosts, MPI's variables do not tell where rank 0 is.",
        _WORKERS + "engines_test.py::test_places[Open MPI16]",
        "distribute/engines.py",
        "if leader is None and variables.get(local_size) == variables[size]:",
        "if leader is None:",
    ),
    Promise(
        "Kubeflow's variables are torchrun's.",
        _WORKERS + "engines_test.py::test_places[torchrun11]",
        "distribute/engines.py",
        'not in ("1", "auto"):',
        'not in ("1",):',
    ),
    Promise(
        "A restarted Slurm job does not meet the processes of its last run.",
        _WORKERS
        + "engines_test.py::test_jobs_differ[variables0-SLURM_RESTART_COUNT]",
        "distribute/engines.py",
        'variables, "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"',
        'variables, "SLURM_JOB_ID", "SLURM_STEP_ID"',
    ),
    Promise(
        "A child process is not taken for its parent.",
        _COLLECTIVES + "mpi_test.py::test_a_child_process_is_not_mpi_s[False]",
        "distribute/engines.py",
        "return variables.get(_CONNECTED) == str(os.getpid()) and any(",
        "return _CONNECTED in variables and any(",
    ),
    Promise(
        "One of several processes does not train alone by mistake.",
        _WORKERS
        + "lone_training_test.py::test_training_alone_is_refused[torchrun]",
        "distribute/lone_training.py",
        "    if size > 1:\n",
        "    if size > 9:\n",
    ),
    Promise(
        "A chief in TF_CONFIG does not train alone by mistake.",
        _WORKERS
        + "lone_training_test.py::test_training_alone_is_refused[chief]",
        "distribute/lone_training.py",
        'task.type in ("chief", "worker")',
        'task.type in ("worker",)',
    ),
    Promise(
        "An evaluator does not train or save.",
        _WORKERS + "lone_training_test.py::test_an_evaluator_is_not_the_chief",
        "distribute/lone_training.py",
        '_EVALUATOR = "evaluator"',
        '_EVALUATOR = "none"',
    ),
    Promise(
        "Each process trains alone if the user wants it.",
        _WORKERS + "lone_training_test.py::test_a_user_may_want_to_train_alone",
        "distribute/lone_training.py",
        (
            '    if os.environ.get(engines.ALONE) == "1":\n'
            '        return "", 1\n'
        ),
        "",
    ),
    Promise(
        "When a worker fails, launch ends the others.",
        _WORKERS + "launch_test.py::test_a_failure_ends_all_and_comes_last",
        "multi_worker/launch.py",
        "if worker.process.returncode and failed is None:",
        "if worker.process.returncode and failed is None and not running:",
    ),
    Promise(
        "launch forwards signals.",
        _WORKERS + "launch_test.py::test_signals_are_passed_on",
        "multi_worker/launch.py",
        (
            '                    worker.send(number, "which launch'
            ' received and passed on")'
        ),
        "                    pass",
    ),
    Promise(
        "After a signal, workers have the seconds of --grace to save.",
        _WORKERS + "launch_test.py::test_workers_may_save_after_a_signal[30-1]",
        "multi_worker/launch.py",
        (
            "deadline = time.monotonic() + grace\n"
            '                    reason = f"since it still ran {grace:g}'
            ' s after {name}"'
        ),
        (
            "deadline = time.monotonic()\n"
            '                    reason = f"since it still ran {grace:g}'
            ' s after {name}"'
        ),
    ),
    Promise(
        "launch kills what still runs after --grace.",
        _WORKERS + "launch_test.py::test_workers_may_save_after_a_signal[1-0]",
        "multi_worker/launch.py",
        (
            "            if deadline is not None and time.monotonic() >"
            " deadline:"
        ),
        (
            "            if deadline is not None and time.monotonic() >"
            " deadline + 9:"
        ),
    ),
    Promise(
        "A second Ctrl-C kills all workers at once.",
        _WORKERS + "launch_test.py::test_a_second_signal_ends_all_at_once",
        "multi_worker/launch.py",
        (
            "                    deadline = time.monotonic()\n"
            '                    reason = f"since launch'
        ),
        '                    reason = f"since launch',
    ),
    Promise(
        "TF_XSHARD_RESTART counts the restarts.",
        _WORKERS + "launch_test.py::test_restart",
        "multi_worker/launch.py",
        '"TF_XSHARD_RESTART": str(restart)',
        '"TF_XSHARD_RESTART": "0"',
    ),
    Promise(
        "A worker's children end with it.",
        _WORKERS + "launch_test.py::test_children_end_with_their_worker",
        "multi_worker/launch.py",
        "        self.send(signal.SIGKILL)\n        self._ended",
        "        self._ended",
    ),
    Promise(
        "Each line of output has its worker's rank.",
        _WORKERS + "launch_test.py::test_all_end_well",
        "multi_worker/launch.py",
        '_Copy(f"[{rank}] ", self.process.stdout, sys.stdout)',
        '_Copy("[0] ", self.process.stdout, sys.stdout)',
    ),
    Promise(
        "Hosts start their new workers together.",
        _WORKERS + "launch_test.py::test_hosts_restart_together",
        "multi_worker/launch.py",
        "if hosts and not _all_have_started(hosts, options):",
        "if hosts and not restart and not _all_have_started(hosts, options):",
    ),
    Promise(
        "launch shows all output, however slowly it is read.",
        _WORKERS + "launch_test.py::test_a_slow_reader_gets_all_output",
        "multi_worker/launch.py",
        (
            "        while not all(worker.is_printed() for worker in"
            " self._workers):"
        ),
        "        while False:",
    ),
    Promise(
        "launch gives each worker its share of the cores.",
        _WORKERS + "launch_test.py::"
        "test_workers_share_cores_and_keep_freed_memory[shared]",
        "multi_worker/local_cluster.py",
        "share = max(1, len(cores()) // num_workers)",
        "share = max(1, len(cores())) + num_workers",
    ),
    Promise(
        "Workers keep memory for the next step.",
        _WORKERS + "two_processes_test.py::test_freed_memory_is_kept_in_fit",
        "multi_worker/local_cluster.py",
        "            mallopt(option, min(int(os.environ[name]), _MAX_INT))",
        "            pass",
        cluster=True,
    ),
    Promise(
        "An epoch ends with the longest pipeline of a worker.",
        _WORKERS + "two_processes_test.py::"
        "test_fit_on_different_numbers_of_batches[fit]",
        "multi_worker/fit.py",
        "return min(counts) if min(counts) < 0 else max(counts)",
        "return min(counts)",
        cluster=True,
    ),
    Promise(
        "fit shuffles arrays alike in all processes.",
        _WORKERS + "two_processes_test.py::test_each_row_is_trained_on_once",
        "multi_worker/fit.py",
        "if chief[0] is None or any(one[:2] != chief[:2] for one in seeds):",
        "if False:",
        cluster=True,
    ),
    Promise(
        "Metrics cover all workers.",
        _WORKERS + "two_processes_test.py::"
        "test_fit_on_different_numbers_of_batches[fit]",
        "multi_worker/fit.py",
        "sums = buckets.sum_dense(parts, transport).values",
        "sums = [one * site.num_replicas for one in parts]",
        cluster=True,
    ),
    Promise(
        "Workers whose counters differ are told so.",
        _WORKERS + "two_processes_test.py::"
        "test_different_counts_are_refused_on_all_workers",
        "multi_worker/fit.py",
        "if any(one != every[0] for one in every):",
        "if False:",
        cluster=True,
    ),
    Promise(
        "Only the chief writes logs.",
        _WORKERS
        + "fit_test.py::test_what_another_worker_does_of_the_callbacks",
        "multi_worker/fit.py",
        "    keras.callbacks.CSVLogger,\n",
        "",
    ),
    Promise(
        "Each worker has its own backup.",
        _WORKERS
        + "fit_test.py::test_what_another_worker_does_of_the_callbacks",
        "multi_worker/fit.py",
        "_worker_{rank}",
        "_worker",
    ),
    Promise(
        "Only the chief shows progress.",
        _WORKERS + "fit_test.py::"
        "test_the_chief_prints_and_others_do_not[fit-1-verbose2-False]",
        "multi_worker/fit.py",
        'if rank and bound.arguments["verbose"] == "auto":',
        'if rank and bound.arguments["verbose"] == 9:',
    ),
    Promise(
        "Of two timeouts of a batch, the longer applies.",
        _WORKERS + "fit_test.py::test_when_a_batch_is_under_way",
        "multi_worker/fit.py",
        "max(own.timeout_seconds, communication.timeout_seconds)",
        "min(own.timeout_seconds, communication.timeout_seconds)",
    ),
    Promise(
        "The last multi_worker_fit that is undone restores Keras.",
        _WORKERS + "fit_test.py::test_it_is_undone",
        "multi_worker/fit.py",
        "        if not _active:\n            self.restore_keras()",
        "        self.restore_keras()",
    ),
    Promise(
        "barrier() waits for all processes.",
        _WORKERS + "four_processes_test.py::test_rank_chief_and_barrier",
        "multi_worker/processes.py",
        "    if not site_lib.spans_processes(strategy):\n        return\n",
        "    if strategy:\n        return\n",
        cluster=True,
    ),
    Promise(
        "Rank 0 is the chief, and no other.",
        _WORKERS + "four_processes_test.py::test_rank_chief_and_barrier",
        "multi_worker/processes.py",
        'return site_lib.rank(_checked(strategy, "is_chief")) == 0',
        'return site_lib.rank(_checked(strategy, "is_chief")) >= 0',
        cluster=True,
    ),
    Promise(
        "A collective that waits too long fails.",
        _COLLECTIVES + "watchdog_test.py::"
        "test_only_a_missing_replica_is_an_error_after_the_timeout",
        "collectives/watchdog.py",
        "        share = one.seconds(now) / timeout\n        if",
        "        share = 0.0\n        if",
    ),
    Promise(
        "A batch that stands still fails after the timeout.",
        _COLLECTIVES + "watchdog_test.py::"
        "test_a_batch_that_stands_still_is_an_error_after_the_timeout",
        "collectives/watchdog.py",
        "batch.seconds(num_ended, now) / batch.timeout_seconds,",
        "0.0,",
    ),
    Promise(
        "Time in which a process is suspended does not count.",
        _COLLECTIVES + "watchdog_test.py::"
        "test_time_in_which_a_process_is_stopped_does_not_count",
        "collectives/watchdog.py",
        "self.seconds += min(now - self._last, _MOST_PER_SLEEP * seconds)",
        "self.seconds += now - self._last",
    ),
    Promise(
        "A step that failed does not count for the next one.",
        _COLLECTIVES + "watchdog_test.py::"
        "test_a_failed_call_does_not_count_for_the_next_one",
        "collectives/watchdog.py",
        "if count != self._last or not runs:",
        "if count != self._last:",
    ),
    Promise(
        "A timeout costs no threads.",
        _COLLECTIVES + "watchdog_test.py::test_a_timeout_costs_no_threads",
        "collectives/watchdog.py",
        "if self._thread is None or not self._thread.is_alive():",
        "if True:",
    ),
    Promise(
        "Groups do not mix over MPI.",
        _COLLECTIVES + "mpi_test.py::test_operations[2-graph]",
        "collectives/mpi.py",
        "members = tuple(self.groups)[self.groups.group_of(site.replica_id)]",
        "members = tuple(range(self.groups.num_replicas))",
        cluster=True,
    ),
    Promise(
        "MPI sums large gradients of all processes.",
        _COLLECTIVES + "mpi_test.py::test_operations[2-eager]",
        "collectives/mpi.py",
        "np.add(received[0], received[1], out=total)",
        "np.copyto(total, received[1])",
        cluster=True,
    ),
    Promise(
        "With MPI, an error names the rank that is missing.",
        _COLLECTIVES + "mpi_test.py::"
        "test_a_rank_that_is_missing_is_an_error_after_the_timeout",
        "collectives/mpi.py",
        "            if waited > seconds:\n",
        "            if waited > seconds + 99:\n",
    ),
    Promise(
        "With MPI, an error names a rank that has ended.",
        _COLLECTIVES
        + "mpi_test.py::test_a_rank_that_has_ended_is_an_error_at_once",
        "collectives/mpi.py",
        "if ended := _ended(self._members):",
        "if ended := []:",
    ),
    Promise(
        "With MPI, an uncaught error ends the job.",
        _COLLECTIVES + "mpi_test.py::test_an_error_ends_the_job",
        "collectives/mpi.py",
        (
            "        before(*args)\n"
            "        # Otherwise, the others wait for this process until"
            " their timeout.\n"
            "        _end_the_job()"
        ),
        "        before(*args)",
    ),
    Promise(
        "Two processes train as one device does.",
        _WORKERS + "two_processes_test.py::"
        "test_fit_on_different_numbers_of_batches[fit]",
        "collectives/subgroups.py",
        '                merge_op="Add",',
        '                merge_op="Max",',
        cluster=True,
    ),
    Promise(
        "Groups of processes do not mix.",
        _WORKERS + "four_processes_test.py::test_oracle[crossed]",
        "collectives/subgroups.py",
        "self._members = tuple(groups)[groups.group_of(site.replica_id)]",
        "self._members = tuple(range(groups.num_replicas))",
        cluster=True,
    ),
    Promise(
        "An error names the worker that takes no part.",
        _WORKERS + "four_processes_test.py::"
        "test_a_worker_that_does_not_take_part_is_named",
        "collectives/silent_workers.py",
        "return list(found) if _call(ask) or found else [0]",
        "return [0]",
        cluster=True,
    ),
    Promise(
        "Every process gets all values in the order of the ranks.",
        _WORKERS + "four_processes_test.py::test_set_and_merge_over_processes",
        "collectives/process_gather.py",
        "return rows[np.argsort(list(dict.fromkeys(ranks)))]",
        "return rows[::-1]",
        cluster=True,
    ),
    Promise(
        "The planned bytes are those on the wire.",
        _WORKERS
        + "four_processes_test.py::test_plan_ledger_and_wire_agree[towers]",
        "collectives/recorder.py",
        "    passes = 2 if operation == ALL_REDUCE else 1",
        "    passes = 1",
        cluster=True,
    ),
    Promise(
        "A killed job goes on where it was, to the bit.",
        _WORKERS + "faults_test.py::test_the_chief_is_killed",
        "callbacks/group_checkpoint.py",
        "        if not self._num_to_skip:\n            return\n",
        "        if self.model:\n            return\n",
        cluster=True,
    ),
    Promise(
        "A signal to one process makes all of them save and end.",
        _WORKERS + "faults_test.py::test_a_worker_is_preempted",
        "callbacks/preemption.py",
        "return any(is_asked for is_asked, _ in answers)",
        "return answers[0][0]",
        cluster=True,
    ),
    Promise(
        "An optimizer with another transport does not use MPI.",
        _COLLECTIVES
        + "mpi_test.py::test_when_mpi_is_used[tensorflow-True-None-False]",
        "collectives/mpi.py",
        'if choice == "tensorflow":',
        'if choice == "none":',
    ),
    Promise(
        "If MPI can't be used, an error says why.",
        _COLLECTIVES + "mpi_test.py::test_only_processes_use_mpi[mirrored]",
        "collectives/mpi.py",
        'if reason and choice == "mpi":',
        'if reason and choice == "none":',
    ),
]

IN_FIT = "tests/callbacks/in_fit_test.py::"
LEDGER = "tests/callbacks/communication_ledger_test.py::"
SENTINEL = "tests/callbacks/divergence_sentinel_test.py::"
WARMUP = "tests/callbacks/learning_rate_warmup_test.py::"
STATE = "tests/group_state/state_test.py::"
SAVES = "tests/group_state/checkpoint_test.py::"
CATALOG = "tests/group_state/catalog_test.py::"
PLAN = "tests/planning/communication_plan_test.py::"
TPU = "tests/testing/simulated_tpu_test.py::"
COMPILED = "tests/testing/compile_for_tpu_test.py::"
REFUSED = "tests/testing/simulated_tpu_refusals_test.py::"
CLI = "tests/cli/cli_test.py::"

STATE_AND_TOOLS: list[Promise] = [
    Promise(
        "A ledger logs each epoch's collectives alone.",
        f"{IN_FIT}test_the_ledger_counts_the_exchanges",
        "callbacks/communication_ledger.py",
        "float(after - before)",
        "float(after)",
    ),
    Promise(
        "On TPUs, a ledger multiplies the plan by the steps.",
        f"{LEDGER}test_on_a_tpu_the_plan_is_multiplied[3]",
        "callbacks/communication_ledger.py",
        "self._plan.bytes_per_step * steps",
        "self._plan.bytes_per_step",
    ),
    Promise(
        "Without a ledger, a step has no clocks.",
        f"{LEDGER}test_only_a_fit_with_it_is_timed",
        "callbacks/communication_ledger.py",
        'getattr(function, "untimed", function)',
        "function",
    ),
    Promise(
        "DivergenceSentinel looks every few batches.",
        f"{SENTINEL}test_it_names_what_differs[weight]",
        "callbacks/divergence_sentinel.py",
        "self._num_since_check += self.model.steps_per_execution",
        "self._num_since_check += 0",
    ),
    Promise(
        "DivergenceSentinel compares all replicas of a group.",
        f"{SENTINEL}test_it_names_what_differs[slot]",
        "group_state/divergence.py",
        "own = [row[r] for r in members]",
        "own = [row[members[0]] for _ in members]",
    ),
    Promise(
        "A repair takes the value of most replicas.",
        f"{SENTINEL}test_it_warns_or_repairs[repair-1]",
        "group_state/divergence.py",
        "value = values[own.index(most)]",
        "value = values[0]",
    ),
    Promise(
        "GroupCheckpoint skips what an epoch has trained on.",
        f"{IN_FIT}test_each_group_goes_on_where_it_ended",
        "callbacks/group_checkpoint.py",
        "self.model, self._num_to_skip, self._restore_new_metrics",
        "self.model, 0, self._restore_new_metrics",
    ),
    Promise(
        "A finished run is not trained again.",
        f"{IN_FIT}test_a_finished_run_is_not_trained_again",
        "callbacks/group_checkpoint.py",
        "fit_internals.start_at_epoch(self.model, position.epoch)",
        "pass",
    ),
    Promise(
        "GroupCheckpoint keeps the number of saves it is told.",
        f"{IN_FIT}test_how_many_are_kept",
        "callbacks/group_checkpoint.py",
        "kept = {newest, *saves[-keep:]}",
        "kept = {newest}",
    ),
    Promise(
        "A restarted script with `regroup` keeps its own groups.",
        f"{IN_FIT}test_other_groups_take_those_of_the_first_once",
        "callbacks/group_checkpoint.py",
        "if not group_assignment.same_groups(",
        "if True or group_assignment.same_groups(",
    ),
    Promise(
        "After a signal, GroupCheckpoint saves and ends.",
        f"{IN_FIT}test_a_signal_saves_and_ends",
        "callbacks/preemption.py",
        "self._is_asked = True",
        "self._is_asked = None",
    ),
    Promise(
        "GroupValidation runs every few epochs.",
        f"{IN_FIT}test_each_groups_validation_is_in_the_history",
        "callbacks/group_validation.py",
        "(epoch + 1) % self._every",
        "epoch % self._every",
    ),
    Promise(
        "Each group is evaluated with its own weights.",
        f"{IN_FIT}test_each_groups_validation_is_in_the_history",
        "group_state/evaluate.py",
        "self._assign(weights)",
        "self._assign(members[0])",
    ),
    Promise(
        "evaluate leaves the model as it was, even if it fails.",
        f"{STATE}test_evaluate_that_fails_leaves_the_model",
        "group_state/evaluate.py",
        "self._replicas.assign(variable, values)",
        "pass",
    ),
    Promise(
        "The rate grows linearly, batch by batch.",
        f"{WARMUP}test_the_rate_grows_linearly[cross]",
        "callbacks/learning_rate_warmup.py",
        "(1 - self._first) * share",
        "(1 - self._first) * share**2",
    ),
    Promise(
        "A warm-up keeps the ratios of the groups' rates.",
        f"{WARMUP}test_each_groups_rate_is_scaled",
        "callbacks/learning_rate_warmup.py",
        "float(of[r]) / largest",
        "float(of[0]) / largest",
    ),
    Promise(
        "With `swap_on_epoch`, AGN's center is saved.",
        f"{IN_FIT}test_the_center_is_validated_and_saved",
        "callbacks/swap_center_weights.py",
        "if self.swap_on_epoch:",
        "if False:",
    ),
    Promise(
        "get_weights gives a group's own values.",
        f"{STATE}test_get_weights",
        "group_state/replica_io.py",
        "yield [local[r] for r in replica_ids]",
        "yield [local[0] for r in replica_ids]",
    ),
    Promise(
        "Groups may have their own learning rates.",
        f"{STATE}test_each_group_has_its_learning_rate",
        "group_state/state.py",
        "dict(enumerate(values))",
        "dict.fromkeys(range(len(values)), values[0])",
    ),
    Promise(
        "Where replicas differ, merge takes the group's mean.",
        f"{STATE}test_merge[mean-weights0]",
        "group_state/merge.py",
        "combined([values[r] for r in members])",
        "values[members[0]]",
    ),
    Promise(
        "merge weighs the groups.",
        f"{STATE}test_merge[how2-weights2]",
        "group_state/merge.py",
        "total += weight * value.astype(wide)",
        "total += value.astype(wide) / len(values)",
    ),
    Promise(
        "The ensemble averages the groups' outputs and losses.",
        f"{STATE}test_the_ensembles_regularization_is_the_groups_mean",
        "group_state/ensemble.py",
        "return total / len(outputs)",
        "return total",
    ),
    Promise(
        "A metric called `group` leaves the group's column.",
        f"{STATE}test_metrics_of_all_kinds_on_one_device",
        "group_state/table.py",
        'if name == "group" else name',
        "if False else name",
    ),
    Promise(
        "export writes the group's optimizer state.",
        f"{STATE}test_export[momentum]",
        "group_state/export.py",
        "its.assign(value_of(mine))",
        "pass",
    ),
    Promise(
        "Groups of nested wrappers are joined.",
        f"{CATALOG}test_nested_optimizers_are_joined[crossed]",
        "group_state/inventory.py",
        "group_assignment_lib.joined(assignments)",
        "assignments[0]",
    ),
    Promise(
        "save keeps every value of every replica.",
        f"{SAVES}test_every_type",
        "group_state/checkpoint/checkpoint.py",
        "row.index(digest) for digest in row",
        "0 for digest in row",
    ),
    Promise(
        "`regroup` maps saved groups to groups.",
        f"{SAVES}test_regroup[swapped]",
        "group_state/checkpoint/checkpoint.py",
        "return [[regroup[group]] for group",
        "return [[group] for group",
    ),
    Promise(
        "A save is verified, byte by byte.",
        f"{SAVES}test_every_byte_counts",
        "group_state/checkpoint/files.py",
        "if _checksum(path) != checksum:",
        "if False:",
    ),
    Promise(
        "A crash leaves the previous save or the new one.",
        f"{SAVES}test_a_crash_between_any_two_operations",
        "group_state/checkpoint/files.py",
        "before = _listed_files(directory)",
        "before = has_save(directory) and tf.io.gfile.remove(path)",
    ),
    Promise(
        "Only files that a save wrote are removed.",
        f"{IN_FIT}test_how_many_are_kept",
        "group_state/checkpoint/files.py",
        "if _FILES.fullmatch(name):",
        'if not name.startswith("/"):',
    ),
    Promise(
        "A plan is of one replica.",
        f"{PLAN}test_operations_bytes_and_counters[groups]",
        "planning/communication_plan.py",
        "for one, r in found if r == first",
        "for one, r in found",
    ),
    Promise(
        "A collective of every fourth step counts a quarter.",
        f"{PLAN}test_operations_bytes_and_counters[towers]",
        "planning/communication_plan.py",
        "sum(one.num_bytes / one.every for one",
        "sum(one.num_bytes / 1 for one",
    ),
    Promise(
        "A plan runs nothing, and nothing remembers it.",
        f"{PLAN}test_nothing_runs_and_nothing_is_remembered",
        "planning/step.py",
        "contexts.enter_context(one.forgetting_traces())",
        "pass",
    ),
    Promise(
        "GlobalMean adds one all-reduce of two numbers.",
        f"{PLAN}test_a_global_mean_adds_one_all_reduce_of_two_numbers",
        "planning/step.py",
        "loss.communicate_as_in_a_call(site_lib.current())",
        "pass",
    ),
    Promise(
        "The simulated TPU numbers replicas as XLA does.",
        f"{TPU}test_a_tpu_strategys_collectives[tpu_permuted-4]",
        "testing/execution.py",
        "[vs[replica] for replica in numbering]",
        "[vs[r] for r in sorted(numbering)]",
    ),
    Promise(
        "The simulated TPU cuts padding off its results.",
        f"{TPU}test_dynamic_shapes",
        "testing/execution.py",
        "if output.sizes is not None:",
        "if False:",
    ),
    Promise(
        "The simulated TPU reduces as a TPU does.",
        f"{TPU}test_native_groups_with_a_device_assignment",
        "testing/tpu_operations.py",
        '.s = b"Add"',
        '.s = b"Max"',
    ),
    Promise(
        "Every operation with an effect runs, used or not.",
        f"{TPU}test_variables",
        "testing/replicated_program.py",
        "[o for o in inside if o.op_def.is_stateful]",
        "[]",
    ),
    Promise(
        "Boolean constants arrive unchanged.",
        f"{TPU}test_bools_as_bits_and_as_bytes",
        "testing/stablehlo.py",
        'bitorder="little"',
        'bitorder="big"',
    ),
    Promise(
        "Equal programs are compiled once.",
        f"{TPU}test_programs_are_compiled_once",
        "testing/xla_cpu.py",
        "_NUM_PROGRAMS = 128",
        "_NUM_PROGRAMS = 0",
    ),
    Promise(
        "`with strategy` frees the compiled programs.",
        f"{TPU}test_a_context_manager_frees_programs",
        "testing/simulated_strategy.py",
        "xla_cpu.compiled.cache_clear()",
        "pass",
    ),
    Promise(
        "compile_for_tpu compiles the training step.",
        f"{COMPILED}test_the_groups_are_exactly_the_assignment",
        "testing/compile_for_tpu.py",
        '"train": model.train_step,',
        '"train": model.test_step,',
    ),
    Promise(
        "Groups of compiled collectives are read in any notation.",
        f"{COMPILED}test_reading_hlo",
        "testing/compiled.py",
        "ids = ids.transpose(transpose)",
        "pass",
    ),
    Promise(
        "Untested versions of jax are refused.",
        f"{REFUSED}test_versions[jax]",
        "testing/requirements.py",
        "if found is not None and tested.contains(found):",
        "if found is not None:",
    ),
    Promise(
        "`doctor` finds a wrong sum.",
        f"{CLI}test_doctor_finds_a_wrong_sum[rows_as_columns]",
        "cli/doctor.py",
        "if np.array_equal(got, wanted):",
        "if True:",
    ),
    Promise(
        "`evidence` says when a number is wrong.",
        f"{CLI}test_evidence_notices_wrong_numbers[0.001-True-False]",
        "cli/evidence.py",
        "right &= ok or is_tpu",
        "right &= True",
    ),
    Promise(
        "`evidence` names the devices.",
        f"{CLI}test_evidence",
        "cli/logical_devices.py",
        'else {"CPU"}',
        "else set()",
    ),
    Promise(
        "`plan` ends the script at its first model.",
        f"{CLI}test_plan_of_a_script_in_a_new_process",
        "cli/plan.py",
        "class _Compiled(BaseException):",
        "class _Compiled(Exception):",
    ),
    Promise(
        "`demo` exits with 1 if a number is wrong.",
        f"{CLI}test_promises_are_the_exit_code[1.0-True]",
        "cli/demo/training.py",
        "holds = off <= tolerance",
        "holds = True",
    ),
    Promise(
        "`demo` compares each group with its own shards.",
        f"{CLI}test_demo_compares_each_run[cross_shard-None]",
        "cli/demo/cross_shard.py",
        "alone[index].weights[0],",
        "alone[0].weights[0],",
    ),
    Promise(
        "`demo` checks both ways to run towers.",
        f"{CLI}test_demo_compares_each_run[tower-tower_train_step]",
        "cli/demo/tower.py",
        '("tower_train_step", at_once),',
        '("tower_train_step", over_time),',
    ),
    Promise(
        "`demo` checks local SGD with an average in NumPy.",
        f"{CLI}test_demo_compares_each_run[agn-AGNOptimizer as]",
        "cli/demo/agn.py",
        "updates, averaged, tolerance)",
        "updates, averaged, np.inf)",
    ),
    Promise(
        "`demo` gives a group the rows of its replicas.",
        f"{CLI}test_digits_of_replicas_and_towers",
        "cli/demo/digits.py",
        "by_replica[:, list(members)]",
        "by_replica[:, : len(members)]",
    ),
]

_NO_SUM = (
    "collectives/subgroups.py",
    "            self._all_reduce(position, tensor)\n",
    "            tensor\n",
)
PAGES = [
    Promise(
        "contiguous() groups consecutive replicas",
        "tests/group_assignment_test.py::test_layouts",
        "group_assignment.py",
        "return cls(np.arange(num_replicas).reshape(num_groups, group_size))",
        "return cls(np.arange(num_replicas).reshape(group_size, -1).T)",
    ),
    Promise(
        "strided() groups every num_groups-th replica",
        "tests/group_assignment_test.py::test_layouts",
        "group_assignment.py",
        "return cls(np.arange(num_replicas).reshape(group_size, num_groups).T)",
        "return cls(np.arange(num_replicas).reshape(num_groups, group_size))",
    ),
    Promise(
        "group_of() names the group that holds a replica",
        "tests/group_assignment_test.py::test_accepts_nested_integers",
        "group_assignment.py",
        "{r: index for index, row in enumerate(rows) for r in row},",
        "{r: r // len(rows[0]) for row in rows for r in row},",
    ),
    Promise(
        "by_host() groups the processes on one host",
        "tests/group_assignment_test.py::test_by_host[processes]",
        "group_assignment.py",
        'address.rpartition(":")[0] for address in addresses',
        "address for address in addresses",
    ),
    Promise(
        "by_host() groups a TPU's cores by their host",
        "tests/group_assignment_test.py::test_by_host[tpu]",
        "group_assignment.py",
        'hosts = [device.rpartition("/device:")[0] for device in devices]',
        'hosts = [device.rpartition("/device:")[2] for device in devices]',
    ),
    Promise(
        "transposed() has one replica of every host in each group",
        "tests/group_assignment_test.py::test_by_host[gpus]",
        "group_assignment.py",
        "return GroupAssignment([list(row) for row in zip(*self, "
        "strict=True)])",
        "return self",
    ),
    Promise(
        "hosts with different numbers of replicas raise ValueError",
        "tests/group_assignment_test.py::"
        "test_hosts_of_different_sizes_are_refused",
        "group_assignment.py",
        "        if len(set(sizes.values())) > 1:\n",
        "        if not sizes:\n",
    ),
    Promise(
        "nested optimizers reduce over the groups of both",
        "tests/group_assignment_test.py::test_assignments_together",
        "group_assignment.py",
        "set().union(*together))",
        "together[0])",
    ),
    Promise(
        "a replica in two groups raises ValueError",
        "tests/group_assignment_test.py::test_refuses"
        "[GroupAssignment-argument9-ValueError-replica 1 in groups 0 and 1]",
        "group_assignment.py",
        "            if replica_id in seen:\n",
        "            if seen.get(replica_id) == index:\n",
    ),
    Promise(
        "GroupAssignment needs no TensorFlow",
        "tests/group_assignment_test.py::test_needs_no_tensorflow",
        "group_assignment.py",
        "import dataclasses\n",
        "import dataclasses\n\nimport tensorflow\n",
    ),
    Promise(
        "help and launch need no TensorFlow",
        "tests/dependencies_test.py::test_no_tensorflow_for_help_and_launch"
        "[module-arguments1]",
        "__init__.py",
        "return after[:1] == [__name__]",
        "return False",
    ),
    Promise(
        "the import makes every saved class known to Keras",
        C + "private_names_test.py::test_only_the_feature_fails",
        "__init__.py",
        "return after[:1] == [__name__]",
        "return True",
    ),
    Promise(
        "Keras newer than tested is allowed, and tested means setup.cfg's",
        "tests/dependencies_test.py::test_what_is_tested[setup.cfg]",
        "dependencies.py",
        "return oldest, (bound[0], bound[1] - 1)",
        "return oldest, bound",
    ),
    Promise(
        "two TensorFlows of different versions raise ImportError",
        "tests/dependencies_test.py::"
        "test_two_tensorflows_of_different_versions[installed0-True]",
        "dependencies.py",
        "    if len(set(found.values())) > 1:\n",
        "    if len(set(found.values())) > 2:\n",
    ),
    Promise(
        "a private name that moved is named in the error",
        C + "private_names_test.py::test_a_name_that_moved",
        "private/names.py",
        'missing.append(" or ".join(paths))',
        "self._found[name] = None",
    ),
    Promise(
        "gradient_accumulation_steps works in a tf.function",
        C + "plain_keras_test.py::test_the_wrapper_is_right[accumulation]",
        "reductions.py",
        "def _count(count: Any) -> Any:\n    return count\n",
        "def _count(count: Any) -> Any:\n    return 1\n",
    ),
    Promise(
        "gradient_accumulation_steps works with IndexedSlices",
        C + "plain_keras_test.py::"
        "test_the_wrapper_is_right[sparse_accumulation]",
        "reductions.py",
        "def _count(count: Any) -> Any:\n    return count\n",
        "def _count(count: Any) -> Any:\n    return 1\n",
    ),
    Promise(
        "use_ema works with ema_overwrite_frequency",
        C + "plain_keras_test.py::test_the_wrapper_is_right[ema_overwrite]",
        "private/keras/local_optimizers.py",
        "            return _BaseOptimizer."
        "_overwrite_model_variables_with_average_value(\n"
        "                self, trainable_variables\n"
        "            )\n",
        "            return None\n",
    ),
    Promise(
        "applying works inside tf.cond",
        C + "plain_keras_test.py::test_the_wrapper_is_right[in_cond]",
        *_NO_SUM,
    ),
    Promise(
        "steps_per_execution works",
        C + "plain_keras_test.py::"
        "test_the_wrapper_is_right[steps_per_execution]",
        *_NO_SUM,
    ),
    Promise(
        "an optimizer with slots is built on first use in a tf.function",
        C + "plain_keras_test.py::test_the_wrapper_is_right[unbuilt]",
        *_NO_SUM,
    ),
    Promise(
        "a None gradient on one replica counts as zero",
        C + "plain_keras_test.py::"
        "test_the_wrapper_is_right[none_on_one_replica]",
        "reduction/presence.py",
        "any(pattern[index].kind != NONE for pattern in group)",
        "all(pattern[index].kind != NONE for pattern in group)",
    ),
    Promise(
        "duplicate indices in IndexedSlices are summed first",
        C + "plain_keras_test.py::test_the_wrapper_is_right[duplicate_indices]",
        "reduction/reducer.py",
        "        indexed_slices.unique(\n            tf.IndexedSlices(",
        "        (lambda one: one)(\n            tf.IndexedSlices(",
    ),
    Promise(
        "README's first program keeps all replicas equal",
        C + "pages_test.py::test_the_first_program_of_the_readme",
        *_NO_SUM,
    ),
    Promise(
        "keywords in the guides exist",
        "tests/source/pages_test.py::test_code_names_what_exists",
        "docs/groups.md",
        "keras.optimizers.SGD(), group_assignment=[[0], [1], [2], [3]]",
        "keras.optimizers.SGD(), groups=[[0], [1], [2], [3]]",
    ),
    Promise(
        "names in the guides exist",
        "tests/source/pages_test.py::test_code_names_what_exists",
        "docs/local_variables.md",
        "tf_xshard.GroupState(model, [[0], [1]])",
        "tf_xshard.GroupStates(model, [[0], [1]])",
    ),
    Promise(
        "many_workers trains one model on two workers",
        C + "examples_test.py::test_one_epoch[many_workers]",
        *_NO_SUM,
    ),
    Promise(
        "from_horovod trains one model on two workers",
        C + "examples_test.py::test_one_epoch[from_horovod]",
        *_NO_SUM,
    ),
    Promise(
        "one_device_numbers ends with one device's weights",
        C + "examples_test.py::test_one_epoch[one_device_numbers]",
        *_NO_SUM,
    ),
    Promise(
        "custom_loop ends with one device's weights after a ragged batch",
        C + "examples_test.py::test_one_epoch[custom_loop]",
        "optimizers/fit/global_mean.py",
        "        if groups.group_size == 1:",
        "        if True:",
    ),
    Promise(
        "padded_text counts tokens instead of rows",
        C + "examples_test.py::test_one_epoch[padded_text]",
        "optimizers/fit/global_mean.py",
        "        if groups.group_size == 1:",
        "        if True:",
    ),
    Promise(
        "sharded_adamw divides AdamW's state",
        C + "examples_test.py::test_one_epoch[sharded_adamw]",
        "examples/sharded_adamw.py",
        "shard_update=shard_update",
        "shard_update=False",
    ),
    Promise(
        "muon divides Muon's state by whole variables",
        C + "examples_test.py::test_one_epoch[muon]",
        "examples/muon.py",
        "shard_update=shard_update",
        "shard_update=False",
    ),
    Promise(
        "ensemble exports the best model",
        C + "examples_test.py::test_one_epoch[ensemble]",
        "examples/ensemble.py",
        "groups.export(best, ",
        "groups.export((best + 1) % 4, ",
    ),
    Promise(
        "local_sgd communicates every 10 steps",
        C + "examples_test.py::test_one_epoch[local_sgd]",
        "examples/local_sgd.py",
        "communication_period=10",
        "communication_period=2",
    ),
    Promise(
        "int8_gradients sends a quarter of the bytes",
        C + "examples_test.py::test_one_epoch[int8_gradients]",
        "examples/int8_gradients.py",
        "Adam(3e-3), communication=communication",
        "Adam(3e-3)",
    ),
    Promise(
        "from_tf_keras trains two groups",
        C + "examples_test.py::test_one_epoch[from_tf_keras]",
        "examples/from_tf_keras.py",
        'with_aggregator(optimizer, "mean", GROUPS)',
        'with_aggregator(optimizer, "mean")',
    ),
    Promise(
        "tf1_script trains without a TPU",
        C + "examples_test.py::test_one_epoch[tf1_script]",
        "examples/tf1_script.py",
        'tf.train.AdamOptimizer(params["learning_rate"])',
        "tf.train.AdamOptimizer(0.0)",
    ),
    Promise(
        "tpu_without_hardware trains two groups",
        C + "examples_test.py::test_one_epoch[tpu_without_hardware]",
        "examples/tpu_without_hardware.py",
        "group_assignment=[[0, 1], [2, 3]]",
        "group_assignment=[[0, 1, 2, 3]]",
    ),
]

PROMISES = [
    *COLLECTIVES_AND_REDUCTION,
    *CROSS_SHARD,
    *TOWER_AND_LOSSES,
    *AGN_AND_STEPS,
    *COMPAT_AND_TF_KERAS,
    *MULTI_WORKER,
    *STATE_AND_TOOLS,
    *PAGES,
]
