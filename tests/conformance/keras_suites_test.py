"""Keras' own tests, as its wheel ships them, with every optimizer wrapped."""

import contextlib
import fnmatch
import functools
import json
import pathlib
import subprocess
import sys
import tempfile

import keras
import pytest

from tests.support import paths

# What plain Keras passes and a wrapped optimizer does not: by the reason. None
# is about the numbers of an update but "one tensor", which is explained.
EXCEPTIONS = {
    "It counts sparse writes with mocks of `optimizer.assign`; the inner"
    " optimizer makes them. (Its twin, test_sparse_correctness, passes.)": (
        "*::test_sparse_gradients_*",
        "*::test_fit_sparse_*",
    ),
    "It reads the private counter `_iterations`, which a wrapper leaves at 0."
    " (`iterations` is right.)": (
        "optimizers/optimizer_test.py::*::test_gradient_accumulation",
        "*::test_overwrite_with_gradient_with_gradient_accumulation",
    ),
    "Replicas pass one tensor that was made outside of `strategy.run`. Keras"
    " counts it once, and two tensors with the same values twice; here both"
    " count twice.": (
        "*/optimizer_distribute_test.py::*::test_ema",
        "*/optimizer_distribute_test.py::*::test_gradient_accumulation",
    ),
    "It compares a config or a file with the inner optimizer's.": (
        "*/loss_scale_optimizer_test.py::*::test_serialization",
        "*/multi_optimizer_test.py::*::test_serialization",
        "*::test_saved_module_paths_and_class_names",
    ),
    "It expects the inner optimizer's name.": (
        "*::test_optimizer_auto_naming",
        "*::test_tensorboard_logging_with_multi_optimizer",
    ),
    "Built with no variables, a wrapper waits for some: Keras' loader of legacy"
    " files does that.": ("*::test_build_with_empty_var_list",),
    "A wrapper that is not built keeps the weights until it is, and raises no"
    " error.": ("optimizers/optimizer_test.py::*::test_set_weights",),
    "A wrapper hides the nested optimizer from MultiOptimizer's own check; with"
    " a LossScaleOptimizer inside it is refused when it is built.": (
        "*::test_multi_optimizer_blocks_nested_optimizers",
    ),
    "Under mixed_float16 on several replicas, a LossScaleOptimizer around a"
    " wrapper is refused with what to write instead.": (
        "*::test_adds_loss_scaling_optimizer",
    ),
}
# Those that apply under one strategy only; under the other one plain Keras
# fails, too, or a wrapped optimizer passes.
_ONLY = {
    "*::test_fit_sparse_*": "none",
    "optimizers/optimizer_test.py::*::test_gradient_accumulation": "none",
    "*::test_overwrite_with_gradient_with_gradient_accumulation": "none",
    "*/optimizer_distribute_test.py::*::test_ema": "none",
    "*/optimizer_distribute_test.py::*::test_gradient_accumulation": "none",
    "*::test_adds_loss_scaling_optimizer": "mirrored",
}
_MINUTES = 30


def _patterns(strategy):
    return [
        pattern
        for patterns in EXCEPTIONS.values()
        for pattern in patterns
        if _ONLY.get(pattern, strategy) == strategy
    ]


@functools.cache
def _outcomes(strategy):
    """Of plain Keras and of wrapped optimizers: {test: outcome}."""
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        files, runs = [], []
        for kind in ("plain", "wrapped"):
            files.append(pathlib.Path(directory) / f"{kind}.json")
            log = stack.enter_context(open(f"{files[-1]}.log", "w+"))
            command = [sys.executable, "-m", "tests.programs.keras_suites"]
            run = subprocess.Popen(
                [*command, kind, strategy, str(files[-1])],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=paths.ROOT,
            )
            runs.append(run)
            stack.callback(run.wait)
            stack.callback(run.kill)
        for run, file in zip(runs, files, strict=True):
            run.wait(60 * _MINUTES)
            log = pathlib.Path(f"{file}.log").read_text()
            assert run.returncode == 0, log[-3000:]
        return [json.loads(file.read_text()) for file in files]


def _passed(outcomes):
    return {test for test, outcome in outcomes.items() if outcome == "passed"}


def _lost(strategy):
    plain, wrapped = _outcomes(strategy)
    return _passed(plain) - _passed(wrapped)


@pytest.mark.full
@pytest.mark.skipif(
    not any(pathlib.Path(keras.__file__).parent.rglob("*_test.py")),
    reason=f"the wheel of Keras {keras.__version__} has no tests",
)
@pytest.mark.parametrize("strategy", ["none", "mirrored"])
def test_what_plain_keras_passes(strategy, report):
    plain, wrapped = _outcomes(strategy)
    report(
        f"Keras {keras.__version__}'s own tests, strategy {strategy}: plain"
        f" Keras passes {len(_passed(plain))} of {len(plain)}, wrapped"
        f" optimizers {len(_passed(wrapped))}"
    )
    # Nearly all tests that need no package that is not installed.
    assert len(_passed(plain)) > 500
    unexplained = {
        test: wrapped.get(test, "did not run")
        for test in sorted(_lost(strategy))
        if not any(fnmatch.fnmatch(test, one) for one in _patterns(strategy))
    }
    assert not unexplained, json.dumps(unexplained, indent=1)
    # Every exception is needed.
    lost = _lost(strategy)
    assert [p for p in _patterns(strategy) if not fnmatch.filter(lost, p)] == []
