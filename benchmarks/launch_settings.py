"""Claim: with the settings of `launch` a sum in 8-bit integers takes 0.8.

`multi_worker`'s sums of 208 MB over groups of two of four processes, with no
environment variable set, with those that keep freed memory, and with all that
`launch` sets; one cluster after the other, several times:
`python -m benchmarks.launch_settings`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from absl import app
from absl import flags

from benchmarks import group_sums
from benchmarks import measuring

_RUNS = flags.DEFINE_integer("runs", 3, "clusters of each kind", 2)

ROWS = (group_sums.OURS, group_sums.INT8, group_sums.FEEDBACK)


def _seconds(settings: str) -> dict[str, float]:
    """Of one cluster, for each row."""
    run = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.multi_worker", "--blocks=5"),
            *(f"--only={name}" for name in ROWS),
            f"--settings={settings}",
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for line in run.stdout.splitlines():
        if "page faults" in line:
            print(f"{settings}: {line}", flush=True)
    [line] = [x for x in run.stdout.splitlines() if x.startswith("seconds ")]
    return json.loads(line.removeprefix("seconds "))


def main(argv):
    del argv
    measuring.print_setting("four processes on the loopback interface")
    runs: dict[str, list[dict[str, float]]] = {
        "none": [],
        "memory": [],
        "launch": [],
    }
    for _ in range(_RUNS.value):
        for settings, results in runs.items():
            results.append(_seconds(settings))
            print(".", end="", flush=True)
    print()
    for name in ROWS:
        seconds = {
            settings: [one[name] for one in results]
            for settings, results in runs.items()
        }
        plain = seconds.pop("none")
        noise = [one / statistics.median(plain) for one in plain]
        print(
            f"{name}: none set {statistics.median(plain):.3f} s"
            f" ({min(noise):.2f} to {max(noise):.2f} of that)"
        )
        for settings, values in seconds.items():
            ratios = [v / p for v, p in zip(values, plain, strict=True)]
            print(
                f"  {settings}: {statistics.median(values):.3f} s; ratio"
                f" {statistics.median(ratios):.2f} ({min(ratios):.2f} to"
                f" {max(ratios):.2f})"
            )


if __name__ == "__main__":
    app.run(main)
