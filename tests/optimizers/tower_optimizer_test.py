"""TowerOptimizer: towers and replicas equal one device; rounds; state."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import training

O = keras.optimizers  # noqa: E741
Tower = tf_xshard.TowerOptimizer
T, V = TypeError, ValueError


def _all_settings():
    """Each acts on the aggregated gradient, and counts updates."""
    return O.SGD(
        O.schedules.ExponentialDecay(0.1, 4, 0.8),
        momentum=0.9,
        weight_decay=0.01,
        clipvalue=0.1,
        use_ema=True,
        ema_momentum=0.8,
        ema_overwrite_frequency=3,
    )


def test_two_towers_equal_one_device():
    """Rounds may straddle executions of three steps."""
    _, reference = training.train(_all_settings, num_steps=9)
    start = training.weights(training.model())
    assert training.deviation(reference, start) > 1e-2
    for options in ({}, {"steps_per_execution": 3}):
        model, got = training.train(
            lambda: Tower(_all_settings(), 2),
            replicas.mirrored(2),
            batch_size=training.BATCH_SIZE // 2,
            num_steps=9 * 2,
            **options,
        )
        assert training.deviation(got, reference) <= 1e-6
        assert model.optimizer.iterations.numpy() == 9


def _gradients(call, r):
    """Powers of ten that tell call and replica; None in the second call."""
    value = tf.constant(10.0 ** (r + 4 * call), tf.float64)
    rows = tf.constant([1, 1 + call])
    return [
        tf.fill([3], value),
        None if call else value,
        tf.IndexedSlices(tf.fill([2, 2], value), rows, tf.constant([4, 2])),
        None,
    ]


def _dense(call, r, index):
    gradient = _gradients(call, r)[index]
    return 0 if gradient is None else tf.convert_to_tensor(gradient)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    "reduction, groups, graph",
    [
        ("mean", None, True),
        ("sum", [[0], [1]], True),
        ("sum", None, False),
        ("mean", [[0], [1]], False),
    ],
)
def test_oracle(reduction, groups, graph):
    """Dense, None in one call, IndexedSlices, None in all; three rounds."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        variables = [
            keras.Variable(np.zeros(shape), dtype="float64")
            for shape in ((3,), (), (4, 2), (2,))
        ]
        inner = O.SGD(1.0)
        cross = tf_xshard.CrossShardOptimizer(
            inner, group_assignment=groups, loss_normalization="replica"
        )
        optimizer = Tower(cross, 2, reduction)
        optimizer.build(variables)
    steps = [
        replicas.applying(
            strategy,
            optimizer,
            functools.partial(_gradients, call),
            variables,
            graph,
        )
        for call in range(2)
    ]
    for round_number in range(3):
        for call, step in enumerate(steps):
            step()
            assert inner.iterations.numpy() == round_number + call
    combine = getattr(np, reduction)
    for r in range(2):
        members = [r] if groups else [0, 1]
        for index, variable in enumerate(variables):
            of_calls = [
                np.mean([_dense(call, m, index) for m in members], axis=0)
                for call in range(2)
            ]
            np.testing.assert_allclose(
                replicas.values(strategy, variable)[r],
                -3 * combine(of_calls, axis=0),
                rtol=1e-12,
            )


def test_embeddings_reach_the_inner_optimizer_sparse():
    """Only rows of the round; duplicates and other towers' rows added up."""
    seen = []

    class Spy(O.SGD):
        def apply_gradients(self, grads_and_vars):
            [(gradient, variable)] = grads_and_vars
            seen.append(gradient)
            return super().apply_gradients([(gradient, variable)])

    weight = keras.Variable(np.zeros((6, 1)))
    optimizer = Tower(Spy(1.0), 2, "sum")

    def apply(values, indices):
        rows = tf.IndexedSlices(tf.constant(values), indices, [6, 1])
        optimizer.apply([rows], [weight])

    for indices in ([1, 1, 4], [4, 0, 1]):
        apply([[1.0], [2.0], [4.0]], indices)
    [got] = seen
    assert isinstance(got, tf.IndexedSlices)
    rows = zip(got.indices.numpy(), got.values.numpy()[:, 0], strict=True)
    assert dict(rows) == {0: 2.0, 1: 7.0, 4: 5.0}
    # The next round starts with no rows.
    for _ in range(2):
        apply([[1.0]], [5])
    assert seen[1].indices.numpy().tolist() == [5]


def test_apply_towers():
    """tower_train_step_test.py has it under strategies and on devices."""
    optimizer, weight = Tower(O.SGD(1.0), 2), keras.Variable(1.0)
    with pytest.raises(ValueError, match="has 2 towers, got gradients of 1"):
        optimizer.apply_towers([[tf.ones([])]], [weight])
    optimizer.apply([tf.ones([])], [weight])
    with pytest.raises(tf.errors.InvalidArgumentError, match="reset"):
        optimizer.apply_towers([[tf.ones([])]] * 2, [weight])
    assert float(weight) == 1.0
    optimizer.reset()
    optimizer.apply_towers([[None], [tf.ones([])]], [weight])
    assert float(weight) == 0.5


def test_a_wrapper_is_put_around_what_has_none():
    plain = Tower(O.SGD(1.0), 2)
    assert isinstance(plain.inner_optimizer, tf_xshard.CrossShardOptimizer)
    given = tf_xshard.CrossShardOptimizer(O.SGD(1.0), "sum")
    assert Tower(given, 2).inner_optimizer is given


def test_config():
    optimizer = Tower(
        O.Adam(0.1), 3, "sum", loss_normalization="replica", name="mine"
    )
    other = Tower.from_config(optimizer.get_config())
    assert other.get_config() == optimizer.get_config()
    assert (other.num_towers, other.reduction, other.name) == (3, "sum", "mine")


def _other_losses():
    inner = tf_xshard.CrossShardOptimizer(O.SGD(), loss_normalization="replica")
    Tower(inner, 2, loss_normalization="global")


def _reset_in_replica_context():
    strategy = replicas.mirrored(2)
    with strategy.scope():
        optimizer = Tower(O.SGD(1.0), 2)
    strategy.run(optimizer.reset)


@pytest.mark.parametrize(
    "error, text, call",
    [
        (V, "must be positive", lambda: Tower(O.SGD(), 0)),
        (T, "must be an int", lambda: Tower(O.SGD(), 2.0)),
        (T, "wraps a keras", lambda: Tower(lambda: 3, 2)),
        (V, "reduction must be", lambda: Tower(O.SGD(), 2, "max")),
        (V, "set it on the inner", lambda: Tower(O.SGD(), 2, clipnorm=1.0)),
        (V, "must be one of", lambda: Tower(O.SGD(), 2, loss_normalization="")),
        (V, "one value of loss_norm", _other_losses),
        (RuntimeError, "outside of strategy.run", _reset_in_replica_context),
    ],
)
def test_refused(error, text, call):
    with pytest.raises(error, match=text):
        call()
