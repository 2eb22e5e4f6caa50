"""Counts, limits and reports steps that are skipped (`skip_nonfinite`)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tf_xshard import checks
from tf_xshard.distribute import replica_variables
from tf_xshard.distribute import site as site_lib
from tf_xshard.private.tensorflow import tracing
from tf_xshard.reduction import gradients as gradients_lib
from tf_xshard.reduction import loss_scaling


class Noted(NamedTuple):
    """Holds what a skip counter does in a step."""

    # A graph's assertion that the limit is not exceeded, or None. A step that
    # exceeds it changes nothing, including the counter.
    check: tf.Operation | None
    write: Callable[[], None]


class SkipCounter:
    """Counts skipped steps, in total and since the last step taken."""

    # The optimizer assigns the variables to attributes whose names checkpoints
    # store.

    def __init__(self) -> None:
        self.total = replica_variables.make((), "int64", "skipped_steps")
        self.in_a_row = replica_variables.make((), "int64", "skips_in_a_row")

    def noted(self, is_taken: tf.Tensor, limit: int | None, name: str) -> Noted:
        """Notes that this replica takes or skips a step; see `Noted`."""
        is_skipped = tf.cast(tf.logical_not(is_taken), tf.int64)
        in_a_row = is_skipped * (replica_variables.read(self.in_a_row) + 1)
        check = None
        if limit is not None:
            _refuse_in_xla()
            check = tf.debugging.assert_less_equal(
                in_a_row,
                tf.constant(limit, tf.int64),
                f"{name} has skipped more than max_consecutive_skips={limit}"
                " steps in a row, since gradients are nan or infinite. Its"
                " variables have their values from before the first skipped"
                " step.",
            )

        def write() -> None:
            replica_variables.add(self.total, is_skipped)
            replica_variables.assign(self.in_a_row, in_a_row)

        return Noted(check, write)


def report(
    batch: gradients_lib.GradientBatch,
    step: Any,
    site: site_lib.Site,
    *,
    what: str = "gradient",
    event: str = "step",
    consequence: str = "All replicas skip the step.",
    when: bool | tf.Tensor = True,
) -> None:
    """Prints the first variable whose value on this replica is not finite.

    In programs that XLA compiles, it prints nothing.
    """
    present = [(g, v) for g, v in batch.pairs() if g is not None]
    if site.kind == "tpu" or tracing.in_xla() or not present:
        return
    flags = tf.stack([loss_scaling.is_finite(value) for value, _ in present])
    names = [getattr(v, "path", None) or v.name for _, v in present]

    def print_first() -> None:
        message = [
            f"tf_xshard: the {what} of '",
            tf.gather(names, tf.argmin(tf.cast(flags, tf.int32))),
            f"' is nan or infinite on replica {site.replica_id or 0}"
            f" in {event} ",
            tf.strings.as_string(step),
            f", counted from 0. {consequence}",
        ]
        # A list would be printed with quotation marks.
        tf.print(tf.strings.join(message), output_stream=sys.stderr)

    is_bad = tf.logical_not(tf.reduce_all(flags))
    replica_variables.cond(tf.logical_and(is_bad, when), print_first)


def _refuse_in_xla() -> None:
    if tracing.in_xla():
        raise ValueError(
            "max_consecutive_skips can't be used in a program that XLA"
            " compiles, which can't raise errors. Pass jit_compile=False to"
            " compile(), or read optimizer.skipped_steps in a callback."
        )


def checked_limit(limit: Any, strategy: tf.distribute.Strategy) -> int | None:
    """Checks `max_consecutive_skips`, which TPU programs can't enforce."""
    if limit is None:
        return None
    limit = checks.positive_integer("max_consecutive_skips", limit)
    if site_lib.kind_of(strategy) == "tpu":
        raise ValueError(
            "max_consecutive_skips can't be used under TPUStrategy, whose"
            " programs can't raise errors. Read optimizer.skipped_steps in a"
            " callback."
        )
    return limit
