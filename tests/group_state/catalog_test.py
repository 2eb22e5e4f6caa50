"""Tests where GroupState finds variables, and that each call looks again."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import group_training
from tests.support import replicas

MEMBERS = group_training.GROUPS
TWO, FOUR = [[0, 1], [2, 3]], [[0], [1], [2], [3]]
SGD = keras.optimizers.SGD


def _cross_shard(groups=None):
    return tf_xshard.CrossShardOptimizer(
        SGD(momentum=0.9), group_assignment=groups
    )


def _dense(optimizer):
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


def test_reading_after_another_compile_changes_nothing(monkeypatch):
    """The first call reads the current groups, and builds no optimizer."""
    strategy = replicas.mirrored(4)
    with strategy.scope():
        model = _dense(_cross_shard(TWO))
        model.optimizer.build(model.trainable_variables)
        state = tf_xshard.GroupState(model)
        assert state.num_groups == 2
        model.compile(_cross_shard(FOUR), "mse")
    state.replicas.assign(model.weights[0], np.arange(8.0).reshape(4, 2, 1))
    before = [replicas.values(strategy, v) for v in model.weights]
    for group in range(4):
        [weight, _] = state.get_weights(group)["model"]
        assert weight.ravel().tolist() == [2 * group, 2 * group + 1]
    assert state.group_of(2) == 2
    assert state.group_assignment.to_list() == FOUR
    # Keras' own would build the optimizer.
    for name in ("evaluate", "predict"):
        monkeypatch.setattr(model, name, lambda *args, **kwargs: {})
    x = np.ones([4, 2], "float32")
    state.variables()
    state.divergence()
    state.evaluate(x, ensemble=False)
    state.predict(x, group=1)
    assert not model.optimizer.built
    after = [replicas.values(strategy, v) for v in model.weights]
    group_training.assert_same(after, before)
    with pytest.raises(ValueError, match="from 0 to 3"):
        state.get_weights(4)


def test_writing_builds_the_optimizer():
    """A read leaves out the variables of an unbuilt optimizer."""
    for write in (
        lambda state: state.merge("mean"),
        lambda state: state.set_weights(0, state.get_weights(0)),
    ):
        state = tf_xshard.GroupState(_dense(_cross_shard()))
        assert list(state.get_weights(0)) == ["model"]
        write(state)
        assert list(state.get_weights(0)) == ["model", "optimizer"]


class ManyOptimizers(keras.Model):
    """Optimizers in attributes, a list, a dict, and of models inside."""

    def __init__(self, groups, others):
        super().__init__()
        self.critics = [_dense(SGD(momentum=0.9)) for _ in range(2)]
        self.encoder = _dense(SGD())
        self.noise = tf.random.Generator.from_seed(1)
        self.deeper = {"more": [tf.Variable(2.0)]}
        self.first_optimizer = _cross_shard(groups)
        self.optimizers = [_cross_shard(others)]
        self.named = {"decoder": keras.optimizers.Adam()}
        # But for two of models inside.
        for one in self.built_optimizers().values():
            one.build(self.encoder.trainable_variables)

    def built_optimizers(self):
        return {
            "critics[1].optimizer": self.critics[1].optimizer,
            "first_optimizer": self.first_optimizer,
            "optimizers[0]": self.optimizers[0],
            "named['decoder']": self.named["decoder"],
        }

    def call(self, x):
        return self.encoder(x)


def _many_optimizers(groups, others):
    with replicas.mirrored(4).scope():
        model = ManyOptimizers(groups, others)
        model(np.zeros([2, 2]))
    return model


def test_optimizers_and_variables_at_any_depth(tmp_path):
    """All that are built; the model's own too, which others may make."""
    model = _many_optimizers(MEMBERS, MEMBERS[::-1])
    optimizers = model.built_optimizers()
    state = tf_xshard.GroupState(model)
    assert state.group_assignment.to_list() == MEMBERS
    # Plain Python: which group a replica is in needs no variable's value.
    assert int(tf.function(lambda: tf.constant(state.group_of(3)))()) == 1
    assert state.get_weights(0).keys() == {"model", *optimizers}
    slots = [v for one in optimizers.values() for v in one.variables]
    listed = {id(one.variable) for one in state.variables()}
    others = (model.noise.state, model.deeper["more"][0])
    assert listed >= {id(one) for one in (*others, *slots)}
    state.save(tmp_path)
    # One that is not built here is missed by name.
    model.critics[1].compile(SGD())
    with pytest.raises(ValueError, match=r"it has {'critics\[1\].optimizer'"):
        tf_xshard.GroupState(model).restore(tmp_path)


def test_parts_that_share_variables():
    with replicas.mirrored(4).scope():
        inside = group_training.network()
        outside = keras.Sequential([inside, keras.layers.Dense(1)])
        outside(np.zeros([2, 4], "float32"))
    state = tf_xshard.GroupState({"all": outside, "inside": inside}, MEMBERS)
    weights = state.get_weights(0)
    assert len(weights["all"]) == 10 and len(weights["inside"]) == 8
    new = [value + 1 for value in weights["inside"]]
    state.set_weights(1, {"inside": new})
    # Trainable weights come first in the outer model.
    for value, its in zip(new[:2], state.get_weights(1)["all"], strict=False):
        np.testing.assert_array_equal(value, its)
    listed = [id(one.variable) for one in state.variables()]
    assert len(listed) == len(set(listed))


def test_what_holds_variables():
    with replicas.mirrored(2).scope():
        parts = {
            "layer": keras.layers.BatchNormalization(),
            "metric": keras.metrics.Mean(),
            "seeds": keras.random.SeedGenerator(1),
            "random": tf.random.Generator.from_seed(1),
            "module": tf.Module(),
            "list": [keras.Variable(1.0), tf.Variable(2.0)],
        }
        parts["layer"].build((3, 3))
        parts["module"].inside = tf.Variable(3.0)
        parts["module"].mean = keras.metrics.Mean()
        parts["module"].optimizers = {"all": _cross_shard([[0], [1]])}
        parts["module"].optimizers["all"].build(parts["list"][:1])
    state = tf_xshard.GroupState(parts)
    assert state.group_assignment.to_list() == [[0], [1]]
    count = collections.Counter(
        (one.part, one.kind) for one in state.variables()
    )
    assert count == {
        ("layer", "weight"): 2,
        ("layer", "statistic"): 2,
        ("metric", "metric"): 2,
        ("seeds", "random"): 1,
        ("random", "random"): 1,
        ("module", "weight"): 1,
        ("module", "slot"): 3,
        ("module", "metric"): 2,
        ("list", "weight"): 2,
    }


def _variable(num_replicas):
    with replicas.mirrored(num_replicas).scope():
        return keras.Variable(1.0)


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda: (3,), TypeError, "needs a keras.Model, a dict"),
        (lambda: ({"one": 3},), TypeError, "'one', which holds no variables"),
        (lambda: ([],), ValueError, "found no variables"),
        (lambda: ([tf.Variable(["a"])],), TypeError, "holds strings"),
        (
            lambda: ({"layer": keras.layers.Dense(2)},),
            *(ValueError, "'layer' has not been built"),
        ),
        (lambda: ({"o": SGD()},), ValueError, "'o' has not been built"),
        (lambda: ([_variable(2), _variable(4)],), ValueError, "2 strategies"),
        (lambda: ([_variable(4)], [[0, 1]]), ValueError, "for 2 replicas"),
        (
            lambda: (_many_optimizers(MEMBERS, None),),
            *(ValueError, "optimizers have different groups"),
        ),
    ],
)
def test_refusals(make, error, text):
    with pytest.raises(error, match=text):
        tf_xshard.GroupState(*make()).get_weights(0)


@pytest.mark.parametrize(
    "outer, inner, joined",
    [
        # Rows, then columns: all replicas are one group in the end.
        (TWO, MEMBERS, [[0, 1, 2, 3]]),
        (TWO, [[3, 2], [1, 0]], TWO),
        (None, MEMBERS, [[0, 1, 2, 3]]),
    ],
    ids=["crossed", "equal", "all"],
)
def test_nested_optimizers_are_joined(outer, inner, joined):
    with replicas.mirrored(4).scope():
        weight = keras.Variable(1.0)
        optimizer = tf_xshard.CrossShardOptimizer(
            _cross_shard(inner), group_assignment=outer
        )
        optimizer.build([weight])
    state = tf_xshard.GroupState([weight, optimizer])
    assert state.group_assignment.to_list() == joined
