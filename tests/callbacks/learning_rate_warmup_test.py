"""The learning rate of every batch during a warm-up, on every replica."""

import itertools

import keras
import numpy as np
import pytest

import tf_xshard
from tests.support import events
from tests.support import replicas
from tests.support.versions import needs_multi_optimizer
from tf_xshard.private.keras import fit_internals

SGD = keras.optimizers.SGD
WARMUP = tf_xshard.LearningRateWarmup
WRAP = tf_xshard.CrossShardOptimizer


def _model(optimizer=lambda: SGD(0.1), num_replicas=1):
    with replicas.mirrored(num_replicas).scope():
        model = keras.Sequential(
            [
                keras.layers.Input((2,)),
                keras.layers.Dense(1, name="a"),
                keras.layers.Dense(1, name="b"),
            ]
        )
        model.compile(optimizer(), "mse")
    return model


def _rates(model):
    """Every replica's learning rates, of each optimizer inside."""
    leaves = getattr(model.optimizer, "optimizers", None) or [model.optimizer]
    strategy = model.distribute_strategy
    return np.array(
        [replicas.values(strategy, one.learning_rate) for one in leaves]
    )


def _check(model, expected, *callbacks, initial_epoch=0, steps=4, **options):
    """The rates of all batches, and the one that stays after them."""
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: seen.append(_rates(model))
    )
    options |= {"initial_epoch": initial_epoch, "steps": steps}
    options["epochs"] = initial_epoch + len(expected) // steps
    events.drive(model, *callbacks, look, **options)
    seen.append(_rates(model))
    assert len(seen) == len(expected)
    for rates, rate in zip(seen, expected, strict=True):
        np.testing.assert_allclose(rates, np.full_like(rates, rate), atol=1e-6)


@pytest.mark.parametrize(
    "wrap, start",
    [
        # One replica's rate by default.
        (WRAP, None),
        (lambda inner: tf_xshard.TowerOptimizer(inner, 2), 0.5),
        (tf_xshard.AGNOptimizer, 0.5),
    ],
    ids=["cross", "tower", "agn"],
)
def test_the_rate_grows_linearly(wrap, start):
    expected = [0.4 + 0.4 * i / 8 for i in range(8)] + [0.8] * 5
    _check(_model(lambda: wrap(SGD(0.1)), 2), expected, WARMUP(0.8, 2, start))


def test_other_callbacks_set_and_save_it_later():
    """After five epochs by default.

    A callback saves the rate that the next epoch begins with.
    """
    model, saved = _model(), []
    saves = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: saved.append(_rates(model)[0, 0])
    )
    later = keras.callbacks.LearningRateScheduler(
        lambda epoch, rate: 0.3 if epoch == 5 else rate
    )
    expected = [0.8 * i / 20 for i in range(20)] + [0.3] * 5
    _check(model, expected, WARMUP(0.8, start=0.0), later, saves)
    np.testing.assert_allclose(saved, [*expected[4:20:4], 0.8, 0.3], atol=1e-6)


LAST = 0.4 + 0.4 * 7 / 8


@pytest.mark.parametrize(
    "rate, epoch, expected",
    [
        (0.1, 1, [0.6, 0.65, 0.7, 0.75, 0.8]),
        # A plateau has reduced the rate since the warm-up.
        (0.008, 5, [0.008] * 5),
        (0.008, 2, [0.008] * 5),
        # The warm-up's last batch had this rate: it was saved before the end.
        (LAST, 2, [0.8] * 5),
        (LAST, 3, [LAST] * 5),
    ],
)
def test_training_that_resumes_continues_it_or_keeps_the_rate(
    rate, epoch, expected
):
    warmup = WARMUP(0.8, 2, start=0.5)
    _check(_model(lambda: SGD(rate)), expected, warmup, initial_epoch=epoch)


@pytest.mark.parametrize(
    "num_saved, rate, seen", [(3, 0.3, 0.3), (2, 0.6, 0.8)]
)
def test_batches_that_a_resumed_epoch_skips_have_no_warmup(
    num_saved, rate, seen
):
    """The warm-up takes two batches of four; the third one's rate is 0.3."""
    model = _model(lambda: SGD(rate))
    fit_internals.skip_steps(model, num_saved, lambda: None)
    batches = itertools.repeat((np.ones([4, 2]), np.ones([4, 1])))
    skip = lambda batch: batch < num_saved and model.train_function(batches)
    expected = [rate] * num_saved + [seen] * (5 - num_saved)
    _check(model, expected, WARMUP(0.8, 0.5, start=0.5), on_batch=skip)


def test_each_groups_rate_is_scaled():
    """Training that goes on in mid-warm-up goes on with the ratios."""
    model = _model(lambda: WRAP(SGD(), "mean", [[0], [1]]), 2)
    state = tf_xshard.GroupState(model)
    state.assign(model.optimizer.learning_rate, [0.02, 0.2])
    for epoch, factor in ((0, 0.75), (1, 1.0)):
        events.drive(
            model, WARMUP(0.8, 2), initial_epoch=epoch, epochs=epoch + 1
        )
        np.testing.assert_allclose(
            _rates(model), [[0.08 * factor, 0.8 * factor]], rtol=1e-6
        )


def _multi(default, of_a):
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(default, {"a/.*": of_a})
    )


@needs_multi_optimizer
@pytest.mark.parametrize(
    "make",
    [
        lambda: WRAP(_multi(SGD(0.1), SGD(0.001))),
        lambda: _multi(WRAP(SGD(0.1)), WRAP(SGD(0.001))),
    ],
    ids=["around", "inside"],
)
def test_each_optimizers_rate_is_scaled(make):
    model = _model(make, 2)
    events.drive(model, WARMUP(0.8, 2, start=0.5))
    np.testing.assert_allclose(
        sorted(_rates(model).ravel()), [0.006] * 2 + [0.6] * 2, rtol=1e-6
    )


def test_unknown_numbers_of_batches_and_schedules_are_refused():
    """Unless the callback knows the number."""
    warmup = WARMUP(0.8, 1, start=0.0, steps_per_epoch=4)
    expected = [0.0, 0.2, 0.4, 0.6, 0.8, 0.8]
    _check(_model(), expected, warmup, steps=5, known=False)
    with pytest.raises(ValueError, match="steps_per_epoch"):
        events.drive(_model(), WARMUP(0.8), known=False)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    with pytest.raises(TypeError, match="is a schedule"):
        events.drive(_model(lambda: SGD(schedule)), warmup)
