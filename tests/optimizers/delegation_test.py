"""What is set or read on the wrapper is the inner optimizer's."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import training
from tests.support import versions
from tests.support.versions import needs_multi_optimizer

O = keras.optimizers  # noqa: E741


def _fit(model, **kwargs):
    x, y = training.data()
    return model.fit(x, y, batch_size=64, verbose=0, shuffle=False, **kwargs)


def _model(strategy, optimizer_fn, **compile_options):
    with strategy.scope():
        model = training.model()
        model.compile(
            optimizer=tf_xshard.CrossShardOptimizer(optimizer_fn()),
            loss="mse",
            **compile_options,
        )
    return model


def test_learning_rate():
    inner = O.SGD(0.5)
    optimizer = tf_xshard.CrossShardOptimizer(inner)
    assert float(optimizer.learning_rate) == 0.5
    optimizer.learning_rate = 0.25
    assert float(inner.learning_rate) == 0.25
    scheduled = tf_xshard.CrossShardOptimizer(
        O.SGD(O.schedules.PiecewiseConstantDecay([1], [1.0, 2.0]))
    )
    assert float(scheduled.learning_rate) == 1.0
    with pytest.raises(TypeError, match="LearningRateSchedule"):
        scheduled.learning_rate = 0.1


@needs_multi_optimizer
def test_multi_optimizer_has_optimizers_and_no_learning_rate():
    inner = O.MultiOptimizer(O.OptimizerMap(O.SGD(0.1)))
    optimizer = tf_xshard.CrossShardOptimizer(inner)
    assert optimizer.optimizers == inner.optimizers
    assert not hasattr(optimizer, "learning_rate")
    assert not hasattr(tf_xshard.CrossShardOptimizer(O.SGD()), "optimizers")


@pytest.mark.parametrize(
    "name, value",
    [
        ("weight_decay", 0.1),
        ("clipnorm", 1.0),
        ("global_clipnorm", 2.0),
        ("clipvalue", 3.0),
        ("use_ema", True),
        ("ema_momentum", 0.5),
        ("ema_overwrite_frequency", 4),
        ("loss_scale_factor", 8.0),
        ("gradient_accumulation_steps", 2),
    ],
)
@pytest.mark.parametrize("scaled", [False, True], ids=["", "loss_scale"])
def test_settings(name, value, scaled):
    inner = O.SGD(0.1)
    optimizer = tf_xshard.CrossShardOptimizer(
        O.LossScaleOptimizer(inner) if scaled else inner
    )
    assert getattr(optimizer, name) == getattr(O.SGD(), name)
    setattr(optimizer, name, value)
    assert getattr(inner, name) == value
    assert getattr(optimizer, name) == value


def test_the_inner_optimizer_keeps_its_class_and_config():
    inner = O.Adam(0.1, clipnorm=1.0)
    config = inner.get_config()
    tf_xshard.CrossShardOptimizer(inner)
    assert isinstance(inner, O.Adam)
    assert inner.__class__ is O.Adam
    assert inner.get_config() == config
    serialized = O.serialize(inner)
    assert serialized == O.serialize(O.Adam.from_config(dict(config)))


def test_iterations_count_updates_on_all_replicas():
    strategy = replicas.mirrored(4)
    model, _ = training.train(
        lambda: tf_xshard.CrossShardOptimizer(
            O.Adam(gradient_accumulation_steps=2)
        ),
        strategy,
        num_steps=6,
    )
    inner = model.optimizer.inner_optimizer
    assert replicas.values(strategy, inner._iterations) == [6] * 4
    assert int(model.optimizer.iterations) == 3


def test_apply_gradients_returns_iterations():
    optimizer = tf_xshard.CrossShardOptimizer(O.SGD())
    weight = keras.Variable(1.0)
    pairs = ((g, v) for g, v in [(tf.constant(1.0), weight)])
    assert int(optimizer.apply_gradients(pairs)) == 1


def test_apply_of_nothing_is_nothing():
    optimizer = tf_xshard.CrossShardOptimizer(O.SGD())
    optimizer.apply([])
    assert not optimizer.built


def test_apply_without_variables_once_built():
    optimizer = tf_xshard.CrossShardOptimizer(O.SGD(1.0))
    weight = keras.Variable(1.0)
    optimizer.build([weight])
    optimizer.apply([tf.constant(0.25)])
    assert float(weight) == 0.75


def test_build_is_idempotent():
    optimizer = tf_xshard.CrossShardOptimizer(O.LossScaleOptimizer(O.Adam()))
    weight = keras.Variable(1.0)
    optimizer.build([weight])
    names = [v.path for v in optimizer.variables]
    optimizer.build([weight])
    assert [v.path for v in optimizer.variables] == names


def test_exclude_from_weight_decay():
    optimizer = tf_xshard.CrossShardOptimizer(O.SGD(1.0, weight_decay=0.5))
    kernel = keras.Variable(1.0, name="kernel")
    bias = keras.Variable(1.0, name="bias")
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.apply([tf.constant(0.0)] * 2, [kernel, bias])
    assert (float(kernel), float(bias)) == (0.5, 1.0)


@pytest.mark.parametrize(
    "make",
    [
        tf_xshard.CrossShardOptimizer,
        lambda inner: tf_xshard.TowerOptimizer(inner, 1),
        tf_xshard.AGNOptimizer,
    ],
    ids=["cross", "tower", "agn"],
)
def test_each_replica_excludes_from_weight_decay(make):
    """When the second does, the first has built it: Keras 3.16 refuses that."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        kernel = keras.Variable(1.0, name="kernel")
        bias = keras.Variable(1.0, name="bias")
        optimizer = make(O.SGD(1.0, weight_decay=0.5))

    def on_replica():
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        optimizer.apply([tf.constant(0.0)] * 2, [kernel, bias])

    if versions.KERAS >= (3, 16):
        with pytest.raises(ValueError, match="before the optimizer is built"):
            strategy.run(on_replica)
        return
    strategy.run(on_replica)
    assert replicas.values(strategy, kernel) == [0.5, 0.5]
    assert replicas.values(strategy, bias) == [1.0, 1.0]


def test_an_inner_apply_gradients_is_called():
    class Doubling(O.SGD):
        def apply_gradients(self, grads_and_vars):
            return super().apply_gradients(
                [(2 * g, v) for g, v in grads_and_vars]
            )

    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(0.0)
        optimizer = tf_xshard.CrossShardOptimizer(Doubling(1.0))
    replicas.apply_once(
        strategy, optimizer, lambda r: [tf.constant(1.0 + r)], [weight]
    )
    assert replicas.values(strategy, weight) == [-6.0, -6.0]


def test_static_loss_scale_with_indexed_slices():
    strategy = replicas.mirrored(2)
    with strategy.scope():
        table = keras.Variable(np.zeros([2, 1]), dtype="float32")
        optimizer = tf_xshard.CrossShardOptimizer(
            O.SGD(1.0, loss_scale_factor=8.0)
        )
    replicas.apply_once(
        strategy,
        optimizer,
        lambda r: [
            tf.IndexedSlices(
                tf.fill([2, 1], 8.0 * (r + 1) / 2),
                tf.constant([1, 1]),
                tf.constant([2, 1]),
            )
        ],
        [table],
    )
    for got in replicas.values(strategy, table):
        assert got.tolist() == [[0.0], [-3.0]]


def test_constraints():
    strategy = replicas.mirrored(2)
    with strategy.scope():
        layer = keras.layers.Dense(
            1, use_bias=False, kernel_constraint=keras.constraints.NonNeg()
        )
        layer.build((None, 1))
        optimizer = tf_xshard.CrossShardOptimizer(O.SGD(10.0))
    replicas.apply_once(
        strategy, optimizer, lambda r: [tf.ones([1, 1])], [layer.kernel]
    )
    assert replicas.values(strategy, layer.kernel) == [[[0.0]]] * 2


def test_overwrite_with_gradient_variables_get_the_groups_mean():
    strategy = replicas.mirrored(4)
    with strategy.scope():
        weight = keras.Variable(1.0)
        scale = keras.Variable(0.0)
        scale.overwrite_with_gradient = True
        optimizer = tf_xshard.CrossShardOptimizer(
            O.SGD(1.0), "sum", [[0, 1], [2, 3]]
        )
    replicas.apply_once(
        strategy,
        optimizer,
        lambda r: [tf.constant(0.25), tf.constant(float(r))],
        [weight, scale],
    )
    assert replicas.values(strategy, weight) == [-1.0] * 4
    assert replicas.values(strategy, scale) == [0.5, 0.5, 2.5, 2.5]


def test_learning_rate_callbacks():
    model = _model(replicas.mirrored(2), lambda: O.SGD(0.1))
    history = _fit(
        model,
        epochs=2,
        callbacks=[
            keras.callbacks.LearningRateScheduler(lambda e, lr: lr / 2),
        ],
    )
    np.testing.assert_allclose(history.history["learning_rate"], [0.05, 0.025])
    _fit(
        model,
        epochs=3,
        callbacks=[
            keras.callbacks.ReduceLROnPlateau(
                monitor="loss", factor=0.1, patience=0, min_delta=1e9
            )
        ],
    )
    rate = model.optimizer.inner_optimizer.learning_rate
    assert replicas.values(None, rate)[0] < 0.01


def test_swap_ema_weights():
    strategy = replicas.mirrored(2)

    def optimizer():
        return O.SGD(0.1, use_ema=True, ema_momentum=0.9)

    seen = {}

    class Record(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            seen.setdefault("test", training.weights(self.model, strategy))

    model = _model(strategy, optimizer)
    swap = keras.callbacks.SwapEMAWeights()
    _fit(
        model,
        epochs=2,
        validation_data=training.data(seed=3),
        callbacks=[swap, Record()],
    )
    reference = training.train(optimizer, num_steps=4)[0]
    averages = [
        replicas.values(None, v)
        for v in reference.optimizer._model_variables_moving_average
    ]
    assert training.deviation(seen["test"], averages) <= 1e-6


def test_model_checkpoint(tmp_path):
    strategy = replicas.mirrored(2)
    model = _model(strategy, lambda: O.Adam(0.01))
    path = os.path.join(tmp_path, "best.keras")
    _fit(model, epochs=2, callbacks=[keras.callbacks.ModelCheckpoint(path)])
    with strategy.scope():
        restored = keras.models.load_model(path)
    assert replicas.values(strategy, restored.optimizer.iterations) == [8, 8]
    for mine, theirs in zip(
        model.optimizer.variables, restored.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())


def test_backup_and_restore(tmp_path):
    """Interrupted after two epochs and resumed: as if it had gone through."""
    strategy = replicas.mirrored(2)

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def optimizer():
        return O.Adam(0.01)

    through = _model(strategy, optimizer)
    _fit(through, epochs=4)
    interrupted = _model(strategy, optimizer)
    with pytest.raises(KeyboardInterrupt):
        _fit(
            interrupted,
            epochs=4,
            callbacks=[
                keras.callbacks.BackupAndRestore(tmp_path),
                Interrupt(),
            ],
        )
    resumed = _model(strategy, optimizer)
    history = _fit(
        resumed,
        epochs=4,
        callbacks=[keras.callbacks.BackupAndRestore(tmp_path)],
    )
    assert history.epoch == [2, 3]
    for mine, theirs in zip(
        training.weights(through, strategy),
        training.weights(resumed, strategy),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, theirs)


def test_stateless_apply_is_refused_as_by_keras():
    optimizer = tf_xshard.CrossShardOptimizer(O.SGD())
    with pytest.raises(ValueError, match="stateless_apply is not supported"):
        optimizer.stateless_apply([], [], [])


@needs_multi_optimizer
@pytest.mark.parametrize(
    "callback", ["LearningRateScheduler", "ReduceLROnPlateau"]
)
def test_callbacks_set_the_local_rates_of_agn(callback):
    """Those that `learning_rate` means, not the center's."""
    optimizer = tf_xshard.AGNOptimizer(
        O.MultiOptimizer(O.OptimizerMap(O.SGD(0.5))), communication_period=2
    )
    model = training.model()
    model.compile(optimizer, "mse")
    callbacks = {
        "LearningRateScheduler": keras.callbacks.LearningRateScheduler(
            lambda epoch, rate: 0.25
        ),
        "ReduceLROnPlateau": keras.callbacks.ReduceLROnPlateau(
            monitor="loss", factor=0.5, patience=0, min_delta=1e9
        ),
    }
    _fit(model, epochs=2, callbacks=[callbacks[callback]])
    [local], [center] = (
        one.optimizers
        for one in (optimizer.local_optimizer, optimizer.inner_optimizer)
    )
    assert float(local.learning_rate) == 0.25
    assert float(center.learning_rate) == 0.5
    with pytest.raises(AttributeError, match="on a MultiOptimizer"):
        optimizer.learning_rate = 0.1
