"""Runs the tests with other versions of Python, TensorFlow and Keras.

`python -m tests.programs.version_matrix [ROW [PYTEST_ARGUMENT ...]]` makes an
environment for a row, or for each, and runs pytest in it: the default run takes
about 10 minutes on 2 cores. It prints one row of the table in
tf_xshard/docs/CONTRIBUTING.md as each ends.
"""

import datetime
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
      keras: A requirement for `keras`; "nightly" for keras-nightly.
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
# The versions that a user gets today.
NEWEST = "keras-3.15"
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


def _run_row(name, folder, arguments):
    """Installs and tests one row, and prints what came of it.

    Args:
      name: The row's name.
      folder: Where to make the environment and the log.
      arguments: Those of pytest.

    Returns:
      True if all tests passed.
    """
    row = ROWS[name]
    copy, log = pathlib.Path(folder, name), pathlib.Path(folder, f"{name}.log")
    ignored = shutil.ignore_patterns(".venv", "build", ".git")
    shutil.copytree(paths.ROOT, copy, ignore=ignored)
    python = copy / ".venv" / "bin" / "python"
    # Not the caller's checkout.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    options = {"cwd": copy, "env": environment}
    commands = [
        [row.python, "-m", "venv", ".venv"],
        *([python, "-m", "pip", *one] for one in _pip_commands(row)),
        [python, "-m", "pytest", "-q", *arguments],
    ]
    with open(log, "w") as file:
        for command in commands:
            start = time.monotonic()
            ended = processes.run(
                command, _SECONDS, stdout=file, stderr=file, **options
            )
            if ended.returncode:
                print(f"{command} failed, see {log}:", flush=True)
                break
    minutes = (time.monotonic() - start) / 60
    found = processes.run([python, "-c", _VERSIONS], **options)
    # An environment has three gigabytes.
    shutil.rmtree(copy, ignore_errors=True)
    lines = log.read_text().splitlines() or ["no output"]
    outcome, today = lines[-1].strip("= "), datetime.date.today()
    versions = found.stdout.strip() or name
    print(f"| {versions} | {outcome} | {minutes:.1f} | {today} |", flush=True)
    print("", *lines[-60:], sep="\n    ", flush=True)
    return not ended.returncode


def main():
    names, arguments = sys.argv[1:2] or ROWS, sys.argv[2:]
    folder = tempfile.mkdtemp(prefix="version_matrix_")
    print(f"Logs in {folder}", flush=True)
    print("| Python | TensorFlow | Keras | jax | outcome | minutes | date |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    results = [_run_row(name, folder, arguments) for name in names]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
