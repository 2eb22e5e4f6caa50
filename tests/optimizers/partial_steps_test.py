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
from tests.support import traced
from tests.support import training

Cross = tf_xshard.CrossShardOptimizer
Tower = tf_xshard.TowerOptimizer
AGN = tf_xshard.AGNOptimizer
NUM_EPOCHS, NUM_BATCHES, BATCH_SIZE = 2, 3, 8


def sgd(**kwargs):
    return keras.optimizers.SGD(0.05, momentum=0.9, **kwargs)


def adam(**kwargs):
    return keras.optimizers.Adam(0.01, **kwargs)


OPTIMIZERS = {
    "cross": lambda: Cross(adam()),
    "averages": lambda: Cross(sgd(use_ema=True, ema_overwrite_frequency=3)),
    "sharded": lambda: Cross(
        adam(gradient_accumulation_steps=2), shard_update=True
    ),
    "skip": lambda: Cross(adam(), skip_nonfinite=True),
    "tower": lambda: Tower(Cross(adam()), 2),
    "agn": lambda: AGN(sgd(), communication_period=2),
}


def state(strategy, variables):
    """The values of variables on every replica."""
    return [replicas.values(strategy, one) for one in variables]


def check_same(got, want):
    for of_got, of_want in zip(got, want, strict=True):
        np.testing.assert_allclose(of_got, of_want, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    "name, kind",
    [
        ("tower", "mirrored"),
        ("averages", "none"),
        ("tower", "one_device"),
        pytest.param("agn", "tpu", marks=replicas.in_full),
    ],
)
def test_fit_on_data_of_unknown_size(name, kind):
    """All variables, counters too, are those of a loop over the batches."""
    strategy = replicas.WITH_ONE_DEVICE[kind](2)
    xy = training.data(NUM_BATCHES * BATCH_SIZE)
    reference, _ = training.train(
        OPTIMIZERS[name], strategy, xy, BATCH_SIZE, NUM_EPOCHS * NUM_BATCHES
    )
    with strategy.scope():
        model = training.model()
        model.compile(OPTIMIZERS[name](), "mse")
        model.optimizer.build(model.trainable_variables)
    # TensorFlow does not know how many rows pass a filter.
    rows = tf.data.Dataset.from_tensor_slices(xy).filter(lambda x, y: True)
    model.fit(
        fitting.untuned(rows.batch(BATCH_SIZE)),
        epochs=NUM_EPOCHS,
        shuffle=False,
        verbose=0,
    )
    got, want = (
        state(strategy, [*one.trainable_variables, *one.optimizer.variables])
        for one in (model, reference)
    )
    check_same(got, want)
    for of_replicas in got if name != "agn" else ():
        for one in of_replicas:
            np.testing.assert_array_equal(one, of_replicas[0])


def of_ones(make, num_replicas=2):
    """An optimizer of a weight of ones, whose gradient is a multiple of it."""
    one = traced.Traced(make, [np.ones(3)], num_replicas=num_replicas)
    [weight] = one.weights
    return one, lambda x: one.optimizer.apply([x * weight.value], [weight])


def after(one, run):
    """The state after a function, from the initial state."""
    one.reset()
    run()
    return state(one.strategy, one.variables)


@pytest.mark.parametrize("name", ["cross", "sharded", "tower", "agn"])
def test_next_in_the_step(name):
    one, apply = of_ones(OPTIMIZERS[name])

    @tf.function(autograph=False)
    def step(iterator):
        one.strategy.run(apply, args=(next(iterator),))

    def elements(context):
        # Seven batches for two replicas: the fourth step has one.
        data = tf.data.Dataset.range(7).map(
            lambda i: tf.ones([3]) / float(i + 1)
        )
        return fitting.untuned(data.filter(lambda x: True))

    def run(num_steps):
        iterator = iter(data)
        for _ in range(num_steps):
            step(iterator)

    def to_the_end():
        with pytest.raises(tf.errors.OutOfRangeError):
            run(10)

    data = one.strategy.distribute_datasets_from_function(elements)
    check_same(after(one, to_the_end), after(one, lambda: run(3)))


@pytest.mark.parametrize(
    "name, graph",
    [
        ("cross", True),
        ("skip", True),
        ("tower", True),
        ("agn", True),
        ("sharded", True),
        ("tower", False),
    ],
)
def test_a_caught_failure_of_one_replica(name, graph):
    """The good steps are those of a run without failures, on all replicas."""
    one, apply = of_ones(OPTIMIZERS[name])

    def step(fails):
        def on_replica():
            gradient = replicas.power_of_ten()
            if replicas.replica_id() == 1:
                check = tf.debugging.Assert(tf.logical_not(fails), ["bad row"])
                with tf.control_dependencies([check] if graph else []):
                    gradient = tf.identity(gradient)
            apply(gradient)

        one.strategy.run(on_replica)

    step = tf.function(step, autograph=False) if graph else step

    def run(*failures):
        for fails in failures:
            with (
                pytest.raises(tf.errors.InvalidArgumentError, match="bad row")
                if fails
                else contextlib.nullcontext()
            ):
                step(tf.constant(fails))

    check_same(
        after(one, lambda: run(False, True, False, True, False)),
        after(one, lambda: run(False, False, False)),
    )


def built(make, num_replicas=2):
    one, apply = of_ones(make, num_replicas)

    @tf.function(autograph=False)
    def step():
        one.strategy.run(lambda: apply(tf.ones([3])))

    return one, step


def set_on(strategy, variable, value, replica):
    strategy.experimental_local_results(variable.value)[replica].assign(value)


DIFFERENT = {
    "cross": (OPTIMIZERS["cross"], lambda o: o.iterations),
    "groups": (
        lambda: Cross(sgd(), group_assignment=[[0, 1], [2, 3]]),
        lambda o: o.iterations,
    ),
    "tower": (OPTIMIZERS["tower"], lambda o: o._tower),
    "agn": (OPTIMIZERS["agn"], lambda o: o._pending),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_counts_are_refused(name):
    """Groups may be at different steps, but not the replicas of one."""
    make, counter_of = DIFFERENT[name]
    num_replicas = 4 if name == "groups" else 2
    one, step = built(make, num_replicas)
    counter = counter_of(one.optimizer)
    step()
    others = [v for v in one.variables if v is not counter]
    before = state(one.strategy, others)
    set_on(one.strategy, counter, 5, num_replicas - 1)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="replicas of this process have made different numbers",
    ):
        step()
    check_same(state(one.strategy, others), before)
    # Follow the advice of the message.
    if name in ("tower", "agn"):
        one.optimizer.reset()
    else:
        set_on(one.strategy, counter, 5, num_replicas - 2)
    step()
    if name == "groups":
        assert replicas.values(one.strategy, counter) == [2, 2, 6, 6]


def test_reset_starts_a_period_from_the_center():
    one, step = built(
        lambda: AGN(
            keras.optimizers.SGD(0.5),
            communication_period=3,
            loss_normalization="replica",
        )
    )
    step()
    one.optimizer.reset()
    np.testing.assert_array_equal(one.values(), np.ones([1, 2, 3]))
    # Values that are assigned after it start the new period.
    one.weights[0].assign([4.0, 4.0, 4.0])
    for _ in range(3):
        step()
    # Gradients are 4, 2 and 1; the center moves by their mean.
    expected = np.full([1, 2, 3], 4 - 0.5 * 7 / 3)
    np.testing.assert_allclose(one.values(), expected, rtol=1e-6)
