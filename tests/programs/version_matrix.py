"""Runs the tests with other versions of Python, TensorFlow and Keras.

`python -m tests.programs.version_matrix` makes an environment for each row and
runs the default run in it, about 10 minutes a row on 2 cores. With `--smoke`
it runs `tests/conformance/smoke_test.py` on the rows of `.ci/run`. `--only`
chooses rows by their names. It prints one row of the table in
tf_xshard/docs/CONTRIBUTING.md as each ends.
"""

import dataclasses
import datetime
import os
import pathlib
import shutil
import sys
import tempfile
import time

from absl import app
from absl import flags

from tests.support import processes

_ONLY = flags.DEFINE_list("only", [], "names of rows; all if empty")
_SOURCE = flags.DEFINE_string(
    "source", "", "a folder to copy; by default what is committed"
)
_SMOKE = flags.DEFINE_bool("smoke", False, "only the smoke tests")
_ARGUMENTS = flags.DEFINE_multi_string("pytest", [], "arguments for pytest")


@dataclasses.dataclass(frozen=True)
class Row:
    """One environment.

    Attributes:
      python: The interpreter: this one, or one on the PATH.
      tensorflow: A requirement of pip for `tensorflow`; "nightly" for
        tf-nightly-cpu.
      keras: A requirement for `keras`; "nightly" for keras-nightly.
      may_fail: Whether a failure of `--smoke` is printed, but not returned:
        these versions have not been released.
    """

    python: str
    tensorflow: str
    keras: str
    may_fail: bool = False


# One axis at a time.
ROWS = {
    "keras-3.12.0": Row(sys.executable, "==2.20.*", "==3.12.0"),
    "keras-3.13": Row(sys.executable, "==2.21.*", "==3.13.*"),
    "keras-3.14": Row(sys.executable, "==2.21.*", "==3.14.*"),
    "keras-3.15": Row(sys.executable, "==2.21.*", "==3.15.*"),
    "keras-nightly": Row(sys.executable, ">=2.22.0rc0", "nightly", True),
    "tensorflow-nightly": Row(sys.executable, "nightly", "nightly", True),
    "python-3.12": Row("python3.12", "==2.21.*", "<4"),
    "python-3.13": Row("python3.13", "==2.21.*", "<4"),
}
# What a user gets today, and the oldest and the newest Keras.
NEWEST = "keras-3.15"
SMOKE = ("keras-3.12.0", "keras-nightly")
# Of one installation, or one run of the tests.
_SECONDS = 4 * 3600
SMOKE_TESTS = "tests/conformance/smoke_test.py"
_VERSIONS = """
import importlib.metadata as m, platform, sys
def version(*names):
    for name in names:
        try:
            return m.version(name)
        except m.PackageNotFoundError:
            pass
print(platform.python_version(), version("tf-nightly-cpu", "tensorflow"),
      version("keras-nightly", "keras"), version("jax"), sep=" | ")
"""


def _install(row: Row, python: str, run) -> None:
    """Installs the package and a row's versions into an environment."""
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    if row.keras != "nightly":
        tensorflow, keras = f"tensorflow{row.tensorflow}", f"keras{row.keras}"
        run(*pip, "install", "-q", ".[tensorflow,test]", tensorflow, keras)
        return
    # Apart, since tf_keras requires a release of TensorFlow.
    run(*pip, "install", "-q", ".[tensorflow,test]")
    if row.tensorflow == "nightly":
        run(*pip, "uninstall", "-q", "-y", "tensorflow")
        run(*pip, "install", "-q", "--pre", "tf-nightly-cpu")
    else:
        run(*pip, "install", "-q", f"tensorflow{row.tensorflow}")
    # Both are installed into one folder, and TensorFlow requires one of them.
    run(*pip, "uninstall", "-q", "-y", "keras", "keras-nightly")
    run(*pip, "install", "-q", "--pre", "--no-deps", "keras-nightly")


def _run_row(name: str, folder: str) -> bool:
    """Installs and tests one row, and prints what came of it.

    Args:
      name: The row's name.
      folder: Where to make the environment and the log.

    Returns:
      True if all tests passed, or if the row may fail.
    """
    row = ROWS[name]
    copy = os.path.join(folder, name)
    os.makedirs(copy)
    if _SOURCE.value:
        shutil.copytree(
            _SOURCE.value,
            copy,
            ignore=shutil.ignore_patterns(".venv", "build", ".git"),
            dirs_exist_ok=True,
        )
    else:
        unpack = f"git archive HEAD | tar -x -C '{copy}'"
        processes.run(["bash", "-c", unpack], check=True, tensorflow=0)
    log = pathlib.Path(folder, f"{name}.log")
    python = os.path.join(copy, ".venv", "bin", "python")
    # Not the caller's checkout.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    versions, minutes = f"{name} | ? | ? | ?", 0.0
    with open(log, "w") as file:

        def run(*command):
            processes.run(
                command,
                _SECONDS,
                check=True,
                cwd=copy,
                env=environment,
                stdout=file,
                stderr=file,
            )

        try:
            run(row.python, "-m", "venv", ".venv")
            _install(row, python, run)
            command = [python, "-c", _VERSIONS]
            versions = processes.run(command, tensorflow=0).stdout.strip()
            start = time.monotonic()
            what = ["-n", "0", "--full", SMOKE_TESTS] if _SMOKE.value else []
            try:
                run(python, "-m", "pytest", "-q", *what, *_ARGUMENTS.value)
            finally:
                minutes = (time.monotonic() - start) / 60
            passed = True
        except AssertionError:
            passed = False
    lines = log.read_text().splitlines()
    outcome = lines[-1].strip("= ") if lines else "no output"
    today = datetime.date.today().isoformat()
    # An environment has three gigabytes.
    shutil.rmtree(copy, ignore_errors=True)
    print(f"| {versions} | {outcome} | {minutes:.1f} | {today} |", flush=True)
    for line in lines:
        if line.startswith(("FAILED", "ERROR", "SKIPPED")) and (
            "needs --full" not in line
        ):
            print(f"    {line}", flush=True)
    if not passed:
        print(
            f"    {'!' * 20} {name} FAILED {'!' * 20}"
            + " (not released, so this does not fail the run)"
            * (row.may_fail and _SMOKE.value)
            + f"\n    {log}",
            flush=True,
        )
        if _SMOKE.value:
            print(*lines[-60:], sep="\n        ", flush=True)
    return passed or (row.may_fail and _SMOKE.value)


def main(argv):
    del argv
    folder = tempfile.mkdtemp(prefix="version_matrix_")
    print(f"Logs in {folder}", flush=True)
    print("| Python | TensorFlow | Keras | jax | outcome | minutes | date |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    names = _ONLY.value or (SMOKE if _SMOKE.value else ROWS)
    results = [_run_row(name, folder) for name in names]
    sys.exit(not all(results))


if __name__ == "__main__":
    app.run(main)
