"""GroupCheckpoint: saving in `fit`, and going on where it ended."""

import os
import shutil
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest

import tf_xshard
from tests.programs import resume_program
from tests.support import fitting
from tests.support import group_training
from tests.support import replicas
from tests.support import seeds

PAIR = [[0], [1]]


def _compiled(optimizer="momentum", groups=PAIR, seed=1):
    return group_training.compiled(
        replicas.mirrored(2), optimizer, groups, seed
    )


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
        ("epoch", (1, 1), "momentum", PAIR),
        (3, (1, 2), "agn", None),
        (1, (0, 2), "towers", PAIR),
    ],
)
def test_goes_on_where_it_ended(every, stop, optimizer, groups, tmp_path):
    """Weights, logs and all, as with no interruption; to the bit on CPUs."""

    def fit(directory, seed=1, *more):
        model = _compiled(optimizer, groups, seed)
        checkpoint = tf_xshard.GroupCheckpoint(directory, every)
        return model, fitting.fit(model, [checkpoint, *more], epochs=3)

    # Its own directory: saving must not change training.
    model, expected = fit(tmp_path / "a")
    with pytest.raises(_Stop):
        fit(tmp_path / "b", 1, _StopAt(*stop))
    position = tf_xshard.GroupCheckpoint.position(tmp_path / "b")
    done = 4 * stop[0] + stop[1] + 1
    steps = 4 if every == "epoch" else every
    assert 4 * position.epoch + position.step == done // steps * steps
    resumed, got = fit(tmp_path / "b", 7)
    group_training.assert_same(
        group_training.values(resumed),
        group_training.values(model),
        replicas.REPEATED,
    )
    assert len(got["loss"]) == 3 - position.epoch
    for name, values in got.items():
        np.testing.assert_allclose(
            values, expected[name][position.epoch :], 0, replicas.REPEATED
        )


def test_an_epoch_that_is_no_multiple_of_what_one_call_takes(tmp_path):
    """Four steps, three and one; also where all of an epoch were trained on."""

    def fit(directory, *more):
        model = _compiled()
        model.steps_per_execution = 3
        checkpoint = tf_xshard.GroupCheckpoint(directory, 3)
        history = fitting.fit(model, [checkpoint, *more], epochs=3)
        assert int(model.optimizer.iterations.numpy()) == 12
        return history, group_training.values(model)

    expected, values = fit(tmp_path / "a")
    for epoch, batch in ((1, 5), (1, 2)):
        directory = tmp_path / str(batch)
        with pytest.raises(_Stop):
            fit(directory, _StopAt(epoch, batch))
        position = tf_xshard.GroupCheckpoint.position(directory)
        assert position == (epoch, batch + 1)
        history, resumed = fit(directory)
        group_training.assert_same(resumed, values, replicas.REPEATED)
        for name in expected:
            np.testing.assert_allclose(
                history[name], expected[name][1:], 0, replicas.REPEATED
            )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The model of two epochs, and its directory."""
    directory = tmp_path_factory.mktemp("saves")
    model = _compiled()
    fitting.fit(model, [tf_xshard.GroupCheckpoint(directory)])
    return model, directory


def test_a_finished_run_is_not_trained_again(finished):
    model, directory = finished
    again = _compiled(seed=9)
    assert fitting.fit(again, [tf_xshard.GroupCheckpoint(directory)]) == {}
    strategy = replicas.mirrored(2)
    # Metrics are made by the first step.
    mine, theirs = (
        [
            replicas.values(strategy, v)
            for v in [*one.weights, *one.optimizer.variables]
        ]
        for one in (again, model)
    )
    assert len(mine) > 12
    group_training.assert_same(mine, theirs)
    # The model's next `fit` begins with its own first epoch.
    assert len(fitting.fit(again, [], epochs=1)["loss"]) == 1


def test_a_damaged_save_is_refused_when_fit_begins(finished, tmp_path):
    model, directory = finished
    shutil.copytree(directory, tmp_path / "saves")
    save = tmp_path / "saves" / "epoch-00002-step-00000000"
    [data] = [name for name in os.listdir(save) if "data" in name]
    os.truncate(save / data, 100)
    before = group_training.values(model)
    with pytest.raises(ValueError, match=data):
        fitting.fit(
            model, [tf_xshard.GroupCheckpoint(tmp_path / "saves")], epochs=3
        )
    group_training.assert_same(group_training.values(model), before)


def test_another_models_save_is_refused_when_fit_begins(finished):
    with replicas.mirrored(2).scope():
        other = keras.Sequential(
            [keras.layers.Input((4,)), keras.layers.Dense(1)]
        )
        other.compile(group_training.OPTIMIZERS["momentum"](PAIR), "mse")
    before = other.get_weights()
    with pytest.raises(ValueError, match="saved from another model"):
        fitting.fit(other, [tf_xshard.GroupCheckpoint(finished[1])], epochs=3)
    group_training.assert_same([other.get_weights()], [before])


FOREIGN = {
    "epoch-00000-step-00000100": "mine.txt",
    "epoch-00000-step-00000200": "state-of-my-thesis.txt",
}


def test_only_what_a_save_wrote_is_removed(tmp_path):
    """A user's file in a save's folder stays."""

    def fit(epochs):
        model = _compiled(groups=None)
        fitting.fit(model, [tf_xshard.GroupCheckpoint(tmp_path)], epochs)

    fit(1)
    first = tmp_path / "epoch-00001-step-00000000"
    (first / "mine.txt").write_text("mine")
    fit(2)
    assert sorted(os.listdir(tmp_path)) == [
        first.name,
        "epoch-00002-step-00000000",
    ]
    assert os.listdir(first) == ["mine.txt"]


class TwoOptimizers(keras.Model):
    """A custom train_step with an optimizer in an attribute."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.dense.build([None, 4])
        self.head_optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD()
        )
        self.built = True

    def call(self, x):
        return self.dense(x)


def test_optimizers_that_are_not_built_are_refused_when_fit_begins(tmp_path):
    with replicas.mirrored(2).scope():
        model = TwoOptimizers()
        model.compile(tf_xshard.CrossShardOptimizer(keras.optimizers.SGD()))
    with pytest.raises(
        ValueError, match="the optimizer 'head_optimizer' has not been built"
    ):
        fitting.fit(model, [tf_xshard.GroupCheckpoint(tmp_path)])
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("stop", [1, 3], ids=["mid-epoch", "whole_epoch"])
def test_metrics_are_restored_without_a_strategy(stop, tmp_path):
    """Keras makes them in the first step, which may be skipped."""

    def fit(directory, seed, *more):
        seeds.seed(seed)
        model = keras.Sequential(
            [keras.layers.Input((4,)), keras.layers.Dense(1)]
        )
        optimizer = tf_xshard.CrossShardOptimizer(keras.optimizers.Adam())
        model.compile(optimizer, "mse", metrics=["mae"])
        checkpoint = tf_xshard.GroupCheckpoint(directory, 2)
        history = fitting.fit(model, [checkpoint, *more])
        return model.get_weights(), history

    weights, expected = fit(tmp_path / "a", 1)
    with pytest.raises(_Stop):
        fit(tmp_path / "b", 1, _StopAt(0, stop))
    position = tf_xshard.GroupCheckpoint.position(tmp_path / "b")
    assert position == (0, stop + 1)
    resumed, got = fit(tmp_path / "b", 2)
    group_training.assert_same([resumed], [weights], replicas.REPEATED)
    assert list(got) == ["loss", "mae"]
    for name in got:
        np.testing.assert_allclose(
            got[name], expected[name], 0, replicas.REPEATED
        )


def test_how_many_are_kept(tmp_path):
    directories = {keep: tmp_path / str(keep) for keep in (1, 2, None)}
    for directory in directories.values():
        # A crash may have left this directory behind.
        os.makedirs(directory / "epoch-00000-step-00000001")
        (directory / "notes.txt").write_text("mine")
        # These have the name of a save, but GroupCheckpoint did not write them.
        for name, file in FOREIGN.items():
            os.makedirs(directory / name)
            (directory / name / file).write_text("mine")
    fitting.fit(
        _compiled(),
        [
            tf_xshard.GroupCheckpoint(directory, keep=keep)
            for keep, directory in directories.items()
        ],
        epochs=3,
    )
    for keep, directory in directories.items():
        found = sorted(
            n
            for n in os.listdir(directory)
            if "epoch" in n and n not in FOREIGN
        )
        if keep is None:
            assert len(found) == 4
        else:
            assert found == [
                f"epoch-{e:05d}-step-00000000" for e in range(4 - keep, 4)
            ]
        assert (directory / "notes.txt").read_text() == "mine"
        for name, file in FOREIGN.items():
            assert (directory / name / file).read_text() == "mine"


def test_steps_per_execution_and_regroup(tmp_path):
    """Six steps in twos; then other groups take those of the first, once."""
    data = group_training.data(96)

    def fit(groups, epochs, **options):
        model = _compiled(groups=groups)
        model.steps_per_execution = 2
        checkpoint = tf_xshard.GroupCheckpoint(tmp_path, 4, **options)
        fitting.fit(model, [checkpoint], epochs, data)
        return model, replicas.values(
            replicas.mirrored(2), model.layers[0].kernel
        )

    fit([[0, 1]], 1)
    assert tf_xshard.GroupCheckpoint.position(tmp_path) == (0, 4)
    with pytest.raises(ValueError, match="regroup"):
        fit(PAIR, 1)
    # Two more steps, and an epoch.
    model, before = fit(PAIR, 2, regroup="first")
    assert int(model.optimizer.iterations.numpy()) == 12
    assert tf_xshard.GroupCheckpoint.position(tmp_path) == (1, 6)
    assert not np.array_equal(*before)
    # A script that is started again, with nothing left to do.
    _, after = fit(PAIR, 2, regroup="first")
    group_training.assert_same([after], [before])


def test_a_killed_process_goes_on_to_the_bit(tmp_path):
    """Two groups of two: every variable of every replica, after 18 steps."""
    killed = subprocess.run(
        [
            *(sys.executable, "-m", "tests.programs.resume_program"),
            str(tmp_path),
        ],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        check=False,
        timeout=300,
    )
    assert killed.returncode == -signal.SIGKILL
    checkpoint = tf_xshard.GroupCheckpoint(tmp_path, every=5)
    position = checkpoint.position(tmp_path)
    assert position == resume_program.SAVED_AT
    model, logs = resume_program.train([], seed=1)
    resumed, resumed_logs = resume_program.train(
        [checkpoint], seed=2, epoch=position.epoch
    )
    group_training.assert_same(
        group_training.values(resumed), group_training.values(model)
    )
    assert resumed_logs == logs[1:]
    # Two groups, each of two equal replicas.
    strategy = replicas.mirrored(4, "CPU")
    kernel = replicas.values(strategy, model.layers[0].kernel)
    for r, other, is_equal in ((0, 2, True), (1, 3, True), (0, 1, False)):
        assert np.array_equal(kernel[r], kernel[other]) == is_equal


def test_a_fit_that_is_left_while_it_skips_leaves_nothing_behind(tmp_path):
    """Neither skipped batches nor the first epoch, for the next `fit`."""

    def fit(model, *more):
        checkpoint = tf_xshard.GroupCheckpoint(tmp_path, 3)
        return fitting.fit(model, [checkpoint, *more], epochs=3)

    with pytest.raises(_Stop):
        fit(_compiled(), _StopAt(1, 3))
    assert tf_xshard.GroupCheckpoint.position(tmp_path) == (1, 2)
    resumed = _compiled()
    with pytest.raises(_Stop):
        fit(resumed, _StopAt(1, 0))
    assert int(resumed.optimizer.iterations.numpy()) == 6
    assert len(fitting.fit(resumed, [])["loss"]) == 2
    assert int(resumed.optimizer.iterations.numpy()) == 6 + 8
    # Steps that can't be skipped.
    resumed.steps_per_execution = 4
    with pytest.raises(ValueError, match="after 2 steps .* takes 4 at once"):
        fit(resumed)


def test_metrics_of_one_name_are_restored_in_mid_epoch(tmp_path):
    x, y = group_training.data(96)

    def fit(directory, *more):
        seeds.seed(1)
        with replicas.mirrored(2).scope():
            inputs = keras.layers.Input((4,))
            outputs = {
                name: keras.layers.Dense(1, "sigmoid", name=name)(inputs)
                for name in "ab"
            }
            model = keras.Model(inputs, outputs)
            model.compile(
                group_training.OPTIMIZERS["momentum"](PAIR),
                loss={"a": "mse", "b": "mse"},
                metrics={"a": ["accuracy"], "b": ["accuracy"]},
            )
        return fitting.fit(
            model,
            [tf_xshard.GroupCheckpoint(directory, 4), *more],
            1,
            (x, {"a": y, "b": 1 - y}),
        )

    expected = fit(tmp_path / "a")
    with pytest.raises(_Stop):
        fit(tmp_path / "b", _StopAt(0, 4))
    assert fit(tmp_path / "b") == expected
