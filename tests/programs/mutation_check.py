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
import collections
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
    """A plugin of pytest that records how each test has ended."""

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


def _jobs_of_tests(rows):
    """Names of files, each with a function that runs its tests as they are."""
    tests = collections.defaultdict(dict)
    for row in rows:
        tests[row.test.split("::")[0]][row.test] = None
    for file, ids in tests.items():
        options = ([*ids], "passed", LIMIT + 60 * len(ids))
        yield file, lambda copy, options=options: _problem(copy, *options)


def _jobs_of_mutants(rows):
    """Names of mutants, each with a function that runs its test with it."""
    for row in rows:
        name = f"{row.file}, {row.test}: {row.text}"
        yield name, lambda copy, row=row: _problem_of_mutant(copy, row)


def _copied(folder):
    """A copy of the project, in a new folder."""
    ignored = ("__pycache__", ".*_cache", ".git", ".venv", "build")
    ignore = shutil.ignore_patterns(*ignored)
    return shutil.copytree(paths.ROOT, folder, ignore=ignore)


def _num_wrong(rows, jobs_of, copies):
    """Runs jobs in copies of the project, and prints how each ends."""

    def is_wrong(job):
        name, problem_of = job
        copy, start = copies.get(), time.monotonic()
        try:
            problem = problem_of(copy)
        finally:
            copies.put(copy)
        seconds = time.monotonic() - start
        text = f"{seconds:4.0f} s  {problem or 'as it must'}: {name}"
        print(text, flush=True)
        return problem is not None

    number = 0
    for is_cluster, at_a_time in ((False, copies.qsize()), (True, 1)):
        jobs = jobs_of([row for row in rows if row.cluster == is_cluster])
        with concurrent.futures.ThreadPoolExecutor(at_a_time) as executor:
            number += sum(executor.map(is_wrong, jobs))
    return number


def main():
    # Not absl's flags: the tests in copies of this process define theirs.
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", help="rows whose test or file has this text"
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="how many at a time"
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
    copies = queue.Queue()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.jobs):
            copies.put(_copied(os.path.join(folder, str(number))))
        if _num_wrong(rows, _jobs_of_tests, copies):
            raise SystemExit("Tests fail without a mutant.")
        survived = _num_wrong(rows, _jobs_of_mutants, copies)
    print(f"{len(rows) - survived} killed, {survived} survived")
    raise SystemExit(survived > 0)


if __name__ == "__main__":
    main()
