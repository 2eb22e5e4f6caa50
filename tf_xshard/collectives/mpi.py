"""Sums over groups of processes that an MPI launcher has started.

A collective is a Python function in the graph that calls mpi4py. All processes
run the same collectives in the same order, since a `tf.function` runs such
functions in the order of its code. Each group has a communicator. Channels
share it, since processes may number their channels differently.

Each process of a group sends messages to all other processes of the group:

sum of           [a0 b0]  [a1 b1]
send parts       a0 + a1 on rank 0, b0 + b1 on rank 1
send sums        [a b]    [a b]

On one host, these messages are faster than MPICH's own all-reduce
(benchmarks/README.md). Calls do not block, but are polled. A missing process
therefore raises an error after `Communication.timeout_seconds`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import importlib.util
import itertools
import json
import math
import sys
import threading
import time
import types
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tf_xshard import communication as communication_lib
from tf_xshard.collectives import recorder
from tf_xshard.collectives import silent_workers
from tf_xshard.collectives import transport
from tf_xshard.collectives import watchdog
from tf_xshard.distribute import engines
from tf_xshard.distribute import site as site_lib
from tf_xshard.private.tensorflow import runtime

# A waiting process first yields its core to others, and later sleeps.
_POLLS_BEFORE_SLEEP = 50
_SECONDS_OF_SLEEP = 100e-6
# The time in which this process is stopped does not count as waiting.
_MOST_SECONDS_BETWEEN_POLLS = 1.0
_SECONDS_TO_PASS_ON = 0.5
_SECONDS_BETWEEN_QUESTIONS_WHO_ENDED = 2.0
_MAX_TAG = 32767
# Below this size, latency matters, and MPI's own algorithms are faster.
_SMALL_BYTES = 16 << 10
# TensorFlow's alignment of tensors, in bytes.
_ALIGNMENT = 64
_NOT_INSTALLED = "mpi4py is not installed (pip install 'tf_xshard[mpi]')"


class MPI(transport.Transport):
    """Communicates in this process's group with MPI."""

    name = "MPI"
    packs = True
    gathers = True

    def sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `Transport.sum`."""
        return [self._all_reduce(*one) for one in enumerate(tensors)]

    def reduce_scatter(self, rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `Transport.reduce_scatter`."""
        return [self._reduce_scatter(*one) for one in enumerate(rows)]

    def all_gather(self, shards: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `Transport.all_gather`."""
        return [self._all_gather(*one) for one in enumerate(shards)]

    def all_to_all(self, rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `Transport.all_to_all`."""
        return [self._all_to_all(*one) for one in enumerate(rows)]

    def gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `Transport.gather`."""
        return [
            self._call(
                recorder.ALL_GATHER,
                position,
                tensor,
                _gather,
                [None, *tensor.shape[1:]],
            )
            for position, tensor in enumerate(tensors)
        ]

    def _all_reduce(self, position: int, tensor: tf.Tensor) -> tf.Tensor:
        if not _has_16_bits(tensor):
            return self._call(
                recorder.ALL_REDUCE, position, tensor, _sum, tensor.shape
            )
        # MPI can't sum 16-bit floats, but it can send them.
        return transport.sum_by_parts(
            tensor,
            self.groups.group_size,
            functools.partial(self._all_to_all, position),
            functools.partial(self._all_gather, position),
        )

    def _all_to_all(self, position: int, rows: tf.Tensor) -> tf.Tensor:
        return self._call(
            recorder.REDUCE_SCATTER, position, rows, _all_to_all, rows.shape
        )

    def _reduce_scatter(self, position: int, rows: tf.Tensor) -> tf.Tensor:
        if _has_16_bits(rows):
            return transport.sum_of_rows(self._all_to_all(position, rows))
        return self._call(
            recorder.REDUCE_SCATTER,
            position,
            rows,
            _reduce_scatter,
            rows.shape[1:],
        )

    def _all_gather(self, position: int, shard: tf.Tensor) -> tf.Tensor:
        return self._call(
            recorder.ALL_GATHER,
            position,
            shard,
            _all_gather,
            [self.groups.group_size, *shard.shape],
        )

    def _call(
        self,
        kind: str,
        position: int,
        tensor: tf.Tensor,
        collective: _Collective,
        shape: Sequence[int | None] | tf.TensorShape,
    ) -> tf.Tensor:
        """Adds a collective to the graph, or runs it in eager mode."""
        cost = self._note(kind, tensor, position)
        seconds = float(self.communication.timeout_seconds)
        site = self.site
        assert site.replica_id is not None, site
        members = tuple(self.groups)[self.groups.group_of(site.replica_id)]
        run = functools.partial(
            _run,
            collective,
            f"{kind} of shape {tensor.shape}",
            members,
            site.rank,
            seconds,
        )
        # NumPy has no bfloat16.
        dtype = tensor.dtype
        if dtype == tf.bfloat16:
            tensor = tf.bitcast(tensor, tf.uint16)
        counters = watchdog.WATCHDOG.lane(site.device, "mpi", seconds).counters
        with tf.control_dependencies([tensor]):
            counters.begin()
        with tf.device("CPU:0"):
            result = tf.numpy_function(run, [tensor], tensor.dtype)
        result.set_shape(shape)
        with tf.control_dependencies([result]):
            counters.end(cost)
        return tf.bitcast(result, dtype) if dtype == tf.bfloat16 else result


def _has_16_bits(tensor: tf.Tensor) -> bool:
    return tensor.dtype in (tf.bfloat16, tf.float16)


# Each collective sends and receives messages, and returns its result. It calls
# `wait` with requests that must be completed before it goes on.

_Wait = Callable[[list[Any]], None]
_Collective = Callable[[Any, np.ndarray, _Wait], np.ndarray]
# One array for each process of the group.
_Arrays = Sequence[np.ndarray] | np.ndarray


def _sum(comm: Any, array: np.ndarray, wait: _Wait) -> np.ndarray:
    total = _empty(array.shape, array.dtype)
    if array.nbytes < _SMALL_BYTES:
        wait([comm.Iallreduce(array, total)])
        return total
    bounds = [array.size * k // comm.size for k in range(comm.size + 1)]
    parts = _split(array.reshape(-1), bounds)
    sums = _split(total.reshape(-1), bounds)
    _add(comm, parts, sums[comm.rank], wait)
    wait(_exchange(comm, [sums[comm.rank]] * comm.size, sums))
    return total


def _reduce_scatter(comm: Any, rows: np.ndarray, wait: _Wait) -> np.ndarray:
    total = _empty(rows.shape[1:], rows.dtype)
    _add(comm, rows, total, wait)
    return total


def _all_to_all(comm: Any, rows: np.ndarray, wait: _Wait) -> np.ndarray:
    received = _empty(rows.shape, rows.dtype)
    received[comm.rank] = rows[comm.rank]
    wait(_exchange(comm, rows, received))
    return received


def _all_gather(comm: Any, shard: np.ndarray, wait: _Wait) -> np.ndarray:
    gathered = _empty([comm.size, *shard.shape], shard.dtype)
    gathered[comm.rank] = shard
    wait(_exchange(comm, [shard] * comm.size, gathered))
    return gathered


def _gather(comm: Any, array: np.ndarray, wait: _Wait) -> np.ndarray:
    """Gathers rows, whose number may differ between processes."""
    num_rows = np.empty(comm.size, np.int64)
    wait([comm.Iallgather(np.array([len(array)], np.int64), num_rows)])
    bounds = [0, *np.cumsum(num_rows).tolist()]
    gathered = _empty([bounds[-1], *array.shape[1:]], array.dtype)
    parts = _split(gathered, bounds)
    parts[comm.rank][...] = array
    wait(_exchange(comm, [array] * comm.size, parts))
    return gathered


def _add(comm: Any, parts: _Arrays, total: np.ndarray, wait: _Wait) -> None:
    """Sends each process its part, and adds up this process's parts."""
    received = [np.empty_like(total) for _ in range(comm.size)]
    received[comm.rank] = parts[comm.rank]
    wait(_exchange(comm, parts, received))
    # Add in the order of the ranks, so that each run gets the same bits.
    np.add(received[0], received[1], out=total)
    for one in received[2:]:
        np.add(total, one, out=total)


def _exchange(comm: Any, sent: _Arrays, received: _Arrays) -> list[Any]:
    """Starts sending arrays to all other processes, and receiving theirs."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    return [
        *(comm.Irecv(_bytes(received[rank]), rank) for rank in others),
        *(comm.Isend(_bytes(sent[rank]), rank) for rank in others),
    ]


def _split(array: np.ndarray, bounds: Sequence[int]) -> list[np.ndarray]:
    return [array[low:high] for low, high in itertools.pairwise(bounds)]


def _empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Allocates an array that TensorFlow takes over without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _run(
    collective: _Collective,
    what: str,
    members: tuple[int, ...],
    rank: int,
    seconds: float,
    array: np.ndarray,
) -> np.ndarray:
    """Runs a collective of a group. All processes of the group must call it."""
    found = _group(members, rank, seconds)
    # TensorFlow passes 0-d arrays as scalars.
    array = np.ascontiguousarray(array).reshape(np.shape(array))
    if _failures:
        raise TimeoutError(_failures[0])
    found.num_started += 1
    return collective(
        found.comm,
        array,
        functools.partial(found.wait, what=what, seconds=seconds),
    )


# Errors after which this process can't communicate. MPI may still write to the
# buffers of requests that it has not finished, so keep these requests.
_failures: list[str] = []
_open_requests: list[Any] = []


class _Group:
    """Holds the processes of a group, and their communicator."""

    def __init__(self, members: tuple[int, ...], rank: int, comm: Any) -> None:
        self.comm = comm
        self.num_started = 0
        self._members, self._rank = members, rank

    def wait(self, requests: list[Any], what: str, seconds: float) -> None:
        """Waits for all requests; raises TimeoutError after a time."""
        waited, last = 0.0, time.monotonic()
        num_polls = 0
        next_question = _SECONDS_BETWEEN_QUESTIONS_WHO_ENDED
        is_told = False
        key = f"tf_xshard/mpi/waits/{self._members}/{self.num_started}"
        test_all = _mpi().Request.Testall
        while not test_all(requests):
            num_polls += 1
            time.sleep(
                0 if num_polls < _POLLS_BEFORE_SLEEP else _SECONDS_OF_SLEEP
            )
            now = time.monotonic()
            waited += min(now - last, _MOST_SECONDS_BETWEEN_POLLS)
            last = now
            if waited > seconds / 2 and not is_told:
                # The processes that time out first then know who else waits.
                silent_workers.say_waits(key, self._rank)
                is_told = True
            if waited > next_question:
                next_question += _SECONDS_BETWEEN_QUESTIONS_WHO_ENDED
                if ended := _ended(self._members):
                    self._fail(
                        requests,
                        f"MPI's {what} can't be completed: ranks {ended} of"
                        f" {list(self._members)} have ended. Restart the"
                        " program.",
                    )
            if waited > seconds:
                missing = silent_workers.silent(key, self._members)
                self._fail(
                    requests,
                    f"MPI's {what} waited longer than {seconds:g} seconds"
                    " (Communication.timeout_seconds) for ranks"
                    f" {missing} of {list(self._members)}. They have ended,"
                    " hang, or run different steps:"
                    f" {silent_workers.named(missing)}. Restart the program.",
                )

    def _fail(self, requests: list[Any], message: str) -> None:
        _open_requests.extend(requests)
        # MPI can't shut down normally while a collective is open.
        atexit.register(_end_the_job)
        _failures.append(message)
        raise TimeoutError(message)


_ENDED = "tf_xshard/mpi/ended"


def _tell_that_this_ends(rank: int) -> None:
    # Rank 0 holds the store, so it is gone if rank 0 has ended.
    with contextlib.suppress(tf.errors.OpError):
        runtime.publish(f"{_ENDED}/{rank}", "")


def _ended(ranks: Sequence[int]) -> list[int]:
    """Asks which processes have come to the end of their program."""
    ended = []
    for rank in ranks:
        with contextlib.suppress(tf.errors.DeadlineExceededError):
            try:
                runtime.lookup(f"{_ENDED}/{rank}", timeout_seconds=0.001)
                ended.append(rank)
            except tf.errors.UnavailableError:
                return [0]  # Rank 0 holds the store.
    return ended


def _rendezvous(
    what: str, value: str, ranks: Sequence[int], seconds: float
) -> list[str]:
    scope = f"tf_xshard/mpi/{what}"
    return runtime.rendezvous(
        scope,
        value,
        ranks,
        seconds,
        lambda worker: TimeoutError(
            f"{worker} did not reach this point ({scope}) within {seconds:g}"
            " seconds (Communication.timeout_seconds). It has ended, hangs, or"
            " runs different steps."
        ),
    )


_lock = threading.Lock()
_groups: dict[tuple[int, ...], _Group] = {}


def _group(members: tuple[int, ...], rank: int, seconds: float) -> _Group:
    """Returns a group. All processes of the group must call it."""
    with _lock:
        if not _groups:
            atexit.register(_tell_that_this_ends, rank)
        if members not in _groups:
            # Creating a communicator blocks until all processes do so. Wait for
            # them here, with a timeout.
            _rendezvous(f"group/{members}", "", members, seconds)
            mpi = _mpi()
            group = mpi.COMM_WORLD.Get_group().Incl(members)
            tag = zlib.crc32(str(members).encode()) % _MAX_TAG
            comm = mpi.COMM_WORLD.Create_group(group, tag)
            _groups[members] = _Group(members, rank, comm)
        return _groups[members]


# The choice of the steps that communicate with MPI.


def is_chosen(
    site: site_lib.Site, communication: communication_lib.Communication
) -> bool:
    """Returns whether `Communication.transport` means MPI here.

    All processes get the same answer.
    """
    choice = communication.transport
    if choice == "tensorflow":
        return False
    if not tf.compat.v1.executing_eagerly_outside_functions():
        # The counters need features that a Session's graph lacks.
        if choice == "mpi":
            raise ValueError(
                'Communication(transport="mpi") can\'t be used: a TF1 session'
                ' runs this graph. Use "auto" or "tensorflow".'
            )
        return False
    if choice == "auto" and (
        site.kind != "multi_worker" or not engines.is_started_by_mpi()
    ):
        return False
    reason = _reason_against(site, float(communication.timeout_seconds))
    if reason and choice == "mpi":
        raise ValueError(
            f'Communication(transport="mpi") can\'t be used: {reason}. Pass'
            ' transport="auto", which uses MPI where it can, or'
            ' transport="tensorflow".'
        )
    if reason:
        logging.log_first_n(
            # Slurm may offer MPI's variables to every program.
            logging.INFO if reason == _NOT_INSTALLED else logging.WARNING,
            "MPI started this process, but gradients are summed by"
            f" TensorFlow's own collectives: {reason}.",
            1,
        )
    return reason is None


def _reason_against(site: site_lib.Site, seconds: float) -> str | None:
    """Returns why MPI can't be used, or None, the same in all processes."""
    own = _own_reason(site)
    if site.kind != "multi_worker" or recorder.is_recording():
        return own
    size = site.num_processes
    with _lock:
        if size not in _agreed:
            answers = _rendezvous(
                "reason", json.dumps(own), range(size), seconds
            )
            reasons = [
                f"rank {rank} says that {reason}"
                for rank, answer in enumerate(answers)
                if (reason := json.loads(answer)) is not None
            ]
            _agreed[size] = own or (reasons[0] if reasons else None)
        return _agreed[size]


# Maps a number of processes to the reason on which they have agreed.
_agreed: dict[int, str | None] = {}


def _own_reason(site: site_lib.Site) -> str | None:
    if site.kind != "multi_worker":
        return (
            "it is for MultiWorkerMirroredStrategy, but this code runs under"
            f" {type(site.strategy).__name__}"
        )
    if site.num_local_replicas > 1 or "CPU" not in site.device:
        return (
            "it needs one CPU replica per process, but this process has"
            f" {site.num_local_replicas} on {site.device}"
        )
    if importlib.util.find_spec("mpi4py") is None:
        return _NOT_INSTALLED
    try:
        mpi = _mpi()
    except (ImportError, RuntimeError) as error:
        return f"mpi4py can't be imported: {error}"
    world = mpi.COMM_WORLD
    if (world.size, world.rank) != (site.num_processes, site.rank):
        return (
            f"this process is rank {site.rank} of {site.num_processes} in"
            f" TF_CONFIG, but rank {world.rank} of {world.size} in MPI. Start"
            " the processes with mpiexec or srun, and call tf_xshard.connect()"
        )
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        return "this MPI allows calls from one thread only"
    return None


@functools.cache
def _mpi() -> types.ModuleType:
    """Returns mpi4py's module; importing it starts MPI."""
    mpi = importlib.import_module("mpi4py.MPI")
    before = sys.excepthook

    def report(*args: Any) -> None:
        before(*args)
        # Otherwise, the others wait for this process until their timeout.
        _end_the_job()

    sys.excepthook = report
    return mpi


def _end_the_job() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    # MPICH's mpiexec drops what it has not passed on yet, such as the error.
    time.sleep(_SECONDS_TO_PASS_ON)
    _mpi().COMM_WORLD.Abort(1)
