"""Nothing of an optimizer's state is lost, whichever way it is saved."""

import copy
import itertools
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import training
from tests.support.versions import needs_multi_optimizer
from tf_xshard.optimizers.saving import warning

O = keras.optimizers  # noqa: E741

INNERS = {
    "adam": lambda: O.Adam(0.01, use_ema=True, ema_momentum=0.7),
    "nadam": lambda: O.Nadam(0.01),
    "accumulation": lambda: O.SGD(
        0.05, momentum=0.9, gradient_accumulation_steps=3
    ),
    "multi": lambda: O.MultiOptimizer(
        O.OptimizerMap(O.SGD(0.05, momentum=0.9), {".*/kernel": O.Adam(0.01)})
    ),
    "loss_scale": lambda: O.LossScaleOptimizer(O.Adam(0.01)),
    "nested": lambda: tf_xshard.CrossShardOptimizer(O.Adam(0.01)),
}


if not hasattr(O, "MultiOptimizer"):  # Keras 3.12 has none.
    del INNERS["multi"]


def _wrapped(name):
    return lambda: tf_xshard.CrossShardOptimizer(INNERS[name]())


def _state(model):
    """All values that the next step depends on."""
    return [
        np.asarray(replicas.values(None, v)[0])
        for v in model.trainable_variables + model.optimizer.variables
    ]


def _more_steps(model):
    x, y = training.data()
    training.run_steps(model, zip(np.split(x, 4), np.split(y, 4), strict=True))


def _assert_continues(model, restored):
    """Same state now, and after more training."""
    # XLA may round otherwise in a program for other shapes: `model` was traced
    # with a dataset before.
    tolerance = 1e-6 if replicas.is_tpu(model.distribute_strategy) else 0
    for again in (False, True):
        if again:
            _more_steps(model)
            _more_steps(restored)
        for mine, theirs in zip(_state(model), _state(restored), strict=True):
            np.testing.assert_allclose(
                mine, theirs, rtol=0, atol=tolerance if again else 0
            )


def _fresh(name, strategy):
    """An optimizer and model of the same kind with another state."""
    with strategy.scope():
        model = training.model(seed=9)
        model.compile(optimizer=_wrapped(name)(), loss="mse")
    return model


@pytest.mark.parametrize(
    "name, kind, file",
    [
        *((name, "mirrored", "model.keras") for name in INNERS),
        ("nested", "tpu", "model.h5"),
        *((name, "mirrored", "model.h5") for name in INNERS if name == "multi"),
        ("adam", "tpu", "model.keras"),
    ],
)
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_whole_models(name, file, kind, tmp_path):
    strategy = replicas.STRATEGIES[kind](2)
    model, _ = training.train(_wrapped(name), strategy, num_steps=4)
    path = os.path.join(tmp_path, file)
    model.save(path)
    with strategy.scope():
        restored = keras.models.load_model(path)
        restored.optimizer.build(restored.trainable_variables)
    assert isinstance(restored.optimizer, tf_xshard.CrossShardOptimizer)
    _assert_continues(model, restored)


def test_a_model_loads_outside_the_strategy(tmp_path):
    model, _ = training.train(
        _wrapped("adam"), replicas.mirrored(2), num_steps=4
    )
    path = os.path.join(tmp_path, "model.keras")
    model.save(path)
    restored = keras.models.load_model(path)
    for mine, theirs in zip(_state(model), _state(restored), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    _more_steps(restored)


@pytest.mark.parametrize(
    "name, kind, deferred",
    [
        *((name, "mirrored", True) for name in INNERS),
        ("nested", "tpu", False),
        *((name, "mirrored", False) for name in INNERS if name == "multi"),
        ("adam", "tpu", True),
    ],
)
def test_checkpoint(name, deferred, kind, tmp_path):
    strategy = replicas.STRATEGIES[kind](2)
    model, _ = training.train(_wrapped(name), strategy, num_steps=4)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(
        os.path.join(tmp_path, "checkpoint")
    )
    restored = _fresh(name, strategy)
    if not deferred:
        with strategy.scope():
            restored.optimizer.build(restored.trainable_variables)
    status = tf.train.Checkpoint(
        model=restored, optimizer=restored.optimizer
    ).restore(path)
    if deferred:
        with strategy.scope():
            restored.optimizer.build(restored.trainable_variables)
    status.assert_existing_objects_matched()
    _assert_continues(model, restored)


def test_plain_keras_loses_state():
    """The plain half: nested state in set_weights, MultiOptimizer's in a
    checkpoint."""
    inner = O.LossScaleOptimizer(O.SGD(0.1, momentum=0.9))
    variable = keras.Variable(1.0)
    inner.build([variable])
    inner.set_weights([np.full(v.shape, 7.0) for v in inner.variables])
    assert [float(v) for v in inner.inner_optimizer.variables] != [7.0] * 3, (
        "Keras mended this: remove the row 'set_weights'"
    )
    wrapped = tf_xshard.CrossShardOptimizer(
        O.LossScaleOptimizer(O.SGD(0.1, momentum=0.9))
    )
    wrapped.build([variable])
    wrapped.set_weights([np.full(v.shape, 7.0) for v in wrapped.variables])
    assert [float(v) for v in wrapped.variables] == [7.0] * len(
        wrapped.variables
    )


@needs_multi_optimizer
def test_plain_keras_checkpoints_no_multi_optimizer(tmp_path):
    """A momentum of 7 is in the checkpoint, or it is not."""

    def is_saved(optimizer):
        optimizer.build([keras.Variable(1.0)])
        for variable in optimizer.variables:
            if "momentum" in variable.path:
                variable.assign(7.0)
        path = tf.train.Checkpoint(optimizer=optimizer).save(
            os.path.join(tmp_path, optimizer.name)
        )
        reader = tf.train.load_checkpoint(path)
        return any(
            np.array_equal(reader.get_tensor(name), 7.0)
            for name, shape in tf.train.list_variables(path)
            if not shape and name != "_CHECKPOINTABLE_OBJECT_GRAPH"
        )

    def multi():
        return O.MultiOptimizer(O.OptimizerMap(O.SGD(0.1, momentum=0.9)))

    assert not is_saved(multi()), (
        "Keras mended this: remove the row 'MultiOptimizer in a checkpoint'"
    )
    assert is_saved(tf_xshard.CrossShardOptimizer(multi()))


@pytest.mark.parametrize(
    "name, kind",
    [*((name, "mirrored") for name in INNERS), ("adam", "tpu")],
)
def test_weights_file(name, kind, tmp_path):
    strategy = replicas.STRATEGIES[kind](2)
    model, _ = training.train(_wrapped(name), strategy, num_steps=4)
    path = os.path.join(tmp_path, "model.weights.h5")
    model.save_weights(path)
    restored = _fresh(name, strategy)
    with strategy.scope():
        restored.optimizer.build(restored.trainable_variables)
        restored.load_weights(path)
    _assert_continues(model, restored)


def test_set_weights_is_all_or_nothing():
    optimizer = tf_xshard.CrossShardOptimizer(O.Adam())
    optimizer.build([keras.Variable(np.zeros(3))])
    before = [v.numpy().copy() for v in optimizer.variables]
    other = [value + 1 for value in before]
    with pytest.raises(ValueError, match="variables, got"):
        optimizer.set_weights(other[:-1])
    with pytest.raises(ValueError, match="got a weight of shape"):
        optimizer.set_weights([*other[:-1], np.zeros(5)])
    for variable, value in zip(optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    optimizer.set_weights(other)
    for variable, value in zip(optimizer.variables, other, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_plain_keras_loses_slots_in_h5(tmp_path):
    """Also those of an optimizer that nothing wraps."""
    path = os.path.join(tmp_path, "model.h5")
    model, _ = training.train(INNERS["adam"], num_steps=2)
    model.save(path)
    restored = keras.models.load_model(path)
    names = [v.path for v in restored.optimizer.variables]
    assert not any("momentum" in name for name in names), (
        "Keras mended this: remove the row '.h5'"
    )


def test_weights_that_were_set_too_early_are_checked_when_they_fit():
    optimizer = tf_xshard.CrossShardOptimizer(O.SGD())
    optimizer.set_weights([np.zeros(7)])
    with pytest.raises(ValueError, match="variables, got 1 weights"):
        optimizer.build([keras.Variable(1.0)])


def test_config_round_trip():
    optimizer = tf_xshard.CrossShardOptimizer(
        O.LossScaleOptimizer(O.SGD(0.25, clipnorm=2.0)),
        "sum",
        [[1, 0], [2, 3]],
        loss_normalization="replica",
        pre_reduce=tf_xshard.clip_by_value(-2.0, 1.0),
        post_reduce=tf_xshard.clip_by_norm(3.0),
        communication=tf_xshard.Communication("bfloat16", 1000, 7.5),
        name="named",
    )
    config = optimizer.get_config()
    kept = copy.deepcopy(config)
    for _ in range(2):
        made = tf_xshard.CrossShardOptimizer.from_config(config)
        assert config == kept
        assert made.get_config() == config
    assert made.group_assignment == optimizer.group_assignment
    assert made.inner_optimizer.inner_optimizer.clipnorm == 2.0
    serialized = keras.saving.serialize_keras_object(optimizer)
    again = keras.saving.deserialize_keras_object(serialized)
    assert again.get_config() == config
    assert (
        keras.optimizers.deserialize(
            keras.optimizers.serialize(optimizer)
        ).get_config()
        == config
    )


def test_a_learning_rate_schedule_survives(tmp_path):
    schedule = O.schedules.CosineDecay(0.1, 100)
    model, _ = training.train(
        lambda: tf_xshard.CrossShardOptimizer(O.SGD(schedule)),
        replicas.mirrored(2),
        num_steps=3,
    )
    path = os.path.join(tmp_path, "model.keras")
    model.save(path)
    with replicas.mirrored(2).scope():
        restored = keras.models.load_model(path)
    assert float(restored.optimizer.learning_rate) == float(schedule(3))
    assert float(schedule(3)) != float(schedule(0))


def test_clone_and_recompile():
    strategy = replicas.mirrored(2)
    model, weights = training.train(_wrapped("adam"), strategy, num_steps=4)
    with strategy.scope():
        clone = keras.models.clone_model(model)
        clone.set_weights(model.get_weights())
        clone.compile(
            optimizer=tf_xshard.CrossShardOptimizer.from_config(
                model.optimizer.get_config()
            ),
            loss="mse",
        )
    _more_steps(clone)
    for optimizer in (clone.optimizer, model.optimizer):
        assert replicas.values(strategy, optimizer.iterations) == [4, 4]
    got = training.weights(model, strategy)
    for mine, theirs in zip(got, weights, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_compile_from_config():
    model, _ = training.train(_wrapped("adam"), num_steps=2)
    other = training.model()
    other.compile_from_config(model.get_compile_config())
    assert other.optimizer.get_config() == model.optimizer.get_config()
    assert other.optimizer.built


def test_export(tmp_path):
    model, _ = training.train(
        _wrapped("adam"), replicas.mirrored(2), num_steps=2
    )
    path = os.path.join(tmp_path, "saved_model")
    model.export(path, verbose=False)
    x = training.data()[0][:4]
    loaded = tf.saved_model.load(path)
    np.testing.assert_allclose(loaded.serve(x), model(x), atol=1e-6)


_MAKERS = {
    "groups": lambda: tf_xshard.CrossShardOptimizer(
        keras.optimizers.Adam(), group_assignment=[[0], [1]]
    ),
    "groups_in_towers": lambda: tf_xshard.TowerOptimizer(
        _MAKERS["groups"](), 2
    ),
    "agn": lambda: tf_xshard.AGNOptimizer(keras.optimizers.Adam()),
    "one_group": lambda: tf_xshard.CrossShardOptimizer(keras.optimizers.Adam()),
}


_WAYS = ["keras", "h5", "weights.h5", "checkpoint"]


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
@pytest.mark.parametrize(
    "name, way",
    [
        *itertools.product(["groups"], _WAYS),
        *replicas.in_turn(["groups_in_towers", "agn", "one_group"], _WAYS),
    ],
)
def test_a_save_that_loses_something_says_so_once(
    name, way, tmp_path, monkeypatch
):
    lines = []
    monkeypatch.setattr(
        warning.logging,
        "warning",
        lambda text, *arguments: lines.append(text % arguments),
    )
    model, _ = training.train(_MAKERS[name], replicas.mirrored(2), num_steps=2)
    path = os.path.join(tmp_path, f"model.{way}")
    for _ in range(2):
        if way in ("keras", "h5"):
            model.save(path)
        elif way == "weights.h5":
            model.save_weights(path)
        else:
            tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(
                path
            )
    said = {
        "groups": ["CrossShardOptimizer trains 2 groups, whose variables"],
        "agn": ["AGNOptimizer trains each replica's own variables and slots."],
        "one_group": [],
    }
    said["groups_in_towers"] = said["groups"]
    lines = [line for line in lines if "HDF5" not in line]  # Keras' own.
    assert len(lines) == len(said[name])
    for line, start in zip(lines, said[name], strict=True):
        assert line.startswith(start) and "replica 0 only" in line
        assert "tf_xshard.GroupState(model).save(directory)" in line


def test_a_save_that_loses_nothing_says_nothing(tmp_path, monkeypatch):
    """Groups that do not differ: before training, and merged."""
    lines = []
    monkeypatch.setattr(
        warning.logging,
        "warning",
        lambda text, *arguments: lines.append(text % arguments),
    )
    with replicas.mirrored(2).scope():
        model = training.model()
        model.compile(_MAKERS["groups"](), "mse")
        model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    x, y = training.data()
    model.fit(x, y, verbose=0)
    tf_xshard.GroupState(model).merge()
    model.save(tmp_path / "model.keras")
    assert not lines
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    assert len(lines) == 1


class _Scaling(tf.Module):
    """A hook that holds a variable."""

    def __init__(self):
        super().__init__()
        self.factor = tf.Variable(2.0)

    def __call__(self, pairs):
        return [(g * self.factor, v) for g, v in pairs]


def test_a_hook_with_variables_is_in_checkpoints(tmp_path):
    hook = _Scaling()
    optimizer = tf_xshard.CrossShardOptimizer(
        keras.optimizers.SGD(), pre_reduce=hook
    )
    path = tf.train.Checkpoint(optimizer=optimizer).write(str(tmp_path / "c"))
    hook.factor.assign(5.0)
    tf.train.Checkpoint(optimizer=optimizer).read(path).assert_consumed()
    assert float(hook.factor) == 2.0


class _Store(dict):
    """A store of a user's own, not one of Keras'."""


def test_calls_with_other_stores_leave_nothing_behind(tmp_path):
    """They made the next save write nothing, and the next load keep all."""
    strategy = replicas.mirrored(2)
    model, _ = training.train(_wrapped("adam"), strategy, num_steps=2)
    optimizer = model.optimizer
    for store in ({}, _Store()):
        optimizer.save_own_variables(store)
        assert len(store) == len(optimizer.variables)
        optimizer.load_own_variables(store)
    inner, own = optimizer.inner_optimizer, {}
    inner.save_own_variables(own)
    assert len(own) == len(inner.variables)
    before = inner.variables[-1].numpy()
    own[str(len(own) - 1)] = before + 1
    inner.load_own_variables(own)
    np.testing.assert_array_equal(inner.variables[-1].numpy(), before + 1)
    path = os.path.join(tmp_path, "model.weights.h5")
    expected = _state(model)
    model.save_weights(path)
    restored = _fresh("adam", strategy)
    restored.optimizer.build(restored.trainable_variables)
    restored.load_weights(path)
    for mine, theirs in zip(_state(restored), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_model_that_also_holds_the_inner_optimizer(tmp_path):
    """Each save is whole, and what Keras can't save is named."""

    def make(wrap):
        model = training.model()
        model.adam = O.Adam(0.01)
        model.compile(wrap(model.adam), "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    model = make(tf_xshard.CrossShardOptimizer)
    x, y = training.data(16)
    for number in range(2):
        model.fit(x, y, verbose=0)
        path = os.path.join(tmp_path, f"{number}.weights.h5")
        model.save_weights(path)
        other = make(tf_xshard.CrossShardOptimizer)
        other.load_weights(path)
        for mine, theirs in zip(_state(other), _state(model), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    with_residuals = make(
        lambda inner: tf_xshard.CrossShardOptimizer(
            inner,
            communication=tf_xshard.Communication(
                "bfloat16", error_feedback=True
            ),
        )
    )
    with pytest.warns(UserWarning, match="CrossShardOptimizer'. is not saved:"):
        with_residuals.save_weights(path)
