"""Steps that do not happen: data that ends, and replicas that fail.

`fit` on data of unknown size ends each epoch with a step whose data does not
arrive. Counters must be those of a loop over exactly the batches, and weights
those of `fit` on the same batches when their number is known.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import fitting
from tests.support import replicas
from tests.support import seeds
from tf_xshard.optimizers import stack
from tf_xshard.private.keras import optimizer_state

Cross = tf_xshard.CrossShardOptimizer
Tower = tf_xshard.TowerOptimizer
AGN = tf_xshard.AGNOptimizer
NUM_EPOCHS, NUM_BATCHES, BATCH_SIZE = 4, 3, 8
NUM_STEPS = NUM_EPOCHS * NUM_BATCHES


def sgd(**kwargs):
    return keras.optimizers.SGD(0.05, momentum=0.9, **kwargs)


def adam(**kwargs):
    return keras.optimizers.Adam(0.01, **kwargs)


def quick():
    return tf_xshard.Communication(timeout_seconds=20)


OPTIMIZERS = {
    "cross": lambda: Cross(adam(), communication=quick()),
    "accumulation": lambda: Cross(adam(gradient_accumulation_steps=2)),
    "averages": lambda: Cross(sgd(use_ema=True, ema_overwrite_frequency=3)),
    "sharded": lambda: Cross(
        adam(gradient_accumulation_steps=2),
        shard_update=True,
        communication=quick(),
    ),
    "int8": lambda: Cross(
        sgd(),
        communication=tf_xshard.Communication(
            dtype="int8", error_feedback=True
        ),
    ),
    "skip": lambda: Cross(adam(), skip_nonfinite=True),
    "loss scale": lambda: Cross(
        keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=8.0)
    ),
    "tower": lambda: Tower(Cross(adam(), communication=quick()), 2),
    "cross of towers": lambda: Cross(Tower(adam(), 2)),
    "agn": lambda: AGN(sgd(), communication_period=4, communication=quick()),
}


def data(num_rows=NUM_BATCHES * BATCH_SIZE):
    x = np.random.default_rng(1).normal(size=(num_rows, 4)).astype("float32")
    return x, x[:, :1] * 2 - x[:, 1:2]


def batches(is_known, drop_remainder=True):
    rows = tf.data.Dataset.from_tensor_slices(data())
    if not is_known:
        rows = rows.filter(lambda x, y: True)
    return fitting.untuned(rows.batch(BATCH_SIZE, drop_remainder))


def fitted(strategy, make, dataset, loss="mse", **options):
    seeds.seed(3)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential(
            [
                keras.layers.Input((4,)),
                keras.layers.Dense(3, "tanh"),
                keras.layers.Dense(1),
            ]
        )
        model.compile(make(), loss, **options)
    model.fit(dataset, epochs=NUM_EPOCHS, shuffle=False, verbose=0)
    return model


pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")


def state(strategy, model):
    """The weights and the optimizer's variables, on every replica."""
    return [
        replicas.values(strategy, one)
        for one in (*model.trainable_variables, *model.optimizer.variables)
    ]


def check_same(got, want):
    for of_got, of_want in zip(got, want, strict=True):
        for one, other in zip(of_got, of_want, strict=True):
            if np.issubdtype(one.dtype, np.integer):
                np.testing.assert_array_equal(one, other)
            else:
                np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def check_replicas_agree(got):
    for first, *others in got:
        for other in others:
            np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize("kind", ["none", "mirrored"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fit_on_data_of_unknown_size(name, kind):
    strategy = None if kind == "none" else replicas.mirrored(2)
    got, want = (
        state(strategy, fitted(strategy, OPTIMIZERS[name], batches(is_known)))
        for is_known in (False, True)
    )
    check_same(got, want)
    if name not in ("agn", "int8"):
        check_replicas_agree(got)


@pytest.mark.parametrize("name", ["cross", "tower", "agn"])
def test_without_drop_remainder(name):
    strategy = replicas.mirrored(2)
    got, want = (
        state(
            strategy,
            fitted(strategy, OPTIMIZERS[name], batches(is_known, False)),
        )
        for is_known in (False, True)
    )
    check_same(got, want)


@pytest.mark.parametrize("name", ["cross", "tower"])
@pytest.mark.parametrize(
    "options",
    [{"steps_per_execution": 2}, {"run_eagerly": True}],
    ids=["steps_per_execution", "eager"],
)
def test_other_loops_of_fit(name, options):
    strategy = replicas.mirrored(2)
    got, want = (
        state(
            strategy,
            fitted(strategy, OPTIMIZERS[name], batches(is_known), **options),
        )
        for is_known in (False, True)
    )
    check_same(got, want)


@pytest.mark.parametrize("name", ["cross", "tower", "agn"])
def test_on_a_simulated_tpu(name):
    strategy = replicas.tpu(2)
    got, want = (
        state(strategy, fitted(strategy, OPTIMIZERS[name], batches(is_known)))
        for is_known in (False, True)
    )
    check_same(got, want)


@pytest.mark.parametrize("name", ["cross", "tower", "agn"])
def test_one_replica_counts_the_batches(name):
    for strategy in (
        tf.distribute.OneDeviceStrategy("CPU:0"),
        replicas.mirrored(1),
    ):
        model = fitted(strategy, OPTIMIZERS[name], batches(False))
        num_updates = NUM_STEPS // (2 if name == "tower" else 1)
        [count] = replicas.values(strategy, model.optimizer.iterations)
        assert count == num_updates


def test_plain_keras_counts_steps_without_data():
    # README and docs/uneven_batches.md say so.
    model = fitted(None, adam, batches(False))
    assert int(model.optimizer.iterations) == NUM_STEPS + NUM_EPOCHS, (
        f"Keras {keras.__version__} mended this: remove the row"
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_next_in_the_step(name):
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(np.ones(3, "float32"))
        optimizer = OPTIMIZERS[name]()
        optimizer.build([weight])

    @tf.function(autograph=False)
    def step(iterator):
        def on_replica(x):
            optimizer.apply([x * weight.value], [weight])

        strategy.run(on_replica, args=(next(iterator),))

    for _ in range(2):
        # Seven batches for two replicas: the fourth step has one.
        iterator = iter(
            strategy.distribute_datasets_from_function(
                lambda context: fitting.untuned(
                    tf.data.Dataset.range(7)
                    .map(lambda i: tf.ones([3]))
                    .filter(lambda x: True)
                )
            )
        )
        with pytest.raises(tf.errors.OutOfRangeError):
            for _ in range(10):
                step(iterator)
    inner = getattr(optimizer, "local_optimizer", stack.updating(optimizer)[-1])
    counts = replicas.values(strategy, optimizer_state.counter(inner))
    assert counts[0] == counts[1] == 6 // (2 if "tower" in name else 1)
    if name != "int8":
        check_replicas_agree([replicas.values(strategy, weight)])


def caught(make, graph=True):
    """Replicas that take good steps and fail in others, on one replica."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(np.ones(3, "float32"))
        optimizer = make()
        optimizer.build([weight])

    def step(fails):
        def on_replica():
            gradient = tf.ones([3]) * weight.value
            if replicas.replica_id() == 1:
                check = tf.debugging.Assert(tf.logical_not(fails), ["bad row"])
                with tf.control_dependencies([check] if graph else []):
                    gradient = tf.identity(gradient)
            optimizer.apply([gradient], [weight])

        strategy.run(on_replica)

    step = tf.function(step, autograph=False) if graph else step
    for _ in range(2):
        step(tf.constant(False))
        with pytest.raises(tf.errors.InvalidArgumentError, match="bad row"):
            step(tf.constant(True))
    step(tf.constant(False))
    return [
        replicas.values(strategy, one) for one in (weight, *optimizer.variables)
    ]


def undisturbed(make):
    strategy, weight, optimizer, step = built(make, num_replicas=2)
    for _ in range(3):
        step()
    return [
        replicas.values(strategy, one) for one in (weight, *optimizer.variables)
    ]


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("name", ["cross", "skip", "tower", "agn", "sharded"])
def test_a_caught_failure_of_one_replica(name, graph):
    check_same(caught(OPTIMIZERS[name], graph), undisturbed(OPTIMIZERS[name]))


def built(make, num_replicas=4):
    strategy = replicas.mirrored(num_replicas)
    with strategy.scope():
        weight = keras.Variable(np.ones(3, "float32"))
        optimizer = make()
        optimizer.build([weight])

    @tf.function(autograph=False)
    def step():
        strategy.run(
            lambda: optimizer.apply([tf.ones([3]) * weight.value], [weight])
        )

    return strategy, weight, optimizer, step


def set_on(strategy, variable, value, replica):
    strategy.experimental_local_results(variable.value)[replica].assign(value)


def of_pairs():
    groups = [[0, 1], [2, 3]]
    return Cross(sgd(), group_assignment=groups, communication=quick())


DIFFERENT = {
    "cross": (OPTIMIZERS["cross"], lambda o: o.iterations),
    "groups": (of_pairs, lambda o: o.iterations),
    "tower": (OPTIMIZERS["tower"], lambda o: o._tower),
    "agn": (OPTIMIZERS["agn"], lambda o: o._pending),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_counts_are_refused(name):
    make, counter = DIFFERENT[name]
    strategy, weight, optimizer, step = built(make)
    step()
    before = [
        replicas.values(strategy, one)
        for one in (weight, *optimizer.variables)
        if one is not counter(optimizer)
    ]
    set_on(strategy, counter(optimizer), 0, replica=2)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="replicas of this process have made different numbers",
    ):
        step()
    after = [
        replicas.values(strategy, one)
        for one in (weight, *optimizer.variables)
        if one is not counter(optimizer)
    ]
    check_same(after, before)
    # Follow the advice of the message.
    if name in ("tower", "agn"):
        optimizer.reset()
    else:
        set_on(strategy, counter(optimizer), 1, replica=2)
    step()


def test_groups_may_be_at_different_steps():
    strategy, _, optimizer, step = built(of_pairs)
    for replica in (2, 3):
        set_on(strategy, optimizer.iterations, 5, replica)
    step()
    counts = replicas.values(strategy, optimizer.iterations)
    assert [int(one) for one in counts] == [1, 1, 6, 6]


def test_reset_starts_a_period_from_the_center():
    strategy, weight, optimizer, step = built(
        lambda: AGN(
            keras.optimizers.SGD(0.5),
            communication_period=3,
            loss_normalization="replica",
        )
    )
    step()
    optimizer.reset()
    for value in replicas.values(strategy, weight):
        np.testing.assert_array_equal(value, 1.0)
    # Values that are assigned after it start the new period.
    weight.assign([4.0, 4.0, 4.0])
    for _ in range(3):
        step()
    # Gradients are 4, 2 and 1; the center moves by their mean.
    for value in replicas.values(strategy, weight):
        np.testing.assert_allclose(value, 4 - 0.5 * 7 / 3)


def test_limit_layers_and_metrics_move_in_a_step_without_data():
    # Keras writes them in the forward pass: docs/how_it_works.md.
    strategy = replicas.mirrored(2)
    seeds.seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((4,)),
                keras.layers.Dropout(0.5, seed=1),
                keras.layers.Dense(1),
            ]
        )
        model.compile(Cross(sgd()), "mse")
    before = int(model.layers[0].seed_generator.state.numpy()[1])
    model.fit(batches(False), epochs=NUM_EPOCHS, shuffle=False, verbose=0)
    moved = int(model.layers[0].seed_generator.state.numpy()[1]) - before
    counts = replicas.values(strategy, model.optimizer.iterations)
    assert counts[0] == counts[1] == NUM_STEPS < moved


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras 3.15"
)
def test_limit_a_multi_optimizer_of_stacks_counts_itself():
    strategy = replicas.mirrored(2)

    def stacks():
        leaves = keras.optimizers.OptimizerMap(
            Cross(sgd()), {".*kernel": Cross(sgd())}
        )
        return keras.optimizers.MultiOptimizer(leaves)

    model = fitted(strategy, stacks, batches(False))
    for one in model.optimizer.optimizers:
        for count in replicas.values(strategy, one.iterations):
            assert count == NUM_STEPS
    [own, *_] = replicas.values(strategy, model.optimizer.iterations)
    assert own >= NUM_STEPS
