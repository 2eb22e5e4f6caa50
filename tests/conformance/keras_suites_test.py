"""Keras' own tests, as its wheel ships them, with every optimizer wrapped."""

import collections
import fnmatch
import json
import pathlib
import subprocess
import sys
from concurrent import futures

import keras
import pytest

from tests.support import paths

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
    # Under mixed_float16 on several replicas, a LossScaleOptimizer around a
    # wrapper is refused with what to write instead.
    "*::test_adds_loss_scaling_optimizer": "mirrored",
}
_MINUTES = 45
# Under MirroredStrategy most of the time is spent waiting for TensorFlow's
# iterators to end, so parts run beside each other, the longest first.
_PARTS = {
    "none": [("1/1",)],
    "mirrored": [
        ("1/2", "trainers"),
        ("2/2", "trainers"),
        ("1/1", "callbacks", "saving"),
        ("1/1", "optimizers", "legacy/saving"),
    ],
}
# A process takes 1.5 GB.
_PROCESSES = 6


def _outcomes(kind, strategy, part, folder):
    """Runs a part with "plain" or "wrapped" optimizers: {test: outcome}."""
    file = folder / "_".join([kind, *part]).replace("/", "_")
    command = [sys.executable, "-m", "tests.programs.keras_suites"]
    run = subprocess.run(
        [*command, kind, strategy, str(file), *part],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=paths.ROOT,
        timeout=60 * _MINUTES,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    return json.loads(file.read_text())


def _passed(outcomes):
    return {test for test, outcome in outcomes.items() if outcome == "passed"}


@pytest.mark.full
@pytest.mark.skipif(
    not any(pathlib.Path(keras.__file__).parent.rglob("*_test.py")),
    reason=f"the wheel of Keras {keras.__version__} has no tests",
)
@pytest.mark.parametrize("strategy", ["none", "mirrored"])
def test_what_plain_keras_passes(strategy, report, tmp_path):
    parts = _PARTS[strategy]
    kinds = ("plain", "wrapped")
    with futures.ThreadPoolExecutor(_PROCESSES) as pool:
        runs = [
            [
                pool.submit(_outcomes, one, strategy, p, tmp_path)
                for one in kinds
            ]
            for p in parts
        ]
    plain, wrapped = (
        dict(collections.ChainMap(*(run.result() for run in of_kind)))
        for of_kind in zip(*runs, strict=True)
    )
    report(
        f"Keras {keras.__version__}'s own tests, strategy {strategy}: plain"
        f" Keras passes {len(_passed(plain))} of {len(plain)}, wrapped"
        f" optimizers {len(_passed(wrapped))}"
    )
    # Nearly all tests that need no package that is not installed.
    assert len(_passed(plain)) > 500
    patterns = [p for p, s in EXCEPTIONS.items() if s in (None, strategy)]
    lost = _passed(plain) - _passed(wrapped)
    unexplained = {
        test: wrapped.get(test, "did not run")
        for test in sorted(lost)
        if not any(fnmatch.fnmatch(test, one) for one in patterns)
    }
    assert not unexplained, json.dumps(unexplained, indent=1)
    # Every exception is needed.
    assert [p for p in patterns if not fnmatch.filter(lost, p)] == []
