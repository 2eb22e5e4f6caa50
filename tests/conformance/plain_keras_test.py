"""What plain Keras fails under a strategy, and this package does not."""

import pytest

import tf_xshard
from tests.programs import plain_keras_cases as cases


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("case", cases.CASES)
def test_the_wrapper_is_right(case):
    found = cases.values(case, tf_xshard.CrossShardOptimizer)
    assert cases.is_right(case, found), found
