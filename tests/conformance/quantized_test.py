"""Gradients as 8-bit integers, with error feedback, against NumPy."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import quantized_oracle
from tests.support import replicas
from tests.support import stacks

# 300 numbers have two blocks with groups of one row's part; 3 have padding.
SHAPES = [(7, 13), (), (3,), (40, 30)]
GROUPS = {"all": [[0, 1, 2, 3]], "crossed": [[0, 2], [3, 1]]}
NUM_STEPS = 5


def _communication(dtype="int8", **kwargs):
    return tf_xshard.Communication(
        dtype=dtype, **{"error_feedback": True, **kwargs}
    )


def _optimizer(inner=None, **kwargs):
    kwargs.setdefault("communication", _communication())
    return tf_xshard.CrossShardOptimizer(
        inner or keras.optimizers.SGD(1.0),
        "sum",
        loss_normalization="replica",
        **kwargs,
    )


def _gradients(num_replicas, shapes=SHAPES, num_steps=NUM_STEPS):
    """Magnitudes that differ by variable, replica and step."""
    rng = np.random.default_rng(7)
    return [
        [
            [
                (10.0 ** (i % 3 - r) * rng.normal(size=shape)).astype("float32")
                for i, shape in enumerate(shapes)
            ]
            for r in range(num_replicas)
        ]
        for _ in range(num_steps)
    ]


def _trained(strategy, make, gradients, graph=True):
    """Weights and residuals, `[variable][replica]`."""
    with strategy.scope():
        weights = [
            keras.Variable(np.zeros(g.shape), dtype="float32")
            for g in gradients[0][0]
        ]
        optimizer = make()
        optimizer.build(weights)

    def on_replica(*stacks):
        own = [stack[replicas.replica_id_tensor()] for stack in stacks]
        optimizer.apply(own, weights)

    step = lambda *stacks: strategy.run(on_replica, stacks)
    run = tf.function(step, autograph=False) if graph else step
    for of_replicas in gradients:
        columns = zip(*of_replicas, strict=True)
        run(*[tf.constant(np.stack(column)) for column in columns])
    return [
        [replicas.values(strategy, v) for v in variables]
        for variables in (weights, getattr(optimizer, "_residuals", []))
    ]


def _largest_difference(got, gradients, groups, devices=range(4), **kwargs):
    """From the simulation, of any weight or residual of any replica.

    As a part of the largest number that it is about.
    """
    largest = 0.0
    for members in groups:
        members = sorted(members, key=devices.__getitem__)
        shapes = [one.shape for one in gradients[0][0]]
        oracle = quantized_oracle.Training(shapes, len(members), **kwargs)
        for of_replicas in gradients:
            oracle.step([of_replicas[r] for r in members])
        weights, residuals = got
        for position, replica in enumerate(members):
            for i in range(len(shapes)):
                for mine, theirs in (
                    (weights[i][replica], oracle.weights[i]),
                    (residuals[i][replica], oracle.residuals[position][i]),
                ):
                    scale = np.abs(oracle.weights[i]).max()
                    # TensorFlow's graph optimizer changes last digits, which
                    # decide near the middle of two integers: 1 in 10,000.
                    errors = np.sort(np.abs(mine - theirs), None)
                    error = errors[-1 - errors.size // 10_000]
                    largest = max(largest, error / scale)
    return largest


@pytest.mark.parametrize(
    "name, sharded, graph",
    [
        ("crossed", False, True),
        ("all", True, True),
        ("all", False, False),
        ("crossed", True, False),
    ],
)
def test_it_is_the_simulation(name, sharded, graph):
    """On every replica, residuals too; and is neither mutant."""
    gradients = _gradients(4)
    got = _trained(
        replicas.mirrored(4),
        lambda: _optimizer(group_assignment=GROUPS[name], shard_update=sharded),
        gradients,
        graph,
    )
    compare = lambda feedback: _largest_difference(
        got,
        gradients,
        GROUPS[name],
        feedback=feedback,
        sharded=sharded,
        packs=None if graph else [[i] for i in range(len(SHAPES))],
    )
    assert compare(1) < 1e-6
    assert compare(0) > 1e-4, "the residual is dropped"
    assert compare(2) > 1e-4, "the residual is added twice"
    # Bits are equal within a group.
    for values in got[0]:
        for members in GROUPS[name]:
            for replica in members[1:]:
                np.testing.assert_array_equal(
                    values[replica], values[members[0]]
                )


@pytest.mark.parametrize(
    "devices, name, sharded, graph",
    [
        (replicas.REVERSED, "all", False, True),
        (replicas.MIXED, "crossed", True, True),
        (replicas.MIXED, "crossed", False, False),
        (replicas.TWELVE, None, False, True),
        (replicas.TWELVE, None, True, True),
        (replicas.SIXTEEN, None, False, True),
    ],
    ids=str,
)
def test_devices_in_any_order_and_number(devices, name, sharded, graph):
    groups = GROUPS[name] if name else [list(range(len(devices)))]
    gradients = _gradients(len(devices), num_steps=2)
    got = _trained(
        replicas.mirrored_on(devices),
        lambda: _optimizer(group_assignment=groups, shard_update=sharded),
        gradients,
        graph,
    )
    difference = _largest_difference(
        got,
        gradients,
        groups,
        devices,
        feedback=1,
        sharded=sharded,
        packs=None if graph else [[i] for i in range(len(SHAPES))],
    )
    assert difference < 1e-6
    for values in got[0]:
        for members in groups:
            for replica in members:
                np.testing.assert_array_equal(
                    values[replica], values[members[0]]
                )


@pytest.mark.parametrize("sharded", [False, True])
def test_large_tensors_are_quantized_by_themselves(sharded):
    """1 MiB, between two small ones, which are quantized together."""
    # One step: in a second one a few of so many numbers are near the middle of
    # two integers, where float32's last digit decides.
    gradients = _gradients(4, [(7, 13), (525, 501), (3,)], 1)
    got = _trained(
        replicas.mirrored(4),
        lambda: _optimizer(
            group_assignment=GROUPS["crossed"], shard_update=sharded
        ),
        gradients,
    )
    compare = functools.partial(
        _largest_difference, got, gradients, GROUPS["crossed"], sharded=sharded
    )
    assert compare(packs=[[1], [0, 2]]) < 1e-6
    assert compare(packs=[[0, 1, 2]]) > 1e-4


@pytest.mark.parametrize(
    "dtype, sharded",
    [
        ("int8", False),
        ("int8", True),
        ("int8", "owned"),
        ("bfloat16", False),
        ("float16", True),
        ("bfloat16", "owned"),
    ],
)
def test_feedback_brings_it_closer_to_float32(dtype, sharded):
    """The sum of many steps; without feedback errors add up."""
    gradients = _gradients(2, [(40, 30)], 20)
    exact = -np.sum([sum(g[0] for g in step) for step in gradients], 0)
    errors = []
    for feedback in (True, False):
        [weights], residuals = _trained(
            replicas.mirrored(2),
            lambda feedback=feedback: _optimizer(
                stacks.WholeSGD(1.0) if sharded == "owned" else None,
                shard_update=bool(sharded),
                communication=_communication(dtype, error_feedback=feedback),
            ),
            gradients,
        )
        errors.append(np.abs(weights[0] - exact).max())
        if feedback and dtype == "int8":
            # What is still missing is what the replicas keep.
            kept = sum(residuals[0])
            np.testing.assert_allclose(weights[0] - kept, exact, atol=1e-4)
    # The partial sums of a 16-bit all-reduce are rounded, too.
    most = 0.9 if dtype != "int8" and not sharded else 0.6
    assert errors[0] < most * errors[1], errors


def test_neither_scale_nor_overflow_changes_anything():
    """The scale doubles after a step, and halves after one that is skipped."""
    strategy = replicas.mirrored(2)
    gradients = _gradients(2, [(40, 30)], 4)
    scaled = [
        [[g * np.float32(scale) for g in of_replica] for of_replica in step]
        for scale, step in zip((4, 8, 4, 8), gradients, strict=True)
    ]
    overflows = np.ones([2, 2, 1, 40, 30], "float32")
    overflows[0, 1, 0, 3, 5] = np.inf
    overflows[1, 0, 0, 3, 5] = np.nan
    with_scale = _trained(
        strategy,
        lambda: _optimizer(
            keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(1.0),
                initial_scale=4.0,
                dynamic_growth_steps=1,
            )
        ),
        [*scaled[:2], *overflows, *scaled[2:]],
    )
    without = _trained(strategy, _optimizer, gradients)
    for mine, theirs in zip(with_scale, without, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_rounding_at_random_is_right_on_average():
    from tf_xshard.reduction import quantization

    rows = tf.constant(
        np.random.default_rng(0).normal(size=[1, 256]), "float32"
    )
    blocks = quantization.blocks_for(256)

    def mean_error(rounding):
        errors = [
            quantization.quantized(rows, blocks, rounding)[1].numpy()
            for _ in range(400)
        ]
        return np.abs(np.mean(errors, 0)).max()

    step = np.abs(rows).max() / 127
    assert mean_error("nearest") > 0.45 * step
    assert mean_error("stochastic") < 0.15 * step


@pytest.mark.parametrize("wrapper", ["towers", "agn"])
def test_towers_agn_and_sparse_rows(wrapper):
    """Equal numbers are quantized without loss, however they arrive."""
    strategy = replicas.mirrored(2)
    rows = tf.IndexedSlices(
        tf.ones([1, 2]), tf.constant([1]), tf.constant([4, 2])
    )
    with strategy.scope():
        dense = keras.Variable([0.0, 0.0])
        sparse = keras.Variable(np.zeros([4, 2]), dtype="float32")
        if wrapper == "towers":
            optimizer = tf_xshard.TowerOptimizer(_optimizer(), 2, "sum")
        else:
            optimizer = tf_xshard.AGNOptimizer(
                keras.optimizers.SGD(1.0),
                communication_period=2,
                reduction="sum",
                normalize=False,
                loss_normalization="replica",
                communication=_communication(),
            )

    def on_replica():
        optimizer.apply([tf.fill([2], 2.0), rows], [dense, sparse])

    step = tf.function(lambda: strategy.run(on_replica), autograph=False)
    step()
    step()
    for value in replicas.values(strategy, dense):
        np.testing.assert_allclose(value, [-8.0, -8.0], rtol=1e-6)
    for value in replicas.values(strategy, sparse):
        np.testing.assert_allclose(value[1], [-4.0, -4.0], rtol=1e-6)


def test_residuals_are_saved_and_regrouped(tmp_path):
    """A file holds their mean, so the group's sum is what it was."""
    [gradients] = _gradients(4, [(40, 30)], 1)

    def made(num_replicas):
        strategy = replicas.mirrored(num_replicas)
        with strategy.scope():
            weight = keras.Variable(np.zeros([40, 30]), dtype="float32")
            optimizer = _optimizer()
            optimizer.build([weight])
        return strategy, weight, optimizer

    strategy, weight, optimizer = made(4)
    replicas.apply_once(
        strategy, optimizer, lambda r: [tf.constant(gradients[r][0])], [weight]
    )
    of_replicas = replicas.values(strategy, optimizer._residuals[0])
    assert np.abs(of_replicas[0] - of_replicas[1]).max() > 0
    path = tf.train.Checkpoint(optimizer=optimizer).write(str(tmp_path / "c"))
    # On as many replicas by the group state, bit for bit.
    state = tf_xshard.GroupState([optimizer])
    state.save(str(tmp_path / "groups"))
    _, _, other = made(4)
    tf_xshard.GroupState([other]).restore(str(tmp_path / "groups"))
    for mine, theirs in zip(
        replicas.values(strategy, other._residuals[0]), of_replicas, strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
    # A reader without them says so, built or not.
    for is_built in (True, False):
        with strategy.scope():
            without = tf_xshard.CrossShardOptimizer(keras.optimizers.SGD(1.0))
            if is_built:
                without.build([weight])
        with pytest.warns(UserWarning, match="CrossShardOptimizer.residuals'"):
            tf.train.Checkpoint(optimizer=without).read(path)
            without.build([weight])
    # On two, by a checkpoint.
    strategy, _, fewer = made(2)
    tf.train.Checkpoint(optimizer=fewer).read(path).assert_consumed()
    for value in replicas.values(strategy, fewer._residuals[0]):
        np.testing.assert_allclose(value, np.mean(of_replicas, 0), atol=1e-6)


def test_group_reduce():
    """The mean of replicas whose values are one and three times these."""
    numbers = np.array([1.0, 2.0, 127.0], "float32")
    reduced = replicas.run(
        "mirrored",
        lambda own: tf_xshard.group_reduce(
            own, communication=tf_xshard.Communication(dtype="int8")
        ),
        2,
        lambda c: tf.constant(numbers * (1 + 2 * c.replica_id_in_sync_group)),
    )
    for value in reduced:
        np.testing.assert_allclose(value, 2 * numbers, rtol=1e-6)


@pytest.fixture
def check_numerics():
    tf.debugging.enable_check_numerics()
    yield
    tf.debugging.disable_check_numerics()


def test_check_numerics(check_numerics):
    """Its operations have no kernels in XLA; it finds a nan."""
    gradients = [[[np.float32([1, 2, 127])], [np.float32([3, 6, 127])]]]
    strategy = replicas.mirrored(2)
    weights, _ = _trained(strategy, _optimizer, gradients)
    for value in weights[0]:
        np.testing.assert_allclose(value, [-4, -8, -254], rtol=1e-6)
    gradients[0][1][0][0] = np.nan
    with pytest.raises(tf.errors.InvalidArgumentError, match="NaN"):
        _trained(strategy, _optimizer, gradients)


def test_a_nan_does_not_stay():
    """A hook that removes nan from the sums works as it does in float32."""
    strategy = replicas.mirrored(2)

    def without_nan(pairs):
        return [
            (tf.where(tf.math.is_finite(g), g, tf.zeros_like(g)), v)
            for g, v in pairs
        ]

    gradients = [[[np.ones(3, "float32")]] * 2 for _ in range(4)]
    gradients[1] = [[np.full(3, np.nan, "float32")], gradients[1][1]]
    for dtype in ("int8", "bfloat16"):
        weights, residuals = _trained(
            strategy,
            lambda dtype=dtype: _optimizer(
                communication=_communication(dtype), post_reduce=without_nan
            ),
            gradients,
        )
        for value in weights[0]:
            np.testing.assert_allclose(value, [-6.0] * 3, rtol=1e-6)
        for value in residuals[0]:
            assert np.isfinite(value).all()


def test_statistics_arrive_as_they_are():
    """What float8 training assigns instead of gradients."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        variables = [keras.Variable(1.0) for _ in range(2)]
        for variable in variables:
            variable.overwrite_with_gradient = True
        optimizer = _optimizer()
        optimizer.build(variables)
    replicas.apply_once(
        strategy,
        optimizer,
        lambda r: [tf.constant(448.0 * r), tf.constant(0.01 + 0.02 * r)],
        variables,
    )
    for variable, expected in zip(variables, (224.0, 0.02), strict=True):
        for value in replicas.values(strategy, variable):
            np.testing.assert_allclose(value, expected, rtol=1e-6)
