"""Sums over groups of processes that an MPI launcher has started.

A collective is a Python function in the graph that calls mpi4py. All processes
run the same ones in the same order, since a `tf.function` runs such functions
in the order of its code. Each group has a communicator of its own.

Processes send messages to each other, each of a group to all others:

sum of           [a0 b0]  [a1 b1]
send parts       a0 + a1 on rank 0, b0 + b1 on rank 1
send sums        [a b]    [a b]

On one host that is faster than MPICH's own all-reduce (benchmarks/README.md).
Calls do not block: they are polled, so that a process that is missing is an
error after `Communication.timeout_seconds`.
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
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tf_xshard import communication as communication_lib
from tf_xshard.collectives import recorder
from tf_xshard.collectives import transport
from tf_xshard.collectives import watchdog
from tf_xshard.distribute import engines
from tf_xshard.distribute import site as site_lib
from tf_xshard.private.tensorflow import runtime

# A process that waits gives its core to others, and then sleeps.
_POLLS_BEFORE_SLEEP = 50
_SECONDS_OF_SLEEP = 100e-6
# A process that was stopped meanwhile does not count the time.
_MOST_SECONDS_BETWEEN_POLLS = 1.0
_SECONDS_TO_ASK_WHO_WAITS = 3.0
_MAX_TAG = 32767
# MPI's own algorithms are better for these, where latency counts.
_SMALL_BYTES = 16 << 10
# TensorFlow's of tensors, in bytes.
_ALIGNMENT = 64
_NOT_INSTALLED = "mpi4py is not installed (pip install 'tf_xshard[mpi]')"


class MPI(transport.Transport):
    """The transport of this process's group by MPI."""

    name = "MPI"
    packs = True
    gathers = True

    def _sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return [
            self._all_reduce(position, tensor)
            for position, tensor in enumerate(tensors)
        ]

    def reduce_scatter(self, rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `Transport.reduce_scatter`."""
        return [
            self._reduce_scatter(position, one)
            for position, one in enumerate(rows)
        ]

    def all_gather(self, shards: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `Transport.all_gather`."""
        return [
            self._all_gather(position, shard)
            for position, shard in enumerate(shards)
        ]

    def all_to_all(self, rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `Transport.all_to_all`."""
        return [
            self._call(
                recorder.REDUCE_SCATTER,
                position,
                one,
                _all_to_all,
                one.shape,
            )
            for position, one in enumerate(rows)
        ]

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
        size = self.groups.group_size
        num_elements = tensor.shape.num_elements()
        flat = tf.pad(tf.reshape(tensor, [-1]), [[0, -num_elements % size]])
        part = self._reduce_scatter(position, tf.reshape(flat, [size, -1]))
        parts = self._all_gather(position, tf.cast(part, tensor.dtype))
        total = tf.reshape(parts, [-1])[:num_elements]
        return tf.reshape(total, tensor.shape)

    def _reduce_scatter(self, position: int, rows: tf.Tensor) -> tf.Tensor:
        if _has_16_bits(rows):
            [received] = self.all_to_all([rows])
            return tf.reduce_sum(tf.cast(received, tf.float32), 0)
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
        collective: Callable[[Any, np.ndarray], _Collective],
        shape: Sequence[int | None] | tf.TensorShape,
    ) -> tf.Tensor:
        """Adds a collective to the graph, or runs it in eager mode."""
        cost = self._note(kind, tensor, position)
        seconds = float(self.communication.timeout_seconds)
        site = self.site
        assert site.replica_id is not None, site
        members = tuple(
            sorted(tuple(self.groups)[self.groups.group_of(site.replica_id)])
        )
        run = functools.partial(
            _run,
            collective,
            f"{kind} of shape {tensor.shape}",
            members,
            site.rank,
            seconds,
        )
        # NumPy has no bfloat16 of its own.
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


# The collectives: each yields requests to wait for, and returns its result.

_Collective = Generator[list[Any], None, np.ndarray]
# One for each process of the group.
_Arrays = Sequence[np.ndarray] | np.ndarray


def _sum(comm: Any, array: np.ndarray) -> _Collective:
    total = _empty(array.shape, array.dtype)
    if array.nbytes < _SMALL_BYTES:
        yield [comm.Iallreduce(array, total)]
        return total
    bounds = [array.size * k // comm.size for k in range(comm.size + 1)]
    parts = _split(array.reshape(-1), bounds)
    sums = _split(total.reshape(-1), bounds)
    yield from _add(comm, parts, sums[comm.rank])
    yield _exchange(comm, [sums[comm.rank]] * comm.size, sums)
    return total


def _reduce_scatter(comm: Any, rows: np.ndarray) -> _Collective:
    total = _empty(rows.shape[1:], rows.dtype)
    yield from _add(comm, rows, total)
    return total


def _all_to_all(comm: Any, rows: np.ndarray) -> _Collective:
    received = _empty(rows.shape, rows.dtype)
    received[comm.rank] = rows[comm.rank]
    yield _exchange(comm, rows, received)
    return received


def _all_gather(comm: Any, shard: np.ndarray) -> _Collective:
    gathered = _empty([comm.size, *shard.shape], shard.dtype)
    gathered[comm.rank] = shard
    yield _exchange(comm, [shard] * comm.size, gathered)
    return gathered


def _gather(comm: Any, array: np.ndarray) -> _Collective:
    """Gathers rows, whose number may differ between processes."""
    num_rows = np.empty(comm.size, np.int64)
    yield [comm.Iallgather(np.array([len(array)], np.int64), num_rows)]
    bounds = [0, *np.cumsum(num_rows).tolist()]
    gathered = _empty([bounds[-1], *array.shape[1:]], array.dtype)
    parts = _split(gathered, bounds)
    parts[comm.rank][...] = array
    yield _exchange(comm, [array] * comm.size, parts)
    return gathered


def _add(
    comm: Any, parts: _Arrays, total: np.ndarray
) -> Generator[list[Any], None, None]:
    """Sends each process its part, and adds up this process's parts."""
    received = [np.empty_like(total) for _ in range(comm.size)]
    received[comm.rank] = parts[comm.rank]
    yield _exchange(comm, parts, received)
    # In the order of the ranks.
    np.add(received[0], received[1], out=total)
    for one in received[2:]:
        np.add(total, one, out=total)


def _exchange(comm: Any, sent: _Arrays, received: _Arrays) -> list[Any]:
    """Starts to send an array to each other process, and to receive one."""
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
    collective: Callable[[Any, np.ndarray], _Collective],
    what: str,
    members: tuple[int, ...],
    rank: int,
    seconds: float,
    array: np.ndarray,
) -> np.ndarray:
    """Runs a collective of a group, in all its processes."""
    found = _group(members, rank, seconds)
    # Python hands 0-d arrays over as scalars.
    array = np.ascontiguousarray(array).reshape(np.shape(array))
    if _failures:
        raise TimeoutError(_failures[0])
    found.num_started += 1
    steps = collective(found.comm, array)
    while True:
        try:
            requests = next(steps)
        except StopIteration as end:
            return end.value
        found.wait(requests, what, seconds)


# Errors after which this process can't communicate, and the requests that MPI
# has not finished, in whose buffers it may still write.
_failures: list[str] = []
_open_requests: list[Any] = []


class _Group:
    """The processes of a group, and their communicator."""

    def __init__(self, members: tuple[int, ...], rank: int, comm: Any) -> None:
        self.comm = comm
        self.num_started = 0
        self._members, self._rank = members, rank

    def wait(self, requests: list[Any], what: str, seconds: float) -> None:
        """Waits for all requests; raises TimeoutError after a time."""
        waited, last = 0.0, time.monotonic()
        num_polls = 0
        is_told = False
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
                # Those whose timeout comes first know who waits as well.
                self._tell_that_this_waits()
                is_told = True
            if waited > seconds:
                _open_requests.extend(requests)
                # MPI can't end regularly with a collective that is open.
                atexit.register(_mpi().COMM_WORLD.Abort, 1)
                _failures.append(
                    f"MPI's {what} waited longer than {seconds:g} seconds"
                    " (Communication.timeout_seconds) for ranks"
                    f" {self._missing()} of {list(self._members)}. They have"
                    " ended, hang, or run different steps. Restart the"
                    " program."
                )
                raise TimeoutError(_failures[0])

    @property
    def _key(self) -> str:
        return f"tf_xshard/mpi/waits/{self._members}/{self.num_started}"

    def _tell_that_this_waits(self) -> None:
        # The store is gone if rank 0 is.
        with contextlib.suppress(tf.errors.OpError):
            runtime.publish(f"{self._key}/{self._rank}", "")

    def _missing(self) -> list[int]:
        """Asks which processes of the group wait in the same collective."""
        missing = []
        deadline = time.monotonic() + _SECONDS_TO_ASK_WHO_WAITS
        for rank in self._members:
            try:
                runtime.lookup(
                    f"{self._key}/{rank}", deadline - time.monotonic()
                )
            except tf.errors.OpError:
                missing.append(rank)
        return missing


_lock = threading.Lock()
_groups: dict[tuple[int, ...], _Group] = {}


def _group(members: tuple[int, ...], rank: int, seconds: float) -> _Group:
    """Returns a group of processes; all of them must call it."""
    with _lock:
        if members not in _groups:
            # Creating a communicator blocks. It does not, once all are here.
            key = f"tf_xshard/mpi/group/{members}"
            runtime.exchange(key, "", members, rank, seconds)
            mpi = _mpi()
            group = mpi.COMM_WORLD.Get_group().Incl(members)
            tag = zlib.crc32(str(members).encode()) % _MAX_TAG
            comm = mpi.COMM_WORLD.Create_group(group, tag)
            _groups[members] = _Group(members, rank, comm)
        return _groups[members]


# Which steps run over MPI.


def is_chosen(
    site: site_lib.Site, communication: communication_lib.Communication
) -> bool:
    """Returns whether `Communication.transport` means MPI here.

    All processes get the same answer.
    """
    choice = communication.transport
    if choice == "tensorflow":
        return False
    if choice == "auto" and (
        site.kind != "multi_worker" or not engines.is_started_by_mpi()
    ):
        return False
    reason = _reason_against(site, float(communication.timeout_seconds))
    if reason and choice == "mpi":
        raise ValueError(
            f'Communication(transport="mpi") can\'t be used: {reason}. Use'
            ' "auto", which takes MPI where it can, or "tensorflow".'
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
    """Says why MPI can't be used, or returns None; agreed by all processes."""
    own = _own_reason(site)
    if site.kind != "multi_worker" or recorder.is_recording():
        return own
    size = site.num_processes
    with _lock:
        if size not in _agreed:
            answers = runtime.exchange(
                "tf_xshard/mpi/reason",
                json.dumps(own),
                range(size),
                site.rank,
                seconds,
            )
            reasons = [
                f"rank {rank} says that {reason}"
                for rank, answer in enumerate(answers)
                if (reason := json.loads(answer)) is not None
            ]
            _agreed[size] = own or (reasons[0] if reasons else None)
        return _agreed[size]


# What the processes have agreed on, by their number.
_agreed: dict[int, str | None] = {}


def _own_reason(site: site_lib.Site) -> str | None:
    if site.kind != "multi_worker":
        return (
            "it is for MultiWorkerMirroredStrategy, and the replicas here are"
            f" those of {type(site.strategy).__name__}"
        )
    if site.num_local_replicas > 1 or "CPU" not in site.device:
        return (
            "it needs one CPU replica per process, and this process has"
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
            " the processes by mpiexec or srun, and call tf_xshard.connect()"
        )
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        return "this MPI allows calls from one thread only"
    return None


@functools.cache
def _mpi() -> types.ModuleType:
    """Returns mpi4py's module; importing it starts MPI."""
    mpi = importlib.import_module("mpi4py.MPI")
    before = sys.excepthook

    def end_the_job(*args: Any) -> None:
        # Else the others wait for this process until their timeout.
        before(*args)
        sys.stdout.flush()
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(1)

    sys.excepthook = end_the_job
    return mpi
