"""Callbacks refuse bad arguments when they are created."""

import pytest

import tf_xshard

CHECKPOINT = tf_xshard.GroupCheckpoint
LEDGER = tf_xshard.CommunicationLedger
SENTINEL = tf_xshard.DivergenceSentinel
VALIDATION = tf_xshard.GroupValidation
WARMUP = tf_xshard.LearningRateWarmup


@pytest.mark.parametrize(
    "callback, arguments, error, text",
    [
        (CHECKPOINT, ("d", "batch"), ValueError, "or 'epoch', got 'batch'"),
        (CHECKPOINT, ("d", 1, 0), ValueError, "keep must be .* or None, got 0"),
        (SENTINEL, (True,), ValueError, "every must be .* int, got True"),
        (SENTINEL, (1, "stop"), ValueError, "must be one of .*, got 'stop'"),
        (VALIDATION, (None, 1.5), ValueError, "got 1.5"),
        (VALIDATION, ((x for x in ()),), TypeError, "a generator can be read"),
        (LEDGER, (0,), ValueError, "rows_per_step"),
        (LEDGER, ("a",), TypeError, "rows_per_step"),
        (WARMUP, (0.0,), ValueError, "learning_rate must be positive"),
        (WARMUP, ("fast",), TypeError, "learning_rate must be a number"),
        (WARMUP, (0.1, 0), ValueError, "warmup_epochs must be positive"),
        (WARMUP, (0.1, 5, 1.5), ValueError, "start must be from 0 to 1"),
        (WARMUP, (0.1, 5, None, 0), ValueError, "steps_per_epoch must be a"),
    ],
)
def test_bad_arguments(callback, arguments, error, text):
    with pytest.raises(error, match=text):
        callback(*arguments)
