"""multi_worker_fit in one process: explicit, reversible, guarded by version."""

import itertools
import os
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow import trainer

import tf_xshard
from tests.support import replicas
from tests.support import training
from tf_xshard.collectives import watchdog
from tf_xshard.multi_worker import fit
from tf_xshard.private import names
from tf_xshard.private.keras import multi_worker_patches


def _places():
    return (
        keras.Model._maybe_symbolic_build,
        trainer.reduce_per_replica,
        trainer.TFEpochIterator,
        keras.Model.fit,
    )


def test_it_is_undone():
    before = _places()
    with pytest.raises(KeyError):
        with tf_xshard.multi_worker_fit():
            assert not set(before) & set(_places())
            raise KeyError
    assert _places() == before and "fit" not in vars(keras.Model)


def test_an_inner_one_has_the_timeout_of_the_outer_one():
    with tf_xshard.multi_worker_fit(
        tf_xshard.Communication("float16", timeout_seconds=7)
    ):
        with tf_xshard.multi_worker_fit():
            assert fit._active[-1].communication == (
                tf_xshard.Communication(timeout_seconds=7)
            )


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_it_is_undone_in_any_order(order):
    """Keras is as before with the last; the latest that holds counts."""
    before = _places()
    # The first and the last are equal.
    calls = [
        tf_xshard.multi_worker_fit(
            tf_xshard.Communication(timeout_seconds=seconds)
        )
        for seconds in (7, 8, 7)
    ]
    active = _places()
    holding = list(calls)
    for index in order:
        assert _places() == active
        assert fit._active == holding
        # A second call has no effect.
        for _ in range(2):
            calls[index].undo()
        holding.remove(calls[index])
    assert _places() == before and not fit._active


def test_nothing_changes_for_other_strategies():
    """`fit` trains as the step that plain Keras runs."""

    def trained(fit):
        _, weights = training.train(
            lambda: tf_xshard.CrossShardOptimizer(keras.optimizers.SGD(0.1)),
            replicas.mirrored(2),
            num_steps=2,
            fit=fit,
        )
        return weights

    stepped = trained(fit=False)
    with tf_xshard.multi_worker_fit():
        assert training.deviation(trained(fit=True), stepped) == 0.0


def test_a_keras_that_is_right_is_left_alone(monkeypatch, caplog):
    right = lambda *args, **kwargs: None
    owner = names.defining_class(keras.Model, "_maybe_symbolic_build")
    monkeypatch.setattr(trainer, "reduce_per_replica", right)
    monkeypatch.setattr(owner, "_maybe_symbolic_build", right)
    with tf_xshard.multi_worker_fit():
        assert _places()[:2] == (right, right)
    for name in ("reduce_per_replica", "_maybe_symbolic_build"):
        assert f"has changed {name} and removed" in caplog.text


def _of_another_text(values, strategy, reduction):
    # With the same mistake.
    v = values
    return strategy.reduce("MEAN", v, axis=0)


_WITHOUT_A_SOURCE = types.FunctionType(
    _of_another_text.__code__.replace(co_filename="<no file>"), {}
)


@pytest.mark.parametrize(
    "function, text",
    [
        (_of_another_text, "does not know whether fit works"),
        (_WITHOUT_A_SOURCE, "could not get source code"),
    ],
)
def test_a_keras_that_is_not_known_is_said_so(function, text, monkeypatch):
    monkeypatch.setattr(trainer, "reduce_per_replica", function)
    before = _places()
    with pytest.raises(RuntimeError, match=text):
        tf_xshard.multi_worker_fit()
    assert _places() == before


def test_the_sources_are_known():
    for function in _places()[:2]:
        name = function.__name__
        assert multi_worker_patches.state_of(name, function) == "wrong", (
            f"Keras {keras.__version__} has changed {name}. Look at what"
            " multi_worker_fit replaces."
        )


def test_what_another_worker_does_of_the_callbacks(tmp_path, monkeypatch):
    """Chief's files are the chief's; all take part in saving."""
    monkeypatch.setattr(fit, "_rank", lambda strategy: 2)
    seen = []

    class _Own(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(sorted(logs))

    model = training.model()
    model.compile("sgd", "mse")
    checkpoint = keras.callbacks.ModelCheckpoint(
        str(tmp_path / "model-{epoch}.keras")
    )
    callbacks = [
        _Own(),
        checkpoint,
        keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
        keras.callbacks.TensorBoard(str(tmp_path / "board")),
        keras.callbacks.BackupAndRestore(
            str(tmp_path / "backup"), delete_checkpoint=False
        ),
    ]
    x, y = training.data(16)
    with tf_xshard.multi_worker_fit():
        model.fit(x, y, epochs=2, callbacks=callbacks)
        model.fit(x, y, verbose=0)
        model.fit(x, y, verbose=0, callbacks=callbacks[0])
    assert seen == [["loss"]] * 3
    assert os.listdir(tmp_path) == ["backup_worker_2"]
    assert checkpoint.filepath == str(tmp_path / "model-{epoch}.keras")


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_when_a_batch_is_under_way(monkeypatch):
    """While Keras has it, and no longer; the longer timeout holds."""
    monkeypatch.setattr(fit, "_rank", lambda strategy: 0)
    seen = []

    def look(batch, logs=None):
        seen.append(
            [work.timeout_seconds for work in watchdog.WATCHDOG.batches]
        )

    times = "epoch_begin", "train_batch_begin", "train_batch_end", "epoch_end"
    callback = keras.callbacks.LambdaCallback(
        **{f"on_{time}": look for time in times}
    )
    model = training.model()
    model.compile(
        tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(),
            communication=tf_xshard.Communication(timeout_seconds=400),
        ),
        "mse",
    )
    # Keras learns only at the end how long these data are.
    dataset = tf.data.Dataset.from_tensor_slices(training.data(8))
    dataset = dataset.filter(lambda x, y: True)
    with tf_xshard.multi_worker_fit():
        model.fit(
            dataset.batch(8), verbose=0, shuffle=False, callbacks=callback
        )
        assert seen == [[], [400], [], [400], []]
        with pytest.raises(tf.errors.InvalidArgumentError):
            model.fit(np.zeros([4, 3]), np.zeros([4, 1]), verbose=0)
    assert not watchdog.WATCHDOG.batches


@pytest.mark.parametrize(
    "loop, rank, verbose, prints",
    [
        ("fit", 0, {}, True),
        ("evaluate", 1, {}, False),
        ("fit", 1, {}, False),
        ("evaluate", 1, {"verbose": 2}, True),
    ],
)
def test_the_chief_prints_and_others_do_not(
    loop, rank, verbose, prints, capfd, monkeypatch
):
    model = training.model()
    model.compile("sgd", "mse")
    monkeypatch.setattr(fit, "_rank", lambda strategy: rank)
    with tf_xshard.multi_worker_fit():
        getattr(model, loop)(np.zeros([4, 8]), np.zeros([4, 1]), **verbose)
    assert ("loss" in capfd.readouterr().out) == prints
