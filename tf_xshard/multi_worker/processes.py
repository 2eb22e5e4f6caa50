"""Identifies this process, and waits for the other processes."""

from __future__ import annotations

import tensorflow as tf

from tf_xshard import collectives
from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.collectives import transport as transport_lib
from tf_xshard.distribute import lone_training
from tf_xshard.distribute import site as site_lib


def rank(strategy: tf.distribute.Strategy | None = None) -> int:
    """Returns this process's number among the processes of a strategy.

    Args:
      strategy: The strategy that trains. Default: None, the current strategy.

    Returns:
      An int from 0 (the chief) to the number of processes - 1.

    Raises:
      RuntimeError: In an evaluator, or if several processes were started and
        the strategy has only this process (see `connect`).
      ValueError: If the strategy is not supported, or if several processes were
        started and there is no strategy.

    Example:

    >>> tf_xshard.rank()
    0

    Source: `horovod.tensorflow.rank`.
    """
    return site_lib.rank(_checked(strategy, "rank"))


def is_chief(strategy: tf.distribute.Strategy | None = None) -> bool:
    """Returns True in the process that writes shared files.

    Args:
      strategy: The strategy that trains. Default: None, the current strategy.

    Returns:
      True if this process's rank is 0. False in an evaluator.

    Raises:
      RuntimeError: See `rank`.
      ValueError: If the strategy is not supported, or if several processes were
        started and there is no strategy.

    Example:

    >>> tf_xshard.is_chief()
    True

    Source: `TF_CONFIG`, whose first worker is the chief if no task is named
    "chief".
    """
    if lone_training.is_evaluator():
        return False
    return site_lib.rank(_checked(strategy, "is_chief")) == 0


def barrier(
    strategy: tf.distribute.Strategy | None = None,
    timeout_seconds: float = 300.0,
) -> None:
    """Waits until every process has called `barrier`.

    For example, the chief saves a file, all processes call `barrier`, and then
    all processes load the file. With one process, `barrier` does nothing.

    Args:
      strategy: The strategy that trains. Default: None, the current strategy.
      timeout_seconds: The seconds to wait for other processes. Default: 300.

    Raises:
      RuntimeError: In replica context; also see `rank`.
      TypeError, ValueError: If an argument is invalid, if the strategy is not
        supported, or if several processes were started and there is no
        strategy.
      tf.errors.OpError: If another process does not call `barrier` in time. The
        error is a DeadlineExceededError, or an UnknownError with MPI. This
        process's collectives then fail, so restart the process.

    Example:

    >>> tf_xshard.barrier()

    Source: `MPI_Barrier`.
    """
    site_lib.refuse_replica_context("barrier()")
    strategy = _checked(strategy, "barrier")
    communication = communication_lib.Communication(
        timeout_seconds=timeout_seconds
    )
    if not site_lib.spans_processes(strategy):
        return
    every = group_assignment_lib.GroupAssignment.single(
        strategy.num_replicas_in_sync
    )

    def on_replica() -> tf.Tensor:
        transport = collectives.transport_for(
            site_lib.current(), transport_lib.Channel(every, communication)
        )
        [total] = transport.sum([tf.constant(1.0)])
        return total

    # This runs as a graph, even with tf.config.run_functions_eagerly(True).
    wait = tf.function(lambda: strategy.run(on_replica), autograph=False)
    with strategy.scope():
        [total, *_] = strategy.experimental_local_results(
            wait.get_concrete_function()()
        )
    total.numpy()


def _checked(
    strategy: tf.distribute.Strategy | None, caller: str
) -> tf.distribute.Strategy:
    strategy = strategy or tf.distribute.get_strategy()
    site_lib.kind_of(strategy)
    engine, size = lone_training.num_started()
    if size > 1 and site_lib.is_default(strategy):
        raise ValueError(
            f"{caller}() is called outside of a strategy's scope, where each of"
            f" the {size} processes ({engine}) would act alone. Pass the"
            f" strategy: {caller}(strategy)."
        )
    lone_training.refuse(strategy, f"{caller}() is called")
    return strategy
