"""Gives every collective a timeout, which one thread per process watches.

TensorFlow's own `timeout_seconds` starts two threads per collective. They sleep
for the whole timeout, even after the collective has completed. At 300 seconds
and 1,000 collectives per second, hundreds of thousands of threads sleep. In
this module, one variable for each function, device and lane is odd while a
collective waits, and one thread polls these variables.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf
from absl import logging

from tf_xshard.collectives import counters
from tf_xshard.collectives import recorder
from tf_xshard.collectives import runtime_variables
from tf_xshard.collectives import silent_workers
from tf_xshard.distribute import site as site_lib
from tf_xshard.private.tensorflow import runtime

_LOOKS_PER_TIMEOUT = 20
_MAX_SECONDS_BETWEEN_LOOKS = 5.0
# A worker that has waited for this share of a timeout says so.
_SHARE_BEFORE_SAYING_SO = 0.5
_KEY = "tf_xshard/waits"
# On a busy machine, a sleep may take this many times the requested time.
_MOST_PER_SLEEP = 3


class _Clock:
    """Counts the seconds in which this process runs.

    While the process is stopped (Ctrl-Z, a suspended laptop, a paused virtual
    machine), its collectives stand still, though nothing is wrong with them.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Waits, and counts only time in which the process runs."""
        time.sleep(seconds)
        now = time.monotonic()
        self.seconds += min(now - self._last, _MOST_PER_SLEEP * seconds)
        self._last = now


@dataclasses.dataclass(eq=False)
class _Lane:
    """Holds the counters and the timeout of one lane of one device."""

    counters: counters.Counters
    host: str
    device: str
    timeout_seconds: float
    context: object


class _Waiting:
    """Tracks whether a collective of one function waits in a lane.

    A function runs a lane's collectives one after another, so at most one of
    them waits. Each adds 1 to a variable when it begins and when it ends. A
    step that fails may leave the variable odd. The function therefore makes the
    variable even when it begins, and `seconds` ignores functions that do not
    run.
    """

    def __init__(self, lane: _Lane, graph: tf.Graph | None) -> None:
        self.lane = lane
        self._is_eager = graph is None
        self._count = runtime_variables.unnamed(lane.host, tf.int64)
        self._last = 0
        self._since = 0.0
        if graph is not None:
            # These operations run before the function's others on this
            # variable, since automatic control dependencies keep the order of
            # the code.
            with graph.as_default(), tf.control_dependencies(None):
                count = tf.raw_ops.ReadVariableOp(
                    resource=self._count, dtype=tf.int64
                )
                self._add(tf.bitwise.bitwise_and(count, 1))

    def begin(self) -> tf.Operation | None:
        """Notes that a collective waits from now on."""
        return self._add(tf.constant(1, tf.int64))

    def end(self) -> None:
        """Notes that no collective waits."""
        self._add(tf.constant(1, tf.int64))

    def _add(self, value: tf.Tensor) -> tf.Operation | None:
        # Do not use tf.timestamp or another stateful operation. The stateful
        # operations of all replicas would run one after another, but replicas
        # wait for each other.
        return tf.raw_ops.AssignAddVariableOp(resource=self._count, value=value)

    def seconds(self, now: float) -> float:
        """Returns how long a collective has waited; 0 if none waits."""
        count = int(runtime_variables.read(self._count, tf.int64))
        # A step that fails on one replica cancels the other replicas'
        # collectives, which leaves counts odd. The function that runs now may
        # be another function, or the next call of this function, which has not
        # yet made the count even.
        runs = self._is_eager or runtime.a_function_uses(self._count)
        if count != self._last or not runs:
            self._last, self._since = count, now
        return now - self._since if count % 2 == 1 else 0.0


@dataclasses.dataclass(eq=False)
class WatchedBatch:
    """Gives a batch of several processes a timeout.

    TensorFlow's own waits have no timeout, such as waiting to hear whether
    other workers have data. If no collective ends within `timeout_seconds`, all
    collectives of this process are aborted. Time spent tracing does not count.
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

    def seconds(self, num_ended: int, now: float) -> float:
        """Returns for how long no collective has ended."""
        if self._num_ended != num_ended or (not runtime.a_function_runs()):
            self._num_ended, self._since = num_ended, now
        return now - self._since


class Watchdog:
    """Watches the lanes and batches of this process, in one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.lanes: dict[tuple[str, str, float], _Lane] = {}
        self.batches: list[WatchedBatch] = []
        # Maps the graphs of functions, and the context of eager code, to the
        # state of each of their lanes.
        self._waiting: weakref.WeakKeyDictionary[
            object, dict[_Lane, _Waiting]
        ] = weakref.WeakKeyDictionary()

    def waiting(
        self, device: str, lane: str, timeout_seconds: float
    ) -> _Waiting:
        """Returns the state of a lane in the function that is being traced."""
        found = self.lane(device, lane, timeout_seconds)
        graph = site_lib.function_graph()
        with self._lock:
            of_function = self._waiting.setdefault(graph or found.context, {})
            if found not in of_function:
                of_function[found] = _Waiting(found, graph)
            return of_function[found]

    def lane(self, device: str, lane: str, timeout_seconds: float) -> _Lane:
        """Returns a lane, which is created on first use."""
        key = device, lane, timeout_seconds
        context = runtime.context()
        with self._lock:
            if key not in self.lanes or self.lanes[key].context is not context:
                spec = tf.DeviceSpec.from_string(device)
                cpu = spec.replace(device_type="CPU", device_index=0)
                host = cpu.to_string()
                name = "tf_xshard_" + "_".join(map(str, key))
                self.lanes[key] = _Lane(
                    counters.Counters(host, name),
                    host,
                    device,
                    timeout_seconds,
                    context,
                )
            self._start_thread()
            return self.lanes[key]

    def totals(self) -> counters.Totals:
        """Returns the totals of this process's collectives, of all replicas."""
        context = runtime.context()
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
        has_said_so = False
        while True:
            context = runtime.context()
            with self._lock:
                # Variables of a context that was reset can't be read anymore.
                waiting = [
                    one
                    for of_function in self._waiting.values()
                    for one in of_function.values()
                    if one.lane.context is context
                ]
                lanes = [
                    one for one in self.lanes.values() if one.context is context
                ]
                batches = list(self.batches)
            message = None
            try:
                found = list(_waits(waiting, lanes, batches, clock.seconds))
                is_slow = any(
                    share > _SHARE_BEFORE_SAYING_SO for share, _ in found
                )
                if is_slow != has_said_so:
                    _tell_others(is_slow)
                    has_said_so = is_slow
                errors = [error for share, error in found if share > 1]
                if errors:
                    message = errors[0] + _suspects()
            except Exception as error:
                # Collectives have no timeout without this thread, so its
                # failure ends them.
                message = f"The watchdog of collectives failed: {error}"
                if runtime.context() is not context:
                    message = None  # The context was reset during the reads.
            if message:
                message += ". Restart the program."
                logging.error(message)
                runtime.abort_collectives(message)
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


def _waits(
    waiting: Sequence[_Waiting],
    lanes: Sequence[_Lane],
    batches: Sequence[WatchedBatch],
    now: float,
) -> Iterator[tuple[float, str]]:
    """Yields the used share of each timeout, and the error if it is over 1."""
    for one in waiting:
        timeout = one.lane.timeout_seconds
        share = one.seconds(now) / timeout
        if share > 1:
            share = one.seconds(now) / timeout  # It may just have ended.
        yield (
            share,
            f"A collective on {one.lane.device} waited longer than"
            f" {timeout} seconds for the other replicas (Communication."
            "timeout_seconds). One of them ended, hangs, or runs different"
            " steps",
        )
    if not batches:
        return
    num_ended = sum(lane.counters.num_ended() for lane in lanes)
    for batch in batches:
        yield (
            batch.seconds(num_ended, now) / batch.timeout_seconds,
            f"A batch waited longer than {batch.timeout_seconds} seconds for"
            " data, or for the other workers to have data (Communication."
            "timeout_seconds). A worker or its input pipeline hangs",
        )


def _tell_others(waits: bool) -> None:
    """Tells the other workers, if there are any, whether this one waits."""
    rank, addresses = runtime.cluster()
    if len(addresses) > 1 and waits:
        silent_workers.say_waits(_KEY, rank)
    elif len(addresses) > 1:
        silent_workers.say_continues(_KEY, rank)


def _suspects() -> str:
    """Names the workers that don't wait, for the end of an error."""
    rank, addresses = runtime.cluster()
    others = [one for one in range(len(addresses)) if one != rank]
    if not others or not (found := silent_workers.silent(_KEY, others)):
        return ""
    return f", probably {silent_workers.named(found)}"


def run(
    collective: Callable[[], tf.Tensor],
    after: Sequence[tf.Tensor | tf.Operation],
    device: str,
    lane: str,
    timeout_seconds: float,
    cost: recorder.Cost,
) -> tf.Tensor:
    """Runs a collective with a timeout, eagerly or in a graph.

    The timeout starts when all of `after`, such as the input, is available.
    Collectives of one lane run one after another. After the timeout, all
    collectives of this process fail with a DeadlineExceededError.
    """
    waiting = WATCHDOG.waiting(device, lane, timeout_seconds)
    with tf.control_dependencies(after):
        begin = waiting.begin()
        waiting.lane.counters.begin()
    try:
        # In eager mode, `begin` is None, since the operation has already run.
        with tf.control_dependencies([] if begin is None else [begin]):
            result = collective()
    except BaseException:
        if begin is None:
            waiting.end()
        raise
    with tf.control_dependencies([result]):
        waiting.end()
        waiting.lane.counters.end(cost)
    return result
