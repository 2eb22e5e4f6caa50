"""Losses that return one number: N replicas train as one device, or warn."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import seeds

SGD = keras.optimizers.SGD


@keras.saving.register_keras_serializable("tests")
def mean_square(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_pred - y_true))


def _model(loss, optimizer, num_replicas):
    seeds.seed(3)
    with replicas.mirrored(num_replicas).scope():
        model = keras.Sequential(
            [
                keras.layers.Input((3,)),
                keras.layers.Dense(2, kernel_regularizer="l2"),
            ]
        )
        model.compile(optimizer(), loss)
    return model


def _fit(loss, optimizer, num_replicas):
    model = _model(loss, optimizer, num_replicas)
    x = np.linspace(-1, 1, 48, dtype="float32").reshape(16, 3)
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :2])).batch(16)
    history = model.fit(dataset.repeat(3), shuffle=False, verbose=0)
    return history.history["loss"], model.get_weights()


WRAPPERS = {
    "cross": lambda: tf_xshard.CrossShardOptimizer(SGD(0.1)),
    "tower": lambda: tf_xshard.TowerOptimizer(SGD(0.1), 1),
    "agn": lambda: tf_xshard.AGNOptimizer(SGD(0.1), communication_period=1),
    "plain": lambda: SGD(0.1),
}


@functools.cache
def _one_device():
    return _fit("mse", WRAPPERS["plain"], 1)


@pytest.mark.parametrize("name", ["cross", "tower", "agn"])
def test_wrapped_n_replicas_train_as_one_device(name):
    """With a regularizer, and the reported loss is the one device's."""
    loss = tf_xshard.ScalarLoss(mean_square)
    losses, weights = _fit(loss, WRAPPERS[name], 2)
    want_losses, want_weights = _one_device()
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    for value, want in zip(weights, want_weights, strict=True):
        np.testing.assert_allclose(value, want, atol=1e-6)


@pytest.mark.parametrize(
    "name, loss",
    [("cross", mean_square), ("tower", [mean_square]), ("agn", mean_square)],
)
def test_a_bare_one_is_warned_of_in_the_first_step(name, loss):
    with pytest.warns(UserWarning, match="'mean_square' returns one number.*2"):
        _fit(loss, WRAPPERS[name], 2)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "loss, num_replicas",
    [
        ("mse", 2),
        (lambda y, p: (y - p) ** 2, 2),
        (tf_xshard.ScalarLoss(lambda y, p: keras.ops.mean((y - p) ** 2)), 2),
        (mean_square, 1),
    ],
    ids=["of_keras", "of_rows", "lambda", "one_replica"],
)
def test_nothing_to_warn_of(loss, num_replicas):
    _fit(loss, WRAPPERS["cross"], num_replicas)


def _divided(value):
    return value / tf.distribute.get_strategy().num_replicas_in_sync


def _with_own_loss(compute, num_replicas):
    """Trains a model whose `compute_loss` is (model, y, y_pred) -> loss."""

    class Model(keras.Model):
        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            return compute(self, y, y_pred)

        def compute_loss_of_keras(self, y, y_pred):
            return keras.Model.compute_loss(self, None, y, y_pred)

    seeds.seed(3)
    with replicas.mirrored(num_replicas).scope():
        inputs = keras.Input((3,))
        layer = keras.layers.Dense(2, kernel_regularizer="l2")
        model = Model(inputs, layer(inputs))
        model.compile(tf_xshard.CrossShardOptimizer(SGD(0.1)), "mse")
    x = np.linspace(-1, 1, 48, dtype="float32").reshape(16, 3)
    history = model.fit(x, x[:, :2], 16, 2, shuffle=False, verbose=0)
    return history.history["loss"], model.get_weights()


OWN_LOSSES = {
    "divided": lambda _, y, p: _divided(mean_square(y, p)),
    "with_a_term": lambda model, y, p: (
        model.compute_loss_of_keras(y, p) + _divided(1.0) * keras.ops.mean(p)
    ),
    "regularized": lambda model, y, p: (
        keras.losses.MeanSquaredError()(y, p) + _divided(sum(model.losses))
    ),
    "average": lambda _, y, p: tf.nn.compute_average_loss(
        tf.reduce_sum(tf.square(y - p), 1), global_batch_size=16
    ),
    "scalar_loss": lambda _, y, p: tf_xshard.ScalarLoss(mean_square)(y, p),
    "global_mean": lambda _, y, p: 0.3 * tf_xshard.GlobalMean("mse")(y, p),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", OWN_LOSSES)
def test_own_losses_that_are_divided(name):
    """N replicas train as one device, without a warning."""
    losses, weights = _with_own_loss(OWN_LOSSES[name], 2)
    want_losses, want_weights = _with_own_loss(OWN_LOSSES[name], 1)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    for value, want in zip(weights, want_weights, strict=True):
        np.testing.assert_allclose(value, want, atol=1e-6)


@pytest.mark.parametrize(
    "compute",
    [
        lambda _, y, p: mean_square(y, p),
        lambda model, y, p: (
            model.compute_loss_of_keras(y, p) + keras.ops.mean(p)
        ),
    ],
    ids=["mean", "term"],
)
def test_own_losses_that_are_not_divided(compute):
    with pytest.warns(UserWarning, match="Model.compute_loss does not divide"):
        _with_own_loss(compute, 2)


def test_it_is_saved_with_the_model(tmp_path):
    model = _model(tf_xshard.ScalarLoss(mean_square), WRAPPERS["cross"], 1)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.loss, tf_xshard.ScalarLoss)
    assert float(loaded.loss(np.zeros(4), np.full(4, 3.0))) == 9


@pytest.mark.parametrize(
    "weights",
    [{"sample_weight": np.arange(16.0)}, {"class_weight": {0: 1.0, 1: 2.0}}],
)
def test_weights_of_rows(weights):
    """A mean of products is not the product of means."""
    x = np.linspace(-1, 1, 48, dtype="float32").reshape(16, 3)
    loss = tf_xshard.ScalarLoss(mean_square)

    def fit(num_replicas):
        model = _model(loss, WRAPPERS["cross"], num_replicas)
        model.fit(x, np.eye(2)[np.arange(16) % 2], verbose=0, **weights)

    fit(1)
    with pytest.raises(ValueError, match="got sample_weight of shape"):
        fit(2)


def test_one_weight_for_all_rows():
    loss = tf_xshard.ScalarLoss(mean_square)
    strategy = replicas.mirrored(2)
    value = strategy.run(lambda: loss(np.zeros(4), np.full(4, 3.0), 2.0))
    # Divided by the two replicas.
    assert [float(one) for one in value.values] == [9.0, 9.0]


def test_bad_arguments():
    with pytest.raises(TypeError, match="takes a function of"):
        tf_xshard.ScalarLoss("mse")
    loss = tf_xshard.ScalarLoss(lambda y, p: p - y)
    with pytest.raises(ValueError, match=r"one number, but .* \(4,\)"):
        loss(np.zeros(4), np.zeros(4))
