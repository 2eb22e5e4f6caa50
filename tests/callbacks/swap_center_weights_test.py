"""What is validated, saved and trained on while the center is shown."""

import keras
import numpy as np
import pytest

import tf_xshard
from tests.support import fitting
from tests.support import group_training
from tests.support import replicas
from tests.support.versions import needs_multi_optimizer

X = np.random.default_rng(3).normal(size=(16, 2)).astype("float32")
SGD = keras.optimizers.SGD


def _agn():
    return tf_xshard.AGNOptimizer(SGD(0.1), communication_period=3)


def _model(make):
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(make(), "mse")
    return model


def _fit(model, callbacks, epochs=1, **kwargs):
    xy = X, X[:, :1]
    fitting.fit(model, callbacks, epochs, xy, 4, **kwargs)


def test_model_checkpoint_saves_the_center(tmp_path):
    """Four steps an epoch, an exchange every third: the two differ."""
    path = tmp_path / "model.keras"
    with replicas.mirrored(2).scope():
        model = _model(_agn)
    noted = []

    def note(epoch, logs):
        assert not model.optimizer.center_is_shown
        noted[:] = [
            (center.numpy(), local.numpy())
            for center, local in zip(
                model.optimizer.center_variables,
                model.trainable_variables,
                strict=True,
            )
        ]

    callbacks = [
        keras.callbacks.LambdaCallback(on_epoch_end=note),
        tf_xshard.SwapCenterWeights(swap_on_epoch=True),
        keras.callbacks.ModelCheckpoint(path),
    ]
    _fit(model, callbacks, epochs=2)
    saved = keras.models.load_model(path, compile=False)
    for value, (center, local) in zip(saved.get_weights(), noted, strict=True):
        np.testing.assert_array_equal(value, center)
        assert np.abs(value - local).max() > 1e-4


def test_training_resumed_from_the_center_begins_with_the_local_variables(
    tmp_path,
):
    path = tmp_path / "model.keras"
    model = _model(_agn)
    start = model.get_weights()
    swap = tf_xshard.SwapCenterWeights(swap_on_epoch=True)
    _fit(model, [swap, keras.callbacks.ModelCheckpoint(path)])
    resumed = keras.models.load_model(path)
    assert resumed.optimizer.center_is_shown
    _fit(resumed, [tf_xshard.SwapCenterWeights()])
    whole = _model(_agn)
    whole.set_weights(start)
    _fit(whole, [], epochs=2)
    for mine, its in zip(
        resumed.get_weights(), whole.get_weights(), strict=True
    ):
        np.testing.assert_allclose(mine, its, rtol=1e-6)


def test_an_agn_optimizer_inside_another_wrapper():
    with replicas.mirrored(2).scope():
        model = _model(lambda: tf_xshard.TowerOptimizer(_agn(), 2))
    shown = []
    look = keras.callbacks.LambdaCallback(
        on_test_batch_end=lambda batch, logs: shown.append(
            model.optimizer.inner_optimizer.center_is_shown
        )
    )
    swap = tf_xshard.SwapCenterWeights()
    _fit(model, [swap, look], validation_data=(X, X[:, :1]))
    assert shown and all(shown)
    assert not swap.swap_on_epoch


@needs_multi_optimizer
def test_every_agn_optimizer_of_a_multi_optimizer():
    def two():
        return keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(_agn(), {".*/bias": _agn()})
        )

    with replicas.mirrored(2).scope():
        model = _model(two)
    seen = []

    def look(batch, logs):
        centers = [
            center.numpy()
            for one in model.optimizer.optimizers
            for center in one.center_variables
        ]
        seen.append((model.get_weights(), centers))

    during = keras.callbacks.LambdaCallback(
        on_test_batch_end=look, on_epoch_end=look
    )
    swap = tf_xshard.SwapCenterWeights()
    _fit(model, [swap, during], validation_data=(X, X[:, :1]))
    (shown, local), *_, (after, centers) = seen
    # During a swap, the centers' variables hold the local values.
    for one in (shown, local, after, centers):
        one.sort(key=np.ndim)
    group_training.assert_same([shown, local], [centers, after])
    for mine, other in zip(shown, local, strict=True):
        assert np.abs(mine - other).max() > 1e-4


def test_without_an_agn_optimizer():
    model = _model(lambda: tf_xshard.CrossShardOptimizer(SGD(0.1)))
    with pytest.raises(ValueError, match="compiled with an AGNOptimizer, got"):
        _fit(model, [tf_xshard.SwapCenterWeights()])
