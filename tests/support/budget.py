"""What the suite costs: counted in traces and processes, printed in CPU.

With `--budget`, pytest counts how many functions each file traces and how many
processes that import TensorFlow it starts, and fails above the limits of
`tests/budget.json`. A machine's speed changes neither. CPU is printed in i, the
CPU that one import of TensorFlow and Keras takes on the machine at the time:
the median of five, over the run. `--record-budget` writes the limits anew.
"""

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
# The tests that may cost more than 1 i, and why.
ABOVE_ONE_I = {
    "four_processes_test.py"
    "::test_each_worker_holds_what_it_must[sums_of_groups]": (
        "four processes run all cases of the file, once"
    ),
    "faults_test.py::test_the_chief_is_killed": "two workers, started twice",
    "two_processes_test.py"
    "::test_each_worker_holds_what_it_must[each_row_is_trained_on_once]": (
        "two processes run all cases of the file, once"
    ),
    "mpi_test.py::test_operations[graph]": (
        "two processes of an MPI run all cases of the file, once"
    ),
    "watchdog_test.py"
    "::test_time_in_which_a_process_is_stopped_does_not_count": (
        "one import of TensorFlow for all programs that hang"
    ),
    "examples_test.py::test_one_epoch[ensemble]": "four models",
    "examples_test.py::test_one_epoch[muon]": "Muon, sharded and whole",
    "examples_test.py::test_one_epoch[tpu_without_hardware]": "two groups",
    "examples_test.py::test_one_epoch[int8_gradients]": "three long runs",
    "examples_test.py::test_one_epoch[padded_text]": "an LSTM, trained twice",
    "examples_test.py::test_one_epoch[from_tf_keras]": "Keras 2, two groups",
    "cli_test.py::test_demo": "README's command for a first look",
    "cli_test.py::test_plan_of_a_script_in_a_new_process": (
        "the one command that runs as users run it"
    ),
    "simulated_tpu_keras_test.py::test_plain_keras_equals_one_device": (
        "fit, evaluate and predict"
    ),
    "simulated_tpu_exit_test.py"
    "::test_a_new_process_that_some_replicas_keep_waiting": (
        "XLA waits in a process of its own"
    ),
    "tpu_scripts_test.py::test_layers_of_keras_2": (
        "tf.layers needs a process that begins with Keras 2"
    ),
    "aggregation_test.py::test_is_one_device[mirrored-legacy_sgd scaled]": (
        "traces all of Keras 2's optimizers under MirroredStrategy"
    ),
    "private_names_test.py::test_only_the_feature_fails": (
        "an import without each private name, in a process"
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
    """The traces, processes and CPU seconds of the tests of one process."""

    def __init__(self):
        self._tests = {}
        self._tracing = Tracing()

    def _now(self):
        return self._tracing.number, processes.num_tensorflow, _cpu()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        start = self._now()
        try:
            return (yield)
        finally:
            pairs = zip(self._now(), start, strict=True)
            self._tests[item.nodeid] = [a - b for a, b in pairs]

    def result(self):
        """The costs of each test, and the process' CPU seconds."""
        return self._tests, _cpu()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workerinput"):
            session.config.workeroutput["budget"] = self.result()


class Budget:
    """Adds up what the processes cost, prints it, and holds it to the limits.

    Args:
      counter: This process' own, if it runs tests.
      record: Whether to write the limits instead.
    """

    def __init__(self, counter, record):
        self._counter = counter
        self._record = record
        self._tests = {}
        self._cpu = 0.0
        self._lines = []
        # The CPU seconds of imports, which run while tests do.
        self._imports = []
        self._thread = threading.Thread(target=self._import)

    def _import(self):
        program = "import keras, tensorflow, time; print(time.process_time())"
        for _ in range(NUM_IMPORTS):
            ended = processes.run(
                processes.python("-c", program), check=True, tensorflow=0
            )
            self._imports.append(float(ended.stdout))

    def _add(self, tests, cpu):
        self._tests |= tests
        self._cpu += cpu

    def pytest_sessionstart(self):
        self._thread.start()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        with contextlib.suppress(AttributeError, KeyError):
            self._add(*node.workeroutput["budget"])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        self._thread.join()
        if self._counter:
            self._add(*self._counter.result())
            self._cpu -= sum(self._imports)
        else:
            self._cpu += time.process_time()
        unit = statistics.median(self._imports)
        files = {}
        for test, cost in self._tests.items():
            pairs = zip(cost, files.get(_file(test), [0] * 3), strict=True)
            files[_file(test)] = [a + b for a, b in pairs]
        if self._record:
            _record(files)
        wrong = [*_over(files)]
        if self._cpu > LIMIT_I * unit:
            wrong.append(f"The run takes more than {LIMIT_I} i.")
        self._lines = [
            f"1 i = {unit:.1f} CPU s, an import of TensorFlow and Keras",
            f"{self._cpu / unit:.1f} i in all",
            "   traces  processes      i",
            *(
                f"{traces:9} {starts:10} {cpu / unit:6.1f}  {file}"
                for file, (traces, starts, cpu) in sorted(
                    files.items(), key=lambda one: -one[1][2]
                )
            ),
            *(
                f"{cpu / unit:6.1f} i, and in no list: {test}"
                for test, (_, _, cpu) in self._tests.items()
                if cpu > unit and not test.endswith(tuple(ABOVE_ONE_I))
            ),
            *wrong,
        ]
        if wrong and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.section("budget")
        terminalreporter.write_line("\n".join(self._lines))


def _file(test):
    return test.split("::")[0]


def _record(files):
    rows = [
        f'  "{file}": {cost[:2]}'
        for file, cost in sorted(files.items())
        if any(cost[:2])
    ]
    LIMITS.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def _over(files):
    """What is above its limit: a file, or all that have run together."""
    limits = json.loads(LIMITS.read_text())
    for kind, index in (("traces", 0), ("processes", 1)):
        rows = {
            file: (cost[index], limits.get(file, (0, 0))[index])
            for file, cost in files.items()
        }
        numbers, allowed = zip((0, 0), *rows.values(), strict=True)
        rows["in all"] = sum(numbers), sum(allowed)
        for name, (number, limit) in rows.items():
            if number > math.ceil(limit * MARGIN):
                yield (
                    f"{name}: {number} {kind}, and the budget has {limit}. Make"
                    " a test cheaper, or record the budget anew and say why."
                )
