"""What the suite costs: counted in traces and processes, printed in CPU.

With `--budget`, pytest counts how many functions each file traces and how many
processes that import TensorFlow it starts, and fails above the limits of
`tests/budget.json`. A machine's speed changes neither. CPU is printed in i, the
CPU that one import of TensorFlow and Keras takes on the machine at the time:
the median of five, over the run. `--record-budget` writes the limits anew.
"""

import collections
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
# The whole run fails above so many i: 165, and 12 for `compare`. It takes 157,
# give or take 8 %: the import is measured while other tests run.
LIMIT_I = 177
NUM_IMPORTS = 5
SECONDS_BETWEEN_IMPORTS = 60
# The tests that may cost more than 1 i, each with its reason.
ABOVE_ONE_I = (
    # Four processes run all cases of the file, once.
    "four_processes_test.py"
    "::test_each_worker_holds_what_it_must[sums_of_groups]",
    # Two workers, started twice.
    "faults_test.py::test_the_chief_is_killed",
    # Two processes run all cases of the file, once; so do those of MPI.
    "two_processes_test.py"
    "::test_each_worker_holds_what_it_must[each_row_is_trained_on_once]",
    "mpi_test.py::test_operations",
    # One import of TensorFlow for all programs that hang.
    "watchdog_test.py::test_time_in_which_a_process_is_stopped_does_not_count",
    # Four models.
    "examples_test.py::test_one_epoch[ensemble]",
    # Muon, sharded and whole.
    "examples_test.py::test_one_epoch[muon]",
    # Two groups.
    "examples_test.py::test_one_epoch[tpu_without_hardware]",
    # Three long runs.
    "examples_test.py::test_one_epoch[int8_gradients]",
    # An LSTM, trained twice.
    "examples_test.py::test_one_epoch[padded_text]",
    # Keras 2, two groups.
    "examples_test.py::test_one_epoch[from_tf_keras]",
    # README's command for a first look.
    "cli_test.py::test_demo",
    # The one command that runs as users run it.
    "cli_test.py::test_plan_of_a_script_in_a_new_process",
    # The command `compare`, each run a process, for a right and a wrong script.
    "compare_test.py::test_the_command_names_the_cause_and_leaves_the_folder"
    "[wrapped_right]",
    "compare_test.py::test_the_command_names_the_cause_and_leaves_the_folder"
    "[clipped_wrong]",
    # A GlobalMean on two replicas, in three runs.
    "compare_test.py::test_a_wrong_script_is_different_until_it_is_cured"
    "[ragged]",
    # fit, evaluate and predict.
    "simulated_tpu_keras_test.py::test_plain_keras_equals_one_device",
    # XLA waits in a process of its own.
    "simulated_tpu_exit_test.py"
    "::test_a_new_process_that_some_replicas_keep_waiting",
    # tf.layers needs a process that begins with Keras 2.
    "tpu_scripts_test.py::test_layers_of_keras_2",
    # Traces all of Keras 2's optimizers under MirroredStrategy.
    "aggregation_test.py::test_is_one_device[mirrored-legacy_sgd scaled]",
    # An import without each private name, in a process.
    "private_names_test.py::test_only_the_feature_fails",
)


def _cpu():
    """The CPU seconds of this process and of its children that have ended."""
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + of_children.ru_utime + of_children.ru_stime


class Budget:
    """Adds up what the tests cost, prints it, and holds it to the limits.

    A process of pytest-xdist only counts, and passes the result on. A function
    that is traced while another one is does not count.

    Args:
      runs_tests: Whether this process does.
      record: Whether to write the limits instead.
    """

    def __init__(self, runs_tests, record):
        self._runs_tests = runs_tests
        self._record = record
        self._tests = {}
        self._traces = self._depth = 0
        self._lock = threading.Lock()
        self._cpu = 0.0
        self._lines = []
        # The CPU seconds of imports, which run while tests do.
        self._imports = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._import)

    def _import(self):
        program = "import keras, tensorflow, time; print(time.process_time())"
        command = processes.python("-c", program)
        for _ in range(NUM_IMPORTS):
            # Over the run, since an import costs more beside other work.
            self._ends.wait(SECONDS_BETWEEN_IMPORTS)
            ended = processes.run(command, check=True, tensorflow=0)
            self._imports.append(float(ended.stdout))

    def _count_traces(self):
        from tensorflow.python.eager.polymorphic_function import (
            tracing_compilation,
        )

        trace = tracing_compilation._create_concrete_function

        def counted(*args, **kwargs):
            with self._lock:
                self._traces += not self._depth
                self._depth += 1
            try:
                return trace(*args, **kwargs)
            finally:
                with self._lock:
                    self._depth -= 1

        tracing_compilation._create_concrete_function = counted

    def pytest_sessionstart(self, session):
        if self._runs_tests:
            self._count_traces()
        if not hasattr(session.config, "workerinput"):
            self._thread.start()

    def _now(self):
        return self._traces, processes.num_tensorflow, _cpu()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        start = self._now()
        try:
            return (yield)
        finally:
            pairs = zip(self._now(), start, strict=True)
            self._tests[item.nodeid] = [a - b for a, b in pairs]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        # One that has crashed has no result.
        tests, cpu = getattr(node, "workeroutput", {}).get("budget", ({}, 0))
        self._tests |= tests
        self._cpu += cpu

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workerinput"):
            session.config.workeroutput["budget"] = self._tests, _cpu()
            return
        self._ends.set()
        self._thread.join()
        # The children of one that runs no tests have passed theirs on.
        own = _cpu() - sum(self._imports)
        self._cpu += own if self._runs_tests else time.process_time()
        unit = statistics.median(self._imports)
        files = collections.defaultdict(lambda: [0, 0, 0.0])
        for test, cost in self._tests.items():
            file = test.split("::")[0]
            files[file] = [*map(sum, zip(cost, files[file], strict=True))]
        if self._record:
            _record(files)
        wrong = [*_over(files)]
        if self._cpu > LIMIT_I * unit:
            wrong.append(f"The run takes more than {LIMIT_I} i.")
        by_cpu = sorted(files.items(), key=lambda one: -one[1][2])
        self._lines = [
            f"1 i = {unit:.1f} CPU s, an import of TensorFlow and Keras",
            f"{self._cpu / unit:.1f} i in all",
            "   traces  processes      i",
            *(
                f"{traces:9} {starts:10} {cpu / unit:6.1f}  {file}"
                for file, (traces, starts, cpu) in by_cpu
            ),
            *(
                f"{cpu / unit:6.1f} i, and in no list: {test}"
                for test, (_, _, cpu) in self._tests.items()
                if cpu > unit and not test.endswith(ABOVE_ONE_I)
            ),
            *wrong,
        ]
        if wrong and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.section("budget")
        terminalreporter.write_line("\n".join(self._lines))


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
    for index, kind in enumerate(("traces", "processes")):
        rows = {
            file: (cost[index], limits.get(file, (0, 0))[index])
            for file, cost in files.items()
        }
        rows["in all"] = [*map(sum, zip((0, 0), *rows.values(), strict=True))]
        for name, (number, limit) in rows.items():
            if number > math.ceil(limit * MARGIN):
                yield (
                    f"{name}: {number} {kind}, and the budget has {limit}. Make"
                    " a test cheaper, or record the budget anew and say why."
                )
