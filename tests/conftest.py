"""Process state has one owner: devices, seeds and options are set here."""

import functools
import os

# The replicas of most tests are logical CPUs of this process, and each has a
# thread pool: without this, TensorFlow's log drowns pytest's.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest

from tests.support import budget
from tests.support import seeds

# A device costs no time or memory until it is used.
NUM_LOGICAL_DEVICES = 16
# Megabytes of a logical GPU.
GPU_MEMORY = 512
# Limits a test with --full; setup.cfg limits it otherwise.
FULL_TIMEOUT_SECONDS = 1200
# The id of every test that was collected, and whether it is full.
COLLECTED = pytest.StashKey[dict[str, bool]]()
# Files that mostly wait, and where in the order of the files they run: one
# beside another would leave the machine idle.
WAITING = {
    "tests/multi_worker/faults_test.py": "",
    "tests/testing/simulated_tpu_exit_test.py": "tests/conformance",
}


_OPTIONS = {
    "--full": "large counts: more sweeps, more kills; takes much longer",
    "--gpu": "the replicas of most tests are parts of a GPU, not of the CPU",
    "--budget": "count traces and processes; fail above tests/budget.json",
    "--record-budget": "write tests/budget.json anew",
}


def pytest_addoption(parser):
    for name, text in _OPTIONS.items():
        parser.addoption(name, action="store_true", help=text)


@pytest.fixture
def report(record_property):
    """A function that prints a line at the end of the run."""
    return functools.partial(record_property, "measured")


def pytest_terminal_summary(terminalreporter):
    lines = [
        line
        for outcome in ("passed", "failed")
        for test in terminalreporter.getreports(outcome)
        for _, line in test.user_properties
    ]
    if lines:
        terminalreporter.section("measured")
        terminalreporter.write_line("\n".join(lines))


def pytest_configure(config):
    on_gpu = config.getoption("--gpu")
    if not on_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    runs_tests = config.option.dist == "no" or hasattr(config, "workerinput")
    if runs_tests:
        _set_up_tensorflow(on_gpu)
    record = config.getoption("--record-budget")
    if record or config.getoption("--budget"):
        config.pluginmanager.register(budget.Budget(runs_tests, record))


def _set_up_tensorflow(on_gpu):
    """What holds for all tests of this process, before TensorFlow has run."""
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * NUM_LOGICAL_DEVICES,
    )
    # Not for each test: see `seeds`.
    tf.random.set_seed(1)
    if on_gpu:
        [gpu, *_] = tf.config.list_physical_devices("GPU")
        tf.config.set_visible_devices([gpu], "GPU")
        tf.config.set_logical_device_configuration(
            gpu,
            [tf.config.LogicalDeviceConfiguration(memory_limit=GPU_MEMORY)]
            * NUM_LOGICAL_DEVICES,
        )
        # It would round the products of one device and of many differently.
        tf.config.experimental.enable_tensor_float_32_execution(False)
        tf.config.list_logical_devices()
        # The programs that tests start have logical CPUs.
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"


def pytest_collection_modifyitems(config, items):
    files = {item: item.nodeid.split("::")[0] for item in items}
    items.sort(key=lambda item: WAITING.get(files[item], files[item]))
    large = [item for item in items if item.get_closest_marker("full")]
    config.stash[COLLECTED] = {item.nodeid: item in large for item in items}
    if config.getoption("--full"):
        for item in items:
            item.add_marker(pytest.mark.timeout(FULL_TIMEOUT_SECONDS))
        # The files that take longest first.
        first = {files[item] for item in large}
        items.sort(key=lambda item: files[item] not in first)
        return
    for item in large:
        item.add_marker(pytest.mark.skip(reason="needs --full"))


@pytest.fixture(autouse=True)
def _seeds_and_policy():
    import keras

    from tests.support import replicas

    seeds.seed(1)
    replicas.use_new_keys()
    yield
    keras.mixed_precision.set_global_policy("float32")
