"""The learning rate of every batch during a warm-up."""

import keras
import numpy as np
import pytest

import tf_xshard
from tests.support import fitting
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


def _model(optimizer, num_replicas=1):
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


def _fit(model, warmup, *others, epochs, **kwargs):
    """The rate of each of four batches an epoch, and after all."""
    rates = _Rates()
    x = np.ones([16, 2])
    xy = x, x[:, :1]
    fitting.fit(model, [warmup, *others, rates], epochs, xy, 4, **kwargs)
    return rates.rates, rates.last


@pytest.mark.parametrize(
    "optimizer, num_replicas, start",
    [
        # One replica's rate by default.
        (lambda: tf_xshard.CrossShardOptimizer(SGD(0.1)), 2, None),
        (lambda: tf_xshard.TowerOptimizer(SGD(0.1), 2), 1, 0.5),
        (lambda: tf_xshard.AGNOptimizer(SGD(0.1)), 1, 0.5),
        pytest.param(
            lambda: tf_xshard.CrossShardOptimizer(
                keras.optimizers.MultiOptimizer(
                    keras.optimizers.OptimizerMap(SGD(0.1))
                )
            ),
            *(1, 0.5),
            marks=needs_multi_optimizer,
        ),
    ],
    ids=["cross", "tower", "agn", "multi"],
)
def test_the_rate_grows_linearly(optimizer, num_replicas, start):
    warmup = tf_xshard.LearningRateWarmup(0.8, 2, start)
    rates, last = _fit(_model(optimizer, num_replicas), warmup, epochs=3)
    expected = [0.4 + 0.4 * i / 8 for i in range(8)] + [0.8] * 4
    np.testing.assert_allclose(rates, expected, atol=1e-6)
    assert last == 0.8


def test_it_continues_where_training_does_and_then_others_may_set_it():
    warmup = tf_xshard.LearningRateWarmup(0.8, 2, start=0.0)
    later = keras.callbacks.LearningRateScheduler(
        lambda epoch, rate: 0.3 if epoch == 2 else rate
    )
    rates, last = _fit(
        _model(lambda: SGD(0.1)), warmup, later, initial_epoch=1, epochs=3
    )
    expected = [0.4, 0.5, 0.6, 0.7] + [0.3] * 4
    np.testing.assert_allclose(rates, expected, atol=1e-6)
    assert last == 0.3


def test_five_epochs_by_default():
    at_end = []
    saves = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: at_end.append(
            float(saves.model.optimizer.learning_rate.numpy())
        )
    )
    warmup = tf_xshard.LearningRateWarmup(0.8, start=0.0)
    rates, _ = _fit(_model(lambda: SGD(0.1)), warmup, saves, epochs=6)
    expected = [0.8 * i / 20 for i in range(20)] + [0.8] * 4
    np.testing.assert_allclose(rates, expected, atol=1e-6)
    # What a later callback saves is the rate that the next epoch begins with.
    np.testing.assert_allclose(at_end, [*expected[4::4], 0.8], atol=1e-6)


@pytest.mark.parametrize(
    "rate, epoch, expected",
    [
        # A plateau has reduced the rate since the warm-up.
        (0.008, 5, 0.008),
        (0.008, 2, 0.008),
        # The warm-up's last batch had this rate: it was saved before the end.
        (0.4 + 0.4 * 7 / 8, 2, 0.8),
        (0.4 + 0.4 * 7 / 8, 3, 0.4 + 0.4 * 7 / 8),
    ],
)
def test_training_that_resumes_after_its_end_keeps_the_rate(
    rate, epoch, expected
):
    warmup = tf_xshard.LearningRateWarmup(0.8, 2, start=0.5)
    rates, last = _fit(
        _model(lambda: SGD(rate)),
        warmup,
        initial_epoch=epoch,
        epochs=epoch + 1,
    )
    np.testing.assert_allclose(rates, [expected] * 4, atol=1e-6)
    assert last == pytest.approx(expected, abs=1e-6)


class _Stop(Exception):
    pass


def _stop_at(batch):
    def stop(at, logs):
        if at == batch:
            raise _Stop

    return keras.callbacks.LambdaCallback(on_train_batch_end=stop)


@pytest.mark.parametrize("num_saved, seen", [(3, 0.3), (2, 0.8)])
def test_batches_that_a_resumed_epoch_skips_have_no_warmup(
    num_saved, seen, tmp_path
):
    """The warm-up takes two batches of four; the third one's rate is 0.3."""

    def fit(*others):
        return _fit(
            _model(lambda: SGD(0.1)),
            tf_xshard.LearningRateWarmup(0.8, 0.5, start=0.5),
            *others,
            tf_xshard.GroupCheckpoint(tmp_path, num_saved),
            epochs=1,
        )

    def lower(batch, logs):
        if batch == 2:
            lowers.model.optimizer.learning_rate = 0.3

    lowers = keras.callbacks.LambdaCallback(on_train_batch_begin=lower)
    with pytest.raises(_Stop):
        fit(lowers, _stop_at(num_saved))
    assert tf_xshard.GroupCheckpoint.position(tmp_path) == (0, num_saved)
    rates, last = fit()
    assert rates[3] == last == pytest.approx(seen, abs=1e-6)


def _rates_of_groups(optimizer, num_replicas=2):
    return [
        float(one)
        for one in replicas.values(
            replicas.mirrored(num_replicas), optimizer.learning_rate
        )
    ]


@pytest.mark.parametrize("epochs, factor", [(1, 0.75), (3, 1.0)])
def test_each_groups_rate_is_scaled(epochs, factor):
    model = _model(
        lambda: tf_xshard.CrossShardOptimizer(SGD(), "mean", [[0], [1]]), 2
    )
    state = tf_xshard.GroupState(model)
    state.assign(model.optimizer.learning_rate, [0.02, 0.2])
    warmup = tf_xshard.LearningRateWarmup(0.8, 2)
    _fit(model, warmup, epochs=epochs)
    rates = _rates_of_groups(model.optimizer)
    np.testing.assert_allclose(rates, [0.08 * factor, 0.8 * factor], rtol=1e-6)
    # Training that goes on in mid-warm-up goes on with the ratios.
    _fit(model, warmup, initial_epoch=epochs, epochs=epochs + 1)
    np.testing.assert_allclose(
        _rates_of_groups(model.optimizer), [0.08, 0.8], rtol=1e-6
    )


@needs_multi_optimizer
@pytest.mark.parametrize("is_around", [True, False])
def test_each_optimizers_rate_is_scaled(is_around):
    def optimizer():
        wrap = tf_xshard.CrossShardOptimizer
        inside = (lambda one: one) if is_around else wrap
        multi = keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(
                inside(SGD(0.1)), {"a/.*": inside(SGD(0.001))}
            )
        )
        return wrap(multi) if is_around else multi

    model = _model(optimizer, 2)
    for epochs, factor in ((1, 0.75), (3, 1.0)):
        warmup = tf_xshard.LearningRateWarmup(0.8, 2, start=0.5)
        x = np.ones([16, 2])
        fitting.fit(model, [warmup], epochs, (x, x[:, :1]), 4)
        rates = [
            rate
            for one in model.optimizer.optimizers
            for rate in _rates_of_groups(one)
        ]
        np.testing.assert_allclose(
            sorted(rates),
            [0.008 * factor] * 2 + [0.8 * factor] * 2,
            rtol=1e-6,
        )


def _fit_generator(callbacks):
    batches = ((np.ones([4, 2]), np.ones([4, 1])) for _ in range(5))
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(SGD(0.1), "mse")
    model.fit(batches, verbose=0, shuffle=False, callbacks=callbacks)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_a_number_of_batches_that_fit_does_not_know():
    warmup = tf_xshard.LearningRateWarmup(0.8, 1, start=0.0, steps_per_epoch=4)
    rates = _Rates()
    _fit_generator([warmup, rates])
    expected = [0.0, 0.2, 0.4, 0.6, 0.8]
    np.testing.assert_allclose(rates.rates[:5], expected, atol=1e-6)
    with pytest.raises(ValueError, match="steps_per_epoch"):
        _fit_generator([tf_xshard.LearningRateWarmup(0.8)])


def test_a_schedule_is_refused():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    with pytest.raises(TypeError, match="is a schedule"):
        _fit(
            _model(lambda: SGD(schedule)),
            tf_xshard.LearningRateWarmup(0.8),
            epochs=1,
        )
