"""Fails with the name when a new TensorFlow or Keras moves a private one."""

import importlib
import inspect
import pkgutil
import re

import keras
import pytest
import tensorflow as tf

import tf_xshard.private
from tests.source import layout_test
from tests.source import private_attributes_test
from tests.support import processes
from tests.support import replicas
from tests.support import training
from tf_xshard.private import names
from tf_xshard.private.keras import local_optimizers
from tf_xshard.private.keras import multi_worker_patches
from tf_xshard.private.tensorflow import runtime
from tf_xshard.private.tensorflow import tracing

# All modules that declare names.
for _module in pkgutil.walk_packages(
    tf_xshard.private.__path__, "tf_xshard.private."
):
    importlib.import_module(_module.name)


def test_names():
    gone = {one.feature: one.missing() for one in names.DECLARED}
    assert not any(gone.values()), (
        f"{gone} are gone from TensorFlow {tf.__version__} or"
        f" Keras {keras.__version__}: see the comments beside them"
    )


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


def test_every_method_with_merge_call_is_overridden():
    """A new one would fail inside tf.cond, where optimizers are local."""
    found = {
        name: getattr(local, name) is not member
        for owner, local in (
            (local_optimizers._TFOptimizer, local_optimizers._Local),
            (
                keras.optimizers.LossScaleOptimizer,
                local_optimizers._LocalLossScale,
            ),
        )
        for name, member in vars(owner).items()
        if inspect.isfunction(member)
        and re.search("merge_call|extended.update", inspect.getsource(member))
    }
    # Only the overridden `_backend_update_step` calls it.
    assert not found.pop("_distributed_tf_update_step")
    assert len(found) >= 5 and all(found.values()), found


def test_keras_sums_in_one_place_only():
    """A sum that a new Keras adds elsewhere would be a second one."""
    source = inspect.getsource(local_optimizers._TFOptimizer)
    assert source.count(".all_reduce(") == 1
    base = inspect.getsource(local_optimizers._BaseOptimizer)
    assert "all_reduce" not in base


# Features that need attributes of other objects.
_OTHER_OBJECTS = (*("GlobalMean", "MultiOptimizer", "tf_xshard.tf_keras"),)


def test_attributes_of_instances():
    optimizer, weight = keras.optimizers.SGD(use_ema=True), keras.Variable(1.0)
    optimizer.build([weight])
    model = training.model()
    model.compile("sgd", "mse")
    x, y = training.data(2)
    model.fit(x, y, verbose=0)
    strategy, tpu = replicas.mirrored(2), replicas.tpu(4)
    data = tf.data.Dataset.from_tensors(tf.ones([2])).batch(2)
    iterator = iter(strategy.experimental_distribute_dataset(data))
    epochs = multi_worker_patches.NAMES.epoch_iterator(
        strategy, x=x, batch_size=2
    )
    [of_host] = iterator._iterators
    objects = (
        *(optimizer, weight, tf.Variable(1.0), runtime.context()),
        *(model, model._compile_loss, tpu, tpu.extended),
        *(iterator, of_host, of_host._iterator, epochs),
        tf.compat.v1.train.AdamOptimizer(),
        *(tf.function(lambda: None), replicas.multi_worker(2).extended),
    )
    missing = {
        feature: [
            name
            for name in attributes
            if not any(hasattr(one, name) for one in objects)
        ]
        for feature, attributes in names.ATTRIBUTES.items()
        # Tests of these features fail as well.
        if not feature.startswith(_OTHER_OBJECTS)
    }
    assert not any(missing.values()), missing
    with strategy.scope():
        counter = keras.optimizers.SGD()._iterations
    assert isinstance(counter.value, tf.distribute.DistributedValues)
    assert (
        counter.value.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
    )


def test_the_cluster_has_no_evaluator(monkeypatch):
    """Its job's name is between the chief's and the workers'."""
    cluster = tf.train.ClusterSpec(
        {"worker": ["b:1", "c:1"], "evaluator": ["e:1"], "chief": ["a:1"]}
    )
    server = tf.train.ServerDef(
        cluster=cluster.as_cluster_def(), job_name="worker", task_index=1
    )
    monkeypatch.setattr(runtime.context(), "_collective_ops_server_def", server)
    assert runtime.cluster() == (2, ["a:1", "b:1", "c:1"])
    assert runtime.worker(2) == "Worker 2 (c:1)"


def test_every_private_attribute_is_declared():
    """A table has each foreign private attribute that private/ touches."""
    # Python's own frames, and an attribute that users' callbacks have.
    declared = {"_getframe", "_current_frames", "_chief_worker_only"}
    declared.update(*names.ATTRIBUTES.values())
    for one in names.DECLARED:
        for alternatives in one.paths.values():
            declared |= {path.split(".")[-1] for path in alternatives}
    for name, tree in layout_test.MODULES.items():
        if name.startswith("tf_xshard.private."):
            found = private_attributes_test.touched(tree) - declared
            assert not found, (name, found)


def test_in_xla():
    seen = []
    for is_compiled in (True, False):
        tf.function(
            lambda: seen.append(tracing.in_xla()), jit_compile=is_compiled
        ).get_concrete_function()
    assert seen == [True, False]
