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
from tests.support import traced
from tests.support import training
from tests.support import versions

Cross = tf_xshard.CrossShardOptimizer
Tower = tf_xshard.TowerOptimizer
AGN = tf_xshard.AGNOptimizer
NUM_EPOCHS, NUM_BATCHES, BATCH_SIZE = 2, 3, 8
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
    "agn": lambda: AGN(sgd(), communication_period=2, communication=quick()),
}


pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")


def batches(is_known=True):
    """Batches of a size that TensorFlow does not know."""
    x = np.random.default_rng(1).normal(size=(NUM_BATCHES * BATCH_SIZE, 4))
    x = x.astype("float32")
    rows = tf.data.Dataset.from_tensor_slices((x, x[:, :1] * 2 - x[:, 1:2]))
    if not is_known:
        rows = rows.filter(lambda x, y: True)
    return fitting.untuned(rows.batch(BATCH_SIZE))


def compiled(strategy, make, dropout=0.0, **options):
    seeds.seed(3)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential(
            [
                keras.layers.Input((4,)),
                keras.layers.Dense(3, "tanh"),
                *([keras.layers.Dropout(dropout, seed=1)] if dropout else []),
                keras.layers.Dense(1),
            ]
        )
        model.compile(make(), "mse", **options)
        model.optimizer.build(model.trainable_variables)
    return model


def fit(model):
    data = batches(is_known=False)
    model.fit(data, epochs=NUM_EPOCHS, shuffle=False, verbose=0)
    return model


def state(strategy, variables):
    """The values of variables on every replica."""
    return [replicas.values(strategy, one) for one in variables]


def of_model(strategy, model):
    return state(
        strategy, [*model.trainable_variables, *model.optimizer.variables]
    )


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


STRATEGIES = {
    "none": lambda: None,
    "one_device": lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
    "mirrored": lambda: replicas.mirrored(2),
    "multi_worker": lambda: replicas.multi_worker(2),
    "tpu": lambda: replicas.tpu(2),
}
in_full = replicas.in_full


@pytest.mark.parametrize(
    "name, kind, options",
    [
        ("tower", "mirrored", {}),
        ("averages", "none", {}),
        ("tower", "one_device", {}),
        *(
            pytest.param(name, kind, {}, marks=in_full)
            for name, kind in replicas.in_turn(
                [one for one in OPTIMIZERS if one != "tower"],
                ["mirrored", "none", "multi_worker", "mirrored"],
            )
        ),
        pytest.param("agn", "tpu", {}, marks=in_full),
        pytest.param("tower", "tpu", {}, marks=in_full),
        pytest.param(
            "tower", "mirrored", {"steps_per_execution": 2}, marks=in_full
        ),
        pytest.param("cross", "mirrored", {"run_eagerly": True}, marks=in_full),
    ],
    ids=str,
)
def test_fit_on_data_of_unknown_size(name, kind, options):
    """All variables, counters too, are those of a loop over the batches."""
    strategy = STRATEGIES[kind]()
    model = fit(compiled(strategy, OPTIMIZERS[name], **options))
    reference = compiled(strategy, OPTIMIZERS[name])
    known = [(x.numpy(), y.numpy()) for x, y in batches()]
    training.run_steps(reference, known * NUM_EPOCHS)
    got = of_model(strategy, model)
    check_same(got, of_model(strategy, reference))
    if name not in ("agn", "int8"):
        check_replicas_agree(got)


@in_full
def test_plain_keras_counts_steps_without_data():
    # README and docs/uneven_batches.md say so.
    model = fit(compiled(None, adam))
    assert int(model.optimizer.iterations) == NUM_STEPS + NUM_EPOCHS, (
        f"Keras {keras.__version__} mended this: remove the row"
    )


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


@pytest.mark.parametrize(
    "name",
    [
        *("cross", "sharded", "tower", "agn"),
        *(
            pytest.param(name, marks=in_full)
            for name in (
                *("accumulation", "averages", "cross of towers"),
                *("int8", "skip", "loss scale"),
            )
        ),
    ],
)
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

    def whole_steps():
        iterator = iter(data)
        for _ in range(3):
            step(iterator)

    def to_the_end():
        iterator = iter(data)
        with pytest.raises(tf.errors.OutOfRangeError):
            for _ in range(10):
                step(iterator)

    data = one.strategy.distribute_datasets_from_function(elements)
    check_same(after(one, to_the_end), after(one, whole_steps))


@pytest.mark.parametrize(
    "name, graph",
    [
        *(
            (name, True)
            for name in ("cross", "skip", "tower", "agn", "sharded")
        ),
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


@in_full
def test_limit_layers_and_metrics_move_in_a_step_without_data():
    # Keras writes them in the forward pass: docs/how_it_works.md.
    strategy = replicas.mirrored(2)
    model = compiled(strategy, lambda: Cross(sgd()), dropout=0.5)
    seed = model.layers[1].seed_generator.state
    before = int(seed.numpy()[1])
    fit(model)
    moved = int(seed.numpy()[1]) - before
    counts = replicas.values(strategy, model.optimizer.iterations)
    assert counts[0] == counts[1] == NUM_STEPS < moved


@in_full
@versions.needs_multi_optimizer
def test_limit_a_multi_optimizer_of_stacks_counts_itself():
    strategy = replicas.mirrored(2)

    def stacks():
        leaves = keras.optimizers.OptimizerMap(
            Cross(sgd()), {".*kernel": Cross(sgd())}
        )
        return keras.optimizers.MultiOptimizer(leaves)

    model = fit(compiled(strategy, stacks))
    for one in model.optimizer.optimizers:
        for count in replicas.values(strategy, one.iterations):
            assert count == NUM_STEPS
    [own, *_] = replicas.values(strategy, model.optimizer.iterations)
    assert own >= NUM_STEPS
