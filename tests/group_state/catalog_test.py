"""A call of GroupState sees what the model holds now, and changes nothing."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import group_training
from tests.support import replicas
from tf_xshard.group_state import inventory

TWO, FOUR = [[0, 1], [2, 3]], [[0], [1], [2], [3]]


def _compiled(model, strategy, groups):
    with strategy.scope():
        model.compile(
            tf_xshard.CrossShardOptimizer(
                keras.optimizers.Adam(0.05), group_assignment=groups
            ),
            "mse",
        )


@pytest.fixture(scope="module")
def recompiled():
    """A GroupState of two groups, whose model is compiled again with four."""
    strategy = replicas.mirrored(4)
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((2,)), keras.layers.Dense(1)]
        )
    _compiled(model, strategy, TWO)
    model.optimizer.build(model.trainable_variables)
    state = tf_xshard.GroupState(model)
    assert state.num_groups == 2
    _compiled(model, strategy, FOUR)
    kernel = model.trainable_variables[0].value
    for r, copy in enumerate(strategy.experimental_local_results(kernel)):
        copy.assign(tf.fill([2, 1], float(r)))
    return model, state


def _kernel(weights):
    return weights["model"][0].ravel().tolist()


def test_groups_after_another_compile(recompiled):
    model, state = recompiled
    # The first call after it: nothing has refreshed anything in between.
    assert _kernel(state.get_weights(3)) == [3.0, 3.0]
    assert state.num_groups == 4 and state.group_of(2) == 2
    assert state.group_assignment.to_list() == FOUR
    # Before, a mere divergence() changed what the next call said.
    before = [state.get_weights(group) for group in range(4)]
    state.divergence()
    for group in range(4):
        assert _kernel(state.get_weights(group)) == [group] * 2
        assert state.get_weights(group).keys() == before[group].keys()
    with pytest.raises(ValueError, match="from 0 to 3"):
        state.get_weights(4)


READERS = {
    "num_groups": lambda state, x: state.num_groups,
    "variables": lambda state, x: state.variables(),
    "get_weights": lambda state, x: state.get_weights(1),
    "divergence": lambda state, x: state.divergence(),
    "evaluate": lambda state, x: state.evaluate((x, x[:, :1])),
    "predict": lambda state, x: state.predict(x, group=1),
}


def _attributes(state):
    # The ensemble is kept so that its functions are traced once.
    return {k: v for k, v in vars(state).items() if k != "_ensemble"}


@pytest.mark.parametrize("name", READERS)
def test_reading_changes_nothing(recompiled, name):
    """Not even an optimizer is built, which would make variables."""
    model, state = recompiled
    optimizer = model.optimizer
    before = optimizer.built, len(optimizer.variables)
    attributes = _attributes(state)
    strategy = model.distribute_strategy
    held = [replicas.values(strategy, v) for v in model.weights]
    READERS[name](state, np.ones([4, 2], "float32"))
    # Keras' own evaluate builds it.
    if name not in ("evaluate", "predict"):
        assert (optimizer.built, len(optimizer.variables)) == before
    assert _attributes(state) == attributes
    for variable, values in zip(model.weights, held, strict=True):
        got = replicas.values(strategy, variable)
        np.testing.assert_array_equal(got, values)


@pytest.fixture(scope="module")
def trained():
    return group_training.trained(
        replicas.mirrored(4), groups=FOUR, num_steps=1
    )


@pytest.mark.parametrize("name", READERS)
def test_one_walk_over_the_model_for_each_call(name, trained, monkeypatch):
    state = tf_xshard.GroupState(trained)
    walked = []
    held = inventory.held

    def counting(holder):
        walked.append(holder)
        return held(holder)

    monkeypatch.setattr(inventory, "held", counting)
    if name == "evaluate":
        state.evaluate(group_training.data(16))
    elif name == "predict":
        state.predict(group_training.data(16)[0], group=1)
    else:
        READERS[name](state, None)
    assert len(walked) == 1 and walked[0] is trained


def test_a_catalog_is_frozen():
    variable = keras.Variable(1.0)
    made = inventory.of([variable])
    with pytest.raises(AttributeError):
        made.groups = None
    [entry] = made.entries
    with pytest.raises(AttributeError):
        entry.kind = "slot"
    assert made.variables() == [entry] and made.variables(["slot"]) == []


def test_writing_builds_the_optimizer():
    """What `restore` and `set_weights` write into has to be there."""
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(tf_xshard.CrossShardOptimizer(keras.optimizers.Adam()), "mse")
    state = tf_xshard.GroupState(model)
    state.merge("mean")
    assert model.optimizer.built


def test_what_was_read_can_be_written_before_the_first_step():
    """What an unbuilt optimizer has is left out; parts may be."""
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(tf_xshard.CrossShardOptimizer(keras.optimizers.Adam()), "mse")
    state = tf_xshard.GroupState(model)
    weights = state.get_weights(0)
    assert list(weights) == ["model"]
    state.set_weights(0, weights)
    assert list(state.get_weights(0)) == ["model", "optimizer"]


def test_groups_inside_a_function():
    """Plain Python: which group a replica is in needs no variable's value."""
    model = group_training.compiled(replicas.mirrored(4), "agn", groups=FOUR)
    state = tf_xshard.GroupState(model)

    @tf.function
    def group_of_three():
        return tf.constant(state.group_of(3))

    assert int(group_of_three()) == 3
