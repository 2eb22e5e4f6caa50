"""Optimizers of tf_keras that reduce with the stages of CrossShardOptimizer."""

import copy
import functools
import gc
import weakref

import keras
import pytest
import tensorflow as tf
import tf_keras

import tf_xshard
from tests.support import keras_2
from tests.support import replicas

LEGACY_SGD = tf_keras.optimizers.legacy.SGD
_BFLOAT16 = tf_xshard.Communication(dtype="bfloat16", error_feedback=True)
KINDS = ("mirrored", "tpu", "workers")
NAMES = (
    "fit",
    "legacy_adam",
    "legacy_sgd",
    "legacy_sgd given",
    "adam",
    "adamw",
    "sgd",
    "replica",
    "clipped",
    "loop",
    "legacy loop",
)
# tf_keras refuses a LossScaleOptimizer under TPUStrategy.
SCALED = (
    "legacy_adam scaled",
    "legacy_adam scaled, overflow",
    "adam scaled",
    "adam scaled, overflow",
)
CASES = [(kind, name) for kind in KINDS for name in NAMES]
CASES += [
    (kind, name)
    for kind in ("mirrored", "workers")
    for name in (*SCALED, "none")
]
# Simulated: one process has all replicas.
ONE_PROCESS = ("mirrored", "tpu")


@functools.cache
def printed(kind):
    return keras_2.printed("tf_keras_program", kind)


def differences(kind):
    return keras_2.differences(printed(kind))


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_is_one_device(kind, name):
    assert differences(kind)[name] < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_every_case_is_tested(kind):
    tested = {name for one, name in CASES if one == kind}
    others = {"ignored"} | ({"feedback"} if kind in ONE_PROCESS else set())
    assert differences(kind).keys() == tested | others


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_aggregator_groups_are_ignored(kind):
    assert differences(kind)["ignored"] > 1e-2


@pytest.mark.parametrize("kind", ONE_PROCESS)
def test_small_gradients_and_residuals_are_those_of_keras_3(kind):
    assert differences(kind)["feedback"] < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_ledger_and_plan(kind):
    for one in printed(kind):
        measured, planned = one["ledger"]
        assert measured == planned


def _aggregates_itself():
    class Own(tf_keras.optimizers.SGD):
        def aggregate_gradients(self, grads_and_vars):
            return grads_and_vars

    class OwnLegacy(tf_keras.optimizers.legacy.SGD):
        def _aggregate_gradients(self, grads_and_vars):
            return grads_and_vars

    aggregator = tf_xshard.tf_keras.gradient_aggregator()
    return [
        Own(),
        OwnLegacy(),
        tf_keras.optimizers.legacy.SGD(gradient_aggregator=aggregator),
        tf_keras.optimizers.legacy.SGD(gradient_aggregator=list),
        tf_xshard.tf_keras.with_aggregator(tf_keras.optimizers.SGD()),
    ]


def test_refuses_a_second_reduction():
    for optimizer in _aggregates_itself():
        with pytest.raises(TypeError, match="would be reduced twice"):
            tf_xshard.tf_keras.with_aggregator(optimizer)


def test_refuses_optimizers_of_keras_3():
    with pytest.raises(TypeError, match="use tf_xshard.CrossShardOptimizer"):
        tf_xshard.tf_keras.with_aggregator(keras.optimizers.SGD())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"reduction": "median"}, "reduction must be"),
        ({"group_assignment": [[0], [0]]}, "once"),
        ({"loss_normalization": "none"}, "loss_normalization must be"),
    ],
)
def test_refuses_bad_arguments(arguments, error):
    optimizer = tf_keras.optimizers.SGD()
    with pytest.raises(ValueError, match=error):
        tf_xshard.tf_keras.with_aggregator(optimizer, **arguments)
    with pytest.raises(ValueError, match=error):
        tf_xshard.tf_keras.gradient_aggregator(**arguments)
    # Nothing was changed.
    tf_xshard.tf_keras.with_aggregator(optimizer)


def test_refuses_to_skip_the_aggregation():
    pairs = [(tf.constant(1.0), tf.Variable(2.0))]
    for optimizer, skip in (
        (tf_keras.optimizers.SGD(1.0), {"skip_gradients_aggregation": True}),
        (
            tf_keras.optimizers.legacy.SGD(1.0),
            {"experimental_aggregate_gradients": False},
        ),
    ):
        tf_xshard.tf_keras.with_aggregator(optimizer)
        with pytest.raises(RuntimeError, match="would train separately"):
            optimizer.apply_gradients(pairs, **skip)
        # tf_keras documents this: aggregate, change, then apply.
        aggregator = vars(optimizer).get("aggregate_gradients")
        aggregated = (aggregator or optimizer.gradient_aggregator)(pairs)
        optimizer.apply_gradients(aggregated, **skip)
        with pytest.raises(RuntimeError, match="would train separately"):
            optimizer.apply_gradients(aggregated, **skip)
    assert float(pairs[0][1]) == 0


@pytest.mark.parametrize("kind", [tf_keras.optimizers.SGD, LEGACY_SGD])
def test_refuses_a_loss_scale_optimizer_that_it_does_not_know(kind):
    strategy = replicas.mirrored(2)
    with strategy.scope():
        variable = tf.Variable(2.0)
        optimizer = kind(1.0)
        outer = tf_keras.mixed_precision.LossScaleOptimizer(optimizer)
        tf_xshard.tf_keras.with_aggregator(
            optimizer, group_assignment=[[0], [1]]
        )

    @tf.function(autograph=False)
    def step():
        strategy.run(
            lambda: outer.apply_gradients([(tf.constant(1.0), variable)])
        )

    with pytest.raises(RuntimeError, match="Pass the LossScaleOptimizer to"):
        step()
    assert replicas.values(strategy, variable) == [2.0, 2.0]


def test_refuses_a_gradient_in_one_group_only():
    strategy = replicas.mirrored(4)
    with strategy.scope():
        variables = [tf.Variable(2.0), tf.Variable(3.0)]
        optimizer = tf_xshard.tf_keras.with_aggregator(
            tf_keras.optimizers.SGD(1.0), group_assignment=[[0, 1], [2, 3]]
        )

    def step(holders):
        replica = tf.distribute.get_replica_context()
        index = int(replica.replica_id_in_sync_group)
        gradient = tf.constant(index + 1.0)
        held = gradient if index in holders else None
        optimizer.apply_gradients(zip([gradient, held], variables, strict=True))

    with pytest.raises(ValueError, match=r"without one: \[2, 3\]"):
        strategy.run(lambda: step([0]))
    assert replicas.values(strategy, variables[0]) == [2.0] * 4
    strategy.run(lambda: step([0, 3]))  # Each group has a gradient.
    # The mean over a group of N=4 times the gradients 1, 2, 3, 4 or None.
    assert replicas.values(strategy, variables[0]) == [-4.0] * 2 + [-12.0] * 2
    assert replicas.values(strategy, variables[1]) == [1.0] * 2 + [-5.0] * 2


# On GPUs, an eager step that XLA compiles can't reach all replicas' variables.
@pytest.mark.parametrize(
    "kind",
    [
        functools.partial(tf_keras.optimizers.SGD, jit_compile=False),
        LEGACY_SGD,
    ],
)
def test_a_copy_trains_with_its_own_state(kind):
    with replicas.mirrored(2).scope():
        optimizer = tf_xshard.tf_keras.with_aggregator(kind(1.0))
        other = copy.deepcopy(optimizer)
        other.learning_rate = 0.5
        variable = tf.Variable(2.0)
    other.apply_gradients([(tf.constant(1.0), variable)])
    assert variable.numpy() == 1.5
    steps = [one.iterations.numpy() for one in (optimizer, other)]
    assert steps == [0, 1]


@pytest.mark.parametrize("kind", [tf_keras.optimizers.SGD, LEGACY_SGD])
def test_residuals_are_saved_by_a_checkpoint_that_was_used_before(
    kind, tmp_path
):
    optimizer = kind(1.0)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer)
    checkpoint.save(str(tmp_path / "before"))
    tf_xshard.tf_keras.with_aggregator(optimizer, communication=_BFLOAT16)
    optimizer.apply_gradients([(tf.constant([1.003]), tf.Variable([2.0]))])
    path = checkpoint.save(str(tmp_path / "after"))
    names = [name for name, _ in tf.train.list_variables(path)]
    assert any("gradient_residuals/residuals/0" in name for name in names)


def test_residuals_stay_with_their_variables():
    """Ids of deleted variables are used again."""
    aggregator = tf_xshard.tf_keras.gradient_aggregator(communication=_BFLOAT16)
    variable = tf.Variable([2.0])
    aggregator([(tf.constant([1.003]), variable)])
    alive = weakref.ref(variable)
    del variable
    gc.collect()
    assert alive() is not None


@pytest.mark.parametrize("kind", [tf_keras.optimizers.SGD, LEGACY_SGD])
def test_no_gradients_at_first(kind):
    optimizer = tf_xshard.tf_keras.with_aggregator(kind(1.0))
    optimizer.apply_gradients([])
    assert not tf_xshard.communication_plan(optimizer, []).operations


@pytest.mark.parametrize(
    "make",
    [
        tf_xshard.CrossShardOptimizer,
        functools.partial(tf_xshard.CrossShardOptimizer, shard_update=True),
        functools.partial(tf_xshard.TowerOptimizer, num_towers=2),
        functools.partial(tf_xshard.AGNOptimizer, communication_period=2),
    ],
)
def test_optimizers_of_keras_3_refuse_tf_keras(make):
    with pytest.raises(TypeError, match="use tf_xshard.tf_keras"):
        make(tf_keras.optimizers.SGD())


def test_group_state_refuses_tf_keras():
    model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(1,))])
    with pytest.raises(TypeError, match="model of Keras 3"):
        tf_xshard.GroupState(model)
