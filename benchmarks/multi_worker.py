"""Claim: subgroup collectives take half the time of a sum over all replicas.

Four processes on one machine under MultiWorkerMirroredStrategy, 162 tensors and
52 million float32 numbers per step, groups of two, summed in the ways of
`group_sums`, interleaved, with the bytes on the wire. With `--horovod_python`,
Horovod's process sets on the same tensors, before and after. With `--gigabits`,
over a slow network: `python -m benchmarks.multi_worker`.
"""

from __future__ import annotations

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

import tf_xshard
from benchmarks import group_sums
from benchmarks import horovod_run
from benchmarks import measuring
from tests.support import mpiexec
from tf_xshard.distribute import site as site_lib
from tf_xshard.multi_worker import local_cluster
from tf_xshard.reduction import error_feedback

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
_GIGABITS = flags.DEFINE_float(
    "gigabits",
    None,
    "the processes share a network of so many Gbit/s, which is the loopback"
    " interface of a namespace; needs root, and the settings of `launch`",
)
_WORKER = flags.DEFINE_bool("worker", False, "for the program's own use")

NUM_WORKERS = 4
# Open MPI over the loopback interface, and not by shared memory.
_OPEN_MPI_OVER_TCP = {
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,tcp",
    "OMPI_MCA_btl_tcp_if_include": "lo",
}


def _worker():
    # Its info lines name every collective that is traced.
    tf.get_logger().setLevel("ERROR")
    logging.set_verbosity(logging.ERROR)
    by_mpi = "TF_CONFIG" not in os.environ
    tf_xshard.connect()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank = strategy.cluster_resolver.task_id
    if by_mpi and rank:
        sys.stdout = open(os.devnull, "w")
    # Powers of two, which bfloat16 holds exactly.
    variables = [tf.Variable(tf.fill(s, 2.0**rank)) for s in group_sums.SHAPES]
    with strategy.scope():
        group_sums.VARIABLES.extend(variables)
        group_sums.RESIDUALS.append(error_feedback.Residuals(variables))

    def make(variant):
        @tf.function(autograph=False)
        def step():
            def on_replica():
                tensors = [v.read_value() for v in variables]
                sums = variant(tensors, site_lib.current())
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

    names = _ONLY.value or list(group_sums.VARIANTS)
    # Without Open MPI, MPI uses shared memory, which no network limits.
    if not by_mpi or (_GIGABITS.value and not mpiexec.is_open_mpi()):
        names = [name for name in names if "MPI" not in name]
    steps = {name: make(group_sums.VARIANTS[name]) for name in names}
    mine = list(group_sums.GROUPS)[group_sums.GROUPS.group_of(rank)]
    for name, step in steps.items():
        everyone = name == group_sums.EVERYONE
        expected = sum(2.0**r for r in (range(4) if everyone else mine))
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
        for name in (group_sums.OURS, group_sums.BFLOAT16, group_sums.INT8)
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
    if by_mpi:
        sys.exit(0)  # MPI ends in order.
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
    before = measuring.loopback_bytes()
    time.sleep(1.0)
    idle = measuring.loopback_bytes() - before
    barrier().numpy()
    before = measuring.loopback_bytes()
    for _ in range(_STEPS.value):
        step().numpy()
    barrier().numpy()
    time.sleep(1.0)
    # Subtract what the idle cluster sends in a second; barriers are included.
    sent = measuring.loopback_bytes() - before - idle
    return sent / NUM_WORKERS / _STEPS.value


def _print_report(medians, sent):
    print(f"{'':36} seconds a step (quartiles); ratio to {group_sums.OURS!r}")
    for name in medians:
        low, middle, high = measuring.quartiles(medians[name])
        ratio = measuring.quartiles(
            measuring.ratios(medians, name, group_sums.OURS)
        )
        print(
            f"{name:36} {middle:.3f} ({low:.3f} to {high:.3f});"
            f" {ratio[1]:.2f} ({ratio[0]:.2f} to {ratio[2]:.2f})"
        )
    others = {"": group_sums.EVERYONE}
    if measured := [name for name in group_sums.SETTINGS if name in medians]:
        fastest = min(
            measured, key=lambda name: measuring.quartiles(medians[name])[1]
        )
        others["the fastest other setting: "] = fastest
    ours = group_sums.OURS
    for what, name in others.items():
        if name in medians:
            ratios = measuring.ratios(medians, ours, name)
            low, middle, high = measuring.quartiles(ratios)
            ratio = f"{middle:.2f} ({low:.2f} to {high:.2f})"
            print(f"{ours} / {what}{name}: {ratio}")
    size = group_sums.GROUPS.group_size
    bound = 2 * (size - 1) / size * group_sums.GRADIENT_BYTES
    for name, share in (
        (group_sums.OURS, 1.0),
        (group_sums.BFLOAT16, 0.5),
        (group_sums.INT8, 0.25),
    ):
        if name not in sent:
            continue
        print(
            f"{name}: each process sends {sent[name] / 1e6:.1f} MB a step; a"
            f" ring's lower bound is {share * bound / 1e6:.1f} MB; ratio"
            f" {sent[name] / (share * bound):.4f}; of float32's"
            f" {sent[name] / sent[group_sums.OURS]:.3f}"
        )
    print(
        "seconds "
        + json.dumps(
            {
                name: measuring.quartiles(medians[name])[1]
                for name in (
                    group_sums.OURS,
                    group_sums.BFLOAT16,
                    group_sums.INT8,
                    group_sums.FEEDBACK,
                    group_sums.MPI,
                    group_sums.MPI_BFLOAT16,
                    group_sums.MPI_INT8,
                )
                if name in medians
            }
        )
    )


def _horovod() -> float:
    """Horovod's median seconds per step, in a separate run."""
    python = _HOROVOD_PYTHON.value
    line, found = horovod_run.printed(
        _limited(
            horovod_run.command(
                python,
                NUM_WORKERS,
                "horovod_process_sets.py",
                [str(_BLOCKS.value * _STEPS.value)],
            )
        ),
        "horovod",
        horovod_run.environment(python),
        _TIMEOUT_SECONDS.value,
    )
    print(line, flush=True)
    return found["median"]


def _limited(command: list[str]) -> list[str]:
    """The command on a network of `--gigabits`, or as it is without it."""
    if not _GIGABITS.value:
        return command
    limit = f"rate {_GIGABITS.value:g}gbit burst 4mb latency 200ms"
    script = (
        "ip link set lo up && tc qdisc add dev lo root tbf"
        f' {limit} && exec "$@"'
    )
    return ["unshare", "--net", "sh", "-c", script, "sh", *command]


def _settings() -> dict[str, str]:
    return local_cluster.settings(1) if _SETTINGS.value == "memory" else {}


def _started(arguments) -> list[subprocess.Popen]:
    """The workers; the first one's output is read."""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    # Under MPI, whose rows are measured beside the others. With other settings
    # than those of `launch`, which are also `connect`'s, without it.
    if _SETTINGS.value == "launch":
        command = mpiexec.command(NUM_WORKERS, *arguments[1:])
        return [
            subprocess.Popen(
                _limited(command),
                env={
                    **mpiexec.OPEN_MPI,
                    **(_OPEN_MPI_OVER_TCP if _GIGABITS.value else {}),
                    **os.environ,
                    **quiet,
                },
                stdout=subprocess.PIPE,
                text=True,
            )
        ]
    nowhere = subprocess.DEVNULL
    return local_cluster.start(
        arguments,
        [(subprocess.PIPE, None)] + [(nowhere, nowhere)] * (NUM_WORKERS - 1),
        quiet,
        _settings(),
        text=True,
    )


def main(argv):
    del argv
    if _WORKER.value:
        _worker()
    if _GIGABITS.value and _SETTINGS.value != "launch":
        raise ValueError("--gigabits needs --settings=launch")
    limit = f" of {_GIGABITS.value:g} Gbit/s" if _GIGABITS.value else ""
    measuring.print_setting(
        f"{NUM_WORKERS} processes on the loopback interface{limit}, one CPU"
        f" device each, {os.cpu_count()} cores"
    )
    horovod = [_horovod()] if _HOROVOD_PYTHON.value else []
    processes = _started(
        [
            "-m",
            "benchmarks.multi_worker",
            "--worker",
            f"--blocks={_BLOCKS.value}",
            f"--steps={_STEPS.value}",
            *(f"--only={name}" for name in _ONLY.value),
            *([f"--gigabits={_GIGABITS.value}"] if _GIGABITS.value else []),
        ]
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
