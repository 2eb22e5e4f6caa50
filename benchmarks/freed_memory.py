"""Claim: workers that keep freed memory take 0.8 of the time of others.

`multi_worker`'s sums of 208 MB over groups of two of four processes, with
glibc's own settings and with those of `launch`, one cluster after the other,
several times: `python -m benchmarks.freed_memory`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from absl import app
from absl import flags

from benchmarks import measuring
from benchmarks import multi_worker

_RUNS = flags.DEFINE_integer("runs", 3, "clusters of each kind", 2)

ROWS = (multi_worker.OURS, multi_worker.INT8)


def _seconds(keeps: bool) -> dict[str, float]:
    """Of one cluster, for each row."""
    run = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.multi_worker", "--blocks=5"),
            *(f"--only={name}" for name in ROWS),
            f"--keep_memory={str(keeps).lower()}",
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for line in run.stdout.splitlines():
        if "page faults" in line:
            print(f"{'launch' if keeps else 'glibc'}: {line}", flush=True)
    [line] = [x for x in run.stdout.splitlines() if x.startswith("seconds ")]
    return json.loads(line.removeprefix("seconds "))


def main(argv):
    del argv
    measuring.print_setting("four processes on the loopback interface")
    runs: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for _ in range(_RUNS.value):
        for keeps, results in runs.items():
            results.append(_seconds(keeps))
            print(".", end="", flush=True)
    print()
    for name in ROWS:
        plain, kept = (
            [one[name] for one in runs[keeps]] for keeps in (False, True)
        )
        ratios = [k / p for k, p in zip(kept, plain, strict=True)]
        noise = [p / statistics.median(plain) for p in plain]
        print(
            f"{name}: glibc's settings {statistics.median(plain):.3f} s"
            f" ({min(noise):.2f} to {max(noise):.2f} of that), launch's"
            f" {statistics.median(kept):.3f} s; ratio"
            f" {statistics.median(ratios):.2f} ({min(ratios):.2f} to"
            f" {max(ratios):.2f})"
        )


if __name__ == "__main__":
    app.run(main)
