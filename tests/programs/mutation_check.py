"""Applies the mutants of `tests/promises.txt`; each has to fail its test.

Run: python -m tests.programs.mutation_check [--only oracle_test]

First the tests of all rows must pass without a mutant. A mutant is killed if
the row's own test then fails: an error of collection or of a fixture, a
timeout, or a text that does not occur once fails the check. The last line is
`N killed, 0 survived`.

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

import pytest

from tests import promises
from tests.support import paths
from tests.support import processes

# Seconds of one run of pytest: a few tests of one file, or one test.
LIMIT = 180
CLUSTER_LIMIT = 400


class _Outcomes:
    """A plugin of pytest that knows whether all tests passed, or all failed."""

    def __init__(self):
        self.found = []

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            self.found.append((report.when, report.outcome))


def _run_pytest(folder, tests, outcome):
    """Runs tests of a copy of the project, in this copy of the process.

    Returns:
      0 if each test has the outcome, "passed" or "failed", and nothing else
      has failed.
    """
    for name in list(sys.modules):
        if name.split(".")[0] in ("tests", "tf_xshard"):
            del sys.modules[name]
    os.chdir(folder)
    sys.path[:] = [str(folder), *sys.path]
    os.environ["PYTHONPATH"] = str(folder)
    sys.dont_write_bytecode = True
    outcomes = _Outcomes()
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "--tb", "short"]
    pytest.main([*options, *tests], plugins=[outcomes])
    return outcomes.found != [("call", outcome)] * len(tests)


def _problem(folder, tests, outcome, seconds):
    """None if each test has the outcome, else the end of pytest's output."""
    output = pathlib.Path(folder, "output")
    code = processes.forked(
        lambda: _run_pytest(folder, tests, outcome), output, seconds
    )
    if code == 0:
        return None
    ending = output.read_text(errors="replace")[-2000:]
    return f"not {outcome}, exit code {code}:\n{ending}\n"


def _problem_of_mutant(folder, row):
    """None if the row's own test fails, else what happened."""
    path = pathlib.Path(folder, "tf_xshard", row.file)
    text = path.read_text()
    if text.count(row.old) != 1:
        return f"the old text occurs {text.count(row.old)} times in {row.file}"
    path.write_text(text.replace(row.old, row.new))
    seconds = CLUSTER_LIMIT if row.cluster else LIMIT
    try:
        return _problem(folder, [row.test], "failed", seconds)
    finally:
        path.write_text(text)


class _Check:
    """Runs jobs in copies of the project, and prints how each ends."""

    def __init__(self, folder, num_copies):
        self.wrong = 0
        self._copies = queue.Queue()
        ignored = ("__pycache__", ".*_cache", ".git", ".venv", "build")
        for number in range(num_copies):
            copy = pathlib.Path(folder, str(number))
            ignore = shutil.ignore_patterns(*ignored)
            shutil.copytree(paths.ROOT, copy, ignore=ignore)
            self._copies.put(copy)

    def run(self, jobs, at_a_time):
        """Each job is (name, function, arguments after a copy's folder)."""
        with concurrent.futures.ThreadPoolExecutor(at_a_time) as executor:
            list(executor.map(lambda job: self._run(*job), jobs))

    def _run(self, name, function, *arguments):
        copy = self._copies.get()
        start = time.monotonic()
        try:
            problem = function(copy, *arguments)
        finally:
            self._copies.put(copy)
        self.wrong += problem is not None
        seconds = time.monotonic() - start
        text = f"{seconds:4.0f} s  {problem or 'as it must'}: {name}"
        print(text, flush=True)


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
    # What all runs of pytest need, as tests/conftest.py would import it.
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    importlib.import_module("keras")
    rows = [
        row
        for row in promises.PROMISES
        if options.only in row.test or options.only in row.file
    ]
    with tempfile.TemporaryDirectory() as folder:
        check = _Check(folder, options.jobs)
        # (how many run at a time, rows)
        kinds = [
            (options.jobs, [row for row in rows if not row.cluster]),
            (1, [row for row in rows if row.cluster]),
        ]
        for at_a_time, some in kinds:
            tests = {}
            for row in some:
                tests.setdefault(row.test.split("::")[0], {})[row.test] = None
            jobs = [
                (file, _problem, [*ids], "passed", LIMIT + 60 * len(ids))
                for file, ids in tests.items()
            ]
            check.run(jobs, at_a_time)
        if check.wrong:
            raise SystemExit("Tests fail without a mutant.")
        for at_a_time, some in kinds:
            jobs = [
                (f"{row.file}, {row.test}: {row.text}", _problem_of_mutant, row)
                for row in some
            ]
            check.run(jobs, at_a_time)
    print(f"{len(rows) - check.wrong} killed, {check.wrong} survived")
    raise SystemExit(check.wrong > 0)


if __name__ == "__main__":
    main()
