"""Callbacks: saving and going on, each group's validation, the sentinel."""

import json
import os
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging

import tf_xshard
from tests import group_training
from tests import replicas
from tests import resume_program
from tf_xshard import group_divergence

ON = pytest.mark.parametrize("kind", ["mirrored", "tpu"])


@pytest.fixture
def logged(monkeypatch):
    lines = []
    monkeypatch.setattr(
        logging, "warning", lambda text, *args: lines.append(text % args)
    )
    return lines


def _fit(model, callbacks, epochs=2, **options):
    x, y = group_training.data()
    return model.fit(
        tf.data.Dataset.from_tensor_slices((x, y)).batch(16),
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
        **options,
    ).history


class _Stop(Exception):
    pass


class _StopAt(keras.callbacks.Callback):
    """Ends `fit` at a batch, as a crash would."""

    def __init__(self, epoch, batch):
        super().__init__()
        self.at = epoch, batch

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.at:
            raise _Stop


@pytest.mark.parametrize(
    "every, stop, optimizer, kind",
    [
        ("epoch", (1, 1), "adam", "mirrored"),
        (1, (0, 2), "towers", "mirrored"),
        (3, (1, 2), "agn", "tpu"),
        pytest.param(
            *(2, (1, 2), "agn_updates", "mirrored"), marks=replicas.in_full
        ),
        pytest.param(*(4, (1, 0), "adam", "tpu"), marks=replicas.in_full),
    ],
)
def test_goes_on_where_it_ended(every, stop, optimizer, kind, tmp_path):
    """Weights, logs and all, as with no interruption, to the bit."""
    strategy = replicas.STRATEGIES[kind](4)
    model = group_training.compiled(strategy, optimizer)
    # Its own directory: saving must not change training.
    expected = _fit(
        model, [tf_xshard.GroupCheckpoint(tmp_path / "a", every)], epochs=3
    )
    checkpoint = tf_xshard.GroupCheckpoint(tmp_path / "b", every)
    stopped = group_training.compiled(strategy, optimizer)
    with pytest.raises(_Stop):
        _fit(stopped, [checkpoint, _StopAt(*stop)], epochs=3)
    resumed = group_training.compiled(strategy, optimizer, seed=7)
    position = tf_xshard.GroupCheckpoint.position(tmp_path / "b")
    done = 4 * stop[0] + stop[1] + 1
    steps = 4 if every == "epoch" else every
    assert 4 * position.epoch + position.step == done // steps * steps
    got = _fit(
        resumed, [tf_xshard.GroupCheckpoint(tmp_path / "b", every)], epochs=3
    )
    group_training.assert_same(
        group_training.values(resumed), group_training.values(model)
    )
    assert len(got["loss"]) == 3 - position.epoch
    for name, values in got.items():
        assert values == expected[name][position.epoch :]
    # The model's next `fit` begins with its own first epoch.
    assert len(_fit(resumed, [])["loss"]) == 2


def test_a_finished_run_is_not_trained_again(tmp_path):
    model = group_training.compiled(replicas.mirrored(4))
    checkpoint = tf_xshard.GroupCheckpoint(tmp_path)
    _fit(model, [checkpoint])
    before = group_training.values(model)
    again = group_training.compiled(replicas.mirrored(4), seed=9)
    assert _fit(again, [checkpoint]) == {}
    # Metrics are made by the first step.
    weights = len(group_training.variables(again)) - len(
        again.metrics_variables
    )
    assert weights > 20
    for mine, theirs in zip(
        again.weights + again.optimizer.variables,
        model.weights + model.optimizer.variables,
        strict=True,
    ):
        group_training.assert_same(
            [replicas.values(replicas.mirrored(4), mine)],
            [replicas.values(replicas.mirrored(4), theirs)],
        )
    group_training.assert_same(group_training.values(model), before)


@pytest.mark.parametrize("keep, expected", [(1, [3]), (2, [2, 3]), (None, 4)])
def test_how_many_are_kept(keep, expected, tmp_path):
    model = group_training.compiled(replicas.mirrored(2), groups=[[0], [1]])
    # What a crash may have left behind.
    os.makedirs(tmp_path / "epoch-00000-step-00000001")
    (tmp_path / "notes.txt").write_text("mine")
    _fit(model, [tf_xshard.GroupCheckpoint(tmp_path, keep=keep)], epochs=3)
    found = sorted(name for name in os.listdir(tmp_path) if "epoch" in name)
    if keep is None:
        assert len(found) == expected
    else:
        assert found == [f"epoch-{e:05d}-step-00000000" for e in expected]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_damaged_save_is_refused_when_fit_begins(tmp_path):
    model = group_training.compiled(replicas.mirrored(2), groups=[[0], [1]])
    _fit(model, [tf_xshard.GroupCheckpoint(tmp_path)])
    save = tmp_path / "epoch-00002-step-00000000"
    [data] = [name for name in os.listdir(save) if "data" in name]
    os.truncate(save / data, 100)
    before = group_training.values(model)
    with pytest.raises(ValueError, match=data):
        _fit(model, [tf_xshard.GroupCheckpoint(tmp_path)], epochs=3)
    group_training.assert_same(group_training.values(model), before)


def test_steps_per_execution_and_regroup(tmp_path):
    """Six steps in twos; then other groups take the mean."""
    strategy = replicas.mirrored(4)
    x, y = group_training.data(96)

    def fit(groups, epochs, **options):
        with strategy.scope():
            model = group_training.network()
            model.compile(
                optimizer=group_training.OPTIMIZERS["adam"](groups),
                loss="mse",
                steps_per_execution=2,
            )
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
        history = model.fit(
            dataset,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=[tf_xshard.GroupCheckpoint(tmp_path, 4, **options)],
        )
        return model, history

    fit([[0, 2], [1, 3]], 1)
    assert tf_xshard.GroupCheckpoint.position(tmp_path) == (0, 4)
    with pytest.raises(ValueError, match="regroup"):
        fit([[0, 1], [2, 3]], 1)
    model, history = fit([[0, 1], [2, 3]], 1, regroup="mean")
    assert history.epoch == [0]
    # Two more steps from the mean.
    for value in replicas.values(strategy, model.optimizer.iterations):
        assert value == 6


def _killed_and_resumed(tmp_path, kind):
    def run(*arguments, code=0):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.resume_program",
                kind,
                str(tmp_path),
                *arguments,
            ],
            stdout=subprocess.PIPE,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            text=True,
            check=False,
        )
        assert done.returncode == code, done.returncode
        return done.stdout.splitlines()[-1] if done.stdout else None

    run("killed", code=-signal.SIGKILL)
    position = tf_xshard.GroupCheckpoint.position(tmp_path / "saves")
    assert position == resume_program.SAVED_AT
    return json.loads(run("resumed"))


@replicas.on_tpu_in_full
def test_a_killed_process_goes_on_to_the_bit(kind, tmp_path):
    """Two groups of four: every variable of every replica, after 18 steps."""
    if kind == "tpu":
        pytest.importorskip("jaxlib")
    result = _killed_and_resumed(tmp_path, kind)
    resumed, uninterrupted = result["resumed"], result["uninterrupted"]
    assert len(resumed) > 20 and resumed == uninterrupted
    kernel = resumed[0]
    assert len(set(kernel)) == 2  # Two groups, each of four equal replicas.
    assert [len(set(kernel[r] for r in g)) for g in resume_program.GROUPS] == [
        1,
        1,
    ]
    assert result["logs"]["resumed"] == result["logs"]["uninterrupted"][1:]


def test_a_fit_that_is_left_while_it_skips_leaves_nothing_behind(tmp_path):
    """Neither skipped batches nor the first epoch, for the next `fit`."""
    strategy = replicas.mirrored(2)

    def model():
        return group_training.compiled(strategy, groups=[[0], [1]])

    with pytest.raises(_Stop):
        _fit(
            model(),
            [tf_xshard.GroupCheckpoint(tmp_path, 3), _StopAt(1, 3)],
            epochs=3,
        )
    assert tf_xshard.GroupCheckpoint.position(tmp_path) == (1, 2)
    resumed = model()
    with pytest.raises(_Stop):
        _fit(
            resumed,
            [tf_xshard.GroupCheckpoint(tmp_path, 3), _StopAt(1, 0)],
            epochs=3,
        )
    assert int(resumed.optimizer.iterations.numpy()) == 6
    history = _fit(resumed, [], epochs=2)
    assert len(history["loss"]) == 2
    assert int(resumed.optimizer.iterations.numpy()) == 6 + 8


def test_what_was_regrouped_is_regrouped_once(tmp_path):
    strategy = replicas.mirrored(2)

    def fit(groups, epochs, **options):
        model = group_training.compiled(strategy, groups=groups)
        _fit(model, [tf_xshard.GroupCheckpoint(tmp_path, **options)], epochs)
        return replicas.values(strategy, model.layers[0].kernel)

    fit([[0, 1]], 1)
    before = fit([[0], [1]], 2, regroup="first")
    assert not np.array_equal(*before)
    # A script that is started again, with nothing left to do.
    after = fit([[0], [1]], 2, regroup="first")
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


def test_steps_that_can_not_be_skipped_are_refused(tmp_path):
    strategy = replicas.mirrored(2)
    model = group_training.compiled(strategy, groups=[[0], [1]])
    with pytest.raises(_Stop):
        _fit(model, [tf_xshard.GroupCheckpoint(tmp_path, 3), _StopAt(0, 2)])
    model.steps_per_execution = 2
    with pytest.raises(ValueError, match="after 3 steps .* takes 2 at once"):
        _fit(model, [tf_xshard.GroupCheckpoint(tmp_path, 3)])


def test_metrics_of_one_name_are_restored_in_mid_epoch(tmp_path):
    strategy = replicas.mirrored(2)
    x, y = group_training.data(96)

    def fit(directory, *more):
        with strategy.scope():
            keras.utils.set_random_seed(1)
            inputs = keras.layers.Input((4,))
            model = keras.Model(
                inputs,
                {
                    name: keras.layers.Dense(1, "sigmoid", name=name)(inputs)
                    for name in "ab"
                },
            )
            model.compile(
                optimizer=tf_xshard.CrossShardOptimizer(
                    keras.optimizers.Adam(0.1), group_assignment=[[0], [1]]
                ),
                loss={"a": "mse", "b": "mse"},
                metrics={"a": ["accuracy"], "b": ["accuracy"]},
            )
        dataset = tf.data.Dataset.from_tensor_slices((x, {"a": y, "b": 1 - y}))
        return model.fit(
            dataset.batch(16),
            verbose=0,
            shuffle=False,
            callbacks=[tf_xshard.GroupCheckpoint(directory, 4), *more],
        ).history

    expected = fit(tmp_path / "a")
    with pytest.raises(_Stop):
        fit(tmp_path / "b", _StopAt(0, 4))
    assert fit(tmp_path / "b") == expected


def test_each_groups_validation_is_in_the_history():
    strategy = replicas.mirrored(4)
    model = group_training.compiled(strategy)
    x, y = group_training.data(40)
    history = _fit(
        model,
        [tf_xshard.GroupValidation((x, y), every=2, batch_size=16)],
        epochs=4,
        validation_data=(x[:32], y[:32]),
    )
    state = tf_xshard.GroupState(model)
    names = ["group_0", "group_1", "ensemble"]
    for name, row in zip(
        names, state.evaluate(x, y, batch_size=16), strict=True
    ):
        for metric in ("loss", "accuracy"):
            values = history[f"val_{name}_{metric}"]
            assert len(values) == 2
            assert values[-1] == row[metric]
    assert len(history["loss"]) == len(history["val_loss"]) == 4
    assert history["val_group_0_loss"] != history["val_group_1_loss"]


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


@ON
@pytest.mark.parametrize(
    "variable_of",
    [
        lambda model: model.layers[0].kernel,
        lambda model: model.optimizer.variables[-1],
    ],
    ids=["weight", "slot"],
)
def test_the_sentinel_raises(kind, variable_of):
    strategy = replicas.STRATEGIES[kind](4)
    model = group_training.compiled(strategy)
    spoil = _SpoilAt(variable_of, 1)
    with pytest.raises(RuntimeError, match="After batch 1") as error:
        _fit(model, [spoil, tf_xshard.DivergenceSentinel(every=2)])
    text = str(error.value)
    assert variable_of(model).path in text
    assert "in group 1: replicas [3] by up to 0.25" in text
    assert "group 0" not in text


def test_the_sentinel_warns_and_repairs(logged):
    strategy = replicas.mirrored(4)
    groups = [[0, 1, 2, 3]]

    def run(action):
        model = group_training.compiled(strategy, groups=groups)
        spoil = _SpoilAt(lambda model: model.layers[0].kernel, 2)
        logged.clear()
        _fit(model, [spoil, tf_xshard.DivergenceSentinel(1, action)], epochs=1)
        return replicas.values(strategy, model.layers[0].kernel)

    values = run("warn")
    assert len(logged) == 2  # Batches 2 and 3.
    assert not np.array_equal(values[0], values[3])
    values = run("repair")
    assert len(logged) == 1 and "value that most hold" in logged[0]
    for value in values[1:]:
        np.testing.assert_array_equal(value, values[0])
    # The majority was right: as with nothing spoilt.
    model = group_training.compiled(strategy, groups=groups)
    _fit(model, [], epochs=1)
    np.testing.assert_array_equal(
        values[0], replicas.values(strategy, model.layers[0].kernel)[0]
    )


def test_the_sentinel_looks_before_training_begins():
    strategy = replicas.mirrored(4)
    model = group_training.compiled(strategy)
    _spoil(strategy, model.layers[0].kernel, 2)
    with pytest.raises(RuntimeError, match="When training began.*group 0"):
        _fit(model, [tf_xshard.DivergenceSentinel()])


@replicas.on_tpu_in_full
@pytest.mark.parametrize("optimizer", group_training.OPTIMIZERS)
def test_the_sentinel_never_fires_on_what_is_meant_to_differ(kind, optimizer):
    """Statistics, random states, AGN's own, open rounds, other groups."""
    strategy = replicas.STRATEGIES[kind](4)
    model = group_training.compiled(strategy, optimizer)
    seeds = model.layers[2].seed_generator.state
    for r in range(4):
        _spoil(strategy, seeds, r, r)
    swap = [tf_xshard.SwapCenterWeights(swap_on_epoch=True)]
    x, y = group_training.data(16)
    repair = tf_xshard.DivergenceSentinel(1, "repair")
    states = []
    check = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: states.append(
            group_training.values(model)
        )
    )
    again = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: group_training.assert_same(
            group_training.values(model), states[-1]
        )
    )
    _fit(
        model,
        [
            *(swap if "agn" in optimizer else []),
            tf_xshard.DivergenceSentinel(1),
            check,
            repair,
            again,
        ],
        validation_data=(x, y),
    )
    assert len(states) == 8


def test_one_device_and_a_model_that_is_built_by_the_first_step(tmp_path):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    _fit(
        model,
        [
            tf_xshard.DivergenceSentinel(1),
            tf_xshard.GroupCheckpoint(tmp_path),
            tf_xshard.GroupValidation(group_training.data(8)),
        ],
    )
    assert tf_xshard.GroupCheckpoint.position(tmp_path) == (2, 0)


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
        rows = group_divergence.unequal(state, repair=False)
        expected = [] if difference is None else [difference]
        assert rows.column("largest_difference") == expected


def test_a_generator_is_refused_at_once():
    with pytest.raises(TypeError, match="a generator can be read only once"):
        tf_xshard.GroupValidation(x for x in ())


@pytest.mark.parametrize(
    "make, text",
    [
        (
            lambda: tf_xshard.GroupCheckpoint("d", every=0),
            "every must be a positive int or 'epoch', got 0",
        ),
        (
            lambda: tf_xshard.GroupCheckpoint("d", every="batch"),
            "every must be a positive int or 'epoch', got 'batch'",
        ),
        (
            lambda: tf_xshard.GroupCheckpoint("d", keep=0),
            "keep must be a positive int or None, got 0",
        ),
        (
            lambda: tf_xshard.GroupValidation(None, every=1.5),
            "every must be a positive int, got 1.5",
        ),
        (
            lambda: tf_xshard.DivergenceSentinel(every=True),
            "every must be a positive int, got True",
        ),
        (
            lambda: tf_xshard.DivergenceSentinel(action="stop"),
            "action must be one of .*, got 'stop'",
        ),
    ],
)
def test_arguments(make, text):
    with pytest.raises(ValueError, match=text):
        make()
