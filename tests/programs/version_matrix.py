"""Runs the whole suite with the oldest and the newest TensorFlow and Keras.

Makes an environment for each pair and prints one line each:
`python -m tests.programs.version_matrix`. About an hour on 2 cores.
"""

import concurrent.futures
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from absl import app
from absl import flags

from tests.support import paths

_JOBS = flags.DEFINE_integer("jobs", 1, "environments at a time", 1)
_ONLY = flags.DEFINE_list("only", [], "such as 2.20/3.12; all if empty")
_ARGUMENTS = flags.DEFINE_multi_string("pytest", [], "arguments for pytest")

TENSORFLOWS = ("2.20.*", "2.21.*")
KERASES = ("3.12.*", "3.15.*")


def _suite(tensorflow, keras, folder) -> str:
    """Installs, tests, and returns the last line and what was skipped."""
    copy = os.path.join(folder, f"tf{tensorflow[:4]}-keras{keras[:4]}")
    os.makedirs(copy)
    archive = subprocess.run(
        ["git", "archive", "HEAD"],
        cwd=paths.ROOT,
        check=True,
        capture_output=True,
    )
    subprocess.run(["tar", "-x", "-C", copy], input=archive.stdout, check=True)
    subprocess.run(
        [sys.executable, "-m", "venv", ".venv"], cwd=copy, check=True
    )
    start = time.monotonic()
    python = os.path.join(copy, ".venv", "bin", "python")
    log = os.path.join(folder, os.path.basename(copy) + ".log")
    with open(log, "w") as file:
        install = [f"tensorflow-cpu=={tensorflow}", f"keras=={keras}"]
        for command in (
            ["pip", "install", "-q", ".[cpu,test]", *install],
            ["pytest", "-q", *_ARGUMENTS.value],
        ):
            code = subprocess.run(
                [python, "-m", *command],
                cwd=copy,
                stdout=file,
                stderr=subprocess.STDOUT,
            ).returncode
            if code:
                break
    lines = pathlib.Path(log).read_text().splitlines()
    skipped = [
        line
        for line in lines
        if line.startswith(("SKIPPED", "FAILED", "ERROR"))
        and "needs --full" not in line
    ]
    minutes = (time.monotonic() - start) / 60
    return "\n".join(
        [
            f"TensorFlow {tensorflow}, Keras {keras}: exit {code},"
            f" {lines[-1] if lines else 'no output'}, {minutes:.0f} minutes;"
            f" {log}",
            *(f"    {line}" for line in skipped),
        ]
    )


def main(argv):
    del argv
    folder = tempfile.mkdtemp(prefix="version_matrix_")
    print(f"Logs in {folder}", flush=True)
    with concurrent.futures.ThreadPoolExecutor(_JOBS.value) as pool:
        results = [
            pool.submit(_suite, tensorflow, keras, folder)
            for tensorflow in TENSORFLOWS
            for keras in KERASES
            if not _ONLY.value or f"{tensorflow[:4]}/{keras[:4]}" in _ONLY.value
        ]
        failed = False
        for result in concurrent.futures.as_completed(results):
            print(result.result(), flush=True)
            failed |= "exit 0," not in result.result()
    sys.exit(failed)


if __name__ == "__main__":
    app.run(main)
