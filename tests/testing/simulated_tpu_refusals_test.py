"""What the simulated TPU can't run, and bad arguments: named, not hung."""

import pytest
import tensorflow as tf

from tests.support import paths
from tests.support import replicas
from tf_xshard import testing
from tf_xshard.testing import requirements


def test_operations_that_a_core_does_not_have():
    variable = tf.Variable(1.0)
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer([1], [2]), 0
    )
    lookup = lambda x: table.lookup(tf.cast(x, tf.int32))
    outside = tf.compat.v1.tpu.outside_compilation
    dequeue = tf.raw_ops.InfeedDequeue
    for what, function in (
        ("tf.print", lambda x: [tf.print(x), x][1]),
        ("tf.numpy_func", lambda x: tf.numpy_function(abs, [x], tf.float32)),
        ("tf.py_function", lambda x: tf.py_function(abs, [x], tf.float32)),
        ("a resource that is not a variable", lookup),
        ("outside strategy.scope", lambda x: x * variable),
        ("outside compilation", lambda x: outside(tf.sin, x)),
        ("AsString", lambda x: tf.strings.length(tf.strings.as_string(x))),
        ("infeed", lambda x: dequeue(dtype=tf.float32, shape=[2])),
    ):
        with pytest.raises(NotImplementedError, match=what):
            replicas.run("tpu", function, 2)


def test_replicas_with_other_shapes_are_refused():
    """Components of RaggedTensors are not padded."""
    strategy = replicas.tpu(2)
    ragged = tf.ragged.constant([[1], [2, 3]])
    dataset = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(ragged).batch(2),
        tf.distribute.InputOptions(experimental_fetch_to_device=False),
    )

    sums = lambda x: tf.reduce_sum(x.flat_values)
    step = tf.function(lambda x: strategy.run(sums, (x,)), autograph=False)
    error = tf.errors.InvalidArgumentError
    with pytest.raises(error, match="arrays of different shapes"):
        step(next(iter(dataset)))


def test_refused_when_the_shape_is_known():
    value = lambda c: tf.ones([c.replica_id_in_sync_group + 1])
    gather = lambda x: tf.distribute.get_replica_context().all_gather(x, axis=0)
    for function, match in (
        (tf.strings.as_string, "AsString"),
        (gather, "drop_remainder=True"),
    ):
        with pytest.raises(tf.errors.UnimplementedError, match=match):
            replicas.run("tpu", function, 2, value)


def test_jit_compile_is_refused():
    step = tf.function(
        lambda: replicas.tpu(2).run(replicas.power_of_ten), jit_compile=True
    )
    with pytest.raises(
        NotImplementedError, match="Remove jit_compile=True; .* jit_compile=F"
    ):
        step()


def _permuted(permutation, device_assignment=False):
    return dict(
        num_replicas=2,
        replica_permutation=permutation,
        device_assignment=device_assignment,
    )


@pytest.mark.parametrize(
    "kwargs, error, match",
    [
        (dict(num_replicas=0), ValueError, "num_replicas must be positive"),
        (dict(num_replicas=True), TypeError, "must be an int, got True"),
        (dict(num_replicas=8, num_hosts=3), ValueError, "spread evenly"),
        (_permuted([1, 0], True), ValueError, "Pass device_assignment=False"),
        (_permuted([1, 1]), ValueError, "each of 0 to 1 once"),
        (_permuted([1.0, 0.0]), ValueError, "each of 0 to 1 once"),
        (_permuted(3), ValueError, "each of 0 to 1 once"),
        (dict(num_replicas=17), RuntimeError, "needs 17 .*already runs with"),
    ],
    ids=str,
)
def test_bad_arguments(kwargs, error, match):
    with pytest.raises(error, match=match):
        testing.simulated_tpu_strategy(**kwargs)


@pytest.mark.parametrize(
    "versions, match",
    [
        ({"jax": None}, "needs jax.*>=0.10.2, found none"),
        ({"jax": "0.9.0"}, "needs jax.*, found 0.9.0"),
        ({"jaxlib": "0.10.1"}, "needs jaxlib<0.13,.*, found 0.10.1"),
        ({"tensorflow-tpu": "2.20.0"}, "separate environment"),
        ({"libtpu": "0.0.51"}, "needs libtpu==0.0.42.1"),
        ({"libtpu": None}, "Linux x86-64 only"),
    ],
    ids=["no jax", "jax", "jaxlib", "tensorflow-tpu", "libtpu", "no libtpu"],
)
def test_versions(versions, match, monkeypatch):
    version = requirements._version
    monkeypatch.setattr(
        requirements, "_version", lambda d: versions.get(d, version(d))
    )
    with pytest.raises(ImportError, match=match):
        requirements.check_jax()
        requirements.check_libtpu()


def test_the_versions_are_those_of_the_extra():
    text = (paths.ROOT / "setup.cfg").read_text()
    assert f"libtpu =={requirements.LIBTPU};" in text
