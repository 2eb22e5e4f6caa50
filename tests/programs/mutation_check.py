"""Applies the mutants of `tests/promises.txt`; each has to fail its test.

Run: python -m tests.programs.mutation_check [--only oracle_test]

First the tests of all rows must pass without a mutant. A mutant is killed if
pytest then ends with 1 and the row's own test has failed: an error of
collection or of a fixture, a timeout, or a text that does not occur once fails
the check. The last line is `N killed, 0 survived`.

TensorFlow and Keras are imported once: each run of pytest is a copy of this
process, which imports the package and the tests anew.
"""

import argparse
import concurrent.futures
import importlib
import os
import pathlib
import queue
import shutil
import sys
import tempfile
import time
import xml.etree.ElementTree

import pytest

from tests import promises
from tests.support import paths
from tests.support import processes

# Seconds of one run of pytest: a few tests of one file, or one test.
LIMIT = 180
CLUSTER_LIMIT = 400
PASSED, FAILED = "passed", "failed"


def _results(folder, tests, seconds):
    """The exit code, and what became of each test; `timeout` for both."""
    report = pathlib.Path(folder, "report.xml")
    output = pathlib.Path(folder, "output")
    report.unlink(missing_ok=True)
    code = processes.forked(
        lambda: _pytest(folder, report, tests), output, seconds
    )
    if code is None:
        return "timeout", ["timeout"]
    if not report.exists():
        return code, [output.read_text(errors="replace")[-2000:]]
    cases = xml.etree.ElementTree.parse(report).iter("testcase")
    return code, [_result(case) for case in cases]


def _pytest(folder, report, tests):
    """Runs tests of a copy of the project, in this copy of the process."""
    for name in list(sys.modules):
        if name.split(".")[0] in ("tests", "tf_xshard"):
            del sys.modules[name]
    os.chdir(folder)
    sys.path[:] = [str(folder), *sys.path]
    os.environ["PYTHONPATH"] = str(folder)
    sys.dont_write_bytecode = True
    return pytest.main(
        [
            *("-q", "-n", "0", "-p", "no:cacheprovider", "--tb", "no"),
            *("--durations", "0", f"--junitxml={report}", *tests),
        ]
    )


def _result(case):
    tags = {child.tag for child in case}
    if tags & {"error", "skipped"}:
        return " and ".join(sorted(tags))
    return FAILED if "failure" in tags else PASSED


def _without_mutant(folder, tests, seconds):
    """None if all of them pass, else what happened."""
    code, results = _results(folder, tests, seconds)
    if code == 0 and results == [PASSED] * len(tests):
        return None
    return f"without a mutant: exit {code}, {results}"


def _with_mutant(folder, row):
    """None if the row's own test fails, else what happened."""
    path = pathlib.Path(folder, "tf_xshard", row.file)
    text = path.read_text()
    if text.count(row.old) != 1:
        return f"the old text occurs {text.count(row.old)} times in {row.file}"
    path.write_text(text.replace(row.old, row.new))
    try:
        code, results = _results(
            folder, [row.test], CLUSTER_LIMIT if row.cluster else LIMIT
        )
    finally:
        path.write_text(text)
    if code == 1 and results == [FAILED]:
        return None
    return f"survived: exit {code}, {results}"


class _Check:
    """Runs jobs in copies of the project, and prints how each ends."""

    def __init__(self, folder, jobs):
        self.wrong = 0
        self._copies = queue.Queue()
        for number in range(jobs):
            copy = pathlib.Path(folder, str(number))
            shutil.copytree(
                paths.ROOT,
                copy,
                ignore=shutil.ignore_patterns(
                    "__pycache__", ".*_cache", ".git", ".venv", "build"
                ),
            )
            self._copies.put(copy)

    def run(self, jobs, at_a_time):
        """Each job is (name, function of a copy's folder)."""
        with concurrent.futures.ThreadPoolExecutor(at_a_time) as executor:
            list(executor.map(self._one, jobs))

    def _one(self, job):
        name, function = job
        copy = self._copies.get()
        start = time.monotonic()
        try:
            problem = function(copy)
        finally:
            self._copies.put(copy)
        self.wrong += problem is not None
        seconds = time.monotonic() - start
        print(
            f"{seconds:4.0f} s  {problem or 'as it must'}: {name}", flush=True
        )


def _import():
    """Imports what all runs of pytest need, as tests/conftest.py would."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    importlib.import_module("tensorflow")
    importlib.import_module("keras")


def main():
    # Not absl's flags: the tests in copies of this process define theirs.
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", help="rows whose test or file has this text"
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="mutants that run at a time"
    )
    options = parser.parse_args()
    _import()
    rows = [
        row
        for row in promises.PROMISES
        if options.only in row.test or options.only in row.file
    ]
    with tempfile.TemporaryDirectory() as folder:
        check = _Check(folder, options.jobs)
        for cluster, at_a_time in ((False, options.jobs), (True, 1)):
            some = [row for row in rows if row.cluster == cluster]
            tests = {}
            for row in some:
                of_file = tests.setdefault(row.test.split("::")[0], [])
                if row.test not in of_file:
                    of_file.append(row.test)
            before = check.wrong
            check.run(
                [
                    (
                        file,
                        lambda copy, of_file=of_file: _without_mutant(
                            copy, of_file, LIMIT + 60 * len(of_file)
                        ),
                    )
                    for file, of_file in tests.items()
                ],
                at_a_time,
            )
            if check.wrong > before:
                raise SystemExit("Tests fail without a mutant.")
            check.run(
                [
                    (
                        f"{row.file}, {row.test}: {row.text}",
                        lambda copy, row=row: _with_mutant(copy, row),
                    )
                    for row in some
                ],
                at_a_time,
            )
    print(f"{len(rows) - check.wrong} killed, {check.wrong} survived")
    raise SystemExit(check.wrong > 0)


if __name__ == "__main__":
    main()
