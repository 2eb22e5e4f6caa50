"""Fails with the name when a new TensorFlow or Keras moves a private one."""

import inspect
import pathlib
import sys
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.source import layout_test
from tests.source import private_attributes_test
from tests.support import processes
from tests.support import replicas
from tf_xshard.private import names
from tf_xshard.private.jax import tpu_simulation  # noqa: F401
from tf_xshard.private.keras import local_optimizers
from tf_xshard.private.keras import multi_worker_patches
from tf_xshard.private.tensorflow import runtime
from tf_xshard.private.tensorflow import tracing
from tf_xshard.private.tensorflow import v1 as tensorflow_v1  # noqa: F401


def test_names():
    gone = {one.feature: one.missing() for one in names.DECLARED}
    assert not any(gone.values()), (
        f"{gone} are gone from TensorFlow {tf.__version__} or"
        f" Keras {keras.__version__}: see the comments beside them"
    )


def test_every_module_is_declared_here():
    """Only private/ declares names, and the test above has all of them."""
    private = pathlib.Path(names.__file__).parent
    declaring = {
        path
        for path in private.parent.glob("**/*.py")
        if "PrivateNames(" in path.read_text() and path.name != "names.py"
    }
    assert {path.parent.parent for path in declaring} == {private}
    modules = {
        f"tf_xshard.private.{path.parent.name}.{path.stem}"
        for path in declaring
    }
    assert modules <= set(sys.modules)


def test_a_name_that_moved():
    """Its feature fails with a sentence; of alternatives, one is enough."""
    declared = names.PrivateNames(
        "The feature",
        {
            "gone": "keras.Variable._gone",
            "either": ("keras.Variable._gone", "keras.Variable.assign"),
        },
    )
    names.DECLARED.remove(declared)
    match = (
        r"The feature needs \['keras.Variable._gone'\].*Keras 3.12 to"
        r".*pip install 'tf_xshard\[cpu,tested\]'"
    )
    for _ in range(2):
        with pytest.raises(ImportError, match=match):
            declared.either  # noqa: B018
    declared.paths.pop("gone")
    assert declared.either is keras.Variable.assign


_PROGRAM = """
import os, sys
# A module of a user's that `python -m` runs: the import makes all names known.
sys.argv, sys.orig_argv = ["-m"], [sys.executable, "-m", "users_module"]
import keras, tensorflow as tf
from keras.src.backend.tensorflow import trainer
from tensorflow.python.ops import summary_ops_v2
def forget(owner, name):
    for one in getattr(owner, "__mro__", (owner,)):
        if name in vars(one):
            delattr(one, name)
def error_of(call):
    try:
        call()
    except ImportError as error:
        return str(error)
def load():
    import tf_xshard
if os.fork() == 0:
    # The import fails for the names of the class swap alone.
    forget(keras.optimizers.Optimizer, "_apply_weight_decay")
    error = error_of(load) or ""
    found = "A tf_xshard optimizer needs" in error
    os._exit(0 if found and "_apply_weight_decay" in error else 1)
assert os.wait()[1] == 0
forget(trainer, "reduce_per_replica")
forget(keras.Variable, "_shared_name")
forget(summary_ops_v2, "_SUMMARY_WRITER_INIT_COLLECTION_NAME")
import tf_xshard
assert keras.saving.get_registered_object("tf_xshard>CrossShardOptimizer")
assert keras.saving.get_registered_object("tf_xshard>CrossShardOptimizer")
weight = keras.Variable(1.0)
tf_xshard.CrossShardOptimizer(keras.optimizers.SGD(0.5)).apply(
    [tf.constant(1.0)], [weight])
assert float(weight) == 0.5
for call, feature, name in (
    (lambda: tf_xshard.multi_worker_fit().__enter__(),
     "multi_worker_fit", "reduce_per_replica"),
    (lambda: tf_xshard.compat.v1, "compat.v1", "_SUMMARY_WRITER_INIT"),
    (lambda: tf_xshard.private.keras.shards.NAMES.check(),
     "shard_update=True", "_shared_name"),
):
    error = error_of(call)
    assert error and feature in error and name in error, (feature, error)
print("done")
"""


def test_only_the_feature_fails():
    run = processes.run(processes.python("-c", _PROGRAM), check=True)
    assert run.stdout.endswith("done\n")


def _uses_merge_call(function):
    source = inspect.getsource(function)
    return any(word in source for word in ("merge_call", "extended.update"))


def test_every_method_with_merge_call_is_overridden():
    """A new one would fail inside tf.cond, where optimizers are local."""
    cases = (
        (local_optimizers._TFOptimizer, local_optimizers._Local),
        (
            keras.optimizers.LossScaleOptimizer,
            local_optimizers._LocalLossScale,
        ),
    )
    found = {
        (owner.__name__, name): getattr(local, name) is not member
        for owner, local in cases
        for name, member in vars(owner).items()
        if inspect.isfunction(member) and _uses_merge_call(member)
    }
    # Only the overridden `_backend_update_step` calls it.
    assert not found.pop(("TFOptimizer", "_distributed_tf_update_step"))
    assert len(found) >= 5 and all(found.values()), found


def test_keras_sums_in_one_place_only():
    """A sum that a new Keras adds elsewhere would be a second one."""
    source = inspect.getsource(local_optimizers._TFOptimizer)
    assert source.count(".all_reduce(") == 1
    base = inspect.getsource(local_optimizers._BaseOptimizer)
    assert "all_reduce" not in base


def _instances():
    """For each feature, objects that have its attributes."""
    optimizer = keras.optimizers.SGD(use_ema=True)
    weight = keras.Variable(1.0)
    optimizer.build([weight])
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones([2, 1]), np.ones([2, 1]), verbose=0)
    strategy = replicas.mirrored(2)
    iterator = iter(
        strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensors(tf.ones([2])).batch(2)
        )
    )
    v1 = tf.compat.v1.train.AdamOptimizer()
    tpu = replicas.tpu(4)
    of_host = iterator._iterators[0]
    found = {
        "A tf_xshard optimizer": [optimizer],
        "SwapEMAWeights": [optimizer],
        runtime._STORE.feature: [runtime.context()],
        "CrossShardOptimizer(shard_update=True)": [weight],
        "ScalarLoss and what fit calls": [model, model._compile_loss],
        "tf_xshard.multi_worker_fit()": [
            model,
            multi_worker_patches.NAMES.epoch_iterator(
                strategy, x=np.ones([2, 1]), batch_size=2
            ),
        ],
        "tf_xshard.testing.simulated_tpu_strategy()": [
            *(tpu.extended, tpu, iterator, of_host, of_host._iterator),
        ],
        "Groups under TPUStrategy": [tpu.extended],
        "tf_xshard.compat.v1": [v1, tf.Variable(1.0)],
    }
    if hasattr(keras.optimizers, "MultiOptimizer"):
        found["MultiOptimizer in a tf_xshard optimizer"] = [
            keras.optimizers.MultiOptimizer(
                optimizer_map=lambda variable: optimizer
            )
        ]
    return found


def test_attributes_of_instances():
    found = _instances()
    missing = {
        feature: [
            name
            for name in attributes
            if not any(hasattr(one, name) for one in found[feature])
        ]
        for feature, attributes in names.ATTRIBUTES.items()
        if feature in found
    }
    assert not any(missing.values()), missing
    with replicas.mirrored(2).scope():
        counter = keras.optimizers.SGD()._iterations
    assert isinstance(counter.value, tf.distribute.DistributedValues)
    assert (
        counter.value.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
    )


def test_the_cluster_has_no_evaluator(monkeypatch):
    """Its job's name is between the chief's and the workers'."""
    cluster = tf.train.ClusterSpec(
        {"worker": ["b:1", "c:1"], "evaluator": ["e:1"], "chief": ["a:1"]}
    ).as_cluster_def()
    for job, index, rank in (("chief", 0, 0), ("worker", 1, 2)):
        server = tf.train.ServerDef(
            cluster=cluster, job_name=job, task_index=index
        )
        monkeypatch.setattr(
            runtime.context(), "_collective_ops_server_def", server
        )
        assert runtime.cluster() == (rank, ["a:1", "b:1", "c:1"])
        assert runtime.worker(2) == "Worker 2 (c:1)"


def test_every_private_attribute_is_declared():
    """A table has each foreign private attribute that private/ touches."""
    declared = {one for found in names.ATTRIBUTES.values() for one in found}
    for one in names.DECLARED:
        for paths_ in one.paths.values():
            declared |= {path.rpartition(".")[2] for path in paths_}
    for name, tree in layout_test.MODULES.items():
        if not name.startswith("tf_xshard.private."):
            continue
        touched = set(private_attributes_test.touched(tree))
        # Python's own frames, and an attribute that users' callbacks have.
        found = touched - declared
        found -= {"_getframe", "_current_frames", "_chief_worker_only"}
        assert not found, (name, found)


def test_in_xla():
    seen = []

    def function():
        seen.append(tracing.in_xla())

    tf.function(function, jit_compile=True).get_concrete_function()
    tf.function(function).get_concrete_function()
    assert seen == [True, False]


def test_what_threads_do():
    """What the watchdog takes for running, tracing, and neither."""
    with tf.init_scope():
        captured, other = (
            tf.raw_ops.VarHandleOp(
                dtype=tf.float32, shape=[], shared_name=f"test_threads_{i}"
            )
            for i in range(2)
        )
        tf.raw_ops.AssignVariableOp(resource=captured, value=0.0)
    seen = []

    def look():
        looker = threading.Thread(
            target=lambda: seen.append(
                (
                    runtime.a_function_runs(),
                    runtime.a_function_uses(captured),
                    runtime.a_function_uses(other),
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
    def inner(x):
        tf.raw_ops.AssignVariableOp(resource=captured, value=x)
        return tf.py_function(wait, [x], tf.float32)

    @tf.function
    def function(x):
        look()
        return inner(x)

    look()
    deadline = time.monotonic() + 10
    while seen[0] != (False,) * 3 and time.monotonic() < deadline:
        # The watchdog of earlier tests may just have read its variables.
        seen.clear()
        look()
    function(tf.constant(1.0))
    before, tracing, running = seen
    assert before == (False,) * 3
    assert tracing == (False,) * 3
    assert running == (True, True, False)
