"""shard_update=True for optimizers that need whole variables."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import sharded
from tf_xshard.distribute import ownership
from tf_xshard.optimizers.update import kinds
from tf_xshard.optimizers.update import sharded as sharded_lib
from tf_xshard.private.keras import shards as keras_shards
from tf_xshard.reduction import owners

O = keras.optimizers  # noqa: E741


@tf_xshard.per_variable
class Normalized(O.SGD):
    """Has a norm of each row, which has no reference variable."""

    def build(self, variables):
        super().build(variables)
        self.norms = [
            self.add_variable(v.shape[:1], name="norms") for v in variables
        ]

    def update_step(self, gradient, variable, learning_rate):
        norms = self.norms[self._get_variable_index(variable)]
        square = tf.reduce_sum(tf.square(gradient))
        self.assign_add(norms, tf.fill(norms.shape, square))
        self.assign_sub(variable, 0.01 * gradient / (1e-3 + tf.sqrt(square)))


OPTIMIZERS = {
    "muon": lambda: O.Muon(0.02),
    "lamb": lambda: O.Lamb(0.05),
    "adafactor": lambda: O.Adafactor(0.05),
    "users": lambda: Normalized(0.1),
}
SETTINGS = {
    "clipnorm": lambda: O.Lamb(0.05, clipnorm=0.02),
    "global_clipnorm": lambda: O.Muon(0.02, global_clipnorm=0.1),
    "clipvalue": lambda: O.Lamb(0.05, clipvalue=0.01),
    "decay": lambda: O.Muon(0.02, weight_decay=0.1, adam_weight_decay=0.2),
    "decay_but_names": lambda: _without_decay(),
    "ema": lambda: O.Lamb(
        0.05, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3
    ),
    "averages": lambda: O.Lamb(0.05, use_ema=True, ema_momentum=0.9),
    "accumulation": lambda: O.Lamb(
        0.05, gradient_accumulation_steps=3, global_clipnorm=0.05
    ),
    "accumulation_ema": lambda: O.Adafactor(
        0.05,
        gradient_accumulation_steps=2,
        use_ema=True,
        ema_momentum=0.9,
        ema_overwrite_frequency=3,
    ),
    "static_scale": lambda: O.Lamb(0.05, clipnorm=0.1, loss_scale_factor=16.0),
    "scale": lambda: O.LossScaleOptimizer(
        O.Lamb(0.05, global_clipnorm=0.1), initial_scale=64.0
    ),
    "relative": lambda: O.Adafactor(
        0.05, relative_step=False, clip_threshold=0.5
    ),
}
if hasattr(O, "MultiOptimizer"):
    SETTINGS["multi"] = lambda: O.MultiOptimizer(
        O.OptimizerMap(
            O.AdamW(0.05, global_clipnorm=0.05),
            {"kernel": O.Muon(0.02), "row": O.Lamb(0.05)},
        )
    )
    SETTINGS["multi_function"] = lambda: O.MultiOptimizer(
        lambda v: O.Lamb(0.05) if len(v.shape) > 1 else O.SGD(0.1, momentum=0.5)
    )
ALL = {**OPTIMIZERS, **SETTINGS}
PAIRS = [[0, 2], [3, 1]]


def _without_decay():
    optimizer = O.Lamb(0.05, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias", "^row"])
    return optimizer


@pytest.mark.parametrize(
    "name, kind, num_replicas, groups",
    [
        *((name, "mirrored", 2, None) for name in OPTIMIZERS),
        *((name, "mirrored", 4, PAIRS) for name in SETTINGS),
        ("muon", "mirrored", 3, None),
        ("adafactor", "mirrored", 8, [[7, 1, 2, 0], [3, 5, 4, 6]]),
        ("muon", "tpu", 4, None),
        ("adafactor", "tpu_permuted", 4, PAIRS),
        ("accumulation", "tpu", 4, PAIRS),
        ("scale", "tpu_permuted", 4, None),
    ],
    ids=str,
)
def test_is_one_device(name, kind, num_replicas, groups):
    is_compared = num_replicas == 2 or name in ("accumulation_ema", "multi")
    sharded.check(
        ALL[name],
        replicas.STRATEGIES[kind](num_replicas),
        groups,
        whole=is_compared,
    )


@replicas.in_full
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "kind, num_replicas, groups",
    [
        ("mirrored", 2, None),
        ("mirrored", 3, None),
        ("mirrored", 4, None),
        ("mirrored", 8, [[7, 1, 2, 0], [3, 5, 4, 6]]),
        ("tpu", 4, None),
        ("tpu_permuted", 4, PAIRS),
    ],
    ids=str,
)
def test_all_of_them_everywhere(name, kind, num_replicas, groups):
    sharded.check(
        ALL[name], replicas.STRATEGIES[kind](num_replicas), groups, whole=True
    )


@pytest.mark.parametrize(
    "name, devices, groups, graph",
    [
        ("muon", replicas.REVERSED, None, True),
        ("adafactor", replicas.MIXED, PAIRS, True),
        ("muon", replicas.MIXED, PAIRS, False),
        ("adafactor", replicas.TWELVE, None, True),
    ],
    ids=str,
)
def test_devices_in_any_order_and_number(name, devices, groups, graph):
    sharded.check(
        ALL[name],
        replicas.mirrored_on(devices),
        groups,
        graph,
        whole=devices == replicas.MIXED,
    )


def test_in_eager_mode():
    sharded.check(SETTINGS["scale"], replicas.mirrored(2), None, graph=False)


def test_constraints_are_of_whole_variables():
    for name in ("lamb", "accumulation"):
        sharded.check(
            ALL[name],
            replicas.mirrored(4),
            PAIRS,
            constraint=keras.constraints.MaxNorm(0.4, axis=0),
        )


def test_hooks_see_whole_gradients():
    """The numbers are those of the whole update, with `post_reduce` too."""
    hook = tf_xshard.clip_by_norm(0.05)
    for name in ("pre_reduce", "post_reduce"):
        whole, got = (
            sharded.Trained(
                OPTIMIZERS["lamb"],
                replicas.mirrored(4),
                PAIRS,
                shard_update=shard_update,
                **{name: hook},
            )
            for shard_update in (False, True)
        )
        assert sharded.difference(got.weights, whole.weights) < 1e-6


def test_towers():
    whole, got = (
        sharded.Trained(
            OPTIMIZERS["lamb"],
            replicas.mirrored(2),
            shard_update=shard_update,
            around=lambda one: tf_xshard.TowerOptimizer(one, 2),
        )
        for shard_update in (False, True)
    )
    assert sharded.difference(got.weights, whole.weights) < 1e-6


@pytest.mark.parametrize("kind", ["mirrored", "tpu"])
def test_none_and_sparse_gradients(kind):
    """Each group has another pattern; a variable without one stays."""
    strategy = replicas.STRATEGIES[kind](4)

    def gradients(r):
        rows = tf.IndexedSlices(
            tf.fill([3, 3], tf.cast(r + 1, tf.float32)),
            tf.stack([4, tf.cast(r, tf.int64), 4]),
            tf.constant([5, 3], tf.int64),
        )
        some = tf.fill([3], 100.0 + tf.cast(r, tf.float32))
        if kind == "tpu":  # All replicas run one program.
            return [tf.convert_to_tensor(rows), None, some]
        return [rows, None, some if r == 2 else None]

    found = []
    for shard_update in (False, True):
        with strategy.scope():
            variables = [
                keras.Variable(tf.ones(shape)) for shape in ([5, 3], [3], [3])
            ]
            optimizer = tf_xshard.CrossShardOptimizer(
                O.Lamb(0.1, global_clipnorm=0.5),
                "mean",
                PAIRS,
                loss_normalization="replica",
                shard_update=shard_update,
            )
            optimizer.build(variables)
        step = replicas.applying(strategy, optimizer, gradients, variables)
        if kind == "tpu":
            on_replica = functools.partial(
                lambda own: own.apply(
                    gradients(replicas.replica_id_tensor()), variables
                ),
                optimizer,
            )
            step = tf.function(
                lambda on_replica=on_replica: strategy.run(on_replica),
                autograph=False,
            )
        with pytest.warns(UserWarning, match="Gradients do not exist"):
            for _ in range(3):
                step()
        found.append(
            [
                np.stack(replicas.values(strategy, v))
                for v in (*variables, *optimizer.variables[2:])
            ]
        )
    assert sharded.difference(*found) < 1e-6
    _, missing, some, *_ = found[1]
    assert (missing == 1).all()
    if kind == "mirrored":
        assert (some[[1, 3]] == 1).all() and (some[[0, 2]] != 1).all()


def test_slots_are_on_their_owners_only():
    """Shapes of several dtypes and blocks; the bytes are those of the plan."""
    strategy = replicas.mirrored(4)
    shapes = [[200, 100], [120, 130], [90, 150], [5], [64, 64], [], [110, 100]]
    dtypes = ["float32"] * 6 + ["float64"]
    with strategy.scope():
        variables = [
            keras.Variable(tf.ones(shape, dtype), dtype=dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        optimizer = tf_xshard.CrossShardOptimizer(
            O.Lamb(), shard_update=True, loss_normalization="replica"
        )
        optimizer.build(variables)
    slots = [
        v for v in optimizer.variables if isinstance(v, keras_shards.Owned)
    ]
    assert len(slots) == 2 * len(shapes)
    blocks = {id(one.shards): one.shards for one in slots}
    assert 1 < len(blocks) < len(slots)
    held = sum(
        one.dtype.size * one.shape.num_elements() for one in blocks.values()
    )
    # Two float32 slots of 200 x 100, and two float64 slots of 110 x 100.
    positions = {one.layout.owner for one in slots}
    assert positions == {0, 1, 2, 3}
    assert 4 * 2 * 200 * 100 <= held <= 1.05 * (8 * 200 * 100 + 16 * 110 * 100)
    plan = tf_xshard.communication_plan(optimizer, variables)
    scalars = 8 + 4  # iterations, learning rate
    assert plan.slot_bytes == held + scalars
    assert 1 <= plan.balance.largest_owner < 1.5
    for slot in slots:
        value = np.arange(np.prod(slot.shape)).reshape(slot.shape)
        slot.assign(value)
    for slot in slots:
        value = np.arange(np.prod(slot.shape)).reshape(slot.shape)
        np.testing.assert_array_equal(slot.numpy(), value)


def test_the_plan_says_what_one_large_variable_costs():
    with replicas.mirrored(4).scope():
        variables = [
            keras.Variable(tf.ones(shape), name=name)
            for shape, name in (([90, 90], "table"), ([30, 30], "w"))
        ]
        optimizer = tf_xshard.CrossShardOptimizer(O.Lamb(), shard_update=True)
    plan = tf_xshard.communication_plan(optimizer, variables)
    largest, variable, share = plan.balance
    assert variable == "table"
    np.testing.assert_allclose([largest, share], [3.6, 0.9])
    assert "3.6 times the mean. The costliest variable, table, has 90.0%" in (
        str(plan)
    )
    scattered = [
        one for one in plan.operations if one.operation == "reduce-scatter"
    ]
    # Four rows of the length of the largest owner's.
    assert [one.num_bytes for one in scattered] == [4 * 4 * 8100]
    assert [one.num_variables for one in scattered] == [2]
    elementwise = tf_xshard.CrossShardOptimizer(O.Adam(), shard_update=True)
    plan = tf_xshard.communication_plan(elementwise, [keras.Variable(1.0)])
    assert plan.balance is None


def test_weights_are_gathered_when_they_change():
    with replicas.mirrored(2).scope():
        variables = [keras.Variable(tf.ones([4, 4])) for _ in range(3)]
        optimizer = tf_xshard.CrossShardOptimizer(
            O.Lamb(gradient_accumulation_steps=4), shard_update=True
        )
    plan = tf_xshard.communication_plan(optimizer, variables)
    assert {one.operation: one.every for one in plan.operations} == {
        "reduce-scatter": 1,
        "all-gather": 4,
    }


def test_muon_divides_what_it_updates_like_adamw_by_element():
    with replicas.mirrored(2).scope():
        variables = [
            keras.Variable(tf.ones(shape), name=name)
            for shape, name in (
                ([6, 4], "kernel"),
                ([6, 4], "embeddings"),
                ([4], "bias"),
            )
        ]
        optimizer = tf_xshard.CrossShardOptimizer(
            O.Muon(0.1), shard_update=True
        )
        optimizer.build(variables)
    kinds_of_slots = {
        v.path.split("/")[-1]: type(v) for v in optimizer.variables[2:]
    }
    assert kinds_of_slots == {
        "kernel_momentum": keras_shards.Owned,
        "embeddings_momentum": keras_shards.Sharded,
        "embeddings_velocity": keras_shards.Sharded,
        "bias_momentum": keras_shards.Sharded,
        "bias_velocity": keras_shards.Sharded,
    }


def test_a_checkpoint_that_is_read_before_the_first_step(tmp_path):
    """TensorFlow assigns values while the optimizer creates its variables."""
    source = sharded.Trained(
        ALL["adafactor"], replicas.mirrored(4), num_steps=3, shard_update=True
    )
    tf.train.Checkpoint(
        optimizer=source.optimizer, variables=list(source.variables)
    ).write(str(tmp_path / "state"))
    shapes = [tuple(v.shape) for v in source.variables]
    with replicas.mirrored(2).scope():
        variables = [keras.Variable(tf.zeros(shape)) for shape in shapes]
        optimizer = tf_xshard.CrossShardOptimizer(
            O.Adafactor(0.05), shard_update=True
        )
        tf.train.Checkpoint(optimizer=optimizer, variables=variables).read(
            str(tmp_path / "state")
        )
        optimizer.build(variables)
    for got, want in zip(
        [*variables, *optimizer.variables],
        [*source.variables, *source.optimizer.variables],
        strict=True,
    ):
        np.testing.assert_array_equal(got.numpy(), want.numpy())


def test_owners_have_similar_costs():
    costs = {i: float(size) for i, size in enumerate([9, 8, 7, 6, 5, 4, 1])}
    owner_of = ownership.balanced(costs, 3)
    assert sorted(owner_of) == sorted(costs)
    totals = [
        sum(costs[i] for i in costs if owner_of[i] == p) for p in range(3)
    ]
    assert sorted(totals) == [13, 13, 14]
    # The largest owner has at most the mean and its largest variable.
    for seed in range(20):
        rng = np.random.default_rng(seed)
        costs = {i: float(x) for i, x in enumerate(rng.integers(1, 99, 17))}
        balance = ownership.balance_of(costs, ownership.balanced(costs, 4), 4)
        mean = sum(costs.values()) / 4
        assert balance.largest_owner * mean <= mean + max(costs.values())


def test_costs():
    """Newton-Schulz costs more than Lamb; AdamW's part has no owner."""
    muon = O.Muon(0.1)
    lamb = kinds.cost_of_owner(O.Lamb(), (64, 256), "kernel")
    assert lamb == 64 * 256
    assert kinds.cost_of_owner(muon, (64, 256), "kernel") > lamb
    assert kinds.cost_of_owner(muon, (64,), "bias") is None
    assert kinds.cost_of_owner(O.Adam(), (64, 256), "kernel") is None


# What must be noticed by the comparisons above.


_owned = sharded_lib.ShardedUpdate._owned

MUTANTS = {
    "another_owner_updates": (
        sharded_lib.ShardedUpdate,
        "_owned",
        lambda self, variable, owner: _owned(self, variable, 1 - owner),
    ),
    "weight_not_gathered": (
        owners,
        "gather_from_owners",
        lambda tensors, *_: [*tensors[:-1], None],
    ),
    "slot_of_another_variable": (
        ownership.Owned,
        "held",
        lambda self, block: block[: self.num_elements],
    ),
    "gradient_of_another_replica": (
        ownership,
        "only_for_owner",
        lambda value, owner, position: value,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(name, monkeypatch):
    monkeypatch.setattr(*MUTANTS[name])
    kind = "tpu" if name == "gradient_of_another_replica" else "mirrored"
    with pytest.raises(AssertionError):
        sharded.check(SETTINGS["clipnorm"], replicas.STRATEGIES[kind](2), None)
