"""What plain Keras fails under a strategy, and this package does not.

Each case is a pair: plain Keras with the exact error or wrong number, ours with
the values of all replicas, worked out by hand.
"""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest

import tf_xshard
from tests.programs import plain_keras_cases as cases
from tests.support import paths
from tests.support import versions

_MERGE_CALL = "`merge_call` called while defining a new graph or a tf.function"
_PLACEHOLDER = "You must feed a value for placeholder tensor"
_INF = float("inf")

# case: (plain Keras' error or its value on all replicas, the right values of
# each variable)
ROWS = {
    # Gradients 0 to 3, mean 1.5, learning rate 1, weight 1: two updates.
    "accumulation": (_MERGE_CALL, [1 - 2 * 1.5]),
    # -0.5 and -2, averaged with momentum 0.5.
    "ema_overwrite": (_MERGE_CALL, [-1.25]),
    # Loss (w - 1)^2 from w = 0, learning rate 0.25: 0.5, then 0.75.
    "steps_per_execution": (_PLACEHOLDER, [[[0.75]]]),
    # Velocities -1.5 and -2.25.
    "unbuilt": (_PLACEHOLDER, [1 - 1.5 - 2.25]),
    # The first step is skipped, the second has gradient 1.
    "overflow": (-_INF, [0.0]),
    # A gradient of 40 is clipped to 1; plain Keras clips four of 10 to 1 each.
    "clipping": (-3.0, [0.0]),
    # 4, none, 4, 4: the divisor stays 4.
    "none_on_one_replica": (
        "Values to regroup had different lengths",
        [1 - 1.0, 1 - 3.0],
    ),
    # Row 0 gets 2 r on replica r, mean 3, accumulated over two steps.
    "sparse_accumulation": (_MERGE_CALL, [[[1 - 3.0], [1.0]]]),
    # Adam's first step is the learning rate, whatever the gradient.
    "duplicate_indices": ([[-0.4142], [1.0]], [[[0.5], [1.0]]]),
    "in_cond": (_MERGE_CALL, [1 - 1.5 - 2.25]),
}
# The version of Keras from which on it does not fail.
MENDED = {"ema_overwrite": (3, 16), "unbuilt": (3, 16)}
# A collective that fails aborts those of every later test in its process.
_OWN_PROCESS = ("steps_per_execution", "unbuilt")


def _mended(case):
    return f"Keras {keras.__version__} mended this: add {case!r} to MENDED"


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("case", ROWS)
def test_plain_keras(case):
    expected, right = ROWS[case]
    if case in _OWN_PROCESS:
        run = subprocess.run(
            [sys.executable, "-m", "tests.programs.plain_keras_cases", case],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=500,
            cwd=paths.ROOT,
        )
        outcome = json.loads(run.stdout.strip().splitlines()[-1])
    else:
        outcome = cases.outcome(case, lambda optimizer: optimizer)
    if versions.KERAS >= MENDED.get(case, (4, 0)):
        _check_right(outcome, right)
    elif isinstance(expected, str):
        assert expected in outcome.get("error", ""), _mended(case)
    else:
        for value in outcome["values"][0]:
            np.testing.assert_allclose(
                value, expected, atol=1e-4, err_msg=_mended(case)
            )
            assert not np.allclose(value, right[0], atol=1e-4), _mended(case)


@pytest.mark.parametrize("case", ROWS)
def test_ours(case):
    outcome = cases.outcome(case, tf_xshard.CrossShardOptimizer)
    _check_right(outcome, ROWS[case][1])


def _check_right(outcome, right):
    assert "error" not in outcome, outcome["error"]
    for values, wanted in zip(outcome["values"], right, strict=True):
        assert len(values) == cases.NUM_REPLICAS
        for value in values:
            np.testing.assert_allclose(value, wanted, atol=1e-5)


def test_every_case_has_a_row():
    assert set(cases.CASES) == set(ROWS)
