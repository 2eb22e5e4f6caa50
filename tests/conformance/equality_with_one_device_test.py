"""Training on N replicas equals one device with the same global batch."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import mutants
from tests.support import replicas
from tests.support import training
from tests.support import versions

O = keras.optimizers  # noqa: E741

SETTINGS = {
    "sgd": lambda: O.SGD(0.05),
    "momentum": lambda: O.SGD(0.02, momentum=0.9),
    "adam": lambda: O.Adam(0.01),
    "adamw_decay": lambda: O.AdamW(0.01, weight_decay=0.05),
    "clipnorm": lambda: O.SGD(0.2, clipnorm=0.1),
    "global_clipnorm": lambda: O.SGD(0.2, global_clipnorm=0.1),
    "clipvalue": lambda: O.SGD(0.2, clipvalue=0.05),
    "ema": lambda: O.SGD(0.05, use_ema=True, ema_momentum=0.8),
    "accumulation": lambda: O.SGD(0.1, gradient_accumulation_steps=4),
    "schedule": lambda: O.SGD(
        O.schedules.ExponentialDecay(0.1, decay_steps=3, decay_rate=0.7)
    ),
}
OTHERS = {
    "adadelta": lambda: O.Adadelta(1.0),
    "adafactor": lambda: O.Adafactor(0.01),
    "adagrad": lambda: O.Adagrad(0.05),
    "adamax": lambda: O.Adamax(0.01),
    "ftrl": lambda: O.Ftrl(0.05),
    "lamb": lambda: O.Lamb(0.01),
    "lion": lambda: O.Lion(0.001),
    "loss_scale": lambda: O.LossScaleOptimizer(O.SGD(0.05)),
    "multi": lambda: O.MultiOptimizer(
        O.OptimizerMap(O.SGD(0.05), {".*/kernel": O.Adam(0.01)})
    ),
    "muon": lambda: O.Muon(0.005),
    "nadam": lambda: O.Nadam(0.01),
    "rmsprop": lambda: O.RMSprop(0.005),
    "schedule_free": lambda: O.ScheduleFreeAdamW(0.05, warmup_steps=2),
    "static_loss_scale": lambda: O.SGD(0.05, loss_scale_factor=64.0),
    "user_subclass": lambda: TanhDescent(0.002),
}
if not hasattr(O, "MultiOptimizer"):  # Keras 3.12 has neither.
    del OTHERS["multi"]
if not hasattr(O, "ScheduleFreeAdamW"):
    del OTHERS["schedule_free"]


class TanhDescent(O.Optimizer):
    """A user's own optimizer, with nothing but an update step."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, learning_rate * keras.ops.tanh(gradient))


@functools.cache
def _tolerance(optimizer_fn):
    """How much the order of rows in a batch matters on one device."""
    x, y = training.data()
    order = np.concatenate(
        [
            start
            + np.random.default_rng(start).permutation(training.BATCH_SIZE)
            for start in range(0, len(x), training.BATCH_SIZE)
        ]
    )
    _, permuted = training.train(optimizer_fn, xy=(x[order], y[order]))
    order_matters = training.deviation(permuted, training.alone(optimizer_fn))
    return 3 * order_matters if order_matters > 3e-7 else 1e-6


def _wrapped(optimizer_fn):
    return lambda: tf_xshard.CrossShardOptimizer(optimizer_fn())


@pytest.mark.parametrize(
    "name, kind, num_replicas, options",
    [
        *(
            (name, "mirrored", n, dict(fit=name in ("ema", "accumulation")))
            for name, n in replicas.in_turn(SETTINGS, [4, 2])
        ),
        *replicas.in_turn(OTHERS, ["mirrored"], [2], [{}]),
        ("sgd", "mirrored", 8, {}),
        ("adam", "tpu_permuted", 8, {}),
        ("ema", "tpu", 4, {}),
        ("accumulation", "tpu_permuted", 4, {}),
        ("global_clipnorm", "tpu", 4, {}),
        ("adam", "mirrored", 2, dict(steps_per_execution=4)),
        ("adam", "tpu", 2, dict(steps_per_execution=4)),
        # A TPU never runs eagerly.
        ("adam", "mirrored", 2, dict(run_eagerly=True)),
    ],
    ids=str,
)
def test_equal_to_one_device(name, kind, num_replicas, options, report):
    """Some by `fit`, the others by the step that `fit` runs."""
    if name == "muon" and keras.__version__.startswith("3.12."):
        pytest.skip("Keras 3.12's Muon fails on one device")
    optimizer_fn = (SETTINGS | OTHERS)[name]
    strategy = replicas.STRATEGIES[kind](num_replicas)
    _, got = training.train(_wrapped(optimizer_fn), strategy, **options)
    reference = training.alone(optimizer_fn)
    moved = training.deviation(reference, training.initial())
    assert moved >= 1e-2, moved
    difference = training.deviation(got, reference)
    # Equal but for the order of rows in a batch.
    tolerance = 1e-6 if difference <= 1e-6 else _tolerance(optimizer_fn)
    report(
        f"{name}, {num_replicas} on {kind}, {options}: moved {moved:.3f},"
        f" tolerance {tolerance:.1e}; difference {difference:.1e}"
    )
    assert difference <= tolerance


@pytest.mark.parametrize(
    "name", ["clipnorm", "global_clipnorm", "clipvalue", "momentum"]
)
def test_plain_keras_clips_before_the_sum(name, report):
    """It fails the comparison above exactly where something is clipped."""
    reference = training.alone(SETTINGS[name])
    _, plain = training.train(SETTINGS[name], replicas.mirrored(2))
    difference = training.deviation(plain, reference)
    report(f"{name}, plain Keras on 2 replicas: {difference:.1e}")
    # Keras mended this: remove the row.
    assert (difference > 1e-3) == ("clip" in name)


def test_no_keras_optimizer_is_left_out():
    swept = {type(fn()).__name__ for fn in (SETTINGS | OTHERS).values()}
    exported = {
        name
        for name, value in vars(O).items()
        if isinstance(value, type) and issubclass(value, O.Optimizer)
    }
    assert exported - swept == {"Optimizer"}


def test_one_replica_is_plain_keras():
    reference = training.alone(SETTINGS["adam"])
    other = tf.distribute.OneDeviceStrategy(f"{replicas.KIND}:3")
    for strategy in (None, other):
        got = training.train(_wrapped(SETTINGS["adam"]), strategy)[1]
        assert training.deviation(got, reference) <= replicas.REPEATED


@pytest.mark.parametrize(
    "num_rows, per_shard, kind",
    [
        (40, 2, "mirrored"),
        (46, 4, "mirrored"),
        (33, 1, "mirrored"),
        (46, 4, "tpu"),
        (33, 1, "tpu_permuted"),
    ],
)
def test_last_batch(num_rows, per_shard, kind):
    """Batches of 16 on 4 replicas: the last is 2 2 2 2, or 4 4 4 2, or 1 0 0 0.

    The oracle is the mean of the replicas' losses; Keras' loss of no rows is 0,
    finite everywhere.
    """
    x, y = training.data(num_rows)

    def train():
        return training.train(
            _wrapped(SETTINGS["sgd"]),
            replicas.STRATEGIES[kind](4),
            (x, y),
            batch_size=16,
            num_steps=6,
            fit=True,
        )[1]

    if num_rows == 46 and kind in replicas.TPUS and versions.KERAS >= (3, 16):
        # Plain Keras fails in the same way.
        with pytest.raises(TypeError, match="'int' and 'NoneType'"):
            train()
        return
    got = train()
    model = training.model()
    optimizer = SETTINGS["sgd"]()
    for start in (0, 16, 32, 0, 16, 32):
        with tf.GradientTape() as tape:
            losses = [
                tf.reduce_mean(tf.square(model(x[rows]) - y[rows]))
                for rows in (
                    np.arange(first, min(first + size, num_rows))
                    for size in [per_shard if start == 32 else 4]
                    for first in range(start, start + 4 * size, size)
                )
                if len(rows)
            ]
            loss = tf.add_n(losses) / 4
        optimizer.apply(
            tape.gradient(loss, [v.value for v in model.trainable_variables]),
            model.trainable_variables,
        )
    assert training.deviation(got, training.weights(model)) <= 1e-6
    if num_rows == 40:
        one = training.train(
            SETTINGS["sgd"], xy=(x, y), batch_size=16, num_steps=6
        )[1]
        assert training.deviation(got, one) <= 1e-6


def test_two_levels_are_the_global_reduction():
    """Rows, then columns, of a 2 x 4 grid of replicas."""

    def two_levels():
        columns = tf_xshard.CrossShardOptimizer(
            SETTINGS["global_clipnorm"](),
            group_assignment=tf_xshard.GroupAssignment.strided(8, 2),
        )
        return tf_xshard.CrossShardOptimizer(
            columns,
            group_assignment=tf_xshard.GroupAssignment.contiguous(8, 4),
        )

    reference = training.alone(SETTINGS["global_clipnorm"])
    got = training.train(two_levels, replicas.mirrored(8))[1]
    assert training.deviation(got, reference) <= 1e-6


@pytest.mark.parametrize(
    "mutant, kind, num_replicas",
    [
        ("factor_2", "mirrored", 2),
        ("factor_1_n", "tpu", 4),
        ("no_reduction", "tpu_permuted", 4),
    ],
)
def test_the_assertion_fails_for_mutants(mutant, kind, num_replicas):
    """The assertions above notice each mutant. groups_test.py has another."""
    with mutants.mutant(mutant, num_replicas):
        got = training.train(
            _wrapped(SETTINGS["sgd"]), replicas.STRATEGIES[kind](num_replicas)
        )[1]
    assert training.deviation(got, training.alone(SETTINGS["sgd"])) > 1e-3
