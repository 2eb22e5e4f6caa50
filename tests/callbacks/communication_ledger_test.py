"""What `fit` logs of its communication is what was planned."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import fitting
from tests.support import replicas
from tests.support import training
from tf_xshard.collectives import counters

NAMES = ("collectives", "bytes", "bytes_sent")


def _cross_shard(rate=0.1, groups=None):
    return tf_xshard.CrossShardOptimizer(
        keras.optimizers.SGD(rate), group_assignment=groups
    )


def _model(strategy, optimizer_fn=_cross_shard):
    with strategy.scope():
        model = training.model()
        model.compile(optimizer_fn(), "mse")
    return model


def _fit(model, *callbacks, epochs=1):
    return fitting.fit(model, callbacks, epochs, training.data(), 64)


def test_one_ledger_agrees_with_the_plans_of_several_models():
    """On a TPU, on replicas, and on one device; a later callback sees it."""
    seen = []
    ledger = tf_xshard.CommunicationLedger()
    later = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(dict(logs))
    )
    totals = np.zeros(3)
    for strategy, optimizer_fn in (
        (replicas.tpu(4), lambda: _cross_shard(groups=[[0, 1], [2, 3]])),
        (
            replicas.mirrored(2),
            lambda: tf_xshard.TowerOptimizer(keras.optimizers.SGD(), 2),
        ),
        (replicas.mirrored(1), _cross_shard),
    ):
        model = _model(strategy, optimizer_fn)
        plan = tf_xshard.communication_plan(model)
        seen.clear()
        history = _fit(model, ledger, later, epochs=2)
        for index, name in enumerate(NAMES):
            planned = 4 * getattr(plan, f"{name}_per_step")
            logged = history[f"communication_{name}"]
            assert logged == [planned] * 2
            assert [logs[f"communication_{name}"] for logs in seen] == logged
            assert (planned > 0) == (strategy.num_replicas_in_sync > 1)
            totals[index] += 2 * planned
        assert [ledger.totals[f"communication_{n}"] for n in NAMES] == (
            totals.tolist()
        )
        seconds = history.get("communication_seconds")
        if replicas.is_tpu(strategy):
            assert seconds is None
        elif strategy.num_replicas_in_sync > 1:
            assert min(seconds) > 0
            assert seconds == [s["communication_seconds"] for s in seen]


class _Broken(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise KeyError("broken")


def test_without_it_a_step_has_no_timestamps():
    """Before, with and after; a model that has been trained is traced anew."""
    strategy = replicas.mirrored(2)
    model = _model(strategy)
    _fit(model)
    plain = model.train_function
    ledger, other = (tf_xshard.CommunicationLedger() for _ in range(2))
    seconds = _fit(model, ledger)["communication_seconds"]
    assert seconds[0] > 0
    assert model.train_function is plain
    # Again, beside another one: it goes on adding.
    seconds += _fit(model, ledger, other)["communication_seconds"]
    assert ledger.totals["communication_seconds"] == pytest.approx(sum(seconds))
    assert other.totals["communication_bytes"] == 4 * 4 * 161
    assert model.train_function is plain
    with pytest.raises(KeyError, match="broken"):
        _fit(model, ledger, _Broken())
    assert not counters._is_timing()
    assert model.train_function.untimed is plain
    _fit(model)
    assert model.train_function is plain

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


def test_one_ledger_for_two_models():
    """And for one that is compiled again: each trains by its own step."""
    strategy = replicas.mirrored(2)
    first = _model(strategy)
    second = _model(strategy, lambda: _cross_shard(0.0))
    ledger = tf_xshard.CommunicationLedger()
    _fit(first, ledger)
    before = [np.array(w) for w in first.get_weights()]
    still = [np.array(w) for w in second.get_weights()]
    _fit(second, ledger)
    for model, expected in ((first, before), (second, still)):
        for mine, theirs in zip(model.get_weights(), expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    second.steps_per_execution = 2
    _fit(second, ledger)
    assert int(second.optimizer.iterations.numpy()) == 8


def test_op_determinism_forbids_clocks(monkeypatch):
    """`enable_op_determinism` lasts as long as the process, hence the patch."""

    def timestamp():
        raise tf.errors.FailedPreconditionError(None, None, "determinism")

    model = _model(replicas.mirrored(2))
    monkeypatch.setattr(tf, "timestamp", timestamp)
    history = _fit(model, tf_xshard.CommunicationLedger())
    assert "communication_seconds" not in history
    plan = tf_xshard.communication_plan(model)
    assert history["communication_bytes"] == [4 * plan.bytes_per_step]
