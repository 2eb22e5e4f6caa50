"""GroupCheckpoint: saving in `fit`, and going on where it ended."""

import json
import os
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.programs import resume_program
from tests.support import group_training
from tests.support import replicas
from tests.support import seeds


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
    "every, stop, optimizer, groups",
    [
        ("epoch", (1, 1), "momentum", group_training.GROUPS),
        (3, (1, 2), "agn", None),
        (1, (0, 2), "towers", [[0], [1]]),
    ],
)
def test_goes_on_where_it_ended(every, stop, optimizer, groups, tmp_path):
    """Weights, logs and all, as with no interruption, to the bit."""
    strategy = replicas.mirrored(4 if groups == group_training.GROUPS else 2)

    def compiled(seed=1):
        return group_training.compiled(strategy, optimizer, groups, seed)

    model = compiled()
    # Its own directory: saving must not change training.
    expected = group_training.fit(
        model, [tf_xshard.GroupCheckpoint(tmp_path / "a", every)], epochs=3
    )
    checkpoint = tf_xshard.GroupCheckpoint(tmp_path / "b", every)
    stopped = compiled()
    with pytest.raises(_Stop):
        group_training.fit(stopped, [checkpoint, _StopAt(*stop)], epochs=3)
    resumed = compiled(seed=7)
    position = tf_xshard.GroupCheckpoint.position(tmp_path / "b")
    done = 4 * stop[0] + stop[1] + 1
    steps = 4 if every == "epoch" else every
    assert 4 * position.epoch + position.step == done // steps * steps
    got = group_training.fit(
        resumed, [tf_xshard.GroupCheckpoint(tmp_path / "b", every)], epochs=3
    )
    group_training.assert_same(
        group_training.values(resumed), group_training.values(model)
    )
    assert len(got["loss"]) == 3 - position.epoch
    for name, values in got.items():
        assert values == expected[name][position.epoch :]
    # The model's next `fit` begins with its own first epoch.
    assert len(group_training.fit(resumed, [])["loss"]) == 2


@pytest.mark.parametrize("stop", [(1, 5), (1, 2)])
def test_an_epoch_that_is_no_multiple_of_what_one_call_takes(stop, tmp_path):
    """Four steps, three and one; also where all of an epoch were trained on."""
    strategy = replicas.mirrored(2)

    def fit(directory, *more):
        model = group_training.compiled(strategy, groups=[[0], [1]])
        model.steps_per_execution = 3
        try:
            history = group_training.fit(
                model,
                [tf_xshard.GroupCheckpoint(directory, 3), *more],
                epochs=3,
            )
        except _Stop:
            return None
        assert int(model.optimizer.iterations.numpy()) == 12
        return history, group_training.values(model)

    expected, values = fit(tmp_path / "a")
    assert fit(tmp_path / "b", _StopAt(*stop)) is None
    assert tf_xshard.GroupCheckpoint.position(tmp_path / "b") == (
        stop[0],
        stop[1] + 1,
    )
    history, resumed = fit(tmp_path / "b")
    group_training.assert_same(resumed, values)
    for name in expected:
        assert history[name] == expected[name][1:]


def test_a_finished_run_is_not_trained_again(tmp_path):
    strategy = replicas.mirrored(2)
    model = group_training.compiled(strategy, groups=[[0], [1]])
    checkpoint = tf_xshard.GroupCheckpoint(tmp_path)
    group_training.fit(model, [checkpoint])
    before = group_training.values(model)
    again = group_training.compiled(strategy, groups=[[0], [1]], seed=9)
    assert group_training.fit(again, [checkpoint]) == {}
    # Metrics are made by the first step.
    weights = len(group_training.variables(again)) - len(
        again.metrics_variables
    )
    assert weights > 15
    for mine, theirs in zip(
        again.weights + again.optimizer.variables,
        model.weights + model.optimizer.variables,
        strict=True,
    ):
        group_training.assert_same(
            [replicas.values(strategy, mine)],
            [replicas.values(strategy, theirs)],
        )
    group_training.assert_same(group_training.values(model), before)


@pytest.mark.parametrize("keep, expected", [(1, [3]), (2, [2, 3]), (None, 4)])
def test_how_many_are_kept(keep, expected, tmp_path):
    model = group_training.compiled(replicas.mirrored(2), groups=[[0], [1]])
    # What a crash may have left behind.
    os.makedirs(tmp_path / "epoch-00000-step-00000001")
    (tmp_path / "notes.txt").write_text("mine")
    group_training.fit(
        model, [tf_xshard.GroupCheckpoint(tmp_path, keep=keep)], epochs=3
    )
    found = sorted(name for name in os.listdir(tmp_path) if "epoch" in name)
    if keep is None:
        assert len(found) == expected
    else:
        assert found == [f"epoch-{e:05d}-step-00000000" for e in expected]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_damaged_save_is_refused_when_fit_begins(tmp_path):
    model = group_training.compiled(replicas.mirrored(2), groups=[[0], [1]])
    group_training.fit(model, [tf_xshard.GroupCheckpoint(tmp_path)])
    save = tmp_path / "epoch-00002-step-00000000"
    [data] = [name for name in os.listdir(save) if "data" in name]
    os.truncate(save / data, 100)
    before = group_training.values(model)
    with pytest.raises(ValueError, match=data):
        group_training.fit(
            model, [tf_xshard.GroupCheckpoint(tmp_path)], epochs=3
        )
    group_training.assert_same(group_training.values(model), before)


def test_another_models_save_is_refused_when_fit_begins(tmp_path):
    strategy = replicas.mirrored(2)
    model = group_training.compiled(strategy, groups=[[0], [1]])
    group_training.fit(model, [tf_xshard.GroupCheckpoint(tmp_path)], epochs=1)
    with strategy.scope():
        other = keras.Sequential(
            [keras.layers.Input((2,)), keras.layers.Dense(1)]
        )
        other.compile(
            tf_xshard.CrossShardOptimizer(
                keras.optimizers.SGD(), group_assignment=[[0], [1]]
            ),
            "mse",
        )
    before = other.get_weights()
    x = np.ones([4, 2])
    with pytest.raises(ValueError, match="saved from another model"):
        other.fit(
            x,
            x[:, :1],
            epochs=2,
            verbose=0,
            callbacks=[tf_xshard.GroupCheckpoint(tmp_path)],
        )
    for one, its in zip(other.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, its)


def test_steps_per_execution_and_regroup(tmp_path):
    """Six steps in twos; then other groups take the mean."""
    strategy = replicas.mirrored(4)
    x, y = group_training.data(96)

    def fit(groups, epochs, **options):
        with strategy.scope():
            model = group_training.network()
            model.compile(
                optimizer=group_training.OPTIMIZERS["momentum"](groups),
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


def _killed_and_resumed(tmp_path):
    def run(*arguments, code=0):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.programs.resume_program",
                str(tmp_path),
                *arguments,
            ],
            stdout=subprocess.PIPE,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == code, done.returncode
        return done.stdout.splitlines()[-1] if done.stdout else None

    run("killed", code=-signal.SIGKILL)
    position = tf_xshard.GroupCheckpoint.position(tmp_path / "saves")
    assert position == resume_program.SAVED_AT
    return json.loads(run("resumed"))


def test_a_killed_process_goes_on_to_the_bit(tmp_path):
    """Two groups of two: every variable of every replica, after 18 steps."""
    result = _killed_and_resumed(tmp_path)
    resumed, uninterrupted = result["resumed"], result["uninterrupted"]
    assert len(resumed) > 20 and resumed == uninterrupted
    kernel = resumed[0]
    assert len(set(kernel)) == 2  # Two groups, each of two equal replicas.
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
        group_training.fit(
            model(),
            [tf_xshard.GroupCheckpoint(tmp_path, 3), _StopAt(1, 3)],
            epochs=3,
        )
    assert tf_xshard.GroupCheckpoint.position(tmp_path) == (1, 2)
    resumed = model()
    with pytest.raises(_Stop):
        group_training.fit(
            resumed,
            [tf_xshard.GroupCheckpoint(tmp_path, 3), _StopAt(1, 0)],
            epochs=3,
        )
    assert int(resumed.optimizer.iterations.numpy()) == 6
    history = group_training.fit(resumed, [], epochs=2)
    assert len(history["loss"]) == 2
    assert int(resumed.optimizer.iterations.numpy()) == 6 + 8


def test_what_was_regrouped_is_regrouped_once(tmp_path):
    strategy = replicas.mirrored(2)

    def fit(groups, epochs, **options):
        model = group_training.compiled(strategy, groups=groups)
        group_training.fit(
            model, [tf_xshard.GroupCheckpoint(tmp_path, **options)], epochs
        )
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
        group_training.fit(
            model, [tf_xshard.GroupCheckpoint(tmp_path, 3), _StopAt(0, 2)]
        )
    model.steps_per_execution = 2
    with pytest.raises(ValueError, match="after 3 steps .* takes 2 at once"):
        group_training.fit(model, [tf_xshard.GroupCheckpoint(tmp_path, 3)])


def test_metrics_of_one_name_are_restored_in_mid_epoch(tmp_path):
    strategy = replicas.mirrored(2)
    x, y = group_training.data(96)

    def fit(directory, *more):
        with strategy.scope():
            seeds.seed(1)
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
