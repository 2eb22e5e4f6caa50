"""Saves one state after another until it is killed.

`python -m tests.programs.saving_program DIRECTORY`. Prints the number of each
save that is complete.
"""

import sys

import keras
import numpy as np
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tf_xshard.group_state import state

GROUPS = [[0, 2], [1, 3]]
_SHAPES = ((200, 1000), (), (50_000,))
# And a slot variable, of which each replica of a group holds a half.
_SHAPES += _SHAPES[:1]


def content(index: int, group: int, step: int) -> np.ndarray:
    """What a variable of a group holds at a step."""
    return np.full(_SHAPES[index], 1e6 * index + 1e3 * step + group, "float32")


def state_of(strategy) -> state.GroupState:
    """Variables of a few shapes in two groups."""
    with strategy.scope():
        variables = [keras.Variable(tf.zeros(shape)) for shape in _SHAPES[:-1]]
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(momentum=0.5),
            group_assignment=GROUPS,
            shard_update=True,
        )
        optimizer.build(variables[:1])
    return state.GroupState([*variables, optimizer.variables[-1]], GROUPS)


def fill(state, step: int) -> None:
    """Gives every group its content of a step."""
    for index, one in enumerate(state.variables()):
        state.assign(one.variable, [content(index, g, step) for g in (0, 1)])


def check(strategy, state, step: int) -> None:
    """Compares every replica with the content of a step."""
    for index, one in enumerate(state.variables()):
        for r, value in enumerate(replicas.values(strategy, one.variable)):
            group = state.group_of(r)
            np.testing.assert_array_equal(value, content(index, group, step))


if __name__ == "__main__":
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 4,
    )
    saver = state_of(replicas.mirrored(4))
    for number in range(1, 1_000_000):
        fill(saver, number)
        saver.save(sys.argv[1], step=number)
        print(number, flush=True)
