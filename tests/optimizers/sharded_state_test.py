"""shard_update=True: state that is whole wherever it is seen or saved."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import filled
from tests.support import replicas
from tests.support import sharded
from tests.support import versions

O = keras.optimizers  # noqa: E741
GROUPS = sharded.PAIRS
# Muon divides matrices by owners and the rest by element; Adafactor's slots
# have other shapes than the variables.
INNERS = {"muon": O.Muon, "adafactor": O.Adafactor}
of_each_kind = pytest.mark.parametrize("inner", INNERS)


def _trained(
    inner, num_steps=3, devices=range(4), groups=GROUPS, shard_update=True
):
    trained = sharded.Trained(
        functools.partial(INNERS[inner], 0.05),
        replicas.mirrored_on(tuple(devices)),
        groups,
        shard_update=shard_update,
    )
    sharded.train([trained], num_steps)
    return trained


def _state(trained):
    return tf_xshard.GroupState(
        {"weights": trained.variables, "optimizer": trained.optimizer}
    )


# Trained once, and not changed. Files do not depend on the order of devices.
_shared = functools.cache(functools.partial(_trained, devices=replicas.MIXED))


def _assert_equal(some, others):
    for one, other in zip(some, others, strict=True):
        np.testing.assert_array_equal(one, other)


@of_each_kind
def test_variables_are_whole_outside_of_a_step(inner):
    """They have the names, shapes and values of plain Keras."""
    trained = _shared(inner)
    make = functools.partial(INNERS[inner], 0.05)
    _, expected = sharded.of_group(make, trained, GROUPS[0], 3)
    names = sharded.names_of(trained.optimizer)
    assert names == sharded.names_of(expected)
    for one, other in zip(
        trained.optimizer.variables, expected.variables, strict=True
    ):
        assert one.shape == other.shape and one.ndim == other.ndim
        for value in (one, one.numpy(), one.value, tf.convert_to_tensor(one)):
            np.testing.assert_allclose(value, other, atol=1e-6)
        np.testing.assert_allclose(one + 1, other + 1, atol=1e-6)
    slot = trained.slots()[0]
    read = tf.function(lambda: slot.value, autograph=False)
    with pytest.raises(RuntimeError, match="outside of the tf.function"):
        read()


@of_each_kind
def test_set_weights_and_assign(inner):
    trained = _trained(inner, num_steps=0)
    values = [
        np.arange(v.numpy().size).reshape(v.shape)
        for v in trained.optimizer.variables
    ]
    trained.optimizer.set_weights(values)
    _assert_equal(trained.state, [np.stack([one] * 4) for one in values])
    slot = trained.slots()[0]
    with pytest.raises(ValueError, match="shape"):
        slot.assign(np.zeros([4]))
    before = slot.numpy()
    slot.assign_add(tf.ones(slot.shape))
    np.testing.assert_array_equal(slot.numpy(), before + 1)


@of_each_kind
def test_group_state_of_whole_slots(inner, tmp_path):
    """Into the whole update and back, each group its own; in other numbers."""
    state = _state(_shared(inner))
    assert not any(row["within_group"] for row in state.divergence())
    expected = [state.get_weights(g)["optimizer"] for g in range(2)]
    state.save(tmp_path / "sharded")
    whole = _state(_trained(inner, 0, shard_update=False))
    whole.restore(tmp_path / "sharded")
    whole.save(tmp_path / "whole")
    back = _trained(inner, 0)
    _state(back).restore(tmp_path / "whole")
    _assert_equal(back.state, _shared(inner).state)
    fewer = _state(_trained(inner, 0, range(2), [[0, 1]]))
    fewer.restore(tmp_path / "whole", regroup={0: 1})
    _assert_equal(fewer.get_weights(0)["optimizer"], expected[1])
    _state(back).merge()
    means = [(a + b) / 2 for a, b in zip(*expected, strict=True)]
    for value, mean in zip(back.state, means, strict=True):
        np.testing.assert_allclose(value, np.stack([mean] * 4), 1e-5, 1e-7)
    _state(back).set_weights(0, state.get_weights(1))
    _assert_equal(_state(back).get_weights(0)["optimizer"], expected[1])


def _sharded(inner, **kwargs):
    return tf_xshard.CrossShardOptimizer(inner, shard_update=True, **kwargs)


def _model(inner="muon", **kwargs):
    return filled.model(
        lambda: _sharded(INNERS[inner](), **kwargs), replicas.mirrored(2)
    )


@pytest.mark.parametrize(
    "inner, groups", replicas.in_turn(INNERS, [None, [[1, 0]]])
)
def test_a_whole_model_and_its_config(inner, groups, tmp_path):
    """A .keras file, on other numbers of replicas and without a strategy."""
    model = _model(inner, group_assignment=groups)
    values = filled.fill(model)
    path = tmp_path / "model.keras"
    model.save(path)
    for num_replicas in (1, 2) if groups else (1, 2, 4):
        is_alone = num_replicas == 1
        outside = tf.distribute.get_strategy()
        to = outside if is_alone else replicas.mirrored(num_replicas)
        with to.scope():
            again = keras.saving.load_model(path)
        assert again.optimizer.shard_update
        filled.check(again, values)
        slots = [v for v in again.optimizer.variables if hasattr(v, "layout")]
        assert bool(slots) != is_alone
        if groups and is_alone:  # Only a step needs the groups.
            x = np.ones([2, 8])
            y = again.predict(x, verbose=0)
            error = "is for 2 replicas, but .*compile=False"
            with pytest.raises(ValueError, match=error):
                again.fit(x, y, verbose=0)
            again.save(path)


def test_export_leaves_the_optimizer_out(tmp_path):
    model = _model()
    model(np.ones([2, 8]))
    with pytest.raises(RuntimeError, match=r"use model.export\(\)"):
        tf.saved_model.save(model, str(tmp_path / "all"))
    model.export(tmp_path / "exported", verbose=False)


def _towers():
    return tf_xshard.TowerOptimizer(O.SGD(), 2)


def _agn():
    return tf_xshard.AGNOptimizer(O.SGD())


class Unknown(O.Adam):
    pass


class HiddenSlots(O.SGD):
    def build(self, variables):
        super().build(variables)
        self.own = [self.add_variable([2], name="own") for _ in variables]


def _built(optimizer):
    optimizer.build([keras.Variable(tf.ones([4]))])
    return optimizer


def _build_sharded(inner):
    return _built(_sharded(inner))


@pytest.mark.parametrize(
    "wrap, inner_fn, error",
    [
        (
            *(_sharded, lambda: O.LossScaleOptimizer(Unknown())),
            r"elementwise\(Unknown\).*per_variable\(Unknown\)",
        ),
        (_sharded, _towers, "TowerOptimizer can't be inside.*innermost"),
        (_sharded, _agn, "AGNOptimizer can't be inside.*different variables"),
        (_build_sharded, lambda: _built(O.SGD()), "been built with whole"),
        (
            *(_build_sharded, tf_xshard.elementwise(HiddenSlots)),
            "add_variable_from_reference",
        ),
        pytest.param(
            *(_build_sharded, lambda: O.MultiOptimizer(lambda v: Unknown())),
            "Unknown",
            marks=versions.needs_multi_optimizer,
        ),
    ],
    ids=["unknown", "tower", "agn", "built", "hidden_slots", "multi"],
)
def test_what_can_not_be_sharded_is_refused(wrap, inner_fn, error):
    """When it is wrapped, or else when it is built."""
    with replicas.mirrored(2).scope():
        inner = inner_fn()
        with pytest.raises(ValueError, match=error):
            wrap(inner)
        if wrap is _sharded:  # It is unchanged: it can still be wrapped.
            tf_xshard.CrossShardOptimizer(inner)


def test_arguments():
    with pytest.raises(TypeError, match="shard_update must be a bool"):
        tf_xshard.CrossShardOptimizer(O.SGD(), shard_update="yes")
    for declare in (tf_xshard.elementwise, tf_xshard.per_variable):
        with pytest.raises(TypeError, match="takes a class of Keras"):
            declare(O.SGD())


@pytest.mark.parametrize("kind", sharded.KINDS)
def test_tensorflow_variables_instead_of_keras_variables(kind):
    """Both name the same variable; TensorFlow's own have no path."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(tf.ones([5]))
        other = tf.Variable(tf.ones([3]), name="other")
        optimizer = _sharded(kind(0.5, momentum=0.5))
        optimizer.build([weight, other])
    gradients = [tf.ones([5]), tf.ones([3])]
    strategy.run(lambda: optimizer.apply(gradients, [weight.value, other]))
    for variable in (weight, other):
        assert not np.any(replicas.values(strategy, variable))
