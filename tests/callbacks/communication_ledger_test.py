"""What `fit` logs of its communication is what was planned.

`in_fit_test.py` counts the collectives of a `fit`.
"""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import events
from tests.support import replicas
from tests.support import training
from tf_xshard.collectives import counters

NAMES = ("collectives", "bytes", "bytes_sent")


def _model(strategy):
    with strategy.scope():
        model = training.model()
        model.compile(
            tf_xshard.CrossShardOptimizer(keras.optimizers.SGD()), "mse"
        )
        model.optimizer.build(model.trainable_variables)
    return model


@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_on_a_tpu_the_plan_is_multiplied(steps_per_execution):
    """The last execution of an epoch may have fewer steps."""
    model = _model(replicas.tpu(2))
    model.steps_per_execution = steps_per_execution
    plan = tf_xshard.communication_plan(model)
    ledger = tf_xshard.CommunicationLedger()
    ledger.set_model(model)
    ledger.set_params({"steps": 4})
    ledger.on_train_begin()
    for _ in range(2):
        logs = {}
        ledger.on_epoch_begin(0)
        for first in range(0, 4, steps_per_execution):
            ledger.on_train_batch_end(first + steps_per_execution - 1)
        ledger.on_epoch_end(0, logs)
        assert logs == {
            f"communication_{name}": 4 * getattr(plan, f"{name}_per_step")
            for name in NAMES
        }
    assert ledger.totals == {name: 2 * value for name, value in logs.items()}
    assert logs["communication_bytes"] == 4 * 4 * 161


def test_on_one_device_nothing_is_sent():
    model = _model(replicas.mirrored(1))
    [logs] = events.drive(model, tf_xshard.CommunicationLedger())
    assert logs == {f"communication_{n}": 0 for n in (*NAMES, "seconds")}


def test_op_determinism_forbids_clocks(monkeypatch):
    """`enable_op_determinism` lasts as long as the process, hence the patch."""

    def timestamp():
        raise tf.errors.FailedPreconditionError(None, None, "determinism")

    monkeypatch.setattr(tf, "timestamp", timestamp)
    model = _model(replicas.mirrored(2))
    [logs] = events.drive(model, tf_xshard.CommunicationLedger())
    assert list(logs) == [f"communication_{n}" for n in NAMES]


def _stub(name, seen):
    """A model whose train functions note their name and whether they time."""

    def function(of):
        return lambda iterator: seen.append((of, counters._is_timing()))

    def make_train_function(force):
        model.train_function = function(f"new {name}")

    model = types.SimpleNamespace(
        make_train_function=make_train_function,
        train_function=function(name),
        history=object(),
        optimizer=None,
        distribute_strategy=replicas.mirrored(2),
    )
    return model


def test_only_a_fit_with_it_is_timed():
    """One ledger for two models, of which each keeps its own function."""
    seen = []
    first, second = (_stub(name, seen) for name in ("first", "second"))
    plain = [one.train_function for one in (first, second)]
    ledger, other = (tf_xshard.CommunicationLedger() for _ in range(2))
    train = lambda model: lambda batch: model.train_function(None)
    for model in (first, second):
        events.drive(model, ledger, other, steps=1, on_batch=train(model))
    assert [one.train_function for one in (first, second)] == plain
    assert seen == [("new first", True), ("new second", True)]
    # An error ends a `fit` without `on_train_end`; the next has a new history.
    ledger.set_model(first)
    ledger.on_train_begin()
    first.history = object()
    train(first)(0)
    assert seen[2:] == [("first", False)]
    assert first.train_function is plain[0]


def test_a_step_has_timestamps_only_while_it_is_timed():
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable([1.0, 2.0])
        optimizer = tf_xshard.CrossShardOptimizer(keras.optimizers.SGD())
        optimizer.build([weight])

    def timestamps():
        step = tf.function(
            lambda: strategy.run(
                lambda: optimizer.apply([tf.ones([2])], [weight])
            ),
            autograph=False,
        )
        graph = step.get_concrete_function().graph
        return [op.type for op in graph.get_operations()].count("Timestamp")

    assert timestamps() == 0
    with counters.timing():
        assert timestamps() == 2 * 2
    assert np.all(weight.numpy() == [1, 2])
