"""Fails with the name when a new TensorFlow or Keras moves a private one."""

import inspect
import sys
import threading
import time

import keras
import pytest
import tensorflow as tf

from tests.support import replicas
from tf_xshard.private import checkpointed
from tf_xshard.private import keras_moving_averages
from tf_xshard.private import keras_optimizer_state
from tf_xshard.private import keras_optimizers
from tf_xshard.private import keras_saving
from tf_xshard.private import keras_sharded_updates
from tf_xshard.private import keras_shards
from tf_xshard.private import keras_training_loops
from tf_xshard.private import tensorflow as private_tensorflow
from tf_xshard.private import tensorflow_v1 as compat_internals
from tf_xshard.private import tpu_iterators
from tf_xshard.private import tpu_simulation


@pytest.mark.parametrize(
    "owner, name",
    private_tensorflow.TF_PRIVATE_NAMES
    + keras_optimizers.KERAS_PRIVATE_NAMES
    + keras_training_loops.KERAS_PRIVATE_NAMES
    + keras_shards.KERAS_PRIVATE_NAMES
    + keras_sharded_updates.KERAS_PRIVATE_NAMES
    + compat_internals.TF_PRIVATE_NAMES
    + checkpointed.TF_PRIVATE_NAMES
    + tpu_iterators.TF_PRIVATE_NAMES
    + tpu_simulation.TF_PRIVATE_NAMES
    + tpu_simulation.KERAS_PRIVATE_NAMES,
    ids=lambda value: getattr(value, "__name__", value),
)
def test_name(owner, name):
    assert hasattr(owner, name), (
        f"{owner}.{name} is gone from TensorFlow {tf.__version__} or"
        f" Keras {keras.__version__}: see the comment beside it"
    )


def test_keras_sums_in_one_place_only():
    """A sum that a new Keras adds elsewhere would be a second one."""
    source = inspect.getsource(keras_optimizers._TFOptimizer)
    assert source.count(".all_reduce(") == 1
    base = inspect.getsource(keras_optimizers._BaseOptimizer)
    assert "all_reduce" not in base


def test_attributes_of_instances():
    optimizer = keras.optimizers.SGD(use_ema=True)
    optimizer.build([keras.Variable(1.0)])
    for name in (
        *keras_optimizer_state.KERAS_PRIVATE_ATTRIBUTES,
        *keras_moving_averages.KERAS_PRIVATE_ATTRIBUTES,
    ):
        assert hasattr(optimizer, name), name
    with replicas.mirrored(2).scope():
        counter = keras.optimizers.SGD()._iterations
    assert isinstance(counter.value, tf.distribute.DistributedValues)
    assert (
        counter.value.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
    )


def test_keras_begins_with_the_epoch_that_it_is_told():
    """What `keras_models` sets, as BackupAndRestore does, while `fit` runs."""
    source = inspect.getsource(keras.Model.fit)
    assert "self._initial_epoch or initial_epoch" in source
    assert "logs = self.train_function(iterator)" in source
    assert keras.Sequential()._losses_override == []


def test_a_store_shows_its_file_and_path(tmp_path):
    """Without them, state saved with other wrappers would start fresh."""
    seen = []

    class Optimizer(keras.optimizers.SGD):
        def load_own_variables(self, store):
            seen.append(store)
            assert getattr(store, keras_saving._PATH) == "optimizer"

    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile(Optimizer(), "mse")
    model.optimizer.build(model.trainable_variables)
    model.save_weights(tmp_path / "model.weights.h5")
    model.load_weights(tmp_path / "model.weights.h5")
    assert len(seen) == 1 and hasattr(seen[0], keras_saving._FILE)


def test_a_node_shows_its_position(tmp_path):
    """Without it, no checkpoint could be restored into a wrapper."""
    seen = []

    class Node(tf.Module):
        def _checkpoint_adapter(self, path):
            seen.append(sys._getframe(1).f_locals[checkpointed._POSITION])

    node = Node()
    node.variable = tf.Variable(1.0)
    path = tf.train.Checkpoint(node=node).save(tmp_path / "state")
    tf.train.Checkpoint(node=node).restore(path).assert_consumed()
    [position] = seen
    [child] = position.object_proto.children
    assert child.local_name == "variable"


def test_graphs_of_control_flow():
    seen = []

    @tf.function
    def function(x):
        def branch():
            seen.append(tf.compat.v1.get_default_graph())
            return x

        def body(y):
            seen.append(tf.compat.v1.get_default_graph())
            return (y + 1,)

        tf.cond(x > 0, branch, lambda: x)
        return tf.while_loop(lambda y: y < 3, body, [x])

    function(tf.constant(1))
    branch, body = seen[0], seen[-1]
    assert branch.is_control_flow_graph and body.is_control_flow_graph
    assert not branch.outer_graph.is_control_flow_graph
    assert type(body) is private_tensorflow._func_graphs.WhileBodyFuncGraph
    assert type(branch) is not type(body)


def test_in_xla():
    seen = []

    def function():
        seen.append(private_tensorflow.in_xla())

    tf.function(function, jit_compile=True).get_concrete_function()
    tf.function(function).get_concrete_function()
    assert seen == [True, False]


def test_what_threads_do():
    """What the watchdog takes for running, tracing, and neither."""
    seen = []

    def look():
        looker = threading.Thread(
            target=lambda: seen.append(
                (
                    private_tensorflow.a_function_runs(),
                    private_tensorflow.nothing_computes(),
                )
            )
        )
        looker.start()
        looker.join()

    def wait(x):
        # Another thread than the one that called the function.
        look()
        return x

    @tf.function
    def function(x):
        look()
        return tf.py_function(wait, [x], tf.float32)

    look()
    deadline = time.monotonic() + 10
    while seen[0] != (False, True) and time.monotonic() < deadline:
        # The watchdog of earlier tests may just have read its counters.
        seen.clear()
        look()
    function(tf.constant(1.0))
    before, tracing, running = seen
    assert before == (False, True)
    assert tracing[0] is False
    assert running == (True, False)
