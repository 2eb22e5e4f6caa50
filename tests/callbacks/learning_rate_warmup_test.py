"""The learning rate of every batch during a warm-up."""

import keras
import numpy as np
import pytest

import tf_xshard
from tests.support import replicas
from tests.support.versions import needs_multi_optimizer

SGD = keras.optimizers.SGD


class _Rates(keras.callbacks.Callback):
    """The rate of every batch, and the one after all."""

    def __init__(self):
        super().__init__()
        self.rates, self.last = [], None

    def _rate(self):
        optimizer = self.model.optimizer
        [one] = getattr(optimizer, "optimizers", None) or [optimizer]
        return round(float(one.learning_rate.numpy()), 6)

    def on_train_batch_begin(self, batch, logs=None):
        self.rates.append(self._rate())

    def on_train_end(self, logs=None):
        self.last = self._rate()


def _fit(optimizer_fn, warmup, strategy=None, others=(), **kwargs):
    with (strategy or replicas.mirrored(1)).scope():
        model = keras.Sequential(
            [keras.layers.Input((2,)), keras.layers.Dense(1)]
        )
        model.compile(optimizer_fn(), "mse")
    rates = _Rates()
    x = np.ones([16, 2])
    model.fit(
        x,
        x[:, :1],
        batch_size=4,
        verbose=0,
        callbacks=[warmup, *others, rates],
        **{"epochs": 3, **kwargs},
    )
    return rates.rates, rates.last


@pytest.mark.parametrize(
    "optimizer_fn",
    [
        lambda: tf_xshard.CrossShardOptimizer(SGD(0.1)),
        lambda: tf_xshard.TowerOptimizer(SGD(0.1), 2),
        lambda: tf_xshard.AGNOptimizer(SGD(0.1)),
        lambda: SGD(0.1),
    ],
    ids=["cross", "tower", "agn", "plain"],
)
def test_the_rate_begins_at_one_replicas_and_grows_linearly(optimizer_fn):
    warmup = tf_xshard.LearningRateWarmup(0.8, 2)
    rates, last = _fit(optimizer_fn, warmup, replicas.mirrored(4))
    expected = [0.2 + 0.6 * i / 8 for i in range(8)] + [0.8] * 4
    np.testing.assert_allclose(rates, expected, atol=1e-6)
    assert last == 0.8


def test_it_continues_where_training_does():
    warmup = tf_xshard.LearningRateWarmup(0.8, 2, start=0.0)
    rates, last = _fit(lambda: SGD(0.1), warmup, initial_epoch=1, epochs=2)
    np.testing.assert_allclose(rates, [0.4, 0.5, 0.6, 0.7], atol=1e-6)
    assert last == 0.8


def test_afterwards_others_may_set_the_rate():
    warmup = tf_xshard.LearningRateWarmup(0.8, 1, start=0.5)
    later = keras.callbacks.LearningRateScheduler(
        lambda epoch, rate: 0.3 if epoch else rate
    )
    with replicas.mirrored(1).scope():
        model = keras.Sequential(
            [keras.layers.Input((2,)), keras.layers.Dense(1)]
        )
        model.compile(SGD(0.1), "mse")
    x = np.ones([8, 2])
    model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=[warmup, later])
    assert round(float(model.optimizer.learning_rate.numpy()), 6) == 0.3


def test_five_epochs_by_default():
    at_end = []
    saves = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: at_end.append(
            float(saves.model.optimizer.learning_rate.numpy())
        )
    )
    warmup = tf_xshard.LearningRateWarmup(0.8, start=0.0)
    rates, _ = _fit(lambda: SGD(0.1), warmup, others=[saves], epochs=6)
    expected = [0.8 * i / 20 for i in range(20)] + [0.8] * 4
    np.testing.assert_allclose(rates, expected, atol=1e-6)
    # What a later callback saves is the rate that the next epoch begins with.
    np.testing.assert_allclose(at_end, [*expected[4::4], 0.8], atol=1e-6)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_a_number_of_batches_that_fit_does_not_know():
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(SGD(0.1), "mse")
    batches = ((np.ones([4, 2]), np.ones([4, 1])) for _ in range(5))
    warmup = tf_xshard.LearningRateWarmup(0.8, 1, start=0.0, steps_per_epoch=4)
    rates = _Rates()
    model.fit(batches, verbose=0, shuffle=False, callbacks=[warmup, rates])
    expected = [0.0, 0.2, 0.4, 0.6, 0.8]
    np.testing.assert_allclose(rates.rates[:5], expected, atol=1e-6)


@needs_multi_optimizer
def test_all_of_a_multi_optimizers_rates():
    optimizers = keras.optimizers
    rates, _ = _fit(
        lambda: tf_xshard.CrossShardOptimizer(
            optimizers.MultiOptimizer(optimizers.OptimizerMap(SGD(0.1)))
        ),
        tf_xshard.LearningRateWarmup(0.8, 1, start=0.5),
        epochs=1,
    )
    np.testing.assert_allclose(rates, [0.4, 0.5, 0.6, 0.7], atol=1e-6)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((0.0,), ValueError, "learning_rate must be positive"),
        ((0.1, 0), ValueError, "warmup_epochs must be positive"),
        ((0.1, 5, 1.5), ValueError, "start must be from 0 to 1"),
        ((0.1, 5, None, 0), ValueError, "steps_per_epoch must be a positive"),
        (("fast",), TypeError, "learning_rate must be a number"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        tf_xshard.LearningRateWarmup(*arguments)


def test_a_schedule_and_an_unknown_number_of_batches_are_refused():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    warmup = tf_xshard.LearningRateWarmup(0.8)
    with pytest.raises(TypeError, match="is a schedule"):
        _fit(lambda: SGD(schedule), warmup)

    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(SGD(0.1), "mse")
    batches = ((np.ones([4, 2]), np.ones([4, 1])) for _ in range(4))
    with pytest.raises(ValueError, match="steps_per_epoch"):
        model.fit(batches, verbose=0, shuffle=False, callbacks=[warmup])
