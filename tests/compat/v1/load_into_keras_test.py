"""Checkpoints of TF1: into shards, back, and into Keras."""

import atexit
import functools
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.compat.v1 import graphs
from tests.support import replicas
from tests.support import v1_oracle
from tf_xshard.compat import v1

tf1 = tf.compat.v1
X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(8, 1)).astype(np.float32)


def _step(optimizer, x, y):
    uniform = tf1.glorot_uniform_initializer
    kernel = tf1.get_variable("dense/kernel", [3, 4], initializer=uniform(1))
    bias = tf1.get_variable("dense/bias", [4], initializer=tf.zeros)
    last = tf1.get_variable("dense_1/kernel", [4, 1], initializer=uniform(2))
    loss = tf.reduce_mean((tf.tanh(x @ kernel + bias) @ last - y) ** 2)
    step = tf1.train.get_or_create_global_step()
    return optimizer.minimize(loss, global_step=step)


_rmsprop = functools.partial(tf1.train.RMSPropOptimizer, 0.1, momentum=0.5)
OPTIMIZERS = {
    **{name: make for name, (_, make) in v1_oracle.OPTIMIZERS.items()},
    "rmsprop": _rmsprop,
    "centered": functools.partial(_rmsprop, centered=True),
    "adadelta": lambda: tf1.train.AdadeltaOptimizer(0.1),
    "ftrl": lambda: tf1.train.FtrlOptimizer(0.1),
}


@functools.cache
def _trained(name):
    """Trains five steps in TF1; wrappers, also the originals, add no variable.

    Returns a checkpoint after three steps, its values, and those after five.
    """
    directory = tempfile.TemporaryDirectory()
    atexit.register(directory.cleanup)
    with tf.Graph().as_default():
        train = _step(OPTIMIZERS[name](), tf.constant(X), tf.constant(Y))
        values = {v.op.name: v for v in tf1.global_variables()}
        with graphs.session() as session:
            for _ in range(3):
                session.run(train)
            path = tf1.train.Saver().save(session, f"{directory.name}/model")
            saved = session.run(values)
            for _ in range(2):
                session.run(train)
            return path, saved, session.run(values)


def test_a_checkpoint_of_tf1_in_shards_and_back(tmp_path):
    path, saved, expected = _trained("adam")

    def computation(x, y):
        return _step(v1.CrossShardOptimizer(OPTIMIZERS["adam"]()), x, y)

    with tf.Graph().as_default(), tf1.Session() as session:
        train = v1.shard(computation, [tf.constant(X), tf.constant(Y)], 2)
        # The variables that the Saver knows.
        variables = tf1.global_variables()
        assert [v.op.name for v in variables] == list(saved)
        tf1.train.Saver().restore(session, path)
        for _ in range(2):
            session.run(train)
        path = tf1.train.Saver().save(session, str(tmp_path / "back"))
    back = tf.train.load_checkpoint(path)
    got = [back.get_tensor(name) for name in expected]
    graphs.check_close(got, list(expected.values()), rtol=1e-4)


_keras_rmsprop = functools.partial(
    keras.optimizers.RMSprop, 0.1, momentum=0.5, epsilon=1e-10
)
KERAS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.1, epsilon=1e-8),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1, epsilon=1e-12),
    "rmsprop": _keras_rmsprop,
    "centered": functools.partial(_keras_rmsprop, centered=True),
    "adadelta": lambda: keras.optimizers.Adadelta(0.1, epsilon=1e-8),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
}


def _model(optimizer, *layers):
    model = keras.Sequential(layers)
    if optimizer is not None:
        model.compile(optimizer, "mse", run_eagerly=True)
    return model


def _two_layers(optimizer, units=4):
    return _model(
        optimizer,
        keras.layers.Input((3,)),
        keras.layers.Dense(units, activation="tanh", name="dense"),
        keras.layers.Dropout(0.0, seed=1),
        keras.layers.Dense(1, use_bias=False, name="dense_1"),
    )


def _one_layer(optimizer):
    dense = keras.layers.Dense(1, use_bias=False, name="dense")
    return _model(optimizer, keras.layers.Input((2,)), dense)


@pytest.mark.parametrize("name", KERAS)
def test_into_keras_and_on(name):
    """Five steps of TF1 equal three of TF1 and two of Keras."""
    path, _, trained = _trained(name)
    inner = KERAS[name]()
    model = _two_layers(tf_xshard.CrossShardOptimizer(inner))
    v1.load_into_keras(path, model)
    assert int(inner.iterations) == 3
    for _ in range(2):
        model.train_on_batch(X, Y)
    names = ("dense/kernel", "dense/bias", "dense_1/kernel")
    expected = [trained[name] for name in names]
    graphs.check_close(model.get_weights(), expected, rtol=2e-4)


def _twins(optimizer):
    """A model with two weights of one path."""

    def inner():
        x = keras.layers.Input((3,))
        return keras.Model(x, keras.layers.Dense(3, name="dense")(x))

    return _model(optimizer, inner(), inner())


@pytest.mark.parametrize(
    "name, original, units, names, text",
    [
        ("adam", "adam", 5, None, r"dense/kernel.*\(3, 5\)"),
        ("sgd", "adam", 4, None, "dense/kernel/Adam.*Only in the model"),
        ("ftrl", "adagrad", 4, None, "accumulator"),
        ("adam", "adam", 4, {"dense/kernel": "no"}, "names has.*'no'"),
        ("adam", "adam", 0, None, "several weights have this path"),
    ],
    ids=["shape", "slots", "fewer", "names", "path"],
)
def test_what_does_not_fit_is_named_and_nothing_changes(
    name, original, units, names, text
):
    optimizer = tf_xshard.CrossShardOptimizer(KERAS[name]())
    model = _two_layers(optimizer, units) if units else _twins(optimizer)
    path, *_ = _trained(original)
    for is_built in (False, True):
        if is_built:
            optimizer.build(model.trainable_variables)
        variables = [*model.weights, *optimizer.variables]
        before = [v.numpy() for v in variables]
        with pytest.raises(ValueError, match=text):
            v1.load_into_keras(path, model, names=names)
        graphs.check_close([v.numpy() for v in variables], before, 0, 0)
        assert optimizer.built == optimizer.inner_optimizer.built == is_built


def _write(values, prefix):
    with tf.Graph().as_default():
        for name, value in values.items():
            tf1.get_variable(name, initializer=value)
        with graphs.session() as session:
            return tf1.train.Saver().save(session, str(prefix))


KERNEL = np.array([[1.0], [2.0]], np.float32)


def _adam_values(name="Adam"):
    return {
        "dense/kernel": KERNEL,
        f"dense/kernel/{name}": 3 * KERNEL,
        f"dense/kernel/{name}_1": 5 * KERNEL,
    }


def test_accumulation_and_schedules(tmp_path):
    values = {**_adam_values(), "global_step": np.int64(7)}
    prefix = _write(values, tmp_path / "model")
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=3)
    v1.load_into_keras(prefix, _one_layer(optimizer))
    assert int(optimizer.iterations) == 7
    del values["dense/kernel/Adam_1"]
    prefix = _write(values, tmp_path / "momentum")
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    optimizer = keras.optimizers.SGD(rate, momentum=0.9)
    v1.load_into_keras(prefix, _one_layer(optimizer))
    expected = -0.1 * 0.5**7 * 3 * KERNEL
    np.testing.assert_allclose(optimizer.momentums[0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    "powers, global_step, expected, name",
    [
        ((0.9**4, 0.999**4), None, 3, "Adam"),
        # Another optimizer's global step, or one that was restarted.
        ((0.9**4, 0.999**4), 1000, 3, "Adam"),
        ((0.0, 0.999**5001), 0, 5000, "Adam"),  # 0.9**5000 is no float32.
        ((0.0, 0.0), 200000, 200000, "Adam"),
        ((0.0, 0.0), None, 69042, "Adam"),
        # A number in the optimizer's name is no number of a slot.
        ((), 5, 5, "Adam_2"),
        ((), None, 0, "a_1_1"),
    ],
)
def test_iterations_and_names_of_slots(
    powers, global_step, expected, name, tmp_path
):
    values = _adam_values(name)
    for index, power in enumerate(powers, 1):
        values[f"beta{index}_power"] = np.float32(power)
    if global_step is not None:
        values["global_step"] = np.int64(global_step)
    inner = keras.optimizers.Adam()
    scaled = keras.optimizers.LossScaleOptimizer(inner)
    model = _one_layer(tf_xshard.CrossShardOptimizer(scaled))
    v1.load_into_keras(_write(values, tmp_path / "model"), model)
    assert int(inner.iterations) == expected
    np.testing.assert_array_equal(inner._momentums[0], 3 * KERNEL)
    np.testing.assert_array_equal(inner._velocities[0], 5 * KERNEL)


def test_batch_normalization_under_another_name(tmp_path):
    norm = keras.layers.BatchNormalization(name="norm")
    model = _model(None, keras.layers.Input((2,)), norm)
    values = {
        f"old/{weight.name}": np.float32([i, i + 1])
        for i, weight in enumerate(model.weights)
    }
    paths = [weight.path for weight in model.weights]
    names = dict(zip(paths, values, strict=True))
    prefix = _write(values, tmp_path / "model")
    v1.load_into_keras(prefix, model, names=names)
    graphs.check_close(model.get_weights(), [*values.values()], 0, 0)


def test_optimizers_with_no_counterpart(tmp_path):
    path, *_ = _trained("adam")
    with pytest.raises(TypeError, match="Lion.*no counterpart"):
        v1.load_into_keras(path, _two_layers(keras.optimizers.Lion()))
    with pytest.raises(ValueError, match="checkpoint:.*dense/kernel/Adam"):
        v1.load_into_keras(path, _two_layers(None))  # It is not compiled.
    with pytest.raises(tf.errors.OpError):
        v1.load_into_keras(str(tmp_path / "none"), _one_layer(None))


def test_momentum_and_the_center_under_a_strategy(tmp_path):
    """v1's momentum times the rate, and AGNOptimizer's slots and center.

    The local copies were saved, too. TensorFlow lists either of two first.
    """
    values = {"dense/kernel": KERNEL, "dense/kernel/Momentum": 4 * KERNEL}
    for name, value in list(values.items()):
        values[f"global_center_variable/{name}"] = 10 * value
    prefix = _write(values, tmp_path / "model")
    strategy = replicas.mirrored(2)
    with strategy.scope():
        model = _one_layer(
            tf_xshard.AGNOptimizer(keras.optimizers.SGD(0.5, momentum=0.9))
        )
        v1.load_into_keras(prefix, model)
    [momentum] = model.optimizer.inner_optimizer.momentums
    for variable, value in (
        (model.weights[0], 10 * KERNEL),
        (model.optimizer.center_variables[0], 10 * KERNEL),
        (momentum, -20 * KERNEL),
    ):
        got = replicas.values(strategy, variable)
        np.testing.assert_array_equal(got, [value] * 2)
