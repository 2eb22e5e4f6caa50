"""Claim: what a sharded update communicates on TPUs is chosen by the compiler.

An Adam step of 8.4 million parameters, compiled for TPU but not run: the whole
update, the sharded one as the package does it (two all-reduces), and by
all-to-alls, which the package does not do. Then a step of Muon, with the whole
update and with owners. All numbers are the TPU compiler's, read from the
optimized HLO: `python -m benchmarks.tpu_sharded_update`.
"""

from __future__ import annotations

import collections
import os
import subprocess
import sys

import keras
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags

import tf_xshard
from benchmarks import measuring
from tf_xshard import testing
from tf_xshard.collectives import cross_replica_sum

_TOPOLOGIES = flags.DEFINE_list(
    "topologies",
    [
        "v5e:2x4",
        "v5p:2x2x2",
        "v5e:8x8",
        "v5p:4x4x4",
        "v5p:8x8x4",
        "v5e:16x16",
    ],
    "of 8, 64 and 256 cores",
)
_VARIANTS = flags.DEFINE_list(
    "variants",
    ["whole", "sharded", "all-to-all", "whole Muon", "owned Muon"],
    "which variants to compile",
)
_VARIANT = flags.DEFINE_string("variant", None, "the only one to compile")

WHOLE, SHARDED, ALL_TO_ALL = "whole", "sharded", "all-to-all"
WHOLE_MUON, OWNED_MUON = "whole Muon", "owned Muon"
WIDTH, LAYERS = 1024, 8
TIMEOUT_SECONDS = 1200


def _all_to_all(transport, rows):
    members = [sorted(group) for group in transport.groups]
    return tf.raw_ops.AllToAll(
        input=rows,
        group_assignment=members,
        concat_dimension=0,
        split_dimension=0,
        split_count=transport.groups.group_size,
    )


def _use_all_to_all():
    """Replaces how shards are communicated, in this process."""

    def reduce_scatter(self, rows):
        return [tf.reduce_sum(_all_to_all(self, one), 0) for one in rows]

    def all_gather(self, shards):
        size = self.groups.group_size
        return [
            _all_to_all(self, tf.tile(one[tf.newaxis], [size, 1]))
            for one in shards
        ]

    for path in (
        cross_replica_sum.OverAllReplicas,
        cross_replica_sum.InGroups,
    ):
        path.reduce_scatter, path.all_gather = reduce_scatter, all_gather


def _compile(topology, variant):
    num_replicas = int(np.prod([int(n) for n in topology[4:].split("x")]))
    strategy = testing.simulated_tpu_strategy(num_replicas)
    if variant == ALL_TO_ALL:
        _use_all_to_all()
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((WIDTH,)),
                *(
                    keras.layers.Dense(WIDTH, activation="relu")
                    for _ in range(LAYERS)
                ),
                keras.layers.Dense(10),
            ]
        )
        inner = keras.optimizers.Adam()
        if variant in (WHOLE_MUON, OWNED_MUON):
            inner = keras.optimizers.Muon(1e-3)
        model.compile(
            tf_xshard.CrossShardOptimizer(
                inner, shard_update=variant not in (WHOLE, WHOLE_MUON)
            ),
            "mse",
        )
    compiled = testing.compile_for_tpu(
        model,
        np.zeros([2 * num_replicas, WIDTH], "float32"),
        np.zeros([2 * num_replicas, 10], "float32"),
        topology=topology,
    )
    kinds = collections.Counter()
    num_bytes = 0
    for one in compiled.collectives:
        kinds[one.kind] += 1
        num_bytes += one.num_bytes
    counts = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    memory = compiled.memory
    print(
        f"{variant:10} {counts:13} {num_bytes / 1e6:5.1f} MB; arguments"
        f" {memory.argument_bytes / 1e6:5.1f}, temporary"
        f" {memory.temporary_bytes / 1e6:4.1f}, code"
        f" {memory.code_bytes / 1e6:4.1f}, peak"
        f" {memory.peak_bytes / 1e6:5.1f} MB; compiler"
        f" {compiled.compile_seconds:.1f} s"
    )


def main(argv):
    del argv
    if _VARIANT.value:
        [topology] = _TOPOLOGIES.value
        _compile(topology, _VARIANT.value)
        return
    measuring.print_setting("compiled for TPU, nothing runs")
    for topology in _TOPOLOGIES.value:
        print(topology)
        for variant in _VARIANTS.value:
            run = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.tpu_sharded_update",
                    f"--topologies={topology}",
                    f"--variant={variant}",
                ],
                capture_output=True,
                text=True,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
                timeout=TIMEOUT_SECONDS,
            )
            if run.returncode:
                sys.exit(run.stderr[-3000:])
            print(f"  {run.stdout.splitlines()[-1]}", flush=True)


if __name__ == "__main__":
    app.run(main)
