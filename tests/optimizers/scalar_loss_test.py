"""Losses that return one number: N replicas train as one device, or warn."""

import functools

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


WRAPPERS = {
    "cross": lambda: tf_xshard.CrossShardOptimizer(SGD(0.1)),
    "tower": lambda: tf_xshard.TowerOptimizer(SGD(0.1), 1),
    "agn": lambda: tf_xshard.AGNOptimizer(SGD(0.1), communication_period=1),
}


def _train(
    loss,
    optimizer=WRAPPERS["cross"],
    num_replicas=2,
    model_class=keras.Model,
    more=(),
):
    """Every replica's weights after a few steps, and the reported losses."""
    strategy = tf.distribute.get_strategy()
    if num_replicas > 1:
        strategy = replicas.mirrored(num_replicas)
    with strategy.scope():
        seeds.seed(3)
        inputs = keras.Input((3,))
        layer = keras.layers.Dense(2, kernel_regularizer="l2")
        model = model_class(inputs, layer(inputs))
        model.compile(optimizer(), loss)
        model.optimizer.build(model.trainable_variables)
    parts = list(
        zip(
            *(np.split(one, num_replicas) for one in (X, X[:, :2], *more)),
            strict=True,
        )
    )
    losses = training.run_parts(model, [parts] * 3)
    return training.weights(model, strategy), losses


@functools.cache
def _one_device():
    return _train("mse", lambda: SGD(0.1), 1)


def _check(got, expected):
    assert training.deviation(got[0], expected[0]) <= 1e-6
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-5)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapped_n_replicas_train_as_one_device(name):
    """With a regularizer, and the reported loss is the one device's."""
    loss = tf_xshard.ScalarLoss(mean_square)
    _check(_train(loss, WRAPPERS[name]), _one_device())


@pytest.mark.parametrize(
    "name, loss",
    [("cross", mean_square), ("tower", [mean_square]), ("agn", mean_square)],
)
def test_a_bare_one_is_warned_of_in_the_first_step(name, loss):
    with pytest.warns(UserWarning, match="'mean_square' returns one number.*2"):
        _train(loss, WRAPPERS[name])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "loss, num_replicas",
    [
        (lambda y, p: (y - p) ** 2, 2),
        (tf_xshard.ScalarLoss(lambda y, p: keras.ops.mean((y - p) ** 2)), 2),
        (mean_square, 1),
    ],
    ids=["of_rows", "lambda", "one_replica"],
)
def test_nothing_to_warn_of(loss, num_replicas):
    _check(_train(loss, num_replicas=num_replicas), _one_device())


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

    return _train("mse", num_replicas=num_replicas, model_class=Model)


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
    _check(*(_with_own_loss(OWN_LOSSES[name], n) for n in (2, 1)))


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
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    model.compile(WRAPPERS["cross"](), tf_xshard.ScalarLoss(mean_square))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.loss, tf_xshard.ScalarLoss)
    assert float(loaded.loss(np.zeros(4), np.full(4, 3.0))) == 9


def test_weights_of_rows():
    """A mean of products is not the product of means."""
    loss, weights = tf_xshard.ScalarLoss(mean_square), np.arange(16.0)
    _train(loss, num_replicas=1, more=[weights])
    with pytest.raises(ValueError, match="got sample_weight of shape"):
        _train(loss, more=[weights])


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
