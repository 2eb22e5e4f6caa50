"""What the suite costs: counted in traces and processes, printed in CPU.

With `--budget`, pytest counts how many functions each file traces and how many
processes that import TensorFlow it starts, and fails above the limits of
`tests/budget.json`. A machine's speed changes neither. CPU is printed in i, the
CPU that one import of TensorFlow and Keras takes on the machine at the time:
the median of five, over the run. `--record-budget` writes the limits anew.
"""

import collections
import contextlib
import json
import math
import resource
import statistics
import threading
import time

import pytest

from tests.support import paths
from tests.support import processes

LIMITS = paths.ROOT / "tests" / "budget.json"
# A run may count so much more than was recorded: functions that TensorFlow
# keeps are traced by whichever test comes first in its process.
MARGIN = 1.03
# The whole run fails above so many i. It takes 154, give or take 8 %: the
# import is measured while other tests run.
LIMIT_I = 190
NUM_IMPORTS = 5
# The tests and fixtures that may cost more than 1 i, and why.
_PROCESSES = "tests/multi_worker/"
_EXAMPLES = "tests/conformance/examples_test.py::test_one_epoch"
ABOVE_ONE_I = {
    f"{_PROCESSES}four_processes_test.py"
    "::test_each_worker_holds_what_it_must[sums_of_groups]": (
        "four processes run all cases of the file, once"
    ),
    f"{_PROCESSES}faults_test.py::test_the_chief_is_killed": (
        "two workers are killed and started again, twice in all"
    ),
    f"{_PROCESSES}two_processes_test.py"
    "::test_each_worker_holds_what_it_must[each_row_is_trained_on_once]": (
        "two processes run all cases of the file, once"
    ),
    "tests/collectives/mpi_test.py::test_operations[graph]": (
        "two processes of an MPI run all cases of the file, once"
    ),
    "tests/collectives/watchdog_test.py"
    "::test_time_in_which_a_process_is_stopped_does_not_count": (
        "one import of TensorFlow for all programs that hang"
    ),
    f"{_EXAMPLES}[ensemble]": "four models, which are evaluated apart",
    f"{_EXAMPLES}[muon]": "Muon, sharded and whole",
    f"{_EXAMPLES}[tpu_without_hardware]": "two groups, evaluated apart",
    f"{_EXAMPLES}[int8_gradients]": "three runs, of enough steps for int8",
    f"{_EXAMPLES}[padded_text]": "an LSTM, on one and on two replicas",
    f"{_EXAMPLES}[from_tf_keras]": "Keras 2, in two groups",
    "tests/cli/cli_test.py::test_demo": "README's command for a first look",
    "tests/cli/cli_test.py::test_plan_of_a_script_in_a_new_process": (
        "the one command that runs as users run it"
    ),
    "tests/testing/simulated_tpu_keras_test.py"
    "::test_plain_keras_equals_one_device": "fit, evaluate and predict",
    "tests/testing/simulated_tpu_exit_test.py"
    "::test_a_new_process_that_some_replicas_keep_waiting": (
        "XLA waits in a process of its own"
    ),
    "tests/compat/v1/tpu_scripts_test.py::test_layers_of_keras_2": (
        "tf.layers needs a process that begins with Keras 2"
    ),
    "tests/tf_keras/aggregation_test.py"
    "::test_is_one_device[mirrored-legacy_sgd scaled]": (
        "traces all of Keras 2's optimizers under MirroredStrategy"
    ),
    "tests/conformance/private_names_test.py::test_only_the_feature_fails": (
        "an import without each private name, in a process"
    ),
    "tests/callbacks/in_fit_test.py::groups (fixture)": (
        "one fit that most tests of callbacks look at"
    ),
    "tests/optimizers/local_variables_test.py::trained (fixture)": (
        "nine wrappers, trained once for nine tests"
    ),
}


def _cpu():
    """The CPU seconds of this process and of its children that have ended."""
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + of_children.ru_utime + of_children.ru_stime


class Tracing:
    """Counts the functions that are traced and lie in no other one."""

    def __init__(self):
        from tensorflow.python.eager.polymorphic_function import (
            tracing_compilation,
        )

        self.number = 0
        self._depth = 0
        self._lock = threading.Lock()
        self._trace = tracing_compilation._create_concrete_function
        tracing_compilation._create_concrete_function = self._counted

    def _counted(self, *args, **kwargs):
        with self._lock:
            self.number += not self._depth
            self._depth += 1
        try:
            return self._trace(*args, **kwargs)
        finally:
            with self._lock:
                self._depth -= 1


class Counter:
    """What one of pytest's processes that runs tests has cost.

    Attributes:
      files: The traces, processes and CPU seconds of each file.
      seconds: The CPU seconds of each test, and of each fixture that several
        tests share.
    """

    def __init__(self):
        self.files = collections.defaultdict(lambda: [0, 0, 0.0])
        self.seconds = collections.Counter()
        self._tracing = Tracing()
        self._of_fixtures = 0.0

    def _now(self):
        return self._tracing.number, processes.num_tensorflow, _cpu()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        start, self._of_fixtures = self._now(), 0.0
        try:
            return (yield)
        finally:
            cost = [a - b for a, b in zip(self._now(), start, strict=True)]
            of_file = self.files[item.nodeid.split("::")[0]]
            of_file[:] = [a + b for a, b in zip(of_file, cost, strict=True)]
            self.seconds[item.nodeid] += cost[-1] - self._of_fixtures

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        if fixturedef.scope == "function":
            return (yield)
        start, before = _cpu(), self._of_fixtures
        try:
            return (yield)
        finally:
            # Without what it has made others cost.
            seconds = _cpu() - start - (self._of_fixtures - before)
            name = f"{fixturedef.baseid}::{fixturedef.argname} (fixture)"
            self.seconds[name] += seconds
            self._of_fixtures += seconds

    def result(self):
        return json.dumps(
            {"files": self.files, "seconds": self.seconds, "cpu": _cpu()}
        )

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workerinput"):
            session.config.workeroutput["budget"] = self.result()


class Imports:
    """The CPU seconds of an import, measured a few times during the run."""

    def __init__(self):
        self.seconds = []
        self._threads = []
        self._num_tests = 0
        self._num_ended = 0

    def expect(self, num_tests):
        self._num_tests = num_tests

    def ended(self):
        """Called after each test."""
        self._num_ended += 1
        if self._num_ended * NUM_IMPORTS > self._num_tests * len(self._threads):
            self._measure()

    def _measure(self):
        if len(self._threads) < NUM_IMPORTS:
            self._threads.append(threading.Thread(target=self._import))
            self._threads[-1].start()

    def _import(self):
        program = "import keras, tensorflow, time; print(time.process_time())"
        ended = processes.run(
            processes.python("-c", program), check=True, tensorflow=0
        )
        self.seconds.append(float(ended.stdout))

    def median(self):
        self._measure()
        for thread in self._threads:
            thread.join()
        return statistics.median(self.seconds)


class Budget:
    """Adds up what the processes cost, prints it, and holds it to the limits.

    Args:
      counter: This process' own, if it runs tests.
      record: Whether to write the limits instead.
    """

    def __init__(self, counter, record):
        self._counter = counter
        self._record = record
        self._results = []
        self._imports = Imports()
        self._lines = []

    def pytest_collection_finish(self, session):
        if session.items:
            self._imports.expect(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        self._imports.expect(len(ids))

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            self._imports.ended()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        with contextlib.suppress(AttributeError, KeyError):
            self._results.append(json.loads(node.workeroutput["budget"]))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        unit = self._imports.median()
        own = sum(self._imports.seconds)
        if self._counter:
            self._results.append(json.loads(self._counter.result()))
            total = self._results[0]["cpu"] - own
        else:
            total = time.process_time() + sum(r["cpu"] for r in self._results)
        files, seconds = _added(self._results)
        if self._record:
            LIMITS.write_text(_recorded(files))
        self._lines = list(_lines(files, seconds, total, unit))
        wrong = [*_over(files)]
        if total > LIMIT_I * unit:
            wrong.append(f"The run takes more than {LIMIT_I} i.")
        self._lines += wrong
        if wrong and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.section("budget")
        for line in self._lines:
            terminalreporter.write_line(line)


def _added(results):
    files = collections.defaultdict(lambda: [0, 0, 0.0])
    seconds = collections.Counter()
    for result in results:
        for name, cost in result["files"].items():
            files[name] = [
                a + b for a, b in zip(files[name], cost, strict=True)
            ]
        # A fixture that several processes make counts once for each.
        seconds.update(result["seconds"])
    return dict(sorted(files.items())), seconds


def _recorded(files):
    lines = [
        f"  {json.dumps(name)}: {json.dumps(cost[:2])}"
        for name, cost in files.items()
        if any(cost[:2])
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _lines(files, seconds, total, unit):
    """What was counted and measured, the dearest file first."""
    yield f"1 i = {unit:.1f} CPU s, an import of TensorFlow and Keras"
    yield "   traces  processes      i"
    for name, (traces, starts, cpu) in sorted(
        files.items(), key=lambda one: -one[1][2]
    ):
        yield f"{traces:9} {starts:10} {cpu / unit:6.1f}  {name}"
    traces, starts, _ = map(sum, zip(*files.values(), strict=True))
    yield f"{traces:9} {starts:10} {total / unit:6.1f}  in all"
    for name, cost in seconds.most_common():
        if cost > unit and name not in ABOVE_ONE_I:
            yield f"{cost / unit:6.1f} i, and in no list: {name}"


def _over(files):
    """What is above its limit: a file, or all that have run together."""
    limits = json.loads(LIMITS.read_text())
    costs = {name: cost[:2] for name, cost in files.items()}
    allowed = {name: limits.get(name, [0, 0]) for name in costs}
    for table in (costs, allowed):
        table["in all"] = [
            sum(kind) for kind in zip(*table.values(), strict=True)
        ]
    for name, cost in costs.items():
        for kind, number, limit in zip(
            ("traces", "processes"), cost, allowed[name], strict=True
        ):
            if number > math.ceil(limit * MARGIN):
                yield (
                    f"{name}: {number} {kind}, and the budget has {limit}. "
                    "Make a test cheaper, or record the budget anew and say "
                    "why."
                )
