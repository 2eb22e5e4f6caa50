"""Losses that return one number: N replicas train as one device, or warn."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import seeds
from tests.support import training

SGD = keras.optimizers.SGD
X = np.linspace(-1, 1, 48, dtype="float32").reshape(16, 3)


@keras.saving.register_keras_serializable("tests")
def mean_square(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_pred - y_true))


SCALAR = tf_xshard.ScalarLoss(mean_square)


def _sgd():
    return SGD(0.1)


def _cross():
    return tf_xshard.CrossShardOptimizer(_sgd())


def _tower():
    return tf_xshard.TowerOptimizer(_sgd(), 1)


def _agn():
    return tf_xshard.AGNOptimizer(_sgd(), communication_period=1)


class _OwnLoss(keras.Model):
    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        return self.own(y, y_pred)


def _train(loss="mse", optimizer=_cross, num_replicas=2, own=None, more=()):
    """Trains, with `own(model, y, y_pred)` as the model's compute_loss, if any.

    Returns:
      Every replica's weights after a few steps, and the reported losses.
    """
    kind = type("Model", (_OwnLoss,), {"own": own}) if own else keras.Model
    strategy = tf.distribute.get_strategy()
    if num_replicas > 1:
        strategy = replicas.mirrored(num_replicas)
    with strategy.scope():
        seeds.seed(3)
        inputs = keras.Input((3,))
        layer = keras.layers.Dense(2, kernel_regularizer="l2")
        model = kind(inputs, layer(inputs))
        model.compile(optimizer(), loss)
        model.optimizer.build(model.trainable_variables)
    columns = (np.split(one, num_replicas) for one in (X, X[:, :2], *more))
    losses = training.run_parts(model, [[*zip(*columns, strict=True)]] * 3)
    return training.weights(model, strategy), losses


def _divided(value):
    return value / tf.distribute.get_strategy().num_replicas_in_sync


def _of_keras(model, y, y_pred):
    return keras.Model.compute_loss(model, None, y, y_pred)


DIVIDED = {
    "cross": {"loss": SCALAR},
    "tower": {"loss": SCALAR, "optimizer": _tower},
    "agn": {"loss": SCALAR, "optimizer": _agn},
    "of_rows": {"loss": lambda y, p: (y - p) ** 2},
    "lambda": {"loss": tf_xshard.ScalarLoss(lambda y, p: mean_square(y, p))},
    "own": {"own": lambda _, y, p: _divided(mean_square(y, p))},
    "own_term": {
        "own": lambda model, y, p: (
            _of_keras(model, y, p) + _divided(1.0) * keras.ops.mean(p)
        )
    },
    "own_regularizer": {
        "own": lambda model, y, p: (
            keras.losses.MeanSquaredError()(y, p) + _divided(sum(model.losses))
        )
    },
    "own_average": {
        "own": lambda _, y, p: tf.nn.compute_average_loss(
            tf.reduce_sum(tf.square(y - p), 1), global_batch_size=16
        )
    },
    "own_scalar_loss": {"own": lambda _, y, p: SCALAR(y, p)},
    "own_global_mean": {
        "own": lambda _, y, p: 0.3 * tf_xshard.GlobalMean("mse")(y, p)
    },
}


@pytest.mark.parametrize("name", DIVIDED)
def test_n_replicas_train_as_one_device(name):
    """With a regularizer, and the reported loss is the one device's."""
    weights, losses = _train(**DIVIDED[name])
    one_device = {"optimizer": _sgd, "num_replicas": 1}
    expected, expected_losses = _train(**DIVIDED[name] | one_device)
    assert training.deviation(weights, expected) <= 1e-6
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)


BARE, OWN = "'mean_square' returns one .*2", "Model.compute_loss does not divi"


@pytest.mark.parametrize(
    "text, options",
    [
        (BARE, {"loss": mean_square}),
        (BARE, {"loss": [mean_square], "optimizer": _tower}),
        (BARE, {"loss": mean_square, "optimizer": _agn}),
        (OWN, {"own": lambda _, y, p: mean_square(y, p)}),
        (OWN, {"own": lambda *args: _of_keras(*args) + mean_square(*args[1:])}),
    ],
    ids=["cross", "tower", "agn", "own", "own_term"],
)
def test_a_loss_that_is_not_divided_is_warned_of(text, options):
    """In the first step, and on several replicas only."""
    _train(**options, num_replicas=1)
    with pytest.warns(UserWarning, match=text):
        _train(**options)


def test_it_is_saved_with_the_model(tmp_path):
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    model.compile(_cross(), SCALAR)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.loss, tf_xshard.ScalarLoss)
    assert float(loaded.loss(np.zeros(4), np.full(4, 3.0))) == 9


def test_weights_of_rows():
    """A mean of products is not the product of means."""
    weights = np.arange(16.0)
    _train(SCALAR, num_replicas=1, more=[weights])
    with pytest.raises(ValueError, match="got sample_weight of shape"):
        _train(SCALAR, more=[weights])


def test_one_weight_for_all_rows():
    value = replicas.mirrored(2).run(
        lambda: SCALAR(np.zeros(4), np.full(4, 3.0), 2.0)
    )
    # Divided by the two replicas.
    assert [float(one) for one in value.values] == [9.0, 9.0]


def test_bad_arguments():
    with pytest.raises(TypeError, match="takes a function of"):
        tf_xshard.ScalarLoss("mse")
    loss = tf_xshard.ScalarLoss(lambda y, p: p - y)
    with pytest.raises(ValueError, match=r"one number, but .* \(4,\)"):
        loss(np.zeros(4), np.zeros(4))
