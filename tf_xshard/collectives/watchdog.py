"""A timeout for every collective, watched by one thread.

TensorFlow's own `timeout_seconds` starts two threads per collective that sleep
for the whole timeout, even after it has completed: at 300 seconds and 1,000
collectives per second, hundreds of thousands. Here two variables per device and
lane count the collectives that have begun and ended, and one thread per process
polls them.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

import tensorflow as tf
from absl import logging

from tf_xshard.collectives import counters
from tf_xshard.collectives import recorder
from tf_xshard.private import tensorflow as private_tensorflow

_LOOKS_PER_TIMEOUT = 20
_MAX_SECONDS_BETWEEN_LOOKS = 5.0
# A busy machine may oversleep this many times.
_MOST_PER_SLEEP = 3


class _Clock:
    """Counts the time in which this process runs.

    While it is stopped (Ctrl-Z, a suspended laptop, a paused virtual machine)
    its collectives stand still, though nothing is wrong with them.

    Attributes:
      seconds: The time, in seconds.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Waits, and counts no more time than a process that runs would take.

        Args:
          seconds: How long to wait.
        """
        time.sleep(seconds)
        now = time.monotonic()
        self.seconds += min(now - self._last, _MOST_PER_SLEEP * seconds)
        self._last = now


@dataclasses.dataclass
class _Lane:
    """The collectives of one lane of one device."""

    counters: counters.Counters
    device: str
    timeout_seconds: float
    context: object
    num_cancelled: int = 0
    num_ended: int = 0
    waiting_since: float | None = None

    def is_overdue(self, now: float) -> bool:
        """Whether a collective has waited longer than the timeout.

        Args:
          now: The time, in seconds.

        Returns:
          A bool.
        """
        begun, ended = self.counters.num_begun_and_ended()
        if begun - self.num_cancelled <= ended:
            self.waiting_since = None
        elif self.waiting_since is None or ended != self.num_ended:
            self.waiting_since = now
        self.num_ended = ended
        if (
            self.waiting_since is None
            or now - self.waiting_since <= self.timeout_seconds
        ):
            return False
        # A step that fails on one replica cancels the others' collectives.
        if private_tensorflow.nothing_computes() and (
            self.counters.num_begun_and_ended() == (begun, ended)
        ):
            self.num_cancelled = begun - ended
            self.waiting_since = None
            return False
        return True


@dataclasses.dataclass(eq=False)
class WatchedBatch:
    """A batch over several processes, with a timeout.

    TensorFlow's own waits have no timeout, such as asking whether other workers
    have data. Only time spent executing counts, not tracing.

    Attributes:
      timeout_seconds: If no collective ends for longer than this, all
        collectives of this process are aborted.
    """

    timeout_seconds: float
    _num_ended: int | None = None
    _since: float = 0.0

    def begin(self) -> None:
        """Starts, or restarts, the timeout."""
        self._num_ended = None
        WATCHDOG.add(self)

    def end(self) -> None:
        """Stops the timeout. A second call does nothing."""
        WATCHDOG.remove(self)

    def is_overdue(self, num_ended: int, now: float) -> bool:
        """Whether no collective has ended for longer than the timeout.

        Args:
          num_ended: How many collectives of this process have ended.
          now: The time, in seconds.

        Returns:
          A bool.
        """
        if self._num_ended != num_ended or (
            not private_tensorflow.a_function_runs()
        ):
            self._num_ended, self._since = num_ended, now
        return now - self._since > self.timeout_seconds


class Watchdog:
    """All that is watched in this process, and the thread that watches it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.lanes: dict[tuple[str, str, float], _Lane] = {}
        self.batches: list[WatchedBatch] = []

    def lane(self, device: str, lane: str, timeout_seconds: float) -> _Lane:
        """The counters of one lane, created on first use.

        Args:
          device: The device of the replica.
          lane: Collectives of one lane run one after another.
          timeout_seconds: Each timeout has separate lanes.

        Returns:
          A `_Lane`.
        """
        key = device, lane, timeout_seconds
        context = private_tensorflow.context()
        with self._lock:
            if key not in self.lanes or self.lanes[key].context is not context:
                spec = tf.DeviceSpec.from_string(device)
                host = spec.replace(device_type="CPU", device_index=0)
                name = "tf_xshard_" + "_".join(map(str, key))
                self.lanes[key] = _Lane(
                    counters.Counters(host.to_string(), name),
                    device,
                    timeout_seconds,
                    context,
                )
            self._start_thread()
            return self.lanes[key]

    def totals(self) -> counters.Totals:
        """What the collectives of this process have cost, of all replicas."""
        context = private_tensorflow.context()
        with self._lock:
            lanes = [
                one for one in self.lanes.values() if one.context is context
            ]
        return counters.added(
            [counters.counted_in_python()]
            + [one.counters.totals() for one in lanes]
        )

    def add(self, batch: WatchedBatch) -> None:
        """Starts watching a batch."""
        with self._lock:
            if batch not in self.batches:
                self.batches.append(batch)
            self._start_thread()

    def remove(self, batch: WatchedBatch) -> None:
        """Stops watching a batch."""
        with self._lock:
            if batch in self.batches:
                self.batches.remove(batch)

    def _start_thread(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._watch, name="tf_xshard_watchdog", daemon=True
            )
            self._thread.start()

    def _watch(self) -> None:
        clock = _Clock()
        while True:
            context = private_tensorflow.context()
            with self._lock:
                lanes, batches = list(self.lanes.values()), list(self.batches)
            # Counters of a context that was reset can't be read any more.
            lanes = [one for one in lanes if one.context is context]
            try:
                message = _overdue(lanes, batches, clock.seconds)
            except Exception as error:  # Without this thread, no timeout.
                message = f"The watchdog of collectives failed: {error}"
                if private_tensorflow.context() is not context:
                    message = None  # It was reset while the counters were read.
            if message:
                message += " Restart the program."
                logging.error(message)
                private_tensorflow.abort_collectives(message)
                return
            shortest = min(
                [one.timeout_seconds for one in lanes]
                + [one.timeout_seconds for one in batches],
                default=_LOOKS_PER_TIMEOUT * _MAX_SECONDS_BETWEEN_LOOKS,
            )
            clock.sleep(
                min(shortest / _LOOKS_PER_TIMEOUT, _MAX_SECONDS_BETWEEN_LOOKS)
            )


# One per process, since aborting collectives affects the whole process.
WATCHDOG = Watchdog()


def _overdue(
    lanes: Sequence[_Lane], batches: Sequence[WatchedBatch], now: float
) -> str | None:
    """An error message for what is overdue at a time, or None."""
    overdue = [lane for lane in lanes if lane.is_overdue(now)]
    num_ended = sum(lane.num_ended for lane in lanes)
    stuck = [batch for batch in batches if batch.is_overdue(num_ended, now)]
    if overdue:
        return (
            f"A collective on {overdue[0].device} waited longer than"
            f" {overdue[0].timeout_seconds} seconds for the other replicas"
            " (Communication.timeout_seconds). One of them ended, hangs, or"
            " runs different steps."
        )
    if stuck:
        return (
            "A batch waited longer than"
            f" {stuck[0].timeout_seconds} seconds for data, or for"
            " the other workers to have data"
            " (Communication.timeout_seconds). One of them hangs."
        )
    return None


def run(
    collective: Callable[[], tf.Tensor],
    after: tf.Tensor,
    device: str,
    lane: str,
    timeout_seconds: float,
    cost: recorder.Cost,
) -> tf.Tensor:
    """Runs a collective with a timeout, eagerly or in a graph.

    Args:
      collective: Creates the operation and returns its result.
      after: Its input. The timeout starts when this is available.
      device: The device of the replica.
      lane: Collectives of one lane run one after another.
      timeout_seconds: If it takes longer than this, all collectives of this
        process are aborted with a DeadlineExceededError.
      cost: What it costs, which is counted.

    Returns:
      The result of `collective`.
    """
    watched = WATCHDOG.lane(device, lane, timeout_seconds).counters
    with tf.control_dependencies([after]):
        begin = watched.begin()
    # In eager mode it has already run; there is nothing to depend on.
    with tf.control_dependencies([] if begin is None else [begin]):
        result = collective()
    with tf.control_dependencies([result]):
        watched.end(cost)
    return result
