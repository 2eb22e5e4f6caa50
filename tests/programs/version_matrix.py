"""Runs the tests with other versions of Python, TensorFlow and Keras.

`python -m tests.programs.version_matrix` makes an environment for each row and
runs the default run in it, about 10 minutes a row on 2 cores. With `--smoke`
it runs the few files of SMOKE_TESTS on the rows of `.ci/run`. `--only` chooses
rows by their names. It prints one row of the table in
tf_xshard/docs/CONTRIBUTING.md as each ends.
"""

import argparse
import datetime
import functools
import os
import pathlib
import shutil
import sys
import tempfile
import time
from typing import NamedTuple

from tests.support import paths
from tests.support import processes


class Row(NamedTuple):
    """One environment.

    Attributes:
      python: The interpreter: this one, or one on the PATH.
      tensorflow: A requirement of pip for `tensorflow`; "nightly" for
        tf-nightly-cpu.
      keras: A requirement for `keras`; "nightly" for keras-nightly, with which
        a failure of `--smoke` is only printed.
    """

    python: str
    tensorflow: str
    keras: str


# One axis at a time.
ROWS = {
    "keras-3.12.0": Row(sys.executable, "==2.20.*", "==3.12.0"),
    "keras-3.13": Row(sys.executable, "==2.21.*", "==3.13.*"),
    "keras-3.14": Row(sys.executable, "==2.21.*", "==3.14.*"),
    "keras-3.15": Row(sys.executable, "==2.21.*", "==3.15.*"),
    "keras-nightly": Row(sys.executable, ">=2.22.0rc0", "nightly"),
    "tensorflow-nightly": Row(sys.executable, "nightly", "nightly"),
    "python-3.12": Row("python3.12", "==2.21.*", "<4"),
    "python-3.13": Row("python3.13", "==2.21.*", "<4"),
}
# What a user gets today, and the oldest and the newest Keras.
NEWEST = "keras-3.15"
SMOKE = ("keras-3.12.0", "keras-nightly")
# Private names; every wrapper, alone and nested; `fit`, and every kind of file.
SMOKE_TESTS = [
    "tests/optimizers/sharded_update_test.py",
    *(
        f"tests/conformance/{name}_test.py"
        for name in "private_names plain_keras nesting pages saving".split()
    ),
]
# Of one installation, or one run of the tests.
_SECONDS = 4 * 3600
_VERSIONS = """
import importlib.metadata as m, platform
found = {one.name: one.version for one in m.distributions()}
print(platform.python_version(),
      found.get("tf-nightly-cpu", found.get("tensorflow")),
      found.get("keras-nightly", found.get("keras")), found["jax"], sep=" | ")
"""


def _pip_commands(row):
    """What installs the package and a row's versions."""
    package = ("install", "-q", ".[tensorflow,test]")
    if row.keras != "nightly":
        versions = f"tensorflow{row.tensorflow}", f"keras{row.keras}"
        return [(*package, *versions)]
    tensorflow = f"tensorflow{row.tensorflow}"
    if row.tensorflow == "nightly":
        tensorflow = "tf-nightly-cpu"
    # Apart, since tf_keras requires a release of TensorFlow. Each pair is
    # installed into one folder, and TensorFlow requires one of Keras' two.
    return [
        package,
        ("uninstall", "-q", "-y", "tensorflow"),
        ("install", "-q", "--pre", tensorflow),
        ("uninstall", "-q", "-y", "keras", "keras-nightly"),
        ("install", "-q", "--pre", "--no-deps", "keras-nightly"),
    ]


def _run_row(name, folder, options):
    """Installs and tests one row, and prints what came of it.

    Args:
      name: The row's name.
      folder: Where to make the environment and the log.
      options: The program's.

    Returns:
      True if all tests passed, or if the row may fail.
    """
    row = ROWS[name]
    copy = pathlib.Path(folder, name)
    ignored = shutil.ignore_patterns(".venv", "build", ".git")
    shutil.copytree(paths.ROOT, copy, ignore=ignored)
    python = copy / ".venv" / "bin" / "python"
    log = pathlib.Path(folder, f"{name}.log")
    # Not the caller's checkout.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    tests = ["-n", "0", *SMOKE_TESTS] if options.smoke else []
    versions, passed, start = f"{name} | ? | ? | ?", False, time.monotonic()
    with open(log, "w") as file:
        run = functools.partial(
            processes.run,
            seconds=_SECONDS,
            check=True,
            cwd=copy,
            env=environment,
            stdout=file,
            stderr=file,
        )
        try:
            run([row.python, "-m", "venv", ".venv"])
            for command in _pip_commands(row):
                run([python, "-m", "pip", *command])
            found = processes.run([python, "-c", _VERSIONS], check=True)
            versions, start = found.stdout.strip(), time.monotonic()
            run([python, "-m", "pytest", "-q", *tests, *options.pytest])
            passed = True
        except AssertionError:
            print(f"{name} failed, see {log}:", flush=True)
    minutes = (time.monotonic() - start) / 60
    # An environment has three gigabytes.
    shutil.rmtree(copy, ignore_errors=True)
    lines = log.read_text().splitlines() or ["no output"]
    outcome, today = lines[-1].strip("= "), datetime.date.today()
    print(f"| {versions} | {outcome} | {minutes:.1f} | {today} |", flush=True)
    for line in lines if passed else lines[-60:]:
        is_outcome = line.startswith(("FAILED", "ERROR", "SKIPPED"))
        if not passed or (is_outcome and "needs --full" not in line):
            print(f"    {line}", flush=True)
    return passed or (options.smoke and row.keras == "nightly")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows, with commas between")
    parser.add_argument(
        "--smoke", action="store_true", help="only the smoke tests"
    )
    parser.add_argument(
        "--pytest", action="append", default=[], help="an argument of pytest"
    )
    options = parser.parse_args()
    names = SMOKE if options.smoke else ROWS
    if options.only:
        names = options.only.split(",")
    folder = tempfile.mkdtemp(prefix="version_matrix_")
    print(f"Logs in {folder}", flush=True)
    print("| Python | TensorFlow | Keras | jax | outcome | minutes | date |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    results = [_run_row(name, folder, options) for name in names]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
