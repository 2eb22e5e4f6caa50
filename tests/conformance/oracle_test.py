"""The reduction against NumPy: scales, types, None, IndexedSlices."""

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import steps

NUMPY_TYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
# Of the sum of all magnitudes. The 16-bit types hold small integers, whose sums
# and means over 2^k replicas are exact.
RELATIVE = {"float16": 0.0, "bfloat16": 0.0, "float32": 1e-6, "float64": 1e-15}
GROUPS = {
    2: [None, [[0], [1]]],
    4: [None, [[0, 1], [2, 3]], [[3, 0], [1, 2]]],
    8: [None, [[0, 2, 4, 6], [1, 3, 5, 7]], [[7, 1], [0, 4], [5, 2], [3, 6]]],
    12: [None, [[11, 0, 5, 7], [1, 9, 2, 10], [8, 4, 3, 6]]],
}
# Keras' warning where no replica of a group has a gradient.
may_lack_gradients = pytest.mark.filterwarnings("ignore:Gradients do not exist")


def _oracle(own, groups, reduction):
    """What each replica applies. `own[replica]` is g_r in float64, or None."""
    num_replicas = len(own)
    reduced = [None] * num_replicas
    for members in groups or [list(range(num_replicas))]:
        held = [own[r] for r in members if own[r] is not None]
        if held:
            total = np.sum(held, axis=0)
            for r in members:
                reduced[r] = (
                    total / len(members) if reduction == "mean" else total
                )
    return reduced


def _dense(gradient, shape):
    if isinstance(gradient, tuple):
        rows, row_values = gradient
        dense = np.zeros(shape, np.float64)
        np.add.at(dense, rows, row_values.astype(np.float64))
        return dense
    return None if gradient is None else gradient.astype(np.float64)


class _Random:
    """A random optimizer and variables; steps from zero must be NumPy's.

    `devices` are the numbers of the replicas' devices, if not a random number
    of devices in the order of the replicas.
    """

    def __init__(self, seed, graph, kind, shard_update, devices=None):
        self._rng = rng = np.random.default_rng(seed)
        self._graph, self._kind = graph, kind
        is_mirrored = kind == "mirrored"
        n = int(rng.choice([2, 4, 8] if is_mirrored else [4, 8]))
        types = [t for t in NUMPY_TYPES if is_mirrored or t != "float64"]
        self._strategy = replicas.STRATEGIES[kind](n)
        if devices is not None:
            n, self._strategy = len(devices), replicas.mirrored_on(devices)
        if n not in (2, 4, 8):
            types = [t for t in types if RELATIVE[t]]
        self._dtype = str(rng.choice(types))
        self._shapes = [
            [int(size) for size in rng.integers(1, 6, size=rng.integers(0, 4))]
            for _ in range(rng.integers(1, 6))
        ]
        self._sparse = [bool(s) and rng.random() < 0.4 for s in self._shapes]
        self._groups = GROUPS[n][rng.integers(len(GROUPS[n]))]
        self._reduction = str(rng.choice(["mean", "sum"]))
        normalization = str(rng.choice(["global", "replica"]))
        self._divisor = n if normalization == "global" else 1
        if shard_update is None:
            shard_update = rng.random() < 0.5
        with self._strategy.scope():
            self._variables = [
                keras.Variable(
                    np.zeros(shape), dtype=self._dtype, autocast=False
                )
                for shape in self._shapes
            ]
            self._optimizer = _optimizer(
                self._groups,
                self._reduction,
                loss_normalization=normalization,
                shard_update=shard_update,
            )

    def check(self):
        """Applies random gradients."""
        gradients = [self._of_replicas(i) for i in range(len(self._shapes))]
        for variable in self._variables:
            variable.assign(np.zeros(variable.shape))
        replicas.apply_once(
            self._strategy,
            self._optimizer,
            lambda r: [
                self._arriving(of_replica[r], shape)
                for of_replica, shape in zip(
                    gradients, self._shapes, strict=True
                )
            ],
            self._variables,
            self._graph,
        )
        for variable, shape, of_replica in zip(
            self._variables, self._shapes, gradients, strict=True
        ):
            self._compare(variable, [_dense(g, shape) for g in of_replica])

    def _of_replicas(self, index):
        """A dense array, a pair of (rows, values), or None, for each: g_r."""
        n = self._strategy.num_replicas_in_sync
        made = [self._gradient(index) for _ in range(n)]
        # A TPU has one program for all replicas: all are None, or some zero.
        is_none = made[0] is None and self._kind != "mirrored"
        return [None] * n if is_none else made

    def _gradient(self, index):
        rng, shape = self._rng, self._shapes[index]
        if rng.random() < 0.25 and index > 0:
            return None
        if self._sparse[index] and rng.random() < 0.9:
            num_rows = int(rng.integers(0, 7))
            rows = rng.integers(0, shape[0], size=num_rows)
            return rows, rng.integers(-2, 3, size=[num_rows, *shape[1:]])
        if self._dtype in ("float32", "float64"):
            return rng.normal(size=shape).astype(NUMPY_TYPES[self._dtype])
        return rng.integers(-2, 3, size=shape)

    def _arriving(self, gradient, shape):
        if gradient is None:
            return None
        if isinstance(gradient, tuple):
            rows, row_values = gradient
            return tf.IndexedSlices(
                tf.constant(row_values / self._divisor, self._dtype),
                tf.constant(rows),
                tf.constant(shape),
            )
        return tf.constant(gradient / self._divisor, self._dtype)

    def _compare(self, variable, own):
        expected = _oracle(own, self._groups, self._reduction)
        magnitude = sum(np.abs(g) for g in own if g is not None)
        for value, wanted in zip(
            replicas.values(self._strategy, variable), expected, strict=True
        ):
            want = 0 if wanted is None else -wanted
            error = np.abs(value.astype(np.float64) - want)
            limit = RELATIVE[variable.dtype] * magnitude
            assert (error <= limit).all(), (value, want)


def _optimizer(groups=None, reduction="sum", **kwargs):
    kwargs.setdefault("loss_normalization", "replica")
    inner = kwargs.pop("inner", None) or keras.optimizers.SGD(1.0)
    return tf_xshard.CrossShardOptimizer(inner, reduction, groups, **kwargs)


@may_lack_gradients
@pytest.mark.parametrize(
    "seed, graph, kind",
    [
        *((seed, True, "mirrored") for seed in range(8)),
        *((seed, False, "mirrored") for seed in range(1000, 1012)),
        (3000, True, "tpu"),
        (3001, True, "tpu_permuted"),
        (3002, True, "tpu"),
        (3000, True, "tpu_permuted"),
    ],
)
def test_random_cases(seed, graph, kind):
    _Random(seed, graph, kind, shard_update=None).check()


@may_lack_gradients
@pytest.mark.parametrize(
    "devices, shard_update, graph",
    replicas.pairwise(
        [replicas.REVERSED, replicas.MIXED, replicas.TWELVE],
        [False, True],
        [True, False],
    ),
    ids=str,
)
def test_random_cases_on_devices_in_any_order(devices, shard_update, graph):
    for seed in range(5000, 5002 if graph else 5006):
        _Random(seed, graph, "mirrored", shard_update, devices).check()


@replicas.in_full
@may_lack_gradients
@pytest.mark.parametrize(
    "seeds, kind, shard_update",
    [
        (range(2000, 2200), "mirrored", None),
        (range(4000, 4050), "tpu", None),
        (range(4000, 4050), "tpu_permuted", None),
        *(
            (range(first, first + 160), "mirrored", True)
            for first in range(10_000, 10_640, 160)
        ),
    ],
    ids=str,
)
def test_many_random_cases(seeds, kind, shard_update):
    for seed in seeds:
        # Few are traced; what runs eagerly costs little.
        graph = seed % 4 == 0 or kind != "mirrored"
        case = _Random(seed, graph, kind, shard_update)
        for _ in range(1 if graph else 4):
            case.check()


@pytest.mark.parametrize(
    "dtype, reduction, normalization, graph",
    replicas.pairwise(
        list(NUMPY_TYPES),
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
    "wire, kind, group_size",
    [
        ("bfloat16", "mirrored", 2),
        ("float16", "mirrored", 2),
        ("bfloat16", "tpu", 2),
        ("float16", "tpu_permuted", 2),
        # Nothing travels in groups of one.
        ("bfloat16", "mirrored", 1),
    ],
)
def test_gradients_travel_in_the_given_type(wire, kind, group_size):
    # bfloat16 has 8 bits of mantissa.
    [weights] = steps.stepped(
        lambda: _optimizer(
            tf_xshard.GroupAssignment.contiguous(4, group_size),
            communication=tf_xshard.Communication(dtype=wire),
        ),
        lambda r: [tf.constant([256.0, 257.0 if r % 2 else 0.0])],
        [np.zeros(2)],
        kind,
    )
    got = [value.tolist() for value in weights]
    rounded = float(np.array(257.0, NUMPY_TYPES[wire]))
    if group_size == 1:
        assert got == [[-256, 0], [-256, -257]] * 2
    else:
        assert got == [[-512, -rounded]] * 4


def test_several_buckets_keep_their_order():
    shapes = [[3], [5, 2], [], [40], [2], [7, 3], [1]]
    weights = steps.stepped(
        lambda: _optimizer(
            [[0, 3], [1, 2]],
            communication=tf_xshard.Communication(bytes_per_bucket=48),
        ),
        lambda r: [
            tf.fill(shape, float(10**r * i))
            for i, shape in enumerate(shapes, 1)
        ],
        [np.zeros(shape) for shape in shapes],
    )
    for i, of_replicas in enumerate(weights, 1):
        for got, total in zip(of_replicas, [1001, 110, 110, 1001], strict=True):
            np.testing.assert_array_equal(got, np.full(got.shape, -total * i))
    assert [list(one[0].shape) for one in weights] == shapes


@pytest.mark.parametrize("graph", [True, False], ids=["function", "eager"])
def test_none_stays_none_in_a_group_without_a_gradient(graph):
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
            graph=graph,
        )
    assert first == [0.5] * 4
    # The divisor stays the size of the group: 0.5 - 4 / 2.
    assert second == [-1.5, -1.5, 1.0, 1.0]


def test_a_group_with_no_gradient_at_all_is_an_error_and_changes_nothing():
    strategy = replicas.mirrored(4)
    with strategy.scope():
        weight = keras.Variable(1.0)
        optimizer = _optimizer([[0, 1], [2, 3]])
    with pytest.raises(ValueError, match="No gradients provided"):
        replicas.apply_once(
            strategy,
            optimizer,
            lambda r: [tf.constant(1.0) if r < 2 else None],
            [weight],
        )
    assert replicas.values(strategy, weight) == [1.0] * 4


def test_sparse_gradients_stay_sparse():
    seen = []

    class Recorder(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            seen.append(gradient)
            super().update_step(gradient, variable, learning_rate)

    [weights] = steps.stepped(
        lambda: _optimizer(inner=Recorder(1.0)),
        lambda r: [
            tf.IndexedSlices(
                tf.ones([2 * r + 1, 2]),
                tf.constant([5, 5, 9][: 2 * r + 1]),
                tf.constant([1000, 2]),
            )
        ],
        [np.zeros([1000, 2])],
        num_replicas=2,
    )
    assert len(seen) == 2
    assert all(isinstance(g, tf.IndexedSlices) for g in seen)
    for got in weights:
        assert got[5].tolist() == [-3, -3] and got[9].tolist() == [-1, -1]


@pytest.mark.parametrize("num_replicas", [3, 6])
def test_a_factor_of_one_is_no_multiplication(num_replicas):
    """Times N and 1/N, a third of float32's numbers have other bits."""
    own = np.random.default_rng(0).normal(size=1000).astype("float32")
    scaled = own * np.float32(num_replicas) * np.float32(1 / num_replicas)
    assert (scaled != own).sum() > 100
    [weights] = steps.stepped(
        lambda: _optimizer(None, "mean", loss_normalization="global"),
        lambda r: [tf.constant(own if r == 0 else np.zeros_like(own))],
        [np.zeros(1000)],
        num_replicas=num_replicas,
    )
    for value in weights:
        np.testing.assert_array_equal(value, -own)


@pytest.mark.parametrize(
    "dtype, reduction, normalization, groups",
    [
        ("float16", "mean", "global", None),
        ("bfloat16", "sum", "replica", None),
        ("float32", "mean", "replica", [[0, 2], [3, 1]]),
        ("float64", "sum", "global", [[0, 2], [3, 1]]),
    ],
)
def test_fit(dtype, reduction, normalization, groups):
    """One step of a linear model, from 0, exact in every type.

    The gradient of replica r's loss, the mean of (w - y)^2 over its rows, is
    -2 y_r. Keras divides it by the number of replicas, which "replica" leaves.
    """
    strategy = replicas.mirrored(4)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((1,), dtype=dtype),
                keras.layers.Dense(
                    1, use_bias=False, kernel_initializer="zeros", dtype=dtype
                ),
            ]
        )
        model.compile(
            loss=keras.losses.MeanSquaredError(dtype=dtype),
            optimizer=_optimizer(
                groups, reduction, loss_normalization=normalization
            ),
        )
    x = np.ones([8, 1], NUMPY_TYPES[dtype])
    y = x * np.repeat(2.0 ** np.arange(4), 2).astype(x.dtype)[:, np.newaxis]
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    divisor = 1 if normalization == "global" else 4
    own = [np.array(-2.0 * 2.0**r / divisor) for r in range(4)]
    expected = _oracle(own, groups, reduction)
    got = replicas.values(strategy, model.trainable_variables[0])
    for r in range(4):
        assert got[r].astype(np.float64).item() == -expected[r]


def test_custom_loop_with_a_loss_per_replica_is_one_device():
    """Unscaled losses, loss_normalization="replica"."""
    strategy = replicas.mirrored(2)
    x = np.random.default_rng(3).normal(size=(16, 3)).astype("float32")
    with strategy.scope():
        weight = keras.Variable(np.ones(3), dtype="float32")
        optimizer = _optimizer(
            None, "mean", inner=keras.optimizers.SGD(0.1, momentum=0.9)
        )
        optimizer.build([weight])

    def gradients_of(r):
        with tf.GradientTape() as tape:
            product = tf.linalg.matvec(x[8 * r : 8 * r + 8], weight.value)
            loss = tf.reduce_mean(tf.square(product))
        return [tape.gradient(loss, weight.value)]

    step = replicas.applying(strategy, optimizer, gradients_of, [weight])
    expected, velocity = np.ones(3), np.zeros(3)
    for _ in range(5):
        step()
        gradient = 2 * x.T.astype(np.float64) @ (x @ expected) / 16
        velocity = 0.9 * velocity - 0.1 * gradient
        expected = expected + velocity
    for got in replicas.values(strategy, weight):
        np.testing.assert_allclose(got, expected, atol=1e-6)
