"""The type on the wire: where 16 bits would lose visibly, float32 is kept."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import steps
from tf_xshard.collectives import transport
from tf_xshard.distribute import site as site_lib
from tf_xshard.reduction import buckets


@pytest.mark.parametrize(
    "wire, own, group_size, expected",
    [
        ("bfloat16", "float32", 16, "bfloat16"),
        ("bfloat16", "float32", 17, "float32"),
        ("bfloat16", "float64", 17, "float32"),
        ("float16", "float32", 128, "float16"),
        ("float16", "float32", 129, "float32"),
        ("float16", "bfloat16", 129, "bfloat16"),
        ("float64", "float32", 10_000, "float64"),
        (None, "float16", 999, "float16"),
    ],
)
def test_float32_is_kept_in_larger_groups(wire, own, group_size, expected):
    how = tf_xshard.Communication(dtype=wire)
    assert how.dtype_of_sum(own, group_size) == expected


@pytest.mark.parametrize(
    "group_size, expected, packs",
    [(16, "bfloat16", True), (16, "bfloat16", False), (17, "float32", True)],
)
def test_what_a_transport_gets(group_size, expected, packs):
    """Gradients are scaled and applied in their own type again."""
    seen = []
    will_pack = packs

    class Recording(transport.Transport):
        name = "recording"
        packs = will_pack

        def sum(self, tensors):
            seen.extend(tensor.dtype.name for tensor in tensors)
            return tensors

    groups = tf_xshard.GroupAssignment.contiguous(2 * group_size, group_size)
    site = site_lib.Site(
        tf.distribute.get_strategy(), "mirrored", 2 * group_size, 0, "", 1
    )
    how = transport.Channel(groups, tf_xshard.Communication(dtype="bfloat16"))
    ones = [tf.ones([3]), tf.ones([2, 2])]
    sums = buckets.sum_dense(ones, Recording(site, how)).values
    assert set(seen) == {expected}
    assert [one.dtype for one in sums] == [tf.float32, tf.float32]


@pytest.mark.parametrize(
    "kind, dtype", [("mirrored", "bfloat16"), ("tpu", "float16")]
)
def test_the_error_on_eight_replicas(kind, dtype, report):
    """Real gradients over one group of eight: within the documented error."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(8, 2000)).astype("float32")
    [got] = steps.stepped(
        lambda: tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(1.0),
            "sum",
            loss_normalization="replica",
            communication=tf_xshard.Communication(dtype=dtype),
        ),
        lambda r: [tf.constant(values[r])],
        [np.zeros(2000)],
        kind,
        num_replicas=8,
    )
    error = np.abs(got[0] + values.astype("float64").sum(0))
    relative = (error / np.abs(values).sum(0)).max()
    report(f"{dtype}, {kind}: largest error {relative:.2e}")
    # Not zero: it did travel in that type.
    roundoff = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    assert roundoff / 32 < relative <= 8 * roundoff
    for one in got[1:]:
        np.testing.assert_array_equal(one, got[0])


@pytest.mark.parametrize(
    "bytes_per_bucket, buckets_in_flight", [(1, 3), (45, 1), (1000, 1)]
)
def test_buckets(bytes_per_bucket, buckets_in_flight):
    """Buckets hold one, two or all of the variables, whose shapes are equal."""
    found = steps.stepped(
        lambda: tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(1.0),
            "sum",
            [[0, 3], [1, 2]],
            loss_normalization="replica",
            communication=tf_xshard.Communication(
                bytes_per_bucket=bytes_per_bucket,
                buckets_in_flight=buckets_in_flight,
            ),
        ),
        lambda r: [tf.fill([5], 10.0**r * (i + 1)) for i in range(7)],
        [np.zeros(5)] * 7,
    )
    totals = np.array([1001, 110, 110, 1001])[:, np.newaxis]
    for i, values in enumerate(found, 1):
        np.testing.assert_array_equal(values, np.tile(-i * totals, 5))


def test_it_is_a_frozen_value():
    optimizer = tf_xshard.CrossShardOptimizer(
        keras.optimizers.SGD(), communication=None
    )
    assert optimizer.communication == tf_xshard.Communication()
    with pytest.raises(dataclasses.FrozenInstanceError):
        optimizer.communication.dtype = "int8"
    for wrong in (0, 1.5):
        with pytest.raises((TypeError, ValueError), match="buckets_in_flight"):
            tf_xshard.Communication(buckets_in_flight=wrong)
    with pytest.raises(TypeError, match=r"error_feedback=\.\.\.\) must be"):
        tf_xshard.Communication(dtype="int8", error_feedback=1)
