"""Uses TensorFlow's runtime: its key-value store, its threads, its abort."""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from tf_xshard.private import names

# Present in TensorFlow 2.20 to 2.22.
_PYTHON = "tensorflow.python."
_CONTEXT = _PYTHON + "eager.context.Context."
_STORE = names.PrivateNames(
    "An optimizer under MultiWorkerMirroredStrategy",
    {
        # The key-value store of the coordination service that
        # MultiWorkerMirroredStrategy starts. While workers trace, they exchange
        # there which variables have a gradient. A collective would not do,
        # since its error does not say which worker was missing.
        "context": _PYTHON + "eager.context.context",
        "set": _CONTEXT + "set_config_key_value",
        "get": _CONTEXT + "get_config_key_value",
        "delete": _CONTEXT + "delete_config_key_value",
    },
)
# What MultiWorkerMirroredStrategy was told about the cluster. Errors about a
# silent worker, which may come from a thread without a strategy, use it.
names.attributes(_STORE.feature, "_collective_ops_server_def")


def worker(rank: int) -> str:
    """Starts an error about a worker, with its rank and address."""
    _, addresses = cluster()
    return f"Worker {rank} ({addresses[rank]})"


def cluster() -> tuple[int, list[str]]:
    """Returns this worker's rank and all workers' addresses; [] if alone."""
    server = _STORE.context()._collective_ops_server_def
    if server is None:
        return 0, []
    # The cluster may also have an evaluator, which has no rank.
    jobs = {job.name: job.tasks for job in server.cluster.job}
    addresses = {
        (name, index): address
        for name in ("chief", "worker")
        for index, address in sorted(jobs.get(name, {}).items())
    }
    own = server.job_name, server.task_index
    return list(addresses).index(own), list(addresses.values())


def publish(key: str, value: str) -> None:
    """Puts a value into the cluster's key-value store."""
    _STORE.set(_STORE.context(), key, value)


_LOOKUP_SLICE_SECONDS = 5.0


def lookup(key: str, timeout_seconds: float) -> str:
    """Waits for a value in the cluster's key-value store."""
    # Wait in slices, so that time in which this process is stopped does not
    # count.
    remaining = max(timeout_seconds, 0.001)
    while True:
        seconds = min(remaining, _LOOKUP_SLICE_SECONDS)
        remaining -= seconds
        try:
            return _STORE.get(
                _STORE.context(), key, max(1, int(seconds * 1000))
            )
        except tf.errors.DeadlineExceededError:
            if remaining <= 0:
                raise


def withdraw(key: str) -> None:
    """Removes a value from the cluster's key-value store."""
    _STORE.delete(_STORE.context(), key)


_rounds: dict[str, int] = {}
_locks: collections.defaultdict = collections.defaultdict(threading.Lock)


def rendezvous(
    scope: str,
    value: str,
    ranks: Iterable[int],
    timeout_seconds: float,
    absence: Callable[[str], Exception],
) -> list[str]:
    """Gives a value to some processes; returns the values of all, by rank.

    These processes must make the same calls for a `scope`, one after another.
    Raises `absence(worker)` for a worker that does not call in time. Then this
    process can call again.
    """
    rank, _ = cluster()
    with _locks[scope]:
        number = _rounds.get(scope, 0)
        own = f"{scope}/{number}/{rank}"
        before = f"{scope}/{number - 1}/{rank}"
        values = []
        try:
            publish(own, value)
            for rank in ranks:
                key = f"{scope}/{number}/{rank}"
                values.append(lookup(key, timeout_seconds))
        except BaseException as error:
            # The leader, which holds the store, may be gone.
            with contextlib.suppress(tf.errors.OpError):
                withdraw(own)
            if isinstance(error, tf.errors.OpError):
                raise absence(worker(rank)) from error
            raise
        _rounds[scope] = number + 1
        if number:
            # Processes that are in this round have left the previous round.
            withdraw(before)
        return values


_TIMEOUT = names.PrivateNames(
    "The timeout of collectives",
    {
        "context": _PYTHON + "eager.context.context",
        "anonymous_name": _PYTHON + "eager.context.anonymous_name",
        # Ends collectives that wait for missing peers.
        "abort": _CONTEXT + "abort_collective_ops",
        # A thread is in this module while TensorFlow runs a function for it.
        # This tells a waiting batch from a batch that is being traced.
        "execute": _PYTHON + "eager.execute",
        "quick_execute": _PYTHON + "eager.execute.quick_execute",
    },
)
# The argument of `quick_execute` with a function's inputs and captures.
_INPUTS = "inputs"


def context() -> object:
    """Returns TensorFlow's runtime context, another object after a reset."""
    return _TIMEOUT.context()


def anonymous_name() -> str:
    """Returns the name of a variable that lives as long as its handle."""
    return _TIMEOUT.anonymous_name()


def abort_collectives(message: str) -> None:
    """Makes every current and future collective of this process fail."""
    _TIMEOUT.abort(_TIMEOUT.context(), tf.errors.DEADLINE_EXCEEDED, message)


def _current_frames() -> dict[int, types.FrameType]:
    """Returns the frame that each thread is in."""
    # Before Python 3.11.9, garbage that is collected in this call can deadlock
    # the process: https://github.com/python/cpython/issues/106883.
    if sys.version_info >= (3, 11, 9) or not gc.isenabled():
        return sys._current_frames()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        gc.enable()


def _executing() -> Iterator[types.FrameType]:
    """Yields the frames in which other threads wait for TensorFlow to run."""
    for thread, frame in _current_frames().items():
        if (
            thread != threading.get_ident()
            and frame.f_code.co_filename == _TIMEOUT.execute.__file__
        ):
            yield frame


def a_function_runs() -> bool:
    """Returns True if another thread executes, not just traces, a function."""
    return any(True for _ in _executing())


def a_function_uses(handle: tf.Tensor) -> bool:
    """Returns True if another thread runs a function that captured a handle."""
    # With asynchronous execution, no thread waits for a function, so assume
    # that the function runs.
    return not tf.config.experimental.get_synchronous_execution() or any(
        any(one is handle for one in frame.f_locals.get(_INPUTS, ()))
        for frame in _executing()
    )


_SEED = names.PrivateNames(
    "multi_worker_fit, which shuffles alike in all processes",
    # TensorFlow derives operations' seeds from this context. The public API can
    # set this state, but can't read or restore it.
    {"context": _PYTHON + "eager.context.context"},
)
names.attributes(_SEED.feature, "_seed", "_rng")


class GlobalSeed:
    """Keeps TensorFlow's global seed from when this object was made."""

    def __init__(self) -> None:
        context = _SEED.context()
        self.seed: int | None = context._seed
        # TensorFlow adds this attribute with the program's first seed.
        self._rng: Any = copy.deepcopy(getattr(context, "_rng", None))

    def next_seed(self) -> int | None:
        """Returns the seed of the next operation, None if it is random."""
        if self.seed is None:
            return None
        return copy.deepcopy(self._rng).getrandbits(31)

    def restore(self) -> None:
        """Sets the global seed to its earlier value."""
        context = _SEED.context()
        context._seed, context._rng = self.seed, self._rng
