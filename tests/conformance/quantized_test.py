"""Gradients as 8-bit integers: what rounding loses is kept and sent later."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import stacks
from tests.support import steps
from tests.support import traced
from tf_xshard.reduction import quantization

# Two blocks of numbers in a group of two, and padding.
SHAPES = [(7, 13), (3,), (40, 30)]
SGD = keras.optimizers.SGD
CROSSED = [[0, 2], [3, 1]]


def _communication(dtype="int8", error_feedback=True):
    return tf_xshard.Communication(dtype=dtype, error_feedback=error_feedback)


INT8 = _communication()


def _optimizer(inner=None, communication=INT8, **kwargs):
    return tf_xshard.CrossShardOptimizer(
        inner or SGD(1.0),
        "sum",
        loss_normalization="replica",
        communication=communication,
        **kwargs,
    )


def _gradients(num_replicas, shapes=SHAPES, num_steps=3):
    """For each variable [steps, replicas, *shape], of different magnitudes."""
    rng = np.random.default_rng(7)
    result = []
    for i, shape in enumerate(shapes):
        scale = 10.0 ** (i % 3 - np.arange(num_replicas))
        numbers = rng.normal(size=(num_steps, *shape, num_replicas)) * scale
        result.append(np.moveaxis(numbers, -1, 1).astype("float32"))
    return result


def _trained(make, gradients, devices=(0, 1), graph=True):
    """Weights and residuals, each for all replicas."""
    strategy = replicas.mirrored_on(devices)
    initial = [np.zeros(one.shape[2:]) for one in gradients]
    one = traced.Traced(make, initial, strategy, graph=graph)
    weights = one.run(*gradients)
    residuals = getattr(one.optimizer, "_residuals", [])
    return weights, [np.stack(replicas.values(strategy, v)) for v in residuals]


def _check(got, gradients, groups):
    """What has not arrived is what the replicas keep, and it is little."""
    largest = max(np.abs(one).max() for one in gradients)
    for members in groups:
        # Half a step of a replica's numbers, and half a step of their sum's.
        bound = 1.05 * (1 + len(members)) * largest / 127 / 2
        for value, residual, sent in zip(*got, gradients, strict=True):
            own = sent[:, members].astype("float64")
            np.testing.assert_allclose(
                residual[members].sum(0) - value[members[0]],
                own.sum((0, 1)),
                atol=1e-6 * largest * own.size / own[0, 0].size,
            )
            for r in members:
                np.testing.assert_array_equal(value[r], value[members[0]])
                assert 0 < np.abs(residual[r]).max() < bound


@pytest.mark.parametrize(
    "devices, groups, sharded, graph",
    [
        ((1, 0), [[0, 1]], False, True),
        (replicas.MIXED, CROSSED, True, True),
        (replicas.MIXED, CROSSED, False, False),
    ],
    ids=["graph", "sharded", "eager"],
)
def test_nothing_is_lost(devices, groups, sharded, graph):
    gradients = _gradients(len(devices))
    make = lambda: _optimizer(group_assignment=groups, shard_update=sharded)
    _check(_trained(make, gradients, devices, graph), gradients, groups)


@pytest.mark.parametrize(
    "dtype, kind, most",
    [
        # The partial sums of a 16-bit all-reduce are rounded, too.
        ("bfloat16", None, 0.9),
        ("bfloat16", stacks.WholeSGD, 0.6),
        ("float16", SGD, 0.6),
    ],
)
def test_feedback_brings_it_closer_to_float32(dtype, kind, most):
    """The sum of many steps; without feedback errors add up."""
    gradients = _gradients(2, [(40, 30)], 20)
    exact = -gradients[0].sum((0, 1))
    errors = []
    for feedback in (True, False):
        [weights], _ = _trained(
            lambda feedback=feedback: _optimizer(
                (kind or SGD)(1.0),
                shard_update=kind is not None,
                communication=_communication(dtype, error_feedback=feedback),
            ),
            gradients,
        )
        errors.append(np.abs(weights - exact).max())
    assert errors[0] < most * errors[1], errors


def test_neither_scale_nor_overflow_changes_anything():
    """The scale doubles after a step, and halves after one that is skipped."""
    gradients = _gradients(2, [(40, 30)], 4)
    overflows = np.ones([2, 2, 40, 30], "float32")
    overflows[0, 1, 3, 5] = np.inf
    overflows[1, 0, 3, 5] = np.nan
    good = gradients[0]
    got = _trained(
        lambda: _optimizer(
            keras.optimizers.LossScaleOptimizer(
                SGD(1.0), initial_scale=4.0, dynamic_growth_steps=1
            )
        ),
        [np.concatenate([good[:2], overflows, good[2:]])],
    )
    _check(got, gradients, [[0, 1]])


def test_rounding_at_random_is_right_on_average():
    numbers = np.random.default_rng(0).normal(size=256).astype("float32")
    rows = tf.constant(np.stack([numbers] * 400))
    blocks = quantization.blocks_for(256)

    def mean_error(rounding):
        _, errors = quantization.quantized(rows, blocks, rounding)
        return np.abs(np.mean(errors, 0)).max()

    step = np.abs(numbers).max() / 127
    assert mean_error("nearest") > 0.45 * step
    assert mean_error("stochastic") < 0.15 * step


def test_residuals_are_saved_and_regrouped(tmp_path):
    """A file holds their mean, so the group's sum is what it was."""

    def made(num_replicas, communication=INT8):
        with replicas.mirrored(num_replicas).scope():
            optimizer = _optimizer(communication=communication)
            optimizer.build([keras.Variable(np.zeros([3]), dtype="float32")])
        return optimizer

    source, other, fewer = made(4), made(4), made(2)
    want = np.array([[r, 10.0**r, -r] for r in range(4)], "float32")
    [residual] = source._residuals
    for copy, value in zip(residual.value.values, want, strict=True):
        copy.assign(value)
    tf_xshard.GroupState([source]).save(str(tmp_path / "groups"))
    tf_xshard.GroupState([other]).restore(str(tmp_path / "groups"))
    # On two, by a checkpoint.
    path = tf.train.Checkpoint(optimizer=source).write(str(tmp_path / "c"))
    tf.train.Checkpoint(optimizer=fewer).read(path).assert_consumed()
    for optimizer, expected in ((other, want), (fewer, [want.mean(0)] * 2)):
        [residual] = optimizer._residuals
        got = replicas.values(replicas.mirrored(len(expected)), residual)
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    # A reader without them says so.
    with pytest.warns(UserWarning, match="CrossShardOptimizer.residuals'"):
        tf.train.Checkpoint(optimizer=made(2, None)).read(path)


def test_check_numerics():
    """Its operations have no kernels in XLA; it finds a nan."""
    gradients = [np.float32([[[1, 2, 127], [np.nan, 6, 127]]])]
    tf.debugging.enable_check_numerics()
    try:
        with pytest.raises(tf.errors.InvalidArgumentError, match="NaN"):
            _trained(_optimizer, gradients)
    finally:
        tf.debugging.disable_check_numerics()


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_a_nan_does_not_stay(dtype):
    """A hook that removes nan from the sums works as it does in float32."""

    def without_nan(pairs):
        [(g, variable)] = pairs
        return [(tf.where(tf.math.is_finite(g), g, tf.zeros_like(g)), variable)]

    gradients = np.ones([4, 2, 3], "float32")
    gradients[1, 0] = np.nan
    [weights], [residuals] = _trained(
        lambda: _optimizer(
            communication=_communication(dtype), post_reduce=without_nan
        ),
        [gradients],
    )
    np.testing.assert_allclose(weights, np.full([2, 3], -6.0), rtol=1e-6)
    assert np.isfinite(residuals).all()


def test_what_is_not_quantized():
    """What float8 training assigns instead of gradients, and sparse rows."""

    def overwritten():
        variable = keras.Variable(1.0)
        variable.overwrite_with_gradient = True
        return variable

    found = steps.stepped(
        _optimizer,
        lambda r: [
            *tf.unstack([[448.0, 0.01], [0.0, 0.03]][r]),
            tf.IndexedSlices([[0.1 + r]], [1], [2, 1]),
        ],
        [overwritten, overwritten, np.zeros([2, 1])],
        num_replicas=2,
    )
    for values, want in zip(found, (224, 0.02, [[0], [-1.2]]), strict=True):
        for value in values:
            np.testing.assert_allclose(value, want, rtol=1e-6)
