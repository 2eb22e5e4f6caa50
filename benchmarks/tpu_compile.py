"""Claim: native groups communicate 1/num_groups of the stacked path's bytes.

A model of 27 million parameters, one Adam step, compiled for TPU but not run:
plain Keras, group sums by `CrossReplicaSum` with a group assignment, and group
sums as a stack through the strategy's all_reduce, which is the path without a
device assignment. All numbers are the TPU compiler's, read from the optimized
HLO: `python -m benchmarks.tpu_compile`.
"""

from __future__ import annotations

import collections

from absl import app
from absl import flags

from benchmarks import measuring
from benchmarks import tpu_compile_program

_NUM_GROUPS = flags.DEFINE_integer("groups", 4, "groups of replicas", 2)
_TOPOLOGIES = flags.DEFINE_list(
    "topologies", ["v5e:2x4", "v5e:8x8", "v5e:16x16"], "of 8, 64, 256 cores"
)
_REPLICAS = flags.DEFINE_list("replicas", ["8", "64", "256"], "as many cores")

WIDTH, LAYERS = 1632, 10
PATHS = ("plain", "native", "stacked")


def _row(path, got):
    gradients = [c for c in got["collectives"] if c[0] == "all-reduce"]
    kinds = collections.Counter(c[0] for c in got["collectives"])
    sizes = ", ".join(f"{c[1] / 1e6:.1f}" for c in gradients)
    counts = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    print(
        f"  {path:8} {counts}; MB each: {sizes}; peak"
        f" {got['peak_bytes'] / 1e6:.0f} MB; compiler"
        f" {got['compile_seconds']:.1f} s of {got['total_seconds']:.0f} s",
        flush=True,
    )
    return sum(c[1] for c in gradients)


def main(argv):
    del argv
    measuring.print_setting("compiled for TPU, nothing runs")
    for topology, num_replicas in zip(
        _TOPOLOGIES.value, _REPLICAS.value, strict=True
    ):
        print(
            f"{topology}, {num_replicas} replicas, {_NUM_GROUPS.value} groups"
        )
        num_bytes = {}
        for path in PATHS:
            got = tpu_compile_program.run(
                topology=topology,
                num_replicas=num_replicas,
                num_groups=_NUM_GROUPS.value,
                path=path,
                width=WIDTH,
                layers=LAYERS,
            )
            assert got["parameters"] >= 25e6, got["parameters"]
            num_bytes[path] = _row(path, got)
        print(
            "  bytes handed over, stacked / native:"
            f" {num_bytes['stacked'] / num_bytes['native']:.3f}"
            f" ({_NUM_GROUPS.value} groups); native / plain Keras:"
            f" {num_bytes['native'] / num_bytes['plain']:.3f}"
        )


if __name__ == "__main__":
    app.run(main)
