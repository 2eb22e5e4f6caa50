"""Claim: subgroup collectives take half the time of a sum over all replicas.

Four processes on one machine under MultiWorkerMirroredStrategy, 162 tensors and
52 million float32 numbers per step, groups of two: our path in float32, again
(the noise), in bfloat16, one tensor at a time, with several bucket sizes and
numbers of buckets in flight, the strategy's own all_reduce over all four, a
one-hot stack, an all_gather; interleaved, all in one run, with the bytes on the
wire. With `--horovod_python`, the Python of an environment that has Horovod,
its process sets on the same tensors, before and after:
`python -m benchmarks.multi_worker`.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import subprocess
import sys
import threading
import time

import numpy as np
import tensorflow as tf
from absl import app
from absl import flags
from absl import logging

from benchmarks import measuring
from tests.support import counting
from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment
from tf_xshard.collectives import one_hot
from tf_xshard.collectives import subgroups
from tf_xshard.distribute import replica_context
from tf_xshard.multi_worker import local_cluster
from tf_xshard.reduction import buckets
from tf_xshard.reduction import group_sum
from tf_xshard.reduction import quantization
from tf_xshard.reduction import residuals

_BLOCKS = flags.DEFINE_integer("blocks", 7, "interleaved blocks", 5)
_STEPS = flags.DEFINE_integer("steps", 2, "steps a block")
_HOROVOD_PYTHON = flags.DEFINE_string(
    "horovod_python", None, "Python of an environment that has Horovod"
)
_TIMEOUT_SECONDS = flags.DEFINE_integer(
    "timeout_seconds", 3600, "ends a run that hangs"
)
_ONLY = flags.DEFINE_multi_string("only", [], "a row to measure; default: all")
_SETTINGS = flags.DEFINE_enum(
    "settings",
    "launch",
    ["launch", "memory", "none"],
    "of the environment: those of `launch`, only those by which freed memory is"
    " kept, or none",
)
_WORKER = flags.DEFINE_bool("worker", False, "for the program's own use")

NUM_WORKERS = 4
GROUPS = group_assignment.GroupAssignment([[0, 2], [1, 3]])
# 81 layers of 800 x 800 and their biases.
SHAPES = [shape for _ in range(81) for shape in ((800, 800), (800,))]
GRADIENT_BYTES = 4 * sum(int(np.prod(shape)) for shape in SHAPES)
# Made by a worker when it begins.
_VARIABLES: list = []
_RESIDUALS: list = []
OURS, ONE_HOT, ALL_GATHER = "ours, float32", "one-hot", "all_gather"
AGAIN, BFLOAT16 = "ours, float32, again", "ours, bfloat16"
INT8, FEEDBACK = "ours, int8", "ours, int8 with error feedback"
EVERYONE = "strategy's all_reduce over all four"


def _ours(tensors, here, transport=subgroups.Subgroups, **communication):
    how = communication_lib.Communication(**communication)
    return buckets.sum_dense(tensors, transport(here, GROUPS, how)).values


def _in_blocks(tensors, here, size):
    """8-bit integers with one scale for so many numbers."""
    before = quantization.NUMBERS_PER_BLOCK
    quantization.NUMBERS_PER_BLOCK = size
    try:
        return _ours(tensors, here, dtype="int8")
    finally:
        quantization.NUMBERS_PER_BLOCK = before


def _with_feedback(tensors, here):
    """With the residuals that an optimizer keeps."""
    how = communication_lib.Communication(dtype="int8", error_feedback=True)
    reducer = group_sum.GroupReducer(GROUPS, how)
    reducer.residuals = _RESIDUALS[0]
    sums = reducer.sum(tensors, _VARIABLES, here)
    reducer.residuals.keep(None)
    return sums


class _AllToAll(subgroups.Subgroups):
    """A sum as all-to-all, additions and all-gather, not as a ring."""

    def _sum(self, tensors):
        size = self.groups.group_size
        rows = [tf.reshape(tensor, [size, -1]) for tensor in tensors]
        gathered = self.all_gather(self.reduce_scatter(rows))
        return [
            tf.reshape(one, tensor.shape)
            for one, tensor in zip(gathered, tensors, strict=True)
        ]


class _Gathered(subgroups.Subgroups):
    """A sum as all-gather and additions: as many bytes, in groups of two."""

    def _sum(self, tensors):
        size = self.groups.group_size
        return [
            tf.add_n(tf.unstack(one, num=size))
            for one in self.all_gather(tensors)
        ]


def _all_gather(tensors, here):
    flat = tf.concat([tf.reshape(t, [-1]) for t in tensors], 0)
    gathered = tf.distribute.get_replica_context().all_gather(
        flat[tf.newaxis], axis=0
    )
    members = list(GROUPS)[GROUPS.group_of(here.replica_id)]
    total = tf.add_n([gathered[member] for member in members])
    return tf.split(total, [int(np.prod(shape)) for shape in SHAPES])


def _everyone(tensors, here):
    del here
    return tf.distribute.get_replica_context().all_reduce(
        tf.distribute.ReduceOp.SUM, tensors
    )


SETTINGS = {
    "one per tensor": dict(bytes_per_bucket=1),
    **{
        f"buckets of {size} MiB": dict(bytes_per_bucket=size << 20)
        for size in (1, 2, 4, 8, 32, 64)
    },
    "all in one bucket": dict(bytes_per_bucket=1 << 30),
    **{
        f"{count} in flight": dict(buckets_in_flight=count)
        for count in (1, 2, 8)
    },
}
VARIANTS = {
    OURS: _ours,
    AGAIN: _ours,
    BFLOAT16: functools.partial(_ours, dtype="bfloat16"),
    INT8: functools.partial(_ours, dtype="int8"),
    FEEDBACK: _with_feedback,
    **{
        f"{INT8}, blocks of {size}": functools.partial(_in_blocks, size=size)
        for size in (64, 1024)
    },
    **{
        name: functools.partial(_ours, **setting)
        for name, setting in SETTINGS.items()
    },
    "all-to-all and all-gather": functools.partial(_ours, transport=_AllToAll),
    "all-gather, then sums": functools.partial(_ours, transport=_Gathered),
    ONE_HOT: functools.partial(_ours, transport=one_hot.OneHot),
    ALL_GATHER: _all_gather,
    EVERYONE: _everyone,
}


def _worker():
    # Its info lines name every collective that is traced.
    tf.get_logger().setLevel("ERROR")
    logging.set_verbosity(logging.ERROR)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank = strategy.cluster_resolver.task_id
    # Powers of two, which bfloat16 holds exactly.
    variables = [tf.Variable(tf.fill(s, 2.0**rank)) for s in SHAPES]
    with strategy.scope():
        _VARIABLES.extend(variables)
        _RESIDUALS.append(residuals.Residuals(variables))

    def make(variant):
        @tf.function(autograph=False)
        def step():
            def on_replica():
                tensors = [v.read_value() for v in variables]
                sums = variant(tensors, replica_context.current())
                # A number of every tensor, so that none is left out.
                return tf.stack([tf.reshape(one, [-1])[0] for one in sums])

            return strategy.run(on_replica)

        return step

    @tf.function(autograph=False)
    def barrier():
        def on_replica():
            return tf.distribute.get_replica_context().all_reduce(
                tf.distribute.ReduceOp.SUM, tf.constant(1.0)
            )

        return strategy.run(on_replica)

    names = _ONLY.value or list(VARIANTS)
    steps = {name: make(VARIANTS[name]) for name in names}
    mine = sum(2.0**r for r in list(GROUPS)[GROUPS.group_of(rank)])
    for name, step in steps.items():
        expected = sum(2.0**r for r in range(4)) if name == EVERYONE else mine
        # 8-bit integers round their scale.
        np.testing.assert_allclose(step().numpy(), expected, rtol=1e-6)

    def timed(name):
        def run():
            seconds = []
            for _ in range(_STEPS.value):
                barrier().numpy()
                start = time.perf_counter()
                steps[name]().numpy()
                seconds.append(time.perf_counter() - start)
            return seconds

        return run

    # Only the chief's own output is shown.
    medians = measuring.interleaved(
        {name: timed(name) for name in steps}, _BLOCKS.value
    )
    sent = {
        name: _sent(steps[name], barrier)
        for name in (OURS, BFLOAT16, INT8)
        if name in steps
    }
    used = {name: _used(steps[name], barrier) for name in sent}
    if rank == 0:
        _print_report(medians, sent)
        for name, (user, system, faults) in used.items():
            print(
                f"{name}: a process uses {user:.2f} CPU seconds a step in its"
                f" own code and {system:.2f} in the kernel, with"
                f" {faults:,.0f} page faults"
            )
    sys.stdout.flush()
    barrier().numpy()
    os._exit(0)


def _used(step, barrier) -> list[float]:
    """CPU seconds in user code and in the kernel, and page faults, per step."""

    def read():
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return np.array([usage.ru_utime, usage.ru_stime, usage.ru_minflt])

    barrier().numpy()
    before = read()
    for _ in range(_STEPS.value):
        step().numpy()
    return ((read() - before) / _STEPS.value).tolist()


def _sent(step, barrier) -> float:
    """Bytes that each process sends per step."""
    barrier().numpy()
    time.sleep(1.0)
    before = counting.loopback_bytes()
    time.sleep(1.0)
    idle = counting.loopback_bytes() - before
    barrier().numpy()
    before = counting.loopback_bytes()
    for _ in range(_STEPS.value):
        step().numpy()
    barrier().numpy()
    time.sleep(1.0)
    # Subtract what the idle cluster sends in a second; barriers are included.
    sent = counting.loopback_bytes() - before - idle
    return sent / NUM_WORKERS / _STEPS.value


def _print_report(medians, sent):
    print(f"{'':36} seconds a step (quartiles); ratio to {OURS!r}")
    for name in medians:
        low, middle, high = measuring.quartiles(medians[name])
        ratio = measuring.quartiles(measuring.ratios(medians, name, OURS))
        print(
            f"{name:36} {middle:.3f} ({low:.3f} to {high:.3f});"
            f" {ratio[1]:.2f} ({ratio[0]:.2f} to {ratio[2]:.2f})"
        )
    others = {"": EVERYONE}
    if measured := [name for name in SETTINGS if name in medians]:
        fastest = min(
            measured, key=lambda name: measuring.quartiles(medians[name])[1]
        )
        others["the fastest other setting: "] = fastest
    for what, name in others.items():
        if name not in medians:
            continue
        low, middle, high = measuring.quartiles(
            measuring.ratios(medians, OURS, name)
        )
        print(f"{OURS} / {what}{name}: {middle:.2f} ({low:.2f} to {high:.2f})")
    size = GROUPS.group_size
    bound = 2 * (size - 1) / size * GRADIENT_BYTES
    for name, share in ((OURS, 1.0), (BFLOAT16, 0.5), (INT8, 0.25)):
        if name not in sent:
            continue
        print(
            f"{name}: each process sends {sent[name] / 1e6:.1f} MB a step; a"
            f" ring's lower bound is {share * bound / 1e6:.1f} MB; ratio"
            f" {sent[name] / (share * bound):.4f}; of float32's"
            f" {sent[name] / sent[OURS]:.3f}"
        )
    print(
        "seconds "
        + json.dumps(
            {
                name: measuring.quartiles(medians[name])[1]
                for name in (OURS, BFLOAT16, INT8, FEEDBACK)
                if name in medians
            }
        )
    )


def _horovod() -> float:
    """Horovod's median seconds per step, in a separate run."""
    program = os.path.join(os.path.dirname(__file__), "horovod_process_sets.py")
    python = _HOROVOD_PYTHON.value
    run = subprocess.run(
        [
            os.path.join(os.path.dirname(python), "horovodrun"),
            *("-np", str(NUM_WORKERS), "--gloo"),
            *(python, program, str(_BLOCKS.value * _STEPS.value)),
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=_TIMEOUT_SECONDS.value,
        env={
            **os.environ,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PATH": f"{os.path.dirname(python)}:{os.environ['PATH']}",
        },
    )
    [line] = [line for line in run.stdout.splitlines() if "horovod " in line]
    print(line, flush=True)
    return json.loads(line.split("horovod ")[1])["median"]


def _settings() -> dict[str, str]:
    settings = {"launch": NUM_WORKERS, "memory": 1}
    if _SETTINGS.value == "none":
        return {}
    return local_cluster.settings(settings[_SETTINGS.value])


def main(argv):
    del argv
    if _WORKER.value:
        _worker()
    measuring.print_setting(
        f"{NUM_WORKERS} processes on the loopback interface, one CPU device"
        f" each, {os.cpu_count()} cores"
    )
    horovod = [_horovod()] if _HOROVOD_PYTHON.value else []
    nowhere = subprocess.DEVNULL
    processes = local_cluster.start(
        [
            "-m",
            "benchmarks.multi_worker",
            "--worker",
            f"--blocks={_BLOCKS.value}",
            f"--steps={_STEPS.value}",
            *(f"--only={name}" for name in _ONLY.value),
        ],
        [(subprocess.PIPE, None)] + [(nowhere, nowhere)] * (NUM_WORKERS - 1),
        {"TF_CPP_MIN_LOG_LEVEL": "3"},
        _settings(),
        text=True,
    )
    ours = {}
    # Ends a run that hangs, and with it the loop.
    limit = threading.Timer(_TIMEOUT_SECONDS.value, processes[0].kill)
    limit.start()
    try:
        for line in processes[0].stdout:
            print(line, end="", flush=True)
            if line.startswith("seconds "):
                ours = json.loads(line.removeprefix("seconds "))
        codes = [process.wait(_TIMEOUT_SECONDS.value) for process in processes]
    finally:
        limit.cancel()
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        sys.exit(f"workers ended with {codes}")
    if horovod:
        horovod.append(_horovod())
        for name, seconds in ours.items():
            ratios = sorted(seconds / one for one in horovod)
            print(
                f"{name} / Horovod's process sets, float32: {ratios[0]:.2f} and"
                f" {ratios[1]:.2f} of the runs before and after"
            )


if __name__ == "__main__":
    app.run(main)
