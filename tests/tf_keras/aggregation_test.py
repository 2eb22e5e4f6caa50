"""Optimizers of tf_keras that reduce with the stages of CrossShardOptimizer."""

import copy
import functools
import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_xshard
from tests.support import keras_2
from tests.support import replicas

SGD = tf_keras.optimizers.SGD
LEGACY_SGD = tf_keras.optimizers.legacy.SGD
gradient_aggregator = tf_xshard.tf_keras.gradient_aggregator
with_aggregator = tf_xshard.tf_keras.with_aggregator
on_both_kinds = pytest.mark.parametrize(
    "kind", [SGD, LEGACY_SGD], ids=["new", "legacy"]
)
_BFLOAT16 = tf_xshard.Communication(dtype="bfloat16", error_feedback=True)


# A TPU has one program for all replicas, so all cases are cheap there.
NAMES = {
    "mirrored": ["legacy_sgd scaled", "none"],
    "tpu": [*keras_2.CASES],
    "multi_worker": ["adamw scaled"],
}


@functools.cache
def _differences(kind):
    if kind == "processes":
        return keras_2.found_by("tf_keras_program", "workers")
    strategy = replicas.STRATEGIES[kind](keras_2.NUM_REPLICAS)
    return keras_2.differences(
        strategy, {name: keras_2.ALL_CASES[name] for name in NAMES[kind]}
    )


@pytest.mark.parametrize(
    "kind, name",
    [
        *((kind, name) for kind, names in NAMES.items() for name in names),
        *(
            pytest.param("processes", name, marks=replicas.in_full)
            for name in keras_2.ALL_CASES
        ),
    ],
)
def test_is_one_device(kind, name):
    assert _differences(kind)[name] < 1e-6


def test_fit_is_one_device_and_its_ledger_has_the_planned_bytes():
    x = np.linspace(-1, 1, 48, dtype="float32").reshape(16, 3)
    kernel = np.linspace(0, 1, 6, dtype="float32").reshape(3, 2)
    dense = tf_keras.layers.Dense(2, use_bias=False, input_shape=[3])
    with replicas.mirrored(2).scope():
        model = tf_keras.Sequential([dense])
        model.compile(with_aggregator(SGD(0.1, momentum=0.9)), "mse")
    model.set_weights([kernel])
    ledger = tf_xshard.tf_keras.communication_ledger()
    options = {"epochs": 2, "shuffle": False, "verbose": 0}
    fitted = model.fit(x, x[:, :2], 8, callbacks=[ledger], **options)
    num_bytes = 2 * tf_xshard.communication_plan(model).bytes_per_step
    assert fitted.history["communication_bytes"] == [num_bytes] * 2
    assert ledger.totals["communication_bytes"] == 2 * num_bytes > 0
    momentum = 0
    for batch in [x[:8], x[8:]] * 2:
        error = batch @ kernel - batch[:, :2]
        momentum = 0.9 * momentum - 0.1 * batch.T @ error / 8
        kernel = kernel + momentum
    got = replicas.values(replicas.mirrored(2), model.weights[0])
    np.testing.assert_allclose(got, [kernel] * 2, rtol=1e-5)


def test_small_gradients_and_residuals_are_those_of_keras_3(tmp_path):
    strategy = replicas.mirrored(2)
    communication = tf_xshard.Communication(dtype="int8", error_feedback=True)
    with strategy.scope():
        wrapper = tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9), communication=communication
        )
        optimizer, other = (
            with_aggregator(SGD(0.1, momentum=0.9), communication=communication)
            for _ in range(2)
        )
        both = (wrapper, optimizer)
        optimizers = {one: keras_2.variables() for one in both}
        for one, variables in optimizers.items():
            one.build(variables)

    @tf.function(autograph=False)
    def step(*arriving):
        def on_replica():
            own = [one[replicas.replica_id_tensor()] / 2 for one in arriving]
            for one, variables in optimizers.items():
                one.apply_gradients(list(zip(own, variables, strict=True)))

        strategy.run(on_replica)

    for arriving in keras_2.gradients():
        step(*map(tf.constant, arriving))
    for pair in zip(*optimizers.values(), strict=True):
        got, expected = (replicas.values(strategy, one) for one in pair)
        np.testing.assert_allclose(got, expected, atol=1e-6)
    path = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "c"))
    tf.train.Checkpoint(optimizer=other).read(path)
    plan = tf_xshard.communication_plan(other, optimizers[optimizer])
    wanted = [residual.numpy() for residual in wrapper._residuals]
    residuals = other.aggregate_gradients.residuals.residuals
    for got, expected in zip(residuals, wanted, strict=True):
        assert np.max(np.abs(expected)) > 1e-4
        np.testing.assert_allclose(got, expected, atol=1e-6)
    assert {one.dtype for one in plan.operations} == {"int8"}
    # Momentum and residuals; `iterations` and the learning rate are small.
    num_values = sum(one.size for one in wanted)
    sizes = sum(np.prod(shape) for shape in keras_2.SHAPES)
    assert 0 <= plan.slot_bytes - 4 * (num_values + sizes) < 20


class _Own(SGD):
    def aggregate_gradients(self, grads_and_vars):
        return grads_and_vars


class _OwnLegacy(LEGACY_SGD):
    def _aggregate_gradients(self, grads_and_vars):
        return grads_and_vars


def test_refuses_a_second_reduction():
    for optimizer in (
        _Own(),
        _OwnLegacy(),
        LEGACY_SGD(gradient_aggregator=gradient_aggregator()),
        LEGACY_SGD(gradient_aggregator=list),
        with_aggregator(SGD()),
    ):
        with pytest.raises(TypeError, match="would be reduced twice"):
            with_aggregator(optimizer)


def test_refuses_bad_arguments_and_changes_nothing():
    optimizer = SGD()
    for argument, value, match in (
        ("reduction", "median", "reduction must be"),
        ("group_assignment", [[0], [0]], "once"),
        ("loss_normalization", "none", "loss_normalization must be"),
    ):
        with pytest.raises(ValueError, match=match):
            with_aggregator(optimizer, **{argument: value})
        with pytest.raises(ValueError, match=match):
            gradient_aggregator(**{argument: value})
    with_aggregator(optimizer)


def test_refuses_the_other_keras():
    for make, options in (
        (tf_xshard.CrossShardOptimizer, {}),
        (tf_xshard.CrossShardOptimizer, {"shard_update": True}),
        (tf_xshard.TowerOptimizer, {"num_towers": 2}),
        (tf_xshard.AGNOptimizer, {"communication_period": 2}),
    ):
        with pytest.raises(TypeError, match="use tf_xshard.tf_keras"):
            make(SGD(), **options)
    with pytest.raises(TypeError, match="model of Keras 3"):
        tf_xshard.GroupState(tf_keras.Sequential())
    with pytest.raises(TypeError, match="use tf_xshard.CrossShardOptimizer"):
        with_aggregator(keras.optimizers.SGD())


def test_refuses_to_skip_the_aggregation():
    pairs = [(tf.constant(1.0), tf.Variable(2.0))]
    for optimizer, skip in (
        (SGD(1.0), {"skip_gradients_aggregation": True}),
        (LEGACY_SGD(1.0), {"experimental_aggregate_gradients": False}),
    ):
        with_aggregator(optimizer)
        with pytest.raises(RuntimeError, match="would train separately"):
            optimizer.apply_gradients(pairs, **skip)
        # tf_keras documents this: aggregate, change, then apply.
        aggregator = vars(optimizer).get("aggregate_gradients")
        aggregated = (aggregator or optimizer.gradient_aggregator)(pairs)
        optimizer.apply_gradients(aggregated, **skip)
        with pytest.raises(RuntimeError, match="would train separately"):
            optimizer.apply_gradients(aggregated, **skip)
    assert float(pairs[0][1]) == 0


@on_both_kinds
def test_refuses_a_loss_scale_optimizer_that_it_does_not_know(kind):
    strategy = replicas.mirrored(2)
    with strategy.scope():
        variable = tf.Variable(2.0)
        optimizer = kind(1.0)
        outer = tf_keras.mixed_precision.LossScaleOptimizer(optimizer)
        with_aggregator(optimizer, group_assignment=[[0], [1]])

    @tf.function(autograph=False)
    def step():
        pairs = [(tf.constant(1.0), variable)]
        strategy.run(lambda: outer.apply_gradients(pairs))

    with pytest.raises(RuntimeError, match="Pass the LossScaleOptimizer to"):
        step()
    assert replicas.values(strategy, variable) == [2.0, 2.0]


def test_refuses_a_gradient_in_one_group_only():
    strategy = replicas.mirrored(4)
    with strategy.scope():
        variables = [tf.Variable(2.0), tf.Variable(3.0)]
        optimizer = with_aggregator(SGD(1.0), group_assignment=[[0, 1], [2, 3]])

    def step(holders):
        index = replicas.replica_id()
        gradient = tf.constant(index + 1.0)
        held = gradient if index in holders else None
        optimizer.apply_gradients(zip([gradient, held], variables, strict=True))

    with pytest.raises(ValueError, match=r"without one: \[2, 3\]"):
        strategy.run(lambda: step([0]))
    got = [replicas.values(strategy, one) for one in variables]
    assert got == [[2.0] * 4, [3.0] * 4]
    strategy.run(lambda: step([0, 3]))  # Each group has a gradient.
    # The mean over a group of N=4 times the gradients 1, 2, 3, 4 or None.
    got = [replicas.values(strategy, one) for one in variables]
    assert got == [[-4.0] * 2 + [-12.0] * 2, [1.0] * 2 + [-5.0] * 2]


@on_both_kinds
def test_a_copy_trains_with_its_own_state(kind):
    # On GPUs, an eager step that XLA compiles can't reach all replicas.
    options = {"jit_compile": False} if kind is SGD else {}
    with replicas.mirrored(2).scope():
        optimizer = with_aggregator(kind(1.0, **options))
        other = copy.deepcopy(optimizer)
        other.learning_rate = 0.5
        variable = tf.Variable(2.0)
    other.apply_gradients([(tf.constant(1.0), variable)])
    assert variable.numpy() == 1.5
    assert optimizer.iterations.numpy() == 0 and other.iterations.numpy() == 1


@on_both_kinds
def test_residuals_are_saved_by_an_earlier_checkpoint(kind, tmp_path):
    optimizer = kind(1.0)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer)
    checkpoint.save(str(tmp_path / "before"))
    with_aggregator(optimizer, communication=_BFLOAT16)
    optimizer.apply_gradients([(tf.constant([1.003]), tf.Variable([2.0]))])
    path = checkpoint.save(str(tmp_path / "after"))
    names = [name for name, _ in tf.train.list_variables(path)]
    assert any("gradient_residuals/residuals/0" in name for name in names)


@on_both_kinds
def test_no_gradients_at_first(kind):
    optimizer = with_aggregator(kind(1.0))
    optimizer.apply_gradients([])
    assert not tf_xshard.communication_plan(optimizer, []).operations


def test_residuals_stay_with_their_variables():
    """Ids of deleted variables are used again."""
    aggregator = gradient_aggregator(communication=_BFLOAT16)
    variable = tf.Variable([2.0])
    aggregator([(tf.constant([1.003]), variable)])
    alive = weakref.ref(variable)
    del variable
    gc.collect()
    assert alive() is not None
