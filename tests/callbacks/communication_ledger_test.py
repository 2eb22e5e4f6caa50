"""What `fit` logs of its communication is what was planned.

`in_fit_test.py` counts the collectives of a `fit`.
"""

import types

import keras
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


def test_on_a_tpu_the_plan_is_multiplied():
    """Two epochs of four steps, in executions of three and of one."""
    model = _model(replicas.tpu(2))
    plan = tf_xshard.communication_plan(model)
    ledger = tf_xshard.CommunicationLedger()
    ledger.set_model(model)
    ledger.set_params({"steps": 4})
    ledger.on_train_begin()
    for epoch in range(2):
        logs = {}
        ledger.on_epoch_begin(epoch)
        # Keras counts as if the last execution had three steps, too.
        for batch in (2, 5):
            ledger.on_train_batch_end(batch)
        ledger.on_epoch_end(epoch, logs)
        assert logs == {
            f"communication_{name}": 4 * getattr(plan, f"{name}_per_step")
            for name in NAMES
        }
    assert ledger.totals == {name: 2 * value for name, value in logs.items()}
    assert logs["communication_bytes"] == 4 * 4 * 161


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_on_one_device_nothing_is_sent(is_deterministic, monkeypatch):
    """`enable_op_determinism` lasts as long as the process, hence the patch."""

    def timestamp():
        raise tf.errors.FailedPreconditionError(None, None, "determinism")

    if is_deterministic:
        monkeypatch.setattr(tf, "timestamp", timestamp)
    model = _model(replicas.mirrored(1))
    [logs] = events.drive(model, tf_xshard.CommunicationLedger())
    names = NAMES if is_deterministic else (*NAMES, "seconds")
    assert logs == {f"communication_{name}": 0 for name in names}


def test_only_a_fit_with_it_is_timed():
    """With two ledgers; the model keeps its own function for another `fit`."""
    seen = []

    def function(name):
        return lambda iterator: seen.append((name, counters._is_timing()))

    own = function("own")
    model = types.SimpleNamespace(
        train_function=own,
        history=object(),
        optimizer=None,
        distribute_strategy=replicas.mirrored(2),
    )
    model.make_train_function = lambda force: setattr(
        model, "train_function", function("new")
    )
    ledger, other = (tf_xshard.CommunicationLedger() for _ in range(2))
    train = lambda batch: model.train_function(None)
    events.drive(model, ledger, other, steps=1, on_batch=train)
    assert model.train_function is own
    # An error ends a `fit` without `on_train_end`; the next has a new history.
    ledger.on_train_begin()
    model.history = object()
    train(0)
    assert seen == [("new", True), ("own", False)]
    assert model.train_function is own


def test_a_step_has_timestamps_only_while_it_is_timed():
    strategy = replicas.mirrored(2)
    model = _model(strategy)
    weights = model.trainable_variables
    gradients = lambda r: [tf.ones(weight.shape) for weight in weights]

    def timestamps():
        step = replicas.applying(strategy, model.optimizer, gradients, weights)
        graph = step.get_concrete_function().graph
        return [op.type for op in graph.get_operations()].count("Timestamp")

    assert timestamps() == 0
    with counters.timing():
        assert timestamps() == 2 * 2
