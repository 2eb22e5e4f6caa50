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

COLLECTIVES_AND_REDUCTION: list[Promise] = []

CROSS_SHARD: list[Promise] = []

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

AGN_AND_STEPS: list[Promise] = []

COMPAT_AND_TF_KERAS: list[Promise] = []

MULTI_WORKER: list[Promise] = []

STATE_AND_TOOLS: list[Promise] = []

PAGES: list[Promise] = []

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
