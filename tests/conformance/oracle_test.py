"""The reduction against NumPy: scales, types, None, IndexedSlices."""

import dataclasses

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tf_xshard.reduction import gradients as gradients_lib

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


@dataclasses.dataclass
class Case:
    """A call of apply with what each replica holds.

    gradients[variable][replica] is a dense array, a pair of (rows, values), or
    None, as g_r.
    """

    shapes: list
    dtype: str
    gradients: list


def _dense(gradient, shape):
    if isinstance(gradient, tuple):
        rows, row_values = gradient
        dense = np.zeros(shape, np.float64)
        np.add.at(dense, rows, row_values.astype(np.float64))
        return dense
    return None if gradient is None else gradient.astype(np.float64)


def _arriving(gradient, shape, dtype, divisor):
    if gradient is None:
        return None
    if isinstance(gradient, tuple):
        rows, row_values = gradient
        return tf.IndexedSlices(
            tf.constant(row_values / divisor, dtype),
            tf.constant(rows),
            tf.constant(shape),
        )
    return tf.constant(gradient / divisor, dtype)


class _Checked:
    """An optimizer whose steps from zero are compared with NumPy's."""

    def __init__(
        self,
        shapes,
        dtype,
        num_replicas,
        groups,
        reduction,
        normalization,
        graph,
        kind="mirrored",
        shard_update=False,
    ):
        self._strategy = replicas.STRATEGIES[kind](num_replicas)
        self._divisor = num_replicas if normalization == "global" else 1
        self._groups, self._reduction, self._graph = groups, reduction, graph
        with self._strategy.scope():
            self._variables = [
                keras.Variable(np.zeros(shape), dtype=dtype, autocast=False)
                for shape in shapes
            ]
            self._optimizer = tf_xshard.CrossShardOptimizer(
                keras.optimizers.SGD(1.0),
                reduction,
                groups,
                loss_normalization=normalization,
                shard_update=shard_update,
            )

    def check(self, case):
        """Applies the case's gradients."""
        for variable in self._variables:
            variable.assign(np.zeros(variable.shape))
        replicas.apply_once(
            self._strategy,
            self._optimizer,
            lambda r: [
                _arriving(of_replica[r], shape, case.dtype, self._divisor)
                for of_replica, shape in zip(
                    case.gradients, case.shapes, strict=True
                )
            ],
            self._variables,
            self._graph,
        )
        for variable, shape, of_replica in zip(
            self._variables, case.shapes, case.gradients, strict=True
        ):
            self._compare(variable, [_dense(g, shape) for g in of_replica])

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


def _on_tpu(case):
    """One program for all replicas: None on all of them, or zero on some."""
    for index, of_replica in enumerate(case.gradients):
        if of_replica[0] is None:
            case.gradients[index] = [None] * len(of_replica)
    return case


def _random_case(rng, num_replicas, dtype):
    sparse, shapes = [], []
    for _ in range(rng.integers(1, 6)):
        rank = int(rng.integers(0, 4))
        shapes.append([int(n) for n in rng.integers(1, 6, size=rank)])
        sparse.append(rank >= 1 and rng.random() < 0.4)
    return Case(
        shapes,
        dtype,
        _random_gradients(rng, num_replicas, dtype, shapes, sparse),
    ), sparse


def _random_gradients(rng, num_replicas, dtype, shapes, sparse):
    gradients = []
    for index, shape in enumerate(shapes):
        of_replica = []
        for _ in range(num_replicas):
            if rng.random() < 0.25 and index > 0:
                of_replica.append(None)
            elif sparse[index] and rng.random() < 0.9:
                num_rows = int(rng.integers(0, 7))
                rows = rng.integers(0, shape[0], size=num_rows)
                row_values = rng.integers(-2, 3, size=[num_rows, *shape[1:]])
                of_replica.append((rows, row_values.astype(np.float64)))
            else:
                of_replica.append(
                    rng.normal(size=shape)
                    .astype(NUMPY_TYPES[dtype])
                    .astype(np.float64)
                    if dtype in ("float32", "float64")
                    else rng.integers(-2, 3, size=shape).astype(np.float64)
                )
        gradients.append(of_replica)
    return gradients


def _sweep(seed, graph, kind="mirrored", shard_update=None, number=1):
    """A random optimizer and variables, with random gradients, `number` of."""
    rng = np.random.default_rng(seed)
    num_replicas = int(rng.choice([2, 4, 8] if kind == "mirrored" else [4, 8]))
    candidates = GROUPS[num_replicas]
    types = [
        dtype
        for dtype in NUMPY_TYPES
        if kind == "mirrored" or dtype != "float64"
    ]
    dtype = str(rng.choice(types))
    case, sparse = _random_case(rng, num_replicas, dtype)
    checked = _Checked(
        case.shapes,
        dtype,
        num_replicas,
        candidates[rng.integers(len(candidates))],
        str(rng.choice(["mean", "sum"])),
        str(rng.choice(["global", "replica"])),
        graph,
        kind,
        rng.random() < 0.5 if shard_update is None else shard_update,
    )
    for _ in range(number):
        checked.check(case if kind == "mirrored" else _on_tpu(case))
        gradients = _random_gradients(
            rng, num_replicas, dtype, case.shapes, sparse
        )
        case = dataclasses.replace(case, gradients=gradients)


@may_lack_gradients
@pytest.mark.parametrize("seed", range(12))
def test_random_cases_in_a_function(seed):
    _sweep(seed, graph=True)


@may_lack_gradients
@pytest.mark.parametrize("seed", range(1000, 1020))
def test_random_cases_eagerly(seed):
    _sweep(seed, graph=False)


@may_lack_gradients
@pytest.mark.parametrize("kind", replicas.TPUS)
@pytest.mark.parametrize("seed", range(3000, 3003))
def test_random_cases_on_a_simulated_tpu(seed, kind):
    _sweep(seed, graph=True, kind=kind)


@replicas.in_full
@may_lack_gradients
@pytest.mark.parametrize("kind", replicas.TPUS)
def test_many_random_cases_on_a_simulated_tpu(kind):
    for seed in range(4000, 4050):
        _sweep(seed, graph=True, kind=kind)


@replicas.in_full
@may_lack_gradients
def test_many_random_cases():
    for seed in range(2000, 2200):
        is_graph = seed % 3 == 0
        _sweep(seed, is_graph, number=1 if is_graph else 4)


@replicas.in_full
@may_lack_gradients
@pytest.mark.parametrize("first", range(10_000, 10_640, 160))
def test_2000_random_cases_of_a_sharded_update(first):
    for seed in range(first, first + 160):
        is_graph = seed % 4 == 0
        number = 1 if is_graph else 4
        _sweep(seed, is_graph, shard_update=True, number=number)


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("normalization", ["global", "replica"])
@pytest.mark.parametrize("graph", [True, False], ids=["function", "eager"])
def test_powers_of_two_are_exact(dtype, reduction, normalization, graph):
    """Values that name the replica, exact in every type: 2^r."""
    strategy = replicas.mirrored(4)
    groups = [[3, 0], [1, 2]]
    divisor = 4 if normalization == "global" else 1
    with strategy.scope():
        weight = keras.Variable(np.zeros(3), dtype=dtype)
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(1.0),
            reduction,
            groups,
            loss_normalization=normalization,
        )
    replicas.apply_once(
        strategy,
        optimizer,
        lambda r: [tf.fill([3], tf.constant(2.0**r / divisor, dtype))],
        [weight],
        graph,
    )
    size = 2 if reduction == "mean" else 1
    expected = [-9 / size, -6 / size, -6 / size, -9 / size]
    for got, want in zip(
        replicas.values(strategy, weight), expected, strict=True
    ):
        np.testing.assert_array_equal(got.astype(np.float64), [want] * 3)


@replicas.on_every_strategy
@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_gradients_travel_in_the_given_type(wire, kind):
    strategy = replicas.STRATEGIES[kind](4)
    exact, rounded = 256.0, 257.0  # bfloat16 has 8 bits of mantissa.
    with strategy.scope():
        weight = keras.Variable([0.0, 0.0])
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(1.0),
            "sum",
            [[0], [1], [2], [3]],
            loss_normalization="replica",
            communication=tf_xshard.Communication(dtype=wire),
        )
        pairs = tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(1.0),
            "sum",
            [[0, 1], [2, 3]],
            loss_normalization="replica",
            communication=tf_xshard.Communication(dtype=wire),
        )
    for each in (optimizer, pairs):
        with strategy.scope():
            weight = keras.Variable([0.0, 0.0])
        replicas.apply_once(
            strategy,
            each,
            lambda r: [tf.constant([exact, rounded if r % 2 else 0.0])],
            [weight],
        )
        got = replicas.values(strategy, weight)
        if each is optimizer:
            # Nothing travels in groups of one.
            assert got[1].tolist() == [-256, -257]
        else:
            want = float(np.array(257.0, NUMPY_TYPES[wire]))
            assert got[0].tolist() == got[1].tolist() == [-512, -want]


def test_several_buckets_keep_their_order():
    strategy = replicas.mirrored(4)
    shapes = [[3], [5, 2], [], [40], [2], [7, 3], [1]]
    with strategy.scope():
        variables = [
            keras.Variable(np.zeros(s), dtype="float32") for s in shapes
        ]
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(1.0),
            "sum",
            [[0, 3], [1, 2]],
            loss_normalization="replica",
            communication=tf_xshard.Communication(bytes_per_bucket=48),
        )
    replicas.apply_once(
        strategy,
        optimizer,
        lambda r: [
            tf.fill(shape, float(10**r * (i + 1)))
            for i, shape in enumerate(shapes)
        ],
        variables,
    )
    for i, (variable, shape) in enumerate(zip(variables, shapes, strict=True)):
        for r, total in enumerate([1001, 110, 110, 1001]):
            np.testing.assert_array_equal(
                replicas.values(strategy, variable)[r],
                np.full(shape, -total * (i + 1), np.float32),
            )


@pytest.mark.parametrize("graph", [True, False], ids=["function", "eager"])
def test_none_stays_none_in_a_group_without_a_gradient(graph):
    """Weight decay shows whether a zero gradient was applied."""
    strategy = replicas.mirrored(4)
    with strategy.scope():
        first = keras.Variable(1.0, name="first")
        second = keras.Variable(1.0, name="second")
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(1.0, weight_decay=0.5),
            "mean",
            [[0, 1], [2, 3]],
            loss_normalization="replica",
        )
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        replicas.apply_once(
            strategy,
            optimizer,
            lambda r: [tf.constant(0.0), tf.constant(4.0) if r == 1 else None],
            [first, second],
            graph,
        )
    assert replicas.values(strategy, first) == [0.5] * 4
    # The divisor stays the size of the group: 0.5 - 4 / 2.
    assert replicas.values(strategy, second) == [-1.5, -1.5, 1.0, 1.0]


def test_a_group_with_no_gradient_at_all_is_an_error_and_changes_nothing():
    strategy = replicas.mirrored(4)
    with strategy.scope():
        weight = keras.Variable(1.0)
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(1.0), group_assignment=[[0, 1], [2, 3]]
        )
    with pytest.raises(ValueError, match="No gradients provided"):
        replicas.apply_once(
            strategy,
            optimizer,
            lambda r: [tf.constant(1.0) if r < 2 else None],
            [weight],
        )
    assert replicas.values(strategy, weight) == [1.0] * 4


def test_duplicate_indices_count_as_one_gradient_without_a_strategy():
    table = keras.Variable(np.zeros([3, 2]), dtype="float32")
    reference = keras.Variable(np.zeros([3, 2]), dtype="float32")
    optimizer = tf_xshard.CrossShardOptimizer(keras.optimizers.Adam(0.1))
    plain = keras.optimizers.Adam(0.1)
    slices = tf.IndexedSlices(
        tf.ones([3, 2]), tf.constant([1, 1, 2]), tf.constant([3, 2])
    )
    optimizer.apply([slices], [table])
    plain.apply([tf.convert_to_tensor(slices)], [reference])
    np.testing.assert_array_equal(table.numpy(), reference.numpy())


def test_sparse_gradients_stay_sparse():
    seen = []

    class Recorder(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            seen.append(gradient)
            super().update_step(gradient, variable, learning_rate)

    strategy = replicas.mirrored(2)
    with strategy.scope():
        table = keras.Variable(np.zeros([1000, 2]), dtype="float32")
        optimizer = tf_xshard.CrossShardOptimizer(
            Recorder(1.0), "sum", loss_normalization="replica"
        )
    replicas.apply_once(
        strategy,
        optimizer,
        lambda r: [
            tf.IndexedSlices(
                tf.ones([2 * r + 1, 2]),
                tf.constant([5, 5, 9][: 2 * r + 1]),
                tf.constant([1000, 2]),
            )
        ],
        [table],
    )
    assert len(seen) == 2
    assert all(isinstance(g, tf.IndexedSlices) for g in seen)
    for got in replicas.values(strategy, table):
        assert got[5].tolist() == [-3, -3] and got[9].tolist() == [-1, -1]


@pytest.mark.parametrize("num_replicas", [2, 3, 5, 6, 7])
def test_a_factor_of_one_is_no_multiplication(num_replicas, monkeypatch):
    """g/3*3 has other bits than g."""
    factors = []
    scaled = gradients_lib.scaled
    monkeypatch.setattr(
        gradients_lib,
        "scaled",
        lambda g, factor: factors.append(factor) or scaled(g, factor),
    )
    strategy = replicas.mirrored(num_replicas)
    with strategy.scope():
        weight = keras.Variable(0.0)
        optimizer = tf_xshard.CrossShardOptimizer(keras.optimizers.SGD(1.0))
    replicas.apply_once(
        strategy, optimizer, lambda r: [tf.constant(0.25)], [weight]
    )
    assert factors == [1.0] * num_replicas
    gradient = tf.constant(0.1)
    assert scaled(gradient, factors[0]) is gradient
    assert replicas.values(strategy, weight) == [-0.25 * num_replicas] * (
        num_replicas
    )


@pytest.mark.parametrize(
    "dtype, reduction, normalization, groups",
    replicas.pairwise(
        list(NUMPY_TYPES),
        ["mean", "sum"],
        ["global", "replica"],
        [None, [[0, 2], [3, 1]]],
    ),
    ids=str,
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
            optimizer=tf_xshard.CrossShardOptimizer(
                keras.optimizers.SGD(0.5),
                reduction,
                groups,
                loss_normalization=normalization,
            ),
        )
    y = np.repeat(2.0 ** np.arange(4), 2)[:, np.newaxis]
    x = np.ones([8, 1])
    model.fit(
        x.astype(NUMPY_TYPES[dtype]),
        y.astype(NUMPY_TYPES[dtype]),
        batch_size=8,
        shuffle=False,
        verbose=0,
    )
    divisor = 1 if normalization == "global" else 4
    own = [np.array(-2.0 * 2.0**r / divisor) for r in range(4)]
    expected = _oracle(own, groups, reduction)
    got = replicas.values(strategy, model.trainable_variables[0])
    for r in range(4):
        assert got[r].astype(np.float64).item() == -0.5 * expected[r]


@replicas.on_every_strategy
def test_custom_loop_with_a_loss_per_replica_is_one_device(kind):
    """Unscaled losses, loss_normalization="replica"."""
    strategy = replicas.STRATEGIES[kind](4)
    rng = np.random.default_rng(3)
    x = rng.normal(size=(16, 3)).astype("float32")
    with strategy.scope():
        weight = keras.Variable(np.ones(3), dtype="float32")
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9),
            loss_normalization="replica",
        )

    @tf.function(autograph=False)
    def step():
        def on_replica():
            r = replicas.replica_id_tensor()
            with tf.GradientTape() as tape:
                rows = tf.gather(tf.reshape(x, [4, 4, 3]), r)
                loss = tf.reduce_mean(
                    tf.square(tf.linalg.matvec(rows, weight.value))
                )
            gradient = tape.gradient(loss, weight.value)
            optimizer.apply_gradients([(gradient, weight)])

        strategy.run(on_replica)

    expected, velocity = np.ones(3), np.zeros(3)
    for _ in range(5):
        step()
        gradient = 2 * x.T.astype(np.float64) @ (x @ expected) / 16
        velocity = 0.9 * velocity - 0.1 * gradient
        expected = expected + velocity
    for got in replicas.values(strategy, weight):
        np.testing.assert_allclose(got, expected, atol=1e-6)
