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


def _loss(x, y):
    with tf1.variable_scope("dense"):
        kernel = tf1.get_variable(
            "kernel", [3, 4], initializer=tf1.glorot_uniform_initializer(seed=1)
        )
        bias = tf1.get_variable("bias", [4], initializer=tf.zeros_initializer())
    with tf1.variable_scope("dense_1"):
        last = tf1.get_variable(
            "kernel", [4, 1], initializer=tf1.glorot_uniform_initializer(seed=2)
        )
    return tf.reduce_mean((tf.tanh(x @ kernel + bias) @ last - y) ** 2)


OPTIMIZERS = {
    **{name: make for name, (_, make) in v1_oracle.OPTIMIZERS.items()},
    "rmsprop": lambda: tf1.train.RMSPropOptimizer(0.1, momentum=0.5),
    "centered": lambda: tf1.train.RMSPropOptimizer(
        0.1, momentum=0.5, centered=True
    ),
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
        train = OPTIMIZERS[name]().minimize(
            _loss(tf.constant(X), tf.constant(Y)),
            global_step=tf1.train.get_or_create_global_step(),
        )
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
        return v1.CrossShardOptimizer(OPTIMIZERS["adam"]()).minimize(
            _loss(x, y), global_step=tf1.train.get_or_create_global_step()
        )

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


KERAS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.1, epsilon=1e-8),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1, epsilon=1e-12),
    "rmsprop": lambda: keras.optimizers.RMSprop(
        0.1, momentum=0.5, epsilon=1e-10
    ),
    "centered": lambda: keras.optimizers.RMSprop(
        0.1, momentum=0.5, epsilon=1e-10, centered=True
    ),
    "adadelta": lambda: keras.optimizers.Adadelta(0.1, epsilon=1e-8),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
}


def _model(num_inputs, layers, optimizer=None, **options):
    model = keras.Sequential([keras.layers.Input((num_inputs,)), *layers])
    if optimizer is not None:
        model.compile(optimizer, "mse", **options)
    return model


def _two_layers(optimizer, units=4, **options):
    layers = [
        keras.layers.Dense(units, activation="tanh", name="dense"),
        keras.layers.Dropout(0.0, seed=1),
        keras.layers.Dense(1, use_bias=False, name="dense_1"),
    ]
    return _model(3, layers, optimizer, **options)


def _one_layer(optimizer):
    dense = keras.layers.Dense(1, use_bias=False, name="dense")
    return _model(2, [dense], optimizer)


@pytest.mark.parametrize("name", KERAS)
def test_into_keras_and_on(name):
    """Five steps of TF1 equal three of TF1 and two of Keras."""
    path, _, trained = _trained(name)
    inner = KERAS[name]()
    model = _two_layers(tf_xshard.CrossShardOptimizer(inner), run_eagerly=True)
    v1.load_into_keras(path, model)
    assert int(inner.iterations) == 3
    for _ in range(2):
        model.train_on_batch(X, Y)
    for weight in model.weights:
        key = "/".join(weight.path.split("/")[-2:])
        graphs.check_close(weight.numpy(), trained[key], rtol=2e-4)


@pytest.mark.parametrize(
    "name, original, units, names, text",
    [
        ("adam", "adam", 5, None, r"dense/kernel.*\(3, 5\)"),
        ("sgd", "adam", 4, None, "dense/kernel/Adam.*Only in the model"),
        ("ftrl", "adagrad", 4, None, "accumulator"),
        (None, "adam", 4, None, "in the checkpoint:.*dense/kernel/Adam"),
        ("adam", "adam", 4, {"dense/kernel": "no"}, "names has.*'no'"),
    ],
    ids=["shape", "slots", "fewer", "not_compiled", "names"],
)
def test_what_does_not_fit_is_named_and_nothing_changes(
    name, original, units, names, text
):
    optimizer = name and tf_xshard.CrossShardOptimizer(KERAS[name]())
    model = _two_layers(optimizer, units)
    before = model.get_weights()
    path, *_ = _trained(original)
    with pytest.raises(ValueError, match=text):
        v1.load_into_keras(path, model, names=names)
    for value, weight in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(weight, value)
    if name:
        assert not optimizer.built
        assert not optimizer.inner_optimizer.built


def _write(values, prefix):
    with tf.Graph().as_default():
        variables = [
            tf1.get_variable(name, initializer=value)
            for name, value in values.items()
        ]
        with graphs.session() as session:
            return tf1.train.Saver(variables).save(session, str(prefix))


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
    optimizer = keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5), momentum=0.9
    )
    v1.load_into_keras(prefix, _one_layer(optimizer))
    np.testing.assert_allclose(
        optimizer.momentums[0], -0.1 * 0.5**7 * 3 * KERNEL, rtol=1e-6
    )


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
    values = {
        f"old/{name}": np.float32([i, i + 1])
        for i, name in enumerate(
            ("gamma", "beta", "moving_mean", "moving_variance")
        )
    }
    model = _model(2, [keras.layers.BatchNormalization(name="norm")])
    paths = [weight.path for weight in model.weights]
    v1.load_into_keras(
        _write(values, tmp_path / "model"),
        model,
        names=dict(zip(paths, values, strict=True)),
    )
    for weight, value in zip(model.get_weights(), values.values(), strict=True):
        np.testing.assert_array_equal(weight, value)


def test_optimizers_with_no_counterpart(tmp_path):
    path, *_ = _trained("adam")
    with pytest.raises(TypeError, match="Lion.*no counterpart"):
        v1.load_into_keras(path, _two_layers(keras.optimizers.Lion()))
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
        for one in replicas.values(strategy, variable):
            np.testing.assert_array_equal(one, value)
