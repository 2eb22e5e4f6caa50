"""Keras' own tests, as its wheel ships them, with every optimizer wrapped.

`python -m tests.programs.keras_suites` fails if plain Keras passes a test that
a wrapped optimizer fails, without a strategy or on two replicas. EXCEPTIONS has
the tests that may fail.

`python -m tests.programs.keras_suites plain|wrapped none|mirrored SUITE FILE`
runs one suite, and writes each test's outcome to a JSON file.

Whatever creates an optimizer (`SGD(...)`, `optimizers.get(...)`, a file) gets a
wrapper around it. Under MirroredStrategy each
test runs in the strategy's scope; what it applies itself, on both replicas.
"""

import collections
import contextlib
import fnmatch
import functools
import json
import os
import pathlib
import sys
import tempfile
from concurrent import futures

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import keras.src.testing
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import processes
from tests.support import replicas
from tf_xshard.optimizers import base

SUITES = ("optimizers", "trainers", "callbacks", "saving", "legacy/saving")
DISTRIBUTION = (
    "backend/tensorflow/distribute_test.py",
    "backend/tensorflow/optimizer_distribute_test.py",
)
# No optimizer is in them, and they need packages of many kinds.
LEFT_OUT = "trainers/data_adapters"


# Plain Keras passes these tests and a wrapped optimizer fails them. A pattern
# maps to the only strategy where they differ, or to None if they differ under
# both. Only "one tensor" is about the numbers of an update, and says why.
EXCEPTIONS = {
    # It counts sparse writes with mocks of `optimizer.assign`; the inner
    # optimizer makes them. (Its twin, test_sparse_correctness, passes.)
    "*::test_sparse_gradients_*": None,
    "*::test_fit_sparse_*": "none",
    # It reads the private counter `_iterations`, which a wrapper leaves at 0.
    # (`iterations` is right.)
    "optimizers/optimizer_test.py::*::test_gradient_accumulation": "none",
    "*::test_overwrite_with_gradient_with_gradient_accumulation": "none",
    # Replicas pass one tensor that was made outside of `strategy.run`. Keras
    # counts it once, and two tensors with the same values twice; here both
    # count twice.
    "*/optimizer_distribute_test.py::*::test_ema": "none",
    "*/optimizer_distribute_test.py::*::test_gradient_accumulation": "none",
    # It compares a config or a file with the inner optimizer's.
    "*/loss_scale_optimizer_test.py::*::test_serialization": None,
    "*/multi_optimizer_test.py::*::test_serialization": None,
    "*::test_saved_module_paths_and_class_names": None,
    # It expects the inner optimizer's name.
    "*::test_optimizer_auto_naming": None,
    "*::test_tensorboard_logging_with_multi_optimizer": None,
    # Built with no variables, a wrapper waits for some: Keras' loader of legacy
    # files does that.
    "*::test_build_with_empty_var_list": None,
    # A wrapper that is not built keeps the weights until it is, and raises no
    # error.
    "optimizers/optimizer_test.py::*::test_set_weights": None,
    # A wrapper hides the nested optimizer from MultiOptimizer's own check; with
    # a LossScaleOptimizer inside it is refused when it is built.
    "*::test_multi_optimizer_blocks_nested_optimizers": None,
}
_SECONDS = 90 * 60
# A process takes 1.5 GB.
_PROCESSES = 6


def _unwrapped(optimizer):
    while getattr(optimizer, "is_tf_xshard_wrapper", False):
        optimizer = _inside(optimizer)
    return optimizer


def _inside(wrapper):
    return wrapper.__dict__["inner_optimizer"]


def _wrap_all_optimizers():
    """Makes the class of each optimizer create a wrapper around it."""
    optimizer, wrapper = keras.optimizers.Optimizer, base.GradientWrapper
    init = wrapper.__init__

    def new(cls, *args, **kwargs):
        made = object.__new__(cls)
        if cls is optimizer or issubclass(cls, wrapper):
            return made
        made.__init__(*args, **kwargs)
        return tf_xshard.CrossShardOptimizer(made)

    optimizer.__new__ = new
    # A wrapper's `from_config` gets an inner optimizer that is wrapped already.
    wrapper.__init__ = lambda self, inner_optimizer, *args, **kwargs: init(
        self, _unwrapped(inner_optimizer), *args, **kwargs
    )


class Outcomes:
    """A pytest plugin that records {test: outcome}."""

    def __init__(self):
        self.outcomes = {}

    def pytest_runtest_setup(self, item):
        # Some tests' random data only passes by chance, wrapped or not.
        keras.utils.set_random_seed(1)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            text = report.outcome
            if report.failed:
                text += ": " + str(report.longrepr).strip()[-600:]
            self.outcomes[report.nodeid.split("keras/src/")[-1]] = text


def _apply_on_all_replicas(owner, strategy):
    """Makes `apply` outside of `strategy.run` run on all replicas.

    Each replica has the same gradients, of its loss divided by their number as
    `fit` has it: the update is that of one device.
    """
    original = owner.apply

    def apply(self, grads, trainable_variables=None):
        if not tf.distribute.in_cross_replica_context():
            return original(self, grads, trainable_variables)
        share = 1 / strategy.num_replicas_in_sync
        return strategy.run(
            lambda: original(
                self, [_scaled(g, share) for g in grads], trainable_variables
            )
        )

    owner.apply = apply


def _scaled(gradient, factor):
    if gradient is None:
        return None
    if not isinstance(gradient, tf.IndexedSlices):
        gradient = tf.convert_to_tensor(gradient)
    return tf.math.scalar_mul(factor, gradient)


def _forward_what_is_not_public(owner):
    """Makes tests find what they read of an optimizer on the inner one."""
    case = keras.src.testing.TestCase
    is_instance = case.assertIsInstance
    case.assertIsInstance = lambda self, one, *args: is_instance(
        self, _unwrapped(one), *args
    )

    def getattr_(self, name):
        if name.startswith("__") or "inner_optimizer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(_unwrapped(self), name)

    def forwarded(name):
        return lambda self, *args: getattr(_inside(self), name)(*args)

    owner.__getattr__ = getattr_
    owner.update_step = forwarded("update_step")
    owner._apply_weight_decay = forwarded("_apply_weight_decay")


def _run_tests_in_scope(strategy):
    """Makes the tests of Keras' own class run in a strategy's scope."""
    case = keras.src.testing.TestCase
    set_up, tear_down = case.setUp, case.tearDown

    def in_scope(self):
        set_up(self)
        self.scope = strategy.scope()
        self.scope.__enter__()

    def out_of_scope(self):
        # Keras' own set-up forgets all scopes when it clears its session.
        with contextlib.suppress(IndexError):
            self.scope.__exit__(None, None, None)
        tear_down(self)

    case.setUp, case.tearDown = in_scope, out_of_scope


def _run_suite(kind, strategy, suite, path):
    """Runs a suite in this process; writes {test: outcome}."""
    owner, plugin = keras.optimizers.Optimizer, Outcomes()
    if kind == "wrapped":
        owner = base.GradientWrapper
        _wrap_all_optimizers()
        _forward_what_is_not_public(owner)
    if strategy == "mirrored":
        replicas.set_up_cpus(2)
        _run_tests_in_scope(replicas.mirrored(2))
        _apply_on_all_replicas(owner, replicas.mirrored(2))
    source = pathlib.Path(keras.__file__).parent / "src"
    # `-c`: not this project's configuration, which may be found above.
    options = (
        *(f"-c{os.devnull}", f"--rootdir={source}", "-q", "--tb=native"),
        *("-opython_files=*_test.py", "-pno:cacheprovider", "-pno:xdist"),
        *("--continue-on-collection-errors", "-Wignore"),
        f"--ignore={source / LEFT_OUT}",
    )
    code = pytest.main([str(source / suite), *options], plugins=[plugin])
    pathlib.Path(path).write_text(json.dumps(plugin.outcomes))
    # Failed tests are outcomes; nothing else is.
    ran = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    sys.exit(0 if code in ran else 1)


def _outcomes(kind, strategy, suite):
    """Runs a suite in a process: {test: outcome}."""
    program = ("-m", "tests.programs.keras_suites", kind, strategy, suite)
    with tempfile.NamedTemporaryFile() as file:
        command = processes.python(*program, file.name)
        processes.run(command, _SECONDS, check=True)
        return json.load(file)


def _passed(outcomes):
    return {test for test, outcome in outcomes.items() if outcome == "passed"}


def _problems(strategy):
    """What wrapped optimizers lose under a strategy, and stale exceptions."""
    suites = SUITES + (DISTRIBUTION if strategy == "none" else ())
    # Most of the time is spent waiting for TensorFlow's iterators to end.
    with futures.ThreadPoolExecutor(_PROCESSES) as pool:
        plain, wrapped = (
            dict(collections.ChainMap(*of_suites))
            for of_suites in [
                pool.map(functools.partial(_outcomes, kind, strategy), suites)
                for kind in ("plain", "wrapped")
            ]
        )
    print(
        f"Keras {keras.__version__}'s own tests, strategy {strategy}: plain"
        f" Keras passes {len(_passed(plain))} of {len(plain)}, wrapped"
        f" optimizers {len(_passed(wrapped))}",
        flush=True,
    )
    # Nearly all tests that need no package that is not installed.
    assert len(_passed(plain)) > 500
    patterns = [p for p, s in EXCEPTIONS.items() if s in (None, strategy)]
    lost = _passed(plain) - _passed(wrapped)
    return [
        f"{test}: {wrapped.get(test, 'did not run')}"
        for test in sorted(lost)
        if not any(fnmatch.fnmatch(test, one) for one in patterns)
    ] + [
        f"{one}: no test needs this exception"
        for one in patterns
        if not fnmatch.filter(lost, one)
    ]


def main(*arguments):
    if arguments:
        _run_suite(*arguments)
    sys.exit("\n".join([*_problems("none"), *_problems("mirrored")]))


if __name__ == "__main__":
    main(*sys.argv[1:])
