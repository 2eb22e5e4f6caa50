"""Nothing of an optimizer's state is lost, whichever way it is saved."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import training
from tests.support.versions import needs_multi_optimizer
from tf_xshard.optimizers import saving as saving_lib

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
ignore_hdf5 = pytest.mark.filterwarnings(
    "ignore:You are saving your model as an HDF5 file"
)


def _wrapped(name):
    return lambda: tf_xshard.CrossShardOptimizer(INNERS[name]())


def _state(model):
    """All values that the next step depends on, of all replicas."""
    strategy = model.distribute_strategy
    variables = model.trainable_variables + model.optimizer.variables
    return [np.stack(replicas.values(strategy, v)) for v in variables]


def _check_state(model, expected, tolerance=0):
    for mine, theirs in zip(_state(model), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance)


def _more_steps(model):
    x, y = training.data()
    training.run_steps(model, zip(np.split(x, 4), np.split(y, 4), strict=True))


def _fresh(optimizer_fn, strategy=None, is_built=True):
    """A model of the same kind with another state."""
    with (strategy or tf.distribute.get_strategy()).scope():
        model = training.model(seed=9)
        model.compile(optimizer=optimizer_fn(), loss="mse")
        if is_built:
            model.optimizer.build(model.trainable_variables)
    return model


def _checkpoint(model):
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


@ignore_hdf5
@pytest.mark.parametrize(
    "name, kind",
    [*((name, "mirrored") for name in INNERS), ("adam", "tpu")],
)
def test_every_way_keeps_the_state(name, kind, tmp_path):
    strategy = replicas.STRATEGIES[kind](2)
    make = _wrapped(name)
    model, _ = training.train(make, strategy, num_steps=4)
    state = _state(model)
    # Keras takes the optimizer out of a model's config when it writes `.h5`.
    files = [tmp_path / "model.keras", tmp_path / "model.h5"]
    for file in files:
        model.save(file)
    weights = tmp_path / "model.weights.h5"
    model.save_weights(weights)
    checkpoint = _checkpoint(model).save(tmp_path / "checkpoint")

    for file in files:
        with strategy.scope():
            whole = keras.models.load_model(file)
            whole.optimizer.build(whole.trainable_variables)
        assert isinstance(whole.optimizer, tf_xshard.CrossShardOptimizer)
        _check_state(whole, state)
    _more_steps(model)
    _more_steps(whole)
    # XLA may round otherwise in a program for other shapes.
    tolerance = 1e-6 if replicas.is_tpu(strategy) else replicas.REPEATED
    _check_state(whole, _state(model), tolerance)

    outside = keras.models.load_model(files[0])
    _check_state(outside, [value[:1] for value in state])
    _more_steps(outside)

    for is_built in (True, False):
        restored = _fresh(make, strategy, is_built)
        status = _checkpoint(restored).restore(checkpoint)
        with strategy.scope():
            restored.optimizer.build(restored.trainable_variables)
        status.assert_existing_objects_matched()
        _check_state(restored, state)

    restored = _fresh(make, strategy)
    with strategy.scope():
        restored.load_weights(weights)
    _check_state(restored, state)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf_xshard.TowerOptimizer(O.Adam(), num_towers=3),
        lambda: tf_xshard.TowerOptimizer(
            O.LossScaleOptimizer(O.Adam()), num_towers=3
        ),
        lambda: tf_xshard.AGNOptimizer(O.Adam(), communication_period=3),
    ],
    ids=["tower", "loss_scale", "agn"],
)
def test_weights_in_several_files(make, tmp_path):
    """The same as in one file, of which each path may be in another file."""
    strategy = replicas.mirrored(2)
    model, _ = training.train(make, strategy, num_steps=2)
    model.save_weights(tmp_path / "one.weights.h5")
    # Hundreds of bytes, in GB.
    model.save_weights(tmp_path / "several.weights.json", max_shard_size=6e-7)
    assert len(list(tmp_path.glob("several_*.weights.h5"))) > 3
    one, several = _fresh(make, strategy), _fresh(make, strategy)
    with strategy.scope():
        one.load_weights(tmp_path / "one.weights.h5")
        several.load_weights(tmp_path / "several.weights.json")
    _check_state(several, _state(one))


def _agn():
    return tf_xshard.AGNOptimizer(O.Adam(0.01), communication_period=4)


@pytest.mark.parametrize("optimizer_fn", [_wrapped("adam"), _agn])
@pytest.mark.parametrize(
    "kind, graph", [("mirrored", True), ("mirrored", False), ("tpu", True)]
)
def test_a_checkpoint_that_is_read_before_the_optimizer_is_built(
    kind, graph, optimizer_fn, tmp_path
):
    """All replicas get its values, though a replica creates the variables."""
    strategy = replicas.STRATEGIES[kind](2)
    steps = []
    for _ in "sr":
        with strategy.scope():
            model = training.model()
            model.compile(optimizer=optimizer_fn(), loss="mse")
        variables = model.trainable_variables
        if not steps:
            for _ in range(2):
                replicas.apply_once(
                    strategy,
                    model.optimizer,
                    lambda _, v=variables: [tf.ones(one.shape) for one in v],
                    variables,
                )
            path = _checkpoint(model).save(str(tmp_path / "saved"))
        with strategy.scope():
            _checkpoint(model).read(path)
            replicas.apply_once(
                strategy,
                model.optimizer,
                lambda r, v=variables: [(r + 1) * tf.ones(w.shape) for w in v],
                variables,
                graph,
            )
        steps.append(model)
    _check_state(steps[1], _state(steps[0]))


def test_plain_keras_loses_nested_state_in_set_weights():
    def inner_state(optimizer):
        optimizer.build([keras.Variable(1.0)])
        optimizer.set_weights(
            [np.full(v.shape, 7.0) for v in optimizer.variables]
        )
        while hasattr(optimizer, "inner_optimizer"):
            optimizer = optimizer.inner_optimizer
        return [float(v) for v in optimizer.variables]

    scaled = lambda: O.LossScaleOptimizer(O.SGD(0.1, momentum=0.9))
    assert inner_state(scaled()) != [7.0] * 3, (
        "Keras mended this: remove the row 'set_weights'"
    )
    wrapped = tf_xshard.CrossShardOptimizer(scaled())
    assert inner_state(wrapped) == [7.0] * 3


@needs_multi_optimizer
def test_plain_keras_checkpoints_no_multi_optimizer(tmp_path):
    """A momentum of 7 is in the checkpoint, or it is not."""

    def is_saved(optimizer):
        optimizer.build([keras.Variable(1.0)])
        for variable in optimizer.variables:
            if "momentum" in variable.path:
                variable.assign(7.0)
        path = tf.train.Checkpoint(optimizer=optimizer).save(
            tmp_path / optimizer.name
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
    path = tmp_path / "model.h5"
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
        communication=tf_xshard.Communication(
            "int8", 1000, 7.5, error_feedback=True, rounding="stochastic"
        ),
        name="named",
    )
    config = optimizer.get_config()
    kept = copy.deepcopy(config)
    for _ in range(2):
        made = tf_xshard.CrossShardOptimizer.from_config(config)
        assert config == kept
        assert made.get_config() == config
    assert made.group_assignment == optimizer.group_assignment
    assert made.communication == optimizer.communication
    assert "error_feedback" not in tf_xshard.Communication().get_config()
    assert made.inner_optimizer.inner_optimizer.clipnorm == 2.0
    serialized = keras.saving.serialize_keras_object(optimizer)
    again = keras.saving.deserialize_keras_object(serialized)
    assert again.get_config() == config
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert again.get_config() == config


def test_a_learning_rate_schedule_survives(tmp_path):
    schedule = O.schedules.CosineDecay(0.1, 100)
    model, _ = training.train(
        lambda: tf_xshard.CrossShardOptimizer(O.SGD(schedule)), num_steps=3
    )
    path = tmp_path / "model.keras"
    model.save(path)
    restored = keras.models.load_model(path)
    assert float(restored.optimizer.learning_rate) == float(schedule(3))
    assert float(schedule(3)) != float(schedule(0))


def test_clone_and_recompile():
    strategy = replicas.mirrored(2)
    model, weights = training.train(_wrapped("adam"), strategy, num_steps=4)
    with strategy.scope():
        clone = keras.models.clone_model(model)
        clone.set_weights(model.get_weights())
        clone.compile_from_config(model.get_compile_config())
    assert clone.optimizer.built
    assert clone.optimizer.get_config() == model.optimizer.get_config()
    _more_steps(clone)
    for optimizer in (clone.optimizer, model.optimizer):
        assert replicas.values(strategy, optimizer.iterations) == [4, 4]
    got = training.weights(model, strategy)
    for mine, theirs in zip(got, weights, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_export(tmp_path):
    model = _fresh(_wrapped("adam"), replicas.mirrored(2))
    path = str(tmp_path / "saved_model")
    model.export(path, verbose=False)
    x = training.data()[0][:4]
    loaded = tf.saved_model.load(path)
    np.testing.assert_allclose(loaded.serve(x), model(x), atol=1e-6)


def _groups():
    return tf_xshard.CrossShardOptimizer(O.Adam(), group_assignment=[[0], [1]])


@pytest.fixture
def logged(monkeypatch):
    """The warnings of a save, without Keras' own."""
    lines = []

    def log(text, *arguments):
        if "HDF5" not in text:
            lines.append(text % arguments)

    monkeypatch.setattr(saving_lib.logging, "warning", log)
    return lines


_WAYS = {
    "keras": lambda model, path: model.save(f"{path}.keras"),
    "h5": lambda model, path: model.save(f"{path}.h5"),
    "weights.h5": lambda model, path: model.save_weights(f"{path}.weights.h5"),
    "checkpoint": lambda model, path: _checkpoint(model).write(path),
}


@ignore_hdf5
@pytest.mark.parametrize(
    "make, ways, said",
    [
        *(
            (_groups, [way], "CrossShardOptimizer trains 2 groups, whose vari")
            for way in _WAYS
        ),
        (
            lambda: tf_xshard.TowerOptimizer(_groups(), 2),
            ["keras"],
            "CrossShardOptimizer trains 2 groups, whose vari",
        ),
        (
            lambda: tf_xshard.AGNOptimizer(O.Adam()),
            ["h5"],
            "AGNOptimizer trains each replica's own variables and slots.",
        ),
        (lambda: tf_xshard.CrossShardOptimizer(O.Adam()), _WAYS, None),
        (
            lambda: tf_xshard.CrossShardOptimizer(
                O.Adam(),
                communication=tf_xshard.Communication(
                    "bfloat16", error_feedback=True
                ),
            ),
            ["keras"],
            "CrossShardOptimizer keeps each replica's rounding errors",
        ),
    ],
)
def test_a_save_that_loses_something_says_so_once(
    make, ways, said, logged, tmp_path
):
    model, _ = training.train(make, replicas.mirrored(2), num_steps=2)
    for way in ways:
        for _ in range(2):
            _WAYS[way](model, str(tmp_path / "model"))
    if said is None:
        assert not logged
        return
    [line] = logged
    assert line.startswith(said) and "one value for all replicas" in line
    assert "tf_xshard.GroupState(model).save(directory)" in line


def test_a_save_that_loses_nothing_says_nothing(tmp_path, logged):
    """Groups that do not differ: before training, and merged."""
    model = _fresh(_groups, replicas.mirrored(2))
    model.save(tmp_path / "model.keras")
    _more_steps(model)
    tf_xshard.GroupState(model).merge()
    model.save(tmp_path / "model.keras")
    assert not logged
    _more_steps(model)
    model.save(tmp_path / "model.keras")
    assert len(logged) == 1


def test_a_model_in_groups_loads_outside_its_strategy(tmp_path):
    """To predict with; only a step needs the replicas."""
    model = _fresh(_groups, replicas.mirrored(2))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    x, y = training.data(2)
    assert loaded.predict(x, verbose=0).shape == (2, 1)
    with pytest.raises(ValueError, match="is for 2 replicas.*compile=False"):
        loaded.fit(x, y, verbose=0)


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
    model, _ = training.train(_wrapped("adam"), num_steps=2)
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
    path = tmp_path / "model.weights.h5"
    expected = _state(model)
    model.save_weights(path)
    restored = _fresh(_wrapped("adam"))
    restored.load_weights(path)
    _check_state(restored, expected)


def test_a_model_that_also_holds_the_inner_optimizer(tmp_path):
    """Each save is whole, and what Keras can't save is named."""

    def make(**kwargs):
        model = training.model()
        model.adam = O.Adam(0.01)
        model.compile(
            tf_xshard.CrossShardOptimizer(model.adam, **kwargs), "mse"
        )
        model.optimizer.build(model.trainable_variables)
        return model

    model = make()
    for number in range(2):
        _more_steps(model)
        path = tmp_path / f"{number}.weights.h5"
        model.save_weights(path)
        other = make()
        other.load_weights(path)
        _check_state(other, _state(model))
    with_residuals = make(
        communication=tf_xshard.Communication("bfloat16", error_feedback=True)
    )
    with pytest.warns(UserWarning, match="CrossShardOptimizer'. is not saved:"):
        with_residuals.save_weights(path)
