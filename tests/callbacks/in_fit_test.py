"""Every callback in three runs of `fit`, at which all tests here look.

`groups` has two groups of one replica, `workers` AGN's local variables, and
`alone` no strategy, and three steps a call.
"""

import os
import shutil
import signal
from typing import NamedTuple

import keras
import numpy as np
import pytest

import tf_xshard
from tests.support import events
from tests.support import fitting
from tests.support import group_training
from tests.support import replicas
from tests.support import seeds
from tests.support.versions import needs_multi_optimizer

CHECKPOINT = tf_xshard.GroupCheckpoint
PAIR = [[0], [1]]
SGD = keras.optimizers.SGD


class _Fit(NamedTuple):
    """A run: its model, history, what was seen, and where it was saved."""

    model: keras.Model
    history: dict
    seen: list
    folder: object


def _look(function, seen, *when):
    """Notes what a function returns, at some methods of a callback."""
    note = lambda *args, **kwargs: seen.append(function())
    return keras.callbacks.LambdaCallback(**dict.fromkeys(when, note))


def _saved(run, save, folder):
    """A directory that ends with one save of a run, as after a crash."""
    shutil.copytree(run.folder / "each" / save, folder / save)
    return folder


def _dense(*inputs, optimizer="sgd"):
    model = keras.Sequential([*inputs, keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


# Two groups.


def _fit_groups(directory, seed, *callbacks):
    model = group_training.compiled(
        replicas.mirrored(2), groups=PAIR, seed=seed
    )
    rates = []
    rate = lambda: model.optimizer.learning_rate.numpy()
    warmup = tf_xshard.LearningRateWarmup(0.2, 1)
    saves = CHECKPOINT(directory, every=1, keep=None)
    look = _look(rate, rates, "on_train_batch_begin")
    history = fitting.fit(model, [warmup, saves, *callbacks, look])
    return model, history, rates


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    folder = tmp_path_factory.mktemp("groups")
    validation = tf_xshard.GroupValidation(
        group_training.data(40), every=2, batch_size=16
    )
    return _Fit(*_fit_groups(folder / "each", 1, validation), folder)


def test_each_group_goes_on_where_it_ended(groups, tmp_path):
    """Weights, logs and all, as with no interruption; so is each rate."""
    directory = _saved(groups, "epoch-00001-step-00000002", tmp_path)
    assert CHECKPOINT.position(directory) == (1, 2)
    resumed, history, rates = _fit_groups(directory, 7)
    assert int(resumed.optimizer.iterations.numpy()) == 8
    after = group_training.values(resumed)
    assert np.abs(after[0][0] - after[0][1]).max() > 1e-3
    group_training.assert_same(
        after, group_training.values(groups.model), replicas.REPEATED
    )
    for name, values in history.items():
        expected = groups.history[name][1:]
        np.testing.assert_allclose(values, expected, 0, replicas.REPEATED)
    expected = [0.1, 0.125, 0.15, 0.175] + [0.2] * 4
    np.testing.assert_allclose(groups.seen, expected, rtol=1e-6)
    np.testing.assert_allclose(rates[2:], expected[6:])


def test_each_groups_validation_is_in_the_history(groups):
    """Every second epoch, with each group's weights, on all rows.

    `predict` uses the same weights; the ensemble's output is the mean.
    """
    x, y = group_training.data(40)
    before = group_training.values(groups.model)
    state = tf_xshard.GroupState(groups.model)
    predicted = [
        group_training.outputs(state.get_weights(group)["model"], x)
        for group in range(2)
    ]
    assert np.abs(predicted[0] - predicted[1]).max() > 0.01
    for name, group, one in (
        ("group_0", 0, predicted[0]),
        ("group_1", 1, predicted[1]),
        ("ensemble", None, np.mean(predicted, axis=0)),
    ):
        found = state.predict(x, group, batch_size=16)
        np.testing.assert_allclose(found, one, atol=1e-5)
        for metric, value in group_training.metrics(one, y).items():
            [got] = groups.history[f"val_{name}_{metric}"]
            np.testing.assert_allclose(got, value, rtol=1e-5)
    assert len(groups.history["loss"]) == 2
    group_training.assert_same(group_training.values(groups.model), before)


# Workers that exchange every third step.

X = np.random.default_rng(3).normal(size=(16, 2)).astype("float32")


def _agn():
    return tf_xshard.AGNOptimizer(SGD(0.1), communication_period=3)


def _shown(optimizer_fn, num_replicas=2):
    with replicas.mirrored(num_replicas).scope():
        model = _dense(keras.layers.Input((2,)), optimizer=optimizer_fn())
        model.optimizer.build(model.trainable_variables)
    return model


def _center_and_local(model):
    """Every replica's center and weights; first, if the center is shown."""
    values = lambda variable: replicas.values(replicas.mirrored(2), variable)
    return (
        model.optimizer.center_is_shown,
        list(map(values, model.optimizer.center_variables)),
        list(map(values, model.trainable_variables)),
    )


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """Four steps an epoch, an exchange after the third and the sixth."""
    folder, seen = tmp_path_factory.mktemp("workers"), []
    model = _shown(_agn)
    look = lambda: _center_and_local(model)
    history = fitting.fit(
        model,
        [
            tf_xshard.CommunicationLedger(),
            tf_xshard.DivergenceSentinel(1),
            _look(look, seen, "on_epoch_end"),
            tf_xshard.SwapCenterWeights(swap_on_epoch=True),
            keras.callbacks.ModelCheckpoint(folder / "model.keras"),
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: seen.append(dict(logs))
            ),
            _look(look, seen, "on_epoch_begin", "on_test_batch_end"),
        ],
        xy=(X, X[:, :1]),
        batch_size=4,
        validation_data=fitting.batches(X, X[:, :1]),
    )
    return _Fit(model, history, seen, folder)


def test_the_center_is_validated_and_saved(workers):
    """An epoch ends with the local variables, which the next one trains.

    So does training that resumes from the center.
    """
    found = [one for one in workers.seen if isinstance(one, tuple)]
    begun, validated, ended = found[3:]
    assert [one[0] for one in found] == [False, True, False] * 2
    group_training.assert_same(validated[2], ended[1])
    group_training.assert_same(validated[1], ended[2])
    saved = keras.models.load_model(workers.folder / "model.keras")
    assert saved.optimizer.center_is_shown
    center, local = ([of[0] for of in values] for values in ended[1:])
    group_training.assert_same([saved.get_weights()], [center])
    for one, other in zip(center, local, strict=True):
        assert np.abs(one - other).max() > 1e-4
    # The second epoch began with the local variables of the first one's end,
    # although the center was shown between them.
    group_training.assert_same(begun[2], found[2][2])
    same = lambda batch: group_training.assert_same(
        [saved.get_weights()], [local]
    )
    events.drive(saved, tf_xshard.SwapCenterWeights(), steps=1, on_batch=same)


def test_the_ledger_counts_the_exchanges(workers):
    """One in each epoch; callbacks after it see the numbers."""
    logs = [one for one in workers.seen if isinstance(one, dict)]
    plan = tf_xshard.communication_plan(workers.model)
    assert plan.collectives_per_step == 1 / 3
    assert plan.bytes_per_step == 4 * 3 / 3
    for name in ("collectives", "bytes", "bytes_sent"):
        planned = getattr(plan, f"{name}_per_step")
        assert workers.history[f"communication_{name}"] == [3 * planned] * 2
    assert min(workers.history["communication_seconds"]) > 0
    for name in (name for name in logs[0] if "communication" in name):
        assert [one[name] for one in logs] == workers.history[name]
    assert not hasattr(workers.model.train_function, "untimed")


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda: tf_xshard.TowerOptimizer(_agn(), 2),
        pytest.param(
            lambda: keras.optimizers.MultiOptimizer(
                keras.optimizers.OptimizerMap(_agn(), {".*/bias": _agn()})
            ),
            marks=needs_multi_optimizer,
        ),
    ],
    ids=["towers", "multi"],
)
def test_every_agn_optimizer_inside_shows_its_center(wrapped):
    model = _shown(wrapped, 1)
    inside = getattr(model.optimizer, "optimizers", None) or [
        model.optimizer.inner_optimizer
    ]
    centers = [v for one in inside for v in one.center_variables]
    assert len(centers) == 2
    for variables, value in ((model.trainable_variables, 1), (centers, 2)):
        for variable in variables:
            variable.assign(variable * 0 + value)
    swap = tf_xshard.SwapCenterWeights()
    swap.set_model(model)
    swap.on_train_begin()
    for method, value in ((swap.on_test_begin, 2), (swap.on_test_end, 1)):
        method()
        assert {float(w.min()) for w in model.get_weights()} == {value}
    swap.on_epoch_end(0)  # Not with `swap_on_epoch`.
    assert not any(one.center_is_shown for one in inside)
    model.optimizer = tf_xshard.CrossShardOptimizer(SGD(0.1))
    with pytest.raises(ValueError, match="compiled with an AGNOptimizer, got"):
        events.drive(model, swap)


# One device: two epochs of four steps in calls of three, two metrics of one
# name.


def _compiled_alone(seed, steps_per_execution=3):
    seeds.seed(seed)
    inputs = keras.layers.Input((4,))
    outputs = {
        name: keras.layers.Dense(1, "sigmoid", name=name)(inputs)
        for name in "ab"
    }
    model = keras.Model(inputs, outputs)
    model.compile(
        tf_xshard.CrossShardOptimizer(SGD(0.1, momentum=0.9)),
        loss={"a": "mse", "b": "mse"},
        metrics={"a": ["accuracy"], "b": ["accuracy"]},
        steps_per_execution=steps_per_execution,
    )
    model.optimizer.build(model.trainable_variables)
    return model


def _fit_alone(model, *callbacks, epochs=2):
    x, y = group_training.data()
    return fitting.fit(model, callbacks, epochs, xy=(x, {"a": y, "b": 1 - y}))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    model = _compiled_alone(1)
    saves = CHECKPOINT(folder / "each", 3, keep=None)
    history = _fit_alone(model, saves, CHECKPOINT(folder / "last"))
    return _Fit(model, history, [], folder)


@pytest.mark.parametrize("step", [3, 6], ids=["mid-epoch", "whole_epoch"])
def test_metrics_go_on_without_a_strategy(step, alone, tmp_path):
    """Keras makes them in the first step, which may be skipped."""
    directory = _saved(alone, f"epoch-00000-step-{step:08d}", tmp_path)
    assert CHECKPOINT.position(directory) == (0, step)
    resumed = _compiled_alone(2)
    history = _fit_alone(resumed, CHECKPOINT(directory, 3))
    assert int(resumed.optimizer.iterations.numpy()) == 8
    assert history.keys() == alone.history.keys() and len(history) == 5
    group_training.assert_same(
        [resumed.get_weights(), np.array(list(history.values()))],
        [alone.model.get_weights(), np.array(list(alone.history.values()))],
        replicas.REPEATED,
    )


def test_a_finished_run_is_not_trained_again(alone):
    again = _compiled_alone(9)
    assert _fit_alone(again, CHECKPOINT(alone.folder / "last")) == {}
    group_training.assert_same(
        [again.get_weights()], [alone.model.get_weights()]
    )
    # The model's next `fit` begins with its own first epoch.
    assert len(_fit_alone(again, epochs=1)["loss"]) == 1


def test_a_fit_that_is_left_leaves_nothing_behind(alone, tmp_path):
    """Neither skipped batches nor the first epoch, for the next `fit`."""
    directory = _saved(alone, "epoch-00001-step-00000003", tmp_path)

    def stop(batch, logs):
        raise RuntimeError("left")

    resumed = _compiled_alone(2, steps_per_execution=1)
    stops = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    with pytest.raises(RuntimeError, match="left"):
        _fit_alone(resumed, CHECKPOINT(directory), stops)
    assert int(resumed.optimizer.iterations.numpy()) == 7
    assert len(_fit_alone(resumed, epochs=1)["loss"]) == 1
    assert int(resumed.optimizer.iterations.numpy()) == 7 + 4
    with pytest.raises(ValueError, match="after 3 steps .* takes 2 at once"):
        _fit_alone(_compiled_alone(1, 2), CHECKPOINT(directory))


def test_what_can_not_resume_is_refused_when_fit_begins(alone, tmp_path):
    shutil.copytree(alone.folder / "last", tmp_path, dirs_exist_ok=True)
    wrapped = tf_xshard.CrossShardOptimizer(SGD(0.1, momentum=0.9))
    [data] = tmp_path.glob("*/*data*")
    for model, text in (
        (_dense(keras.layers.Input((4,)), optimizer=wrapped), "another model"),
        (_dense(), "has not been built, so it has no"),
        (_compiled_alone(3), data.name),
    ):
        if text == data.name:
            os.truncate(data, 100)
        before, found = model.get_weights(), sorted(tmp_path.rglob("*"))
        with pytest.raises(ValueError, match=text):
            fitting.fit(model, [CHECKPOINT(tmp_path)], epochs=3)
        group_training.assert_same([model.get_weights()], [before])
        assert sorted(tmp_path.rglob("*")) == found


def test_other_callbacks_take_a_model_that_the_first_step_builds():
    """Validation of some batches, without the ensemble."""
    (x, y), model = group_training.data(40), _dense()
    validation = tf_xshard.GroupValidation(
        (x, y), batch_size=16, steps=1, ensemble=False
    )
    callbacks = [tf_xshard.DivergenceSentinel(1), validation]
    history = fitting.fit(model, callbacks, epochs=1)
    assert history.keys() == {"loss", "val_group_0_loss"}
    expected = np.mean((model(x[:16]) - y[:16]) ** 2)
    np.testing.assert_allclose(
        history["val_group_0_loss"], [expected], rtol=1e-5
    )


# Without `fit`.


def test_how_many_are_kept(tmp_path):
    """Only what a save wrote is removed: a user's files stay."""
    saves = [f"epoch-{epoch:05d}-step-00000000" for epoch in (1, 2, 3)]
    foreign = (
        "notes.txt",
        f"{saves[0]}/mine.txt",
        # In directories with the name of a save, which holds none.
        "epoch-00000-step-00000100/mine.txt",
        "epoch-00000-step-00000200/state-of-my-thesis.txt",
    )
    for keep, last in ((1, [3]), (2, [2, 3]), (None, [1, 2, 3])):
        directory = tmp_path / str(keep)
        # A crash may have left this directory behind.
        crashed = directory / "epoch-00000-step-00000001"
        crashed.mkdir(parents=True)
        for name in foreign:
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text("mine")
        for epoch in range(3):
            events.drive(
                _dense(keras.layers.Input((1,))),
                CHECKPOINT(directory, keep=keep),
                initial_epoch=epoch,
                epochs=epoch + 1,
            )
        complete = [(directory / n / "manifest.json").exists() for n in saves]
        assert complete == [epoch in last for epoch in (1, 2, 3)]
        assert crashed.exists() == (keep is None)
        for name in foreign:
            assert (directory / name).read_text() == "mine"


def test_a_signal_saves_and_ends(tmp_path):
    """SIGTERM in the first of two calls of an epoch; handlers come back."""
    mine = lambda number, frame: None
    before = signal.signal(signal.SIGTERM, mine)
    sends = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: signal.raise_signal(
            signal.SIGTERM
        )
    )
    saves = CHECKPOINT(tmp_path, on_preemption=True)
    try:
        with pytest.raises(SystemExit) as ended:
            _fit_alone(_compiled_alone(1), sends, saves)
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM
    assert CHECKPOINT.position(tmp_path) == (0, 3)


def test_other_groups_take_those_of_the_first_once(tmp_path):
    """A script that is started again goes on with its own groups."""
    strategy = replicas.mirrored(2)

    def run(groups, values, **options):
        """Each replica's bias as training begins; batches assign the values."""
        model, seen = group_training.compiled(strategy, groups=groups), []
        bias = model.layers[0].bias

        def on_batch(batch):
            seen.append([v[0] for v in replicas.values(strategy, bias)])
            tf_xshard.GroupState(model).assign(
                bias, [np.full(6, one) for one in values]
            )

        saves = CHECKPOINT(tmp_path, 1, **options)
        events.drive(model, saves, steps=1, epochs=2, on_batch=on_batch)
        return seen[0]

    run([[0, 1]], [3.0])
    assert CHECKPOINT.position(tmp_path) == (1, 1)
    with pytest.raises(ValueError, match="regroup"):
        run(PAIR, ())
    assert run(PAIR, [5.0, 7.0], regroup="first") == [3.0, 3.0]
    assert run(PAIR, [0.0, 0.0], regroup="first") == [5.0, 7.0]
