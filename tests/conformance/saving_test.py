"""Nothing of an optimizer's state is lost, whichever way it is saved."""

import copy
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import filled
from tests.support import replicas
from tests.support.versions import needs_multi_optimizer

O = keras.optimizers  # noqa: E741
CROSS = tf_xshard.CrossShardOptimizer
INNERS = {
    "adam": lambda: O.Adam(0.01, use_ema=True, ema_momentum=0.7),
    "nadam": lambda: O.Nadam(0.01),
    "accumulation": lambda: O.SGD(momentum=0.9, gradient_accumulation_steps=3),
    "multi": lambda: O.MultiOptimizer(
        O.OptimizerMap(O.SGD(0.05, momentum=0.9), {".*/kernel": O.Adam(0.01)})
    ),
    "loss_scale": lambda: O.LossScaleOptimizer(O.Adam(0.01)),
    "nested": lambda: CROSS(O.Adam(0.01)),
}


def _wrapped(name):
    return lambda: CROSS(INNERS[name]())


def _agn():
    return tf_xshard.AGNOptimizer(O.Adam(0.01), communication_period=4)


OPTIMIZERS = {
    **{name: _wrapped(name) for name in INNERS},
    "tower": lambda: tf_xshard.TowerOptimizer(INNERS["loss_scale"](), 3),
    "agn": _agn,
}
pytestmark = pytest.mark.filterwarnings(
    "ignore:You are saving your model as an HDF5 file"
)


def _kept(model, make, way, path, strategy=None):
    """A second model, which has got what the first has."""
    saved = filled.save(model, way, path)
    return filled.load(make, strategy or model.distribute_strategy, way, saved)


_multi = functools.partial(pytest.param, "multi", marks=needs_multi_optimizer)


@pytest.mark.parametrize(
    "name, way, kind",
    [
        # Keras takes the optimizer out of a model's config to write `.h5`.
        ("adam", "h5", "mirrored"),
        ("adam", "unbuilt", "tpu"),
        ("nadam", "weights.h5", "mirrored"),
        ("accumulation", "keras", "tpu"),
        ("accumulation", "unbuilt", "mirrored"),
        _multi("built", "mirrored"),
        _multi("keras", "mirrored"),
        ("loss_scale", "h5", "mirrored"),
        ("loss_scale", "keras", "outside"),
        ("loss_scale", "set_weights", "mirrored"),
        ("nested", "weights.h5", "mirrored"),
        ("tower", "weights.json", "mirrored"),
        ("agn", "weights.json", "mirrored"),
    ],
)
def test_every_way_keeps_the_state(name, way, kind, tmp_path):
    """All values that the next step depends on, on all replicas."""
    make, outside = OPTIMIZERS[name], tf.distribute.get_strategy()
    strategy = replicas.STRATEGIES.get(kind, replicas.mirrored)(2)
    model = filled.model(make, strategy)
    values = filled.fill(model)
    to = outside if kind == "outside" else strategy
    kept = _kept(model, make, way, tmp_path / "model", to)
    assert type(kept.optimizer) is type(model.optimizer)
    filled.check(kept, values)


@pytest.mark.filterwarnings("ignore:Skipping variable loading")
@pytest.mark.parametrize(
    "name, way",
    [_multi("built"), ("adam", "h5"), ("loss_scale", "set_weights")],
)
def test_plain_keras_loses_it(name, way, tmp_path):
    """The rows of README, which the tests above hold for the wrappers."""
    model = filled.model(INNERS[name])
    values = filled.fill(model)
    kept = _kept(model, INNERS[name], way, tmp_path / "model")
    held = [one.numpy().tolist() for one in filled.variables(kept)]
    assert held != [one.tolist() for one in values], "Keras mended this row"


@pytest.mark.parametrize(
    "graph, optimizer_fn", [(True, _wrapped("adam")), (False, _agn)]
)
def test_a_checkpoint_that_is_read_before_the_optimizer_is_built(
    graph, optimizer_fn, tmp_path
):
    """All replicas get its values, though a replica creates the variables."""
    strategy = replicas.mirrored(2)
    source = filled.model(optimizer_fn, strategy)
    filled.fill(source)
    path = filled.checkpoint(source).save(str(tmp_path / "saved"))
    unbuilt = filled.model(optimizer_fn, strategy, is_built=False)
    with strategy.scope():
        filled.checkpoint(unbuilt).read(path)
        for model in (source, unbuilt):
            variables = model.trainable_variables
            replicas.apply_once(
                strategy,
                model.optimizer,
                lambda r, v=variables: [(r + 1) * tf.ones(w.shape) for w in v],
                variables,
                graph,
            )
    for pair in zip(*map(filled.variables, (unbuilt, source)), strict=True):
        got, want = (replicas.values(strategy, one) for one in pair)
        np.testing.assert_array_equal(got, want)


def test_set_weights_is_all_or_nothing():
    optimizer = CROSS(O.Adam())
    optimizer.build([keras.Variable(np.zeros(3))])
    before = [v.numpy().copy() for v in optimizer.variables]
    other = [value + 1 for value in before]
    for wrong in (other[:-1], [*other[:-1], np.zeros(5)]):
        with pytest.raises(ValueError, match="got"):
            optimizer.set_weights(wrong)
    for variable, value in zip(optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    early = CROSS(O.SGD())
    early.set_weights([np.zeros(7)])
    with pytest.raises(ValueError, match="variables, got 1 weights"):
        early.build([keras.Variable(1.0)])


def test_config_round_trip():
    optimizer = CROSS(
        O.LossScaleOptimizer(
            O.SGD(O.schedules.CosineDecay(0.1, 100), clipnorm=2.0)
        ),
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
        made = CROSS.from_config(config)
        assert config == kept == made.get_config()
    assert made.group_assignment == optimizer.group_assignment
    assert made.communication == optimizer.communication
    assert made.inner_optimizer.inner_optimizer.clipnorm == 2.0
    made.iterations.assign(50)
    np.testing.assert_allclose(float(made.learning_rate), 0.05, rtol=1e-6)
    serialized = keras.saving.serialize_keras_object(optimizer)
    again = keras.saving.deserialize_keras_object(serialized)
    assert again.get_config() == config


def _groups():
    return CROSS(O.Adam(), group_assignment=[[0], [1]])


FILES = ("keras", "h5", "weights.h5", "built")


def _towers():
    return tf_xshard.TowerOptimizer(_groups(), 2)


def _feedback():
    how = tf_xshard.Communication("bfloat16", error_feedback=True)
    return CROSS(O.Adam(), communication=how)


@pytest.mark.parametrize(
    "make, ways, said",
    [
        (_groups, FILES, "CrossShardOptimizer trains 2 groups, whose vari"),
        (_towers, FILES[:1], "CrossShardOptimizer trains 2 groups, whose v"),
        (_agn, FILES[1:2], "AGNOptimizer trains each replica's own variabl"),
        (_feedback, FILES[:1], "CrossShardOptimizer keeps each replica's ro"),
        (_wrapped("adam"), FILES, None),
    ],
)
def test_a_save_that_loses_something_says_so_once(
    make, ways, said, caplog, tmp_path
):
    """Not before replicas differ, as if they had been trained apart."""

    def warnings():
        texts = [one.getMessage() for one in caplog.records]
        return [one for one in texts if "GroupState" in one]

    for way in ways:
        caplog.clear()
        model = filled.model(make, replicas.mirrored(2))
        filled.save(model, way, tmp_path / "model")
        assert not warnings()
        if said is None:
            continue
        for variable in filled.variables(model):
            *_, last = variable.value.values
            last.assign_add(tf.ones(variable.shape, variable.dtype))
        for _ in range(2):
            filled.save(model, way, tmp_path / "model")
        [line] = warnings()
        assert line.startswith(said) and "one value for all replicas" in line
        assert "tf_xshard.GroupState(model).save(directory)" in line


class _Scaling(tf.Module):
    """A hook that holds a variable."""

    def __init__(self):
        super().__init__()
        self.factor = tf.Variable(2.0)

    def __call__(self, pairs):
        return [(g * self.factor, v) for g, v in pairs]


def test_a_hook_with_variables_is_in_checkpoints(tmp_path):
    hook = _Scaling()
    optimizer = CROSS(O.SGD(), pre_reduce=hook)
    path = tf.train.Checkpoint(optimizer=optimizer).write(str(tmp_path / "c"))
    hook.factor.assign(5.0)
    tf.train.Checkpoint(optimizer=optimizer).read(path).assert_consumed()
    assert float(hook.factor) == 2.0


class _Store(dict):
    """A store of a user's own, not one of Keras'."""


def test_calls_with_other_stores_leave_nothing_behind(tmp_path):
    """They made the next save write nothing, and the next load keep all."""
    model = filled.model(_wrapped("adam"))
    expected = filled.fill(model)
    optimizer = model.optimizer
    for store in ({}, _Store()):
        optimizer.save_own_variables(store)
        assert len(store) == len(optimizer.variables)
        optimizer.load_own_variables(store)
    inner, own = optimizer.inner_optimizer, {}
    inner.save_own_variables(own)
    assert len(own) == len(inner.variables)
    expected[-1] = expected[-1] + 1
    own[str(len(own) - 1)] = expected[-1]
    inner.load_own_variables(own)
    filled.check(model, expected)
    kept = _kept(model, _wrapped("adam"), "weights.h5", tmp_path / "model")
    filled.check(kept, expected)


def test_a_model_that_also_holds_the_inner_optimizer(tmp_path):
    """Each save is whole, and what Keras can't save is named."""

    def make(**kwargs):
        model = filled.model(lambda: CROSS(O.Adam(0.01), **kwargs))
        model.adam = model.optimizer.inner_optimizer
        return model

    model, other, path = make(), make(), tmp_path / "model.weights.h5"
    for seed in range(2):
        values = filled.fill(model, seed)
        model.save_weights(path)
        other.load_weights(path)
        filled.check(other, values)
    how = tf_xshard.Communication("bfloat16", error_feedback=True)
    with pytest.warns(UserWarning, match="CrossShardOptimizer'. is not saved:"):
        make(communication=how).save_weights(path)
