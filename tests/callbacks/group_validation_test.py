"""Callbacks: each group's validation, the sentinel."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging

import tf_xshard
from tests.support import fitting
from tests.support import group_training
from tests.support import replicas
from tf_xshard.group_state import divergence


@pytest.fixture
def logged(monkeypatch):
    lines = []
    monkeypatch.setattr(
        logging, "warning", lambda text, *args: lines.append(text % args)
    )
    return lines


PAIR = [[0], [1]]


def test_each_groups_validation_is_in_the_history():
    model = group_training.compiled(replicas.mirrored(2), groups=PAIR)
    x, y = group_training.data(40)
    history = fitting.fit(
        model,
        [tf_xshard.GroupValidation((x, y), every=2, batch_size=16)],
        validation_data=(x[:32], y[:32]),
    )
    rows = tf_xshard.GroupState(model).evaluate(x, y, batch_size=16)
    for name, row in zip(["group_0", "group_1", "ensemble"], rows, strict=True):
        for metric in ("loss", "accuracy"):
            assert history[f"val_{name}_{metric}"] == [row[metric]]
    assert len(history["loss"]) == len(history["val_loss"]) == 2
    assert history["val_group_0_loss"] != history["val_group_1_loss"]


def test_the_ensemble_and_the_number_of_batches_can_be_chosen():
    model = group_training.compiled(replicas.mirrored(2), groups=PAIR)
    x, y = group_training.data(40)
    seen = []
    history = fitting.fit(
        model,
        [
            tf_xshard.GroupValidation(
                (x, y), batch_size=16, steps=1, ensemble=False
            ),
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: seen.append(dict(logs))
            ),
        ],
        epochs=1,
    )
    state = tf_xshard.GroupState(model)
    rows = state.evaluate(x[:16], y[:16], batch_size=16, ensemble=False)
    assert rows.column("group") == [0, 1]
    assert len(set(rows.column("loss"))) == 2
    for group, loss in enumerate(rows.column("loss")):
        assert history[f"val_group_{group}_loss"] == [loss]
        assert seen[0][f"val_group_{group}_loss"] == loss
    assert not [name for name in history if "ensemble" in name]


def _spoil(strategy, variable, replica, by=0.25):
    copy = strategy.experimental_local_results(variable.value)[replica]
    copy.assign(copy + tf.cast(by, copy.dtype))


class _SpoilAt(keras.callbacks.Callback):
    """Replica 3 of group 1 holds something else, from a batch on."""

    def __init__(self, variable_of, batch):
        super().__init__()
        self.variable_of, self.at = variable_of, batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.at:
            _spoil(
                self.model.distribute_strategy, self.variable_of(self.model), 3
            )


@pytest.mark.parametrize(
    "kind, variable_of",
    [
        ("mirrored", lambda model: model.layers[0].kernel),
        ("tpu", lambda model: model.optimizer.variables[-1]),
    ],
    ids=["weight", "slot"],
)
def test_the_sentinel_raises(kind, variable_of):
    strategy = replicas.STRATEGIES[kind](4)
    model = group_training.compiled(strategy)
    spoil = _SpoilAt(variable_of, 1)
    with pytest.raises(RuntimeError, match="After batch 1") as error:
        fitting.fit(model, [spoil, tf_xshard.DivergenceSentinel(every=2)])
    text = str(error.value)
    assert variable_of(model).path in text
    assert "in group 1: replicas [3] differ by up to 0.25" in text
    assert "group 0" not in text


def test_the_sentinel_warns_and_repairs(logged):
    strategy = replicas.mirrored(4)
    groups = [[0, 1, 2, 3]]

    def run(action):
        model = group_training.compiled(strategy, groups=groups)
        spoil = _SpoilAt(lambda model: model.layers[0].kernel, 2)
        logged.clear()
        fitting.fit(
            model, [spoil, tf_xshard.DivergenceSentinel(1, action)], epochs=1
        )
        return replicas.values(strategy, model.layers[0].kernel)

    values = run("warn")
    assert len(logged) == 2  # Batches 2 and 3.
    assert not np.array_equal(values[0], values[3])
    values = run("repair")
    assert len(logged) == 1 and "value that most replicas held" in logged[0]
    for value in values[1:]:
        np.testing.assert_array_equal(value, values[0])
    # The majority was right: as with nothing spoilt.
    model = group_training.compiled(strategy, groups=groups)
    fitting.fit(model, [], epochs=1)
    np.testing.assert_array_equal(
        values[0], replicas.values(strategy, model.layers[0].kernel)[0]
    )


@pytest.mark.parametrize(
    "optimizer, variable_of, name",
    [
        ("momentum", lambda model: model.layers[0].kernel, ""),
        # What AGN's workers train may differ; their center may not.
        ("agn", lambda model: model.optimizer.center_variables[0], "center/"),
    ],
)
def test_the_sentinel_looks_before_training_begins(
    optimizer, variable_of, name
):
    strategy = replicas.mirrored(4)
    model = group_training.compiled(strategy, optimizer)
    variable = variable_of(model)
    _spoil(strategy, variable, 3)
    text = f"When training began.*{name}{variable.path}' in group 1.*3"
    with pytest.raises(RuntimeError, match=text):
        fitting.fit(model, [tf_xshard.DivergenceSentinel()])


@pytest.mark.parametrize(
    "optimizer, kind",
    # "towers" are around the optimizer with momentum.
    replicas.in_turn(["towers", "agn", "agn_updates"], ["mirrored", "tpu"]),
)
def test_the_sentinel_never_fires_on_what_is_meant_to_differ(kind, optimizer):
    """Statistics, random states, AGN's own, open rounds, other groups."""
    strategy = replicas.STRATEGIES[kind](4)
    model = group_training.compiled(strategy, optimizer)
    seeds = model.layers[2].seed_generator.state
    for r in range(4):
        _spoil(strategy, seeds, r, r)
    swap = [tf_xshard.SwapCenterWeights(swap_on_epoch=True)]
    states = []

    def check(batch, logs):
        states.append(group_training.values(model))

    def check_again(batch, logs):
        group_training.assert_same(group_training.values(model), states[-1])

    fitting.fit(
        model,
        [
            *(swap if "agn" in optimizer else []),
            tf_xshard.DivergenceSentinel(1),
            keras.callbacks.LambdaCallback(on_train_batch_end=check),
            tf_xshard.DivergenceSentinel(1, "repair"),
            keras.callbacks.LambdaCallback(on_train_batch_end=check_again),
        ],
        validation_data=group_training.data(16),
    )
    assert len(states) == 8


def test_one_device_and_a_model_that_is_built_by_the_first_step(tmp_path):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    # It could not resume from what it would save.
    with pytest.raises(ValueError, match="has not been built, so it has no"):
        fitting.fit(model, [tf_xshard.GroupCheckpoint(tmp_path)])
    history = fitting.fit(
        model,
        [
            tf_xshard.DivergenceSentinel(1),
            tf_xshard.GroupValidation(group_training.data(8)),
        ],
    )
    assert len(history["loss"]) == 2


def test_nan_and_minus_zero_are_no_difference():
    strategy = replicas.mirrored(2)
    with strategy.scope():
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
