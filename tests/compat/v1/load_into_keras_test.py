"""Checkpoints with the originals' names: into ours, back, and into Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import v1_oracle
from tf_xshard.compat import v1

tf1 = tf.compat.v1
R = tf1.losses.Reduction
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


def _without_tpu(graph_def):
    """CrossReplicaSum has no kernel here; one shard's sum is its gradient."""
    for node in graph_def.node:
        if node.op == "CrossReplicaSum":
            node.op = "Identity"
            del node.input[1:]
    return graph_def


def _write_with_the_original(make, prefix, num_steps=3):
    """The original's graph and Saver; returns what the Saver saved."""
    with tf.Graph().as_default() as graph:
        loss = _loss(tf.constant(X), tf.constant(Y))
        step = tf1.train.get_or_create_global_step()
        train = tf1.tpu.CrossShardOptimizer(make()).minimize(
            loss, global_step=step
        )
        initialize = tf1.global_variables_initializer()
        saver = tf1.train.Saver().as_saver_def()
        names = [v.op.name for v in tf1.global_variables()]
        graph_def = _without_tpu(graph.as_graph_def())
    with tf.Graph().as_default(), tf1.Session() as session:
        tf.graph_util.import_graph_def(graph_def, name="")
        session.run(initialize.name)
        for _ in range(num_steps):
            session.run(train.name)
        session.run(
            saver.save_tensor_name, {saver.filename_tensor_name: prefix}
        )
        return names, session.run([f"{n}/Read/ReadVariableOp:0" for n in names])


def _ours(make, shards=1):
    """Trains with ours; makes the variables that the Saver knows."""

    def computation(x, y):
        return v1.CrossShardOptimizer(make()).minimize(
            _loss(x, y), global_step=tf1.train.get_or_create_global_step()
        )

    return v1.shard(
        computation, [tf.constant(X), tf.constant(Y)], num_shards=shards
    )


OPTIMIZERS = {
    **{name: make for name, (_, make) in v1_oracle.OPTIMIZERS.items()},
    "rmsprop": lambda: tf1.train.RMSPropOptimizer(0.1, momentum=0.5),
    "centered": lambda: tf1.train.RMSPropOptimizer(
        0.1, momentum=0.5, centered=True
    ),
    "adadelta": lambda: tf1.train.AdadeltaOptimizer(0.1),
    "ftrl": lambda: tf1.train.FtrlOptimizer(0.1),
}


@pytest.mark.parametrize(
    "name, shards",
    [*((name, 4) for name in OPTIMIZERS), ("adam", 1)],
)
def test_the_originals_checkpoint_in_ours_and_back(name, shards, tmp_path):
    make = OPTIMIZERS[name]
    prefix = str(tmp_path / "model")
    names, values = _write_with_the_original(make, prefix)
    _, expected = _write_with_the_original(make, str(tmp_path / "five"), 5)
    with tf.Graph().as_default(), tf1.Session() as session:
        train = _ours(make, shards)
        assert [v.op.name for v in tf1.global_variables()] == names
        saver = tf1.train.Saver()
        saver.restore(session, prefix)
        for value, saved in zip(
            session.run(tf1.global_variables()), values, strict=True
        ):
            np.testing.assert_array_equal(value, saved)
        for _ in range(2):
            session.run(train)
        saver.save(session, str(tmp_path / "back"))
    back = tf.train.load_checkpoint(str(tmp_path / "back"))
    for one, value in zip(names, expected, strict=True):
        np.testing.assert_allclose(
            back.get_tensor(one), value, rtol=1e-4, atol=1e-6
        )


KERAS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.1, epsilon=1e-8),
    "adagrad": lambda: keras.optimizers.Adagrad(
        0.1, initial_accumulator_value=0.1, epsilon=1e-12
    ),
    "rmsprop": lambda: keras.optimizers.RMSprop(
        0.1, rho=0.9, momentum=0.5, epsilon=1e-10
    ),
    "centered": lambda: keras.optimizers.RMSprop(
        0.1, rho=0.9, momentum=0.5, epsilon=1e-10, centered=True
    ),
    "adadelta": lambda: keras.optimizers.Adadelta(0.1, rho=0.95, epsilon=1e-8),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
}


def _model(optimizer=None, units=4):
    model = keras.Sequential(
        [
            keras.layers.Input((3,)),
            keras.layers.Dense(units, activation="tanh", name="dense"),
            keras.layers.Dropout(0.0, seed=1),
            keras.layers.Dense(1, use_bias=False, name="dense_1"),
        ]
    )
    if optimizer is not None:
        model.compile(optimizer=optimizer, loss="mse")
    return model


@pytest.mark.parametrize(
    "name, wrap",
    [
        *((name, "cross_shard") for name in KERAS),
        ("adam", "plain"),
        ("adam", "loss_scale"),
    ],
)
def test_into_keras_and_on(name, wrap, tmp_path):
    """Five steps of TF1 equal three of TF1 and two of Keras."""
    make = OPTIMIZERS[name]
    prefix = str(tmp_path / "model")
    _write_with_the_original(make, prefix)
    names, expected = _write_with_the_original(make, str(tmp_path / "five"), 5)
    inner = KERAS[name]()
    optimizer = {
        "cross_shard": lambda: tf_xshard.CrossShardOptimizer(inner),
        "plain": lambda: inner,
        "loss_scale": lambda: tf_xshard.CrossShardOptimizer(
            keras.optimizers.LossScaleOptimizer(inner)
        ),
    }[wrap]()
    model = _model()
    model.compile(optimizer=optimizer, loss="mse", auto_scale_loss=False)
    v1.load_into_keras(prefix, model)
    assert int(inner.iterations) == 3
    if wrap == "loss_scale":  # Its scale does not fit a loss in float32.
        return
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    of = dict(zip(names, expected, strict=True))
    for weight in model.weights:
        layer, kind = weight.path.split("/")[-2:]
        np.testing.assert_allclose(
            weight, of[f"{layer}/{kind}"], rtol=2e-4, atol=2e-6
        )


def test_agn_checkpoints_give_the_center(tmp_path):
    getter = v1.AGNCustomGetter("/CPU:0")
    with tf.Graph().as_default(), tf1.Session() as session:
        with tf1.variable_scope("", custom_getter=getter):
            loss = _loss(tf.constant(X), tf.constant(Y))
        optimizer = v1.AGNOptimizer(
            tf1.train.MomentumOptimizer(0.1, 0.9), 1, getter, 2
        )
        train = optimizer.minimize(loss)
        session.run(
            [
                tf1.global_variables_initializer(),
                tf1.local_variables_initializer(),
            ]
        )
        session.run(optimizer.get_init_op(0))
        for _ in range(5):
            session.run(train)
        prefix = tf1.train.Saver().save(session, str(tmp_path / "model"))
        center = session.run([c.center for c in getter.all_copies()])
    model = _model(KERAS["momentum"]())
    v1.load_into_keras(prefix, model)
    for weight, value in zip(model.get_weights(), center, strict=True):
        np.testing.assert_array_equal(weight, value)


def test_long_training_has_no_beta1_power_left(tmp_path):
    """0.9^5000 is no float32, 0.999^5000 is."""
    with tf.Graph().as_default(), tf1.Session() as session:
        _ours(OPTIMIZERS["adam"])
        session.run(tf1.global_variables_initializer())
        for name, value in (
            ("beta1_power", 0.0),
            ("beta2_power", 0.999**5001),
        ):
            [power] = [v for v in tf1.global_variables() if v.op.name == name]
            power.load(value, session)
        prefix = tf1.train.Saver().save(session, str(tmp_path / "model"))
    optimizer = tf_xshard.CrossShardOptimizer(keras.optimizers.Adam())
    v1.load_into_keras(prefix, _model(optimizer))
    assert int(optimizer.iterations) == 5000


def _state(model):
    variables = [*model.weights, *model.optimizer.variables]
    return [v.numpy().copy() for v in variables]


@pytest.mark.parametrize(
    "make, kwargs, texts",
    [
        (
            lambda: _model(KERAS["adam"](), units=5),
            {},
            ["dense/kernel", "(3, 5)"],
        ),
        (
            lambda: _model(KERAS["sgd"]()),
            {},
            ["dense/kernel/Adam", "Without a value"],
        ),
        (lambda: _model(KERAS["ftrl"]()), {"drop": "_1"}, ["accumulator"]),
        (lambda: _model(), {}, ["dense/kernel/Adam", "Without a place"]),
        (
            lambda: _model(KERAS["adam"]()),
            {"names": {"dense/kernel": "nothing"}},
            ["names has", "nothing"],
        ),
    ],
    ids=["shape", "slots", "fewer", "not_compiled", "names"],
)
def test_what_does_not_fit_is_named_and_nothing_changes(
    make, kwargs, texts, tmp_path
):
    prefix = str(tmp_path / "model")
    _write_with_the_original(
        OPTIMIZERS["adagrad" if "drop" in kwargs else "adam"], prefix
    )
    kwargs.pop("drop", None)
    model = make()
    compiled = getattr(model, "optimizer", None) is not None
    if compiled:
        model.optimizer.build(model.trainable_variables)
        before = _state(model)
    with pytest.raises(ValueError) as caught:
        v1.load_into_keras(prefix, model, **kwargs)
    for text in texts:
        assert text in str(caught.value)
    if compiled:
        for one, other in zip(before, _state(model), strict=True):
            np.testing.assert_array_equal(one, other)


def _write_values(values, prefix):
    with tf.Graph().as_default(), tf1.Session() as session:
        variables = [
            tf1.get_variable(name, initializer=value)
            for name, value in values.items()
        ]
        session.run(tf1.global_variables_initializer())
        return tf1.train.Saver(variables).save(session, prefix)


def _dense_model(optimizer):
    model = keras.Sequential(
        [
            keras.layers.Input((2,)),
            keras.layers.Dense(1, use_bias=False, name="dense"),
        ]
    )
    model.compile(optimizer, "mse")
    return model


KERNEL = np.array([[1.0], [2.0]], np.float32)


def _adam_values(name="Adam", **others):
    return {
        "dense/kernel": KERNEL,
        f"dense/kernel/{name}": 3 * KERNEL,
        f"dense/kernel/{name}_1": 5 * KERNEL,
        **others,
    }


@pytest.mark.parametrize("name", ["Adam", "Adam_2", "opt_3", "a_1_1"])
def test_names_of_optimizers(name, tmp_path):
    """A number in the optimizer's name is no number of a slot."""
    prefix = _write_values(_adam_values(name), str(tmp_path / "model"))
    optimizer = keras.optimizers.Adam()
    v1.load_into_keras(prefix, _dense_model(optimizer))
    adapter = v1.CrossShardOptimizer(optimizer)
    [kernel] = optimizer._trainable_variables
    for slot, factor in (("momentum", 3), ("velocity", 5)):
        np.testing.assert_array_equal(
            adapter.get_slot(kernel, slot), factor * KERNEL
        )


def test_accumulation_and_schedules(tmp_path):
    values = _adam_values(global_step=np.int64(7))
    prefix = _write_values(values, str(tmp_path / "model"))
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=3)
    v1.load_into_keras(prefix, _dense_model(optimizer))
    assert int(optimizer.iterations) == 7
    del values["dense/kernel/Adam_1"]
    prefix = _write_values(values, str(tmp_path / "momentum"))
    optimizer = keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5), momentum=0.9
    )
    v1.load_into_keras(prefix, _dense_model(optimizer))
    np.testing.assert_allclose(
        optimizer.momentums[0], -0.1 * 0.5**7 * 3 * KERNEL, rtol=1e-6
    )


@pytest.mark.parametrize(
    "powers, global_step, expected",
    [
        ((0.9**4, 0.999**4), None, 3),
        ((0.9**4, 0.999**4), 1000, 3),  # Another optimizer's, or restarted.
        ((0.0, 0.999**40001), 40000, 40000),
        ((0.0, 0.0), 200000, 200000),
        ((0.0, 0.0), None, 69042),
        ((), 5, 5),
        ((), None, 0),
    ],
)
def test_iterations(powers, global_step, expected, tmp_path):
    values = _adam_values()
    for index, power in enumerate(powers, 1):
        values[f"beta{index}_power"] = np.float32(power)
    if global_step is not None:
        values["global_step"] = np.int64(global_step)
    optimizer = tf_xshard.CrossShardOptimizer(keras.optimizers.Adam())
    v1.load_into_keras(
        _write_values(values, str(tmp_path / "model")), _dense_model(optimizer)
    )
    assert int(optimizer.iterations) == expected


def test_weights_of_one_path_are_refused(tmp_path):
    def inner():
        x = keras.layers.Input((2,))
        layer = keras.layers.Dense(2, use_bias=False, name="dense")
        return keras.Model(x, layer(x))

    x = keras.layers.Input((2,))
    model = keras.Model(x, inner()(inner()(x)))
    paths = [weight.path for weight in model.weights]
    prefix = _write_values(
        {"dense/kernel": np.ones((2, 2), np.float32)}, str(tmp_path / "model")
    )
    if len(set(paths)) == 1:
        with pytest.raises(ValueError, match="several weights"):
            v1.load_into_keras(prefix, model)


def test_batch_normalization(tmp_path):
    names = ("gamma", "beta", "moving_mean", "moving_variance")
    values = {
        f"batch_normalization/{name}": np.float32([i, i + 1])
        for i, name in enumerate(names)
    }
    model = keras.Sequential(
        [keras.layers.Input((2,)), keras.layers.BatchNormalization()]
    )
    path = model.weights[0].path.rpartition("/")[0]
    v1.load_into_keras(
        _write_values(values, str(tmp_path / "model")),
        model,
        names={
            f"{path}/{name}": f"batch_normalization/{name}" for name in names
        },
    )
    for weight, value in zip(model.get_weights(), values.values(), strict=True):
        np.testing.assert_array_equal(weight, value)


def test_other_names(tmp_path):
    prefix = str(tmp_path / "model")
    names, values = _write_with_the_original(OPTIMIZERS["sgd"], prefix)
    model = keras.Sequential(
        [
            keras.layers.Input((3,)),
            keras.layers.Dense(4, activation="tanh", name="first"),
            keras.layers.Dense(1, use_bias=False, name="second"),
        ]
    )
    model.compile(KERAS["sgd"](), "mse")
    ours = [w.path for w in model.weights]
    # Behind the weights are counters.
    names, values = names[: len(ours)], values[: len(ours)]
    v1.load_into_keras(prefix, model, names=dict(zip(ours, names, strict=True)))
    for weight, value in zip(model.get_weights(), values, strict=True):
        np.testing.assert_array_equal(weight, value)


def test_optimizers_with_no_counterpart(tmp_path):
    prefix = str(tmp_path / "model")
    _write_with_the_original(OPTIMIZERS["adam"], prefix)
    with pytest.raises(TypeError, match="Lion.*no counterpart"):
        v1.load_into_keras(prefix, _model(keras.optimizers.Lion()))
    with pytest.raises(tf.errors.OpError):
        v1.load_into_keras(str(tmp_path / "none"), _model(KERAS["sgd"]()))
