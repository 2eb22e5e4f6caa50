"""The type on the wire: where 16 bits would lose visibly, float32 is kept."""

import dataclasses

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import steps
from tf_xshard.collectives import transport
from tf_xshard.distribute import site as site_lib
from tf_xshard.reduction import buckets

TYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
LARGEST = {"bfloat16": 16, "float16": 128}


def _summed_one_by_one(values, dtype):
    """As a ring does: each partial sum is rounded."""
    total = values[0].astype(dtype)
    for value in values[1:]:
        total = (total + value.astype(dtype)).astype(dtype)
    return total.astype(np.float64)


def _worst_error(dtype, group_size):
    """The largest error of many sums, relative to the sum of magnitudes."""
    rng = np.random.default_rng(group_size)
    values = rng.uniform(1, 2, size=(group_size, 500))
    # The worst is systematic: what is added is lost whole each time.
    values[1:, 0] = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    values[0, 0] = 1.0
    error = np.abs(_summed_one_by_one(values, TYPES[dtype]) - values.sum(0))
    return (error / np.abs(values).sum(0)).max()


@pytest.mark.parametrize("dtype", TYPES)
def test_the_bound_holds_in_numpy(dtype, report):
    """Up to the largest group the error is below 1/16; far beyond it is not."""
    largest = LARGEST[dtype]
    errors = [_worst_error(dtype, size) for size in (2, largest, 64 * largest)]
    report(f"{dtype}: worst errors {errors} of 2, {largest}, {64 * largest}")
    assert errors[0] < errors[1] <= 1 / 16 < errors[2]


@pytest.mark.parametrize("dtype", TYPES)
def test_float32_is_kept_in_larger_groups(dtype):
    largest = LARGEST[dtype]
    wire = tf_xshard.Communication(dtype=dtype)
    assert wire.dtype_of_sum("float32", largest) == dtype
    for own, expected in (
        ("float32", "float32"),
        ("float64", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
    ):
        assert wire.dtype_of_sum(own, largest + 1) == expected
    for other in ("float32", "float64"):
        wire = tf_xshard.Communication(dtype=other)
        assert wire.dtype_of_sum("float32", 10_000) == other
    assert tf_xshard.Communication().dtype_of_sum("float16", 999) == "float16"


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

        def _sum(self, tensors):
            seen.extend(tensor.dtype.name for tensor in tensors)
            return tensors

    groups = tf_xshard.GroupAssignment.contiguous(2 * group_size, group_size)
    site = site_lib.Site(
        tf.distribute.get_strategy(), "mirrored", 2 * group_size, 0, "", 1
    )
    how = transport.Channel(groups, tf_xshard.Communication(dtype="bfloat16"))
    sums = buckets.sum_dense(
        [tf.ones([3]), tf.ones([2, 2])], Recording(site, how)
    ).values
    assert set(seen) == {expected}
    assert [one.dtype for one in sums] == [tf.float32, tf.float32]


@pytest.mark.parametrize(
    "kind, dtype", replicas.in_turn(replicas.STRATEGIES, list(TYPES))
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
    assert 0 < relative <= 8 * roundoff
    for one in got[1:]:
        np.testing.assert_array_equal(one, got[0])


@pytest.mark.parametrize("buckets_in_flight", [1, 3])
def test_buckets_in_flight(buckets_in_flight):
    found = steps.stepped(
        lambda: tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(1.0),
            "sum",
            [[0, 3], [1, 2]],
            loss_normalization="replica",
            communication=tf_xshard.Communication(
                bytes_per_bucket=1, buckets_in_flight=buckets_in_flight
            ),
        ),
        lambda r: [tf.fill([5], 10.0**r * (i + 1)) for i in range(7)],
        [np.zeros(5)] * 7,
    )
    for i, values in enumerate(found):
        for value, total in zip(values, (1001, 110, 110, 1001), strict=True):
            np.testing.assert_array_equal(value, [-total * (i + 1)] * 5)


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
