"""The reduction against NumPy: scales, types, None, IndexedSlices."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import stacks
from tests.support import steps

# Of the sum of all magnitudes. The 16-bit types hold small integers, whose sums
# and means over 2^k replicas are exact.
RELATIVE = {"float16": 0.0, "bfloat16": 0.0, "float32": 1e-6, "float64": 1e-15}
GROUPS = {
    2: [None, [[0], [1]]],
    4: [None, [[0, 1], [2, 3]], [[3, 0], [1, 2]]],
    8: [None, [[0, 2, 4, 6], [1, 3, 5, 7]], [[7, 1], [0, 4], [5, 2], [3, 6]]],
    12: [None, [[11, 0, 5, 7], [1, 9, 2, 10], [8, 4, 3, 6]]],
}
ORDERS = (replicas.REVERSED, replicas.MIXED, replicas.TWELVE)
full = replicas.in_full


def _random_gradient(
    kinds, rng, shape, dtype, divisor, may_be_none, may_be_sparse
):
    """A tensor, IndexedSlices or None, as the generator `kinds` says."""
    if may_be_none and kinds.random() < 0.25:
        return None
    if may_be_sparse and kinds.random() < 0.9:
        num_rows = int(kinds.integers(0, 7))
        values = rng.integers(-2, 3, size=[num_rows, *shape[1:]])
        rows = rng.integers(0, shape[0], size=num_rows)
        parts = tf.constant(values / divisor, dtype), tf.constant(rows)
        return tf.IndexedSlices(*parts, tf.constant(shape))
    values = rng.integers(-2, 3, size=shape)
    if dtype in ("float32", "float64"):
        values = rng.normal(size=shape)
    return tf.constant(values / divisor, dtype)


def _optimizer(groups=None, reduction="sum", **kwargs):
    kwargs.setdefault("loss_normalization", "replica")
    inner = kwargs.pop("inner", None) or keras.optimizers.SGD(1.0)
    return tf_xshard.CrossShardOptimizer(inner, reduction, groups, **kwargs)


def _cases(kind, seeds, graph, devices=(None,), marks=()):
    return [
        pytest.param(kind, seed, graph, devices[i % len(devices)], marks=marks)
        for i, seed in enumerate(seeds)
    ]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    "kind, seed, graph, devices",
    [
        *_cases("mirrored", range(3), True),
        *_cases("mirrored", [1000], False),
        *_cases("mirrored", range(5000, 5002), False, ORDERS),
        *_cases("mirrored", [5001], True, [replicas.MIXED]),
        *_cases("multi_worker", [3], True),
        *_cases("multi_worker", [1002], False),
        *_cases("tpu", [3001], True),
        *_cases("tpu_permuted", [3000], True),
        *_cases("mirrored", range(2000, 2030), True, ORDERS, full),
        *_cases("mirrored", range(10_000, 10_150), False, ORDERS, full),
        *_cases("multi_worker", range(10_000, 10_050), False, marks=full),
        *_cases("tpu", range(4000, 4020), True, marks=full),
        *_cases("tpu_permuted", range(4000, 4020), True, marks=full),
    ],
    ids=str,
)
def test_random_cases(kind, seed, graph, devices):
    """A random optimizer and variables; a step from zero is NumPy's.

    `devices` are the numbers of the replicas' devices, if not a random number
    of devices in the order of the replicas.
    """
    rng = np.random.default_rng(seed)
    is_tpu = kind in replicas.TPUS
    if devices is None:
        n = int(rng.choice([4, 8] if is_tpu else [2, 4, 8]))
        strategy = replicas.STRATEGIES[kind](n)
    else:
        n, strategy = len(devices), replicas.mirrored_on(devices)
    # A TPU has no float64. The 16-bit types hold only means over 2^k replicas.
    dtypes = [
        one
        for one in RELATIVE
        if not (is_tpu and one == "float64") and (n != 12 or RELATIVE[one])
    ]
    dtype = str(rng.choice(dtypes))
    shapes = [
        [int(size) for size in rng.integers(1, 6, size=rng.integers(0, 4))]
        for _ in range(rng.integers(1, 6))
    ]
    groups = GROUPS[n][rng.integers(len(GROUPS[n]))]
    reduction = str(rng.choice(["mean", "sum"]))
    normalization = str(rng.choice(["global", "replica"]))
    divisor = n if normalization == "global" else 1
    own = []
    for index, shape in enumerate(shapes):
        may_be = (index > 0, bool(shape) and rng.random() < 0.4)
        own.append([])
        for _ in range(n):
            # A TPU has one program for all replicas.
            kinds = np.random.default_rng([seed, index]) if is_tpu else rng
            own[-1].append(
                _random_gradient(kinds, rng, shape, dtype, divisor, *may_be)
            )
    found = steps.stepped(
        lambda: _optimizer(
            groups,
            reduction,
            loss_normalization=normalization,
            shard_update=bool(rng.random() < 0.5),
        ),
        lambda r: [of_replicas[r] for of_replicas in own],
        [np.zeros(shape) for shape in shapes],
        strategy,
        graph=graph,
        dtype=dtype,
    )
    for value, of_replicas in zip(map(np.float64, found), own, strict=True):
        dense = np.zeros_like(value)
        for r, one in enumerate(of_replicas):
            if one is not None:
                dense[r] = tf.convert_to_tensor(one).numpy()
        dense *= divisor
        error = np.abs(value + stacks.reduced(dense, groups, reduction))
        limit = RELATIVE[dtype] * np.abs(dense).sum(0)
        assert (error <= limit).all(), (value, dense)


@pytest.mark.parametrize(
    "dtype, reduction, normalization, graph",
    replicas.pairwise(
        list(RELATIVE),
        ["mean", "sum"],
        ["global", "replica"],
        [True, False],
    ),
)
def test_powers_of_two_are_exact(dtype, reduction, normalization, graph):
    """Values that name the replica, exact in every type: 2^r."""
    divisor = 4 if normalization == "global" else 1
    [weights] = steps.stepped(
        lambda: _optimizer(
            [[3, 0], [1, 2]], reduction, loss_normalization=normalization
        ),
        lambda r: [tf.fill([3], tf.constant(2.0**r / divisor, dtype))],
        [np.zeros(3)],
        graph=graph,
        dtype=dtype,
    )
    size = 2 if reduction == "mean" else 1
    for got, total in zip(weights, [9, 6, 6, 9], strict=True):
        assert got.astype(np.float64).tolist() == [-total / size] * 3


@pytest.mark.parametrize(
    "kind, graph",
    [("mirrored", True), ("mirrored", False), ("multi_worker", False)],
)
def test_none_stays_none_in_a_group_without_a_gradient(kind, graph):
    """Weight decay shows whether a zero gradient was applied."""
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        first, second = steps.stepped(
            lambda: _optimizer(
                [[0, 1], [2, 3]],
                "mean",
                inner=keras.optimizers.SGD(1.0, weight_decay=0.5),
            ),
            lambda r: [tf.constant(0.0), tf.constant(4.0) if r == 1 else None],
            [1.0, 1.0],
            kind,
            graph=graph,
        )
    assert first == [0.5] * 4
    # The divisor stays the size of the group: 0.5 - 4 / 2.
    assert second == [-1.5, -1.5, 1.0, 1.0]


def test_a_group_with_no_gradient_at_all_is_an_error():
    with pytest.raises(ValueError, match="No gradients provided"):
        steps.stepped(
            lambda: _optimizer([[0], [1]]),
            lambda r: [None if r else tf.constant(1.0)],
            num_replicas=2,
        )


class _AddsToRows(keras.optimizers.SGD):
    """Moves each row that it gets by 100 more, so its number is seen."""

    def update_step(self, gradient, variable, learning_rate):
        assert isinstance(gradient, tf.IndexedSlices)
        more = tf.IndexedSlices(
            gradient.values + 100.0, gradient.indices, gradient.dense_shape
        )
        super().update_step(more, variable, learning_rate)


@pytest.mark.parametrize("graph", [True, False], ids=["function", "eager"])
def test_sparse_gradients_stay_sparse(graph):
    """The inner optimizer gets the rows that replicas have, once, no others."""
    [weights] = steps.stepped(
        lambda: _optimizer(inner=_AddsToRows(1.0)),
        lambda r: [
            tf.IndexedSlices(
                tf.ones([2 * r + 1]),
                tf.constant([5, 5, 9][: 2 * r + 1]),
                tf.constant([10]),
            )
        ],
        [np.zeros(10)],
        num_replicas=2,
        graph=graph,
    )
    for got in weights:
        assert got.tolist() == [0, 0, 0, 0, 0, -103, 0, 0, 0, -101]


@pytest.mark.parametrize(
    "name", ["Adam", "RMSprop", "Adagrad", "Ftrl", "Nadam", "AdamW"]
)
def test_rows_that_occur_twice_are_summed_first(name):
    """An Embedding is one-hot rows and a dense layer; not so in plain Keras."""
    rows = np.array([0, 2, 2, 2, 1, 0, 2, 2])
    rng = np.random.default_rng(1)
    table = rng.normal(size=(4, 3)).astype("float32")
    values = rng.normal(size=(8, 3)).astype("float32")

    def trained(is_sparse, wrap):
        weight = keras.Variable(table)
        optimizer = wrap(getattr(keras.optimizers, name)(0.1))
        for step in range(3):
            gradient = tf.IndexedSlices(values + step, rows, [4, 3])
            if not is_sparse:
                gradient = tf.convert_to_tensor(gradient)
            optimizer.apply([gradient], [weight])
        return weight.numpy()

    expected = trained(False, lambda inner: inner)
    got = trained(True, tf_xshard.CrossShardOptimizer)
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_a_factor_of_one_is_no_multiplication():
    """Times N and 1/N, a third of float32's numbers have other bits."""
    own = np.random.default_rng(0).normal(size=1000).astype("float32")
    scaled = own * np.float32(3) * np.float32(1 / 3)
    assert (scaled != own).sum() > 100
    [weights] = steps.stepped(
        lambda: _optimizer(None, "mean", loss_normalization="global"),
        lambda r: [tf.constant(own if r == 0 else np.zeros_like(own))],
        [np.zeros(1000)],
        num_replicas=3,
    )
    for value in weights:
        np.testing.assert_array_equal(value, -own)
