"""DivergenceSentinel finds what must not differ, and nothing else."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging

import tf_xshard
from tests.support import events
from tests.support import group_training
from tests.support import replicas
from tests.support import training
from tf_xshard.distribute import replica_variables
from tf_xshard.group_state import divergence

SENTINEL = tf_xshard.DivergenceSentinel


def _spoil(variable, replica, by=0.25):
    copy = replica_variables.copies(variable)[replica]
    copy.assign(copy + tf.cast(by, copy.dtype))


def _kernel(model):
    return model.layers[0].kernel


def _slot(model):
    return model.optimizer.variables[-1]


def _center(model):
    """What AGN's workers train may differ, not their center."""
    return model.optimizer.center_variables[0]


@pytest.mark.parametrize(
    "kind, optimizer, variable_of, prefix",
    [
        ("mirrored", "momentum", _kernel, ""),
        ("tpu", "momentum", _slot, ""),
        ("mirrored", "agn", _center, "center/"),
    ],
    ids=["weight", "slot", "center"],
)
def test_it_names_what_differs(kind, optimizer, variable_of, prefix):
    """After every other batch, and when training begins."""
    model = group_training.compiled(replicas.STRATEGIES[kind](4), optimizer)
    variable = variable_of(model)
    spoil = lambda batch: batch == 0 and _spoil(variable, 3)
    with pytest.raises(RuntimeError, match="After batch 1") as error:
        events.drive(model, SENTINEL(every=2), on_batch=spoil)
    text = f"{prefix}{variable.path}' in group 1: replicas [3] differ by up to"
    assert f"{text} 0.25" in str(error.value)
    assert "group 0" not in str(error.value)
    with pytest.raises(RuntimeError, match="When training began"):
        events.drive(model, SENTINEL())


@pytest.mark.parametrize("action, num_lines", [("warn", 3), ("repair", 1)])
def test_it_warns_or_repairs(action, num_lines, monkeypatch):
    """To the value of most replicas."""
    lines = []
    monkeypatch.setattr(
        logging, "warning", lambda text, *args: lines.append(text % args)
    )
    strategy = replicas.mirrored(4)
    model = group_training.compiled(strategy, groups=[[0, 1, 2, 3]])
    before = replicas.values(strategy, _kernel(model))
    spoil = lambda batch: batch == 1 and _spoil(_kernel(model), 0)
    events.drive(model, SENTINEL(1, action), on_batch=spoil)
    assert len(lines) == num_lines
    after = replicas.values(strategy, _kernel(model))
    if action == "warn":
        np.testing.assert_allclose(after[0], before[0] + 0.25)
        after[0] = before[0]
    else:
        assert "value that most replicas held" in lines[0]
    group_training.assert_same([after], [before])


def test_it_never_fires_on_what_is_meant_to_differ():
    """Statistics, random states, open rounds."""
    model = group_training.compiled(
        replicas.mirrored(2), "towers", groups=[[0, 1]]
    )
    _spoil(model.layers[2].seed_generator.state, 1, 1)
    strategy, step = model.distribute_strategy, training.step_of(model)
    rows = [
        training.distributed(strategy, one) for one in group_training.data(16)
    ]
    events.drive(model, SENTINEL(1), on_batch=lambda batch: step(*rows))
    after = group_training.values(model)
    events.drive(model, SENTINEL(1, "repair"))
    group_training.assert_same(group_training.values(model), after)
    assert sum(not np.array_equal(*values) for values in after) > 2


def test_nan_and_minus_zero_are_no_difference():
    with replicas.mirrored(2).scope():
        variable = keras.Variable([0.0, 1.0])
    state = tf_xshard.GroupState([variable])
    for one, other, difference in (
        ([np.nan, 0.0], [np.nan, -0.0], None),
        ([np.nan, 0.0], [0.0, 0.0], np.inf),
        ([np.inf, 1.0], [np.inf, 1.0], None),
        ([np.inf, 1.0], [-np.inf, 1.0], np.inf),
        ([1.0, 1.0], [1.0, 1.5], 0.5),
    ):
        state.replicas.assign(variable, np.float32([one, other]))
        rows = divergence.unequal(state.catalog(), state.replicas, repair=False)
        expected = [] if difference is None else [difference]
        assert rows.column("largest_difference") == expected
