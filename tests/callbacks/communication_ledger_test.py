"""What `fit` logs of its communication is what was planned."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import training
from tf_xshard.collectives import counters

NAMES = ("collectives", "bytes", "bytes_sent")


def _model(strategy, optimizer_fn):
    with strategy.scope():
        model = training.model()
        model.compile(optimizer_fn(), "mse")
    return model


def _fit(model, ledger, epochs=2, **kwargs):
    return model.fit(
        *training.data(),
        batch_size=64,
        epochs=epochs,
        verbose=0,
        callbacks=[ledger],
        **kwargs,
    ).history


def _planned(plan, num_steps=4):
    return [
        plan.collectives_per_step * num_steps,
        plan.bytes_per_step * num_steps,
        plan.bytes_sent_per_step * num_steps,
    ]


def _logged(history):
    return [history[f"communication_{name}"] for name in NAMES]


@pytest.mark.parametrize(
    "kind, optimizer_fn",
    [
        (
            "mirrored",
            lambda: tf_xshard.TowerOptimizer(keras.optimizers.SGD(), 2),
        ),
        (
            "tpu",
            lambda: tf_xshard.CrossShardOptimizer(
                keras.optimizers.SGD(), group_assignment=[[0, 1], [2, 3]]
            ),
        ),
    ],
)
def test_it_agrees_with_the_plan(kind, optimizer_fn):
    model = _model(replicas.STRATEGIES[kind](4), optimizer_fn)
    planned = _planned(tf_xshard.communication_plan(model))
    ledger = tf_xshard.CommunicationLedger()
    history = _fit(model, ledger)
    assert _logged(history) == [[number] * 2 for number in planned]
    assert [ledger.totals[f"communication_{n}"] for n in NAMES] == [
        2 * number for number in planned
    ]
    seconds = history.get("communication_seconds")
    assert (seconds is None) if kind == "tpu" else min(seconds) > 0


def test_without_it_a_step_has_no_timestamps():
    """Before, with and after; a model that has been trained is traced anew."""
    strategy = replicas.mirrored(2)
    model = _model(
        strategy,
        lambda: tf_xshard.CrossShardOptimizer(keras.optimizers.SGD()),
    )
    data = training.data()
    model.fit(*data, batch_size=64, verbose=0)
    plain = model.train_function
    ledger = tf_xshard.CommunicationLedger()
    seconds = _fit(model, ledger, epochs=1)["communication_seconds"]
    assert seconds[0] > 0
    assert model.train_function is plain
    # Again, with the same callback: it goes on adding.
    seconds += _fit(model, ledger, epochs=1)["communication_seconds"]
    assert ledger.totals["communication_seconds"] == pytest.approx(sum(seconds))

    def operations():
        step = tf.function(
            lambda: strategy.run(
                lambda: model.optimizer.apply(
                    [tf.ones(v.shape) for v in model.trainable_variables]
                )
            ),
            autograph=False,
        )
        return [
            op.type
            for op in step.get_concrete_function().graph.get_operations()
        ]

    assert "Timestamp" not in operations()
    with counters.timing():
        assert operations().count("Timestamp") == 2 * 2


def test_one_device():
    model = _model(
        replicas.mirrored(1),
        lambda: tf_xshard.CrossShardOptimizer(keras.optimizers.SGD()),
    )
    history = _fit(model, tf_xshard.CommunicationLedger(), epochs=1)
    assert _logged(history) == [[0.0]] * 3


def test_later_callbacks_see_it():
    seen = []
    model = _model(
        replicas.mirrored(2),
        lambda: tf_xshard.CrossShardOptimizer(keras.optimizers.SGD()),
    )
    model.fit(
        *training.data(),
        batch_size=64,
        verbose=0,
        callbacks=[
            tf_xshard.CommunicationLedger(),
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: seen.append(dict(logs))
            ),
        ],
    )
    assert seen[0]["communication_bytes"] == 4 * 4 * 161
    assert np.isfinite(seen[0]["communication_seconds"])


class _Broken(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise KeyError("broken")


def _compiled(rate=0.1, **kwargs):
    strategy = replicas.mirrored(2)
    with strategy.scope():
        model = training.model()
        model.compile(
            tf_xshard.CrossShardOptimizer(keras.optimizers.SGD(rate)),
            "mse",
            **kwargs,
        )
    return model


def test_after_an_error_the_next_fit_is_untimed():
    model = _compiled()
    with pytest.raises(KeyError, match="broken"):
        model.fit(
            *training.data(),
            batch_size=64,
            verbose=0,
            callbacks=[tf_xshard.CommunicationLedger(), _Broken()],
        )
    assert not counters._is_timing()
    timed = model.train_function
    model.fit(*training.data(), batch_size=64, verbose=0)
    assert model.train_function is timed.untimed


def test_two_ledgers():
    model = _compiled()
    ledgers = [tf_xshard.CommunicationLedger() for _ in range(2)]
    model.fit(*training.data(), batch_size=64, verbose=0, callbacks=ledgers)
    assert ledgers[0].totals["communication_bytes"] == 4 * 4 * 161
    assert not hasattr(model.train_function, "untimed")


def test_one_ledger_for_two_models():
    """And for one that is compiled again: each trains by its own step."""
    first, second = _compiled(), _compiled(rate=0.0)
    ledger = tf_xshard.CommunicationLedger()
    _fit(first, ledger, epochs=1)
    before = [np.array(w) for w in first.get_weights()]
    still = [np.array(w) for w in second.get_weights()]
    _fit(second, ledger, epochs=1)
    for model, expected in ((first, before), (second, still)):
        for mine, theirs in zip(model.get_weights(), expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    second.steps_per_execution = 2
    _fit(second, ledger, epochs=1)
    assert int(second.optimizer.iterations.numpy()) == 8


@pytest.mark.parametrize("value", [0, "a", 1.5])
def test_bad_rows(value):
    with pytest.raises((TypeError, ValueError), match="rows_per_step"):
        tf_xshard.CommunicationLedger(rows_per_step=value)


def test_one_ledger_on_a_tpu_and_elsewhere():
    """The plan of the first is not that of the second."""
    ledger = tf_xshard.CommunicationLedger()
    make = lambda: tf_xshard.CrossShardOptimizer(keras.optimizers.SGD())
    _fit(_model(replicas.tpu(2), make), ledger, epochs=1)
    history = _fit(_model(replicas.mirrored(2), make), ledger, epochs=1)
    assert history["communication_seconds"][0] > 0
