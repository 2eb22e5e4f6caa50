"""Callbacks refuse bad arguments when they are created."""

import pytest

import tf_xshard

WARMUP = tf_xshard.LearningRateWarmup


@pytest.mark.parametrize(
    "make, error, text",
    [
        (
            lambda: tf_xshard.GroupCheckpoint("d", every=0),
            ValueError,
            "every must be a positive int or 'epoch', got 0",
        ),
        (
            lambda: tf_xshard.GroupCheckpoint("d", every="batch"),
            ValueError,
            "every must be a positive int or 'epoch', got 'batch'",
        ),
        (
            lambda: tf_xshard.GroupCheckpoint("d", keep=0),
            ValueError,
            "keep must be a positive int or None, got 0",
        ),
        (
            lambda: tf_xshard.GroupValidation(None, every=1.5),
            ValueError,
            "every must be a positive int, got 1.5",
        ),
        (
            lambda: tf_xshard.GroupValidation(x for x in ()),
            TypeError,
            "a generator can be read only once",
        ),
        (
            lambda: tf_xshard.DivergenceSentinel(every=True),
            ValueError,
            "every must be a positive int, got True",
        ),
        (
            lambda: tf_xshard.DivergenceSentinel(action="stop"),
            ValueError,
            "action must be one of .*, got 'stop'",
        ),
        (
            lambda: tf_xshard.CommunicationLedger(rows_per_step=0),
            (TypeError, ValueError),
            "rows_per_step",
        ),
        (
            lambda: tf_xshard.CommunicationLedger(rows_per_step="a"),
            (TypeError, ValueError),
            "rows_per_step",
        ),
        (lambda: WARMUP(0.0), ValueError, "learning_rate must be positive"),
        (lambda: WARMUP("fast"), TypeError, "learning_rate must be a number"),
        (lambda: WARMUP(0.1, 0), ValueError, "warmup_epochs must be positive"),
        (lambda: WARMUP(0.1, 5, 1.5), ValueError, "start must be from 0 to 1"),
        (
            lambda: WARMUP(0.1, 5, None, 0),
            ValueError,
            "steps_per_epoch must be a positive",
        ),
    ],
)
def test_bad_arguments(make, error, text):
    with pytest.raises(error, match=text):
        make()
