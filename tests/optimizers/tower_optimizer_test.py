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
full = replicas.in_full


def _momentum():
    return O.SGD(0.1, momentum=0.9)


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


def _towers(optimizer_fn, num_towers):
    return lambda: tf_xshard.TowerOptimizer(optimizer_fn, num_towers)


@pytest.mark.parametrize(
    "num_towers, kind",
    [
        (2, "mirrored"),
        # global_mean_test.py has rounds on a TPU.
        pytest.param(4, "tpu_permuted", marks=full),
    ],
)
def test_equals_one_device(num_towers, kind):
    reference = training.alone(_all_settings)
    model, got = training.train(
        _towers(_all_settings, num_towers),
        replicas.STRATEGIES[kind](2),
        batch_size=training.BATCH_SIZE // num_towers,
        num_steps=training.NUM_STEPS * num_towers,
    )
    assert training.deviation(got, reference) <= 1e-6
    assert training.deviation(reference, training.initial()) > 1e-2
    assert model.optimizer.iterations.numpy() == training.NUM_STEPS


@pytest.mark.parametrize(
    "strategy, options",
    [
        (replicas.mirrored, {"steps_per_execution": 3}),
        pytest.param(replicas.tpu, {"steps_per_execution": 3}, marks=full),
        pytest.param(replicas.mirrored, {"run_eagerly": True}, marks=full),
    ],
    ids=["mirrored", "tpu", "eager"],
)
def test_fit_and_compile_options(strategy, options):
    """Rounds of two straddle executions of three steps."""
    reference = training.alone(_momentum, num_steps=9)
    _, got = training.train(
        _towers(_momentum, 2),
        strategy(2),
        batch_size=training.BATCH_SIZE // 2,
        num_steps=18,
        **options,
    )
    assert training.deviation(got, reference) <= 1e-6


def test_one_tower_is_the_inner_optimizer():
    reference = training.alone(_momentum)
    _, got = training.train(_towers(_momentum, 1))
    assert training.deviation(got, reference) <= replicas.REPEATED


def _oracle_gradients(call, r):
    """Powers of ten that tell call and replica; None in the second call."""
    value = tf.constant(10.0 ** (r + 4 * call), tf.float64)
    return [
        tf.fill([3], value),
        None if call % 2 else value,
        tf.IndexedSlices(
            tf.fill([2, 2], value),
            tf.constant([1, 1 + call % 2]),
            tf.constant([4, 2]),
        ),
        None,
    ]


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
        optimizer = tf_xshard.TowerOptimizer(
            tf_xshard.CrossShardOptimizer(
                inner, group_assignment=groups, loss_normalization="replica"
            ),
            2,
            reduction,
        )
        optimizer.build(variables)
    steps = [
        replicas.applying(
            strategy,
            optimizer,
            functools.partial(_oracle_gradients, call),
            variables,
            graph,
        )
        for call in range(2)
    ]
    for round_number in range(3):
        for call, step in enumerate(steps):
            step()
            assert inner.iterations.numpy() == round_number + call
    rows = [[r] for r in range(2)] if groups == [[0], [1]] else [[0, 1]] * 2
    for r, members in enumerate(rows):
        factor = 3 / len(members) / (1 if reduction == "sum" else 2)
        first = sum(10.0**m for m in members)
        second = 10**4 * first
        got = [replicas.values(strategy, v)[r] for v in variables]
        column = np.array([0, 2 * first + second, second, 0])
        expected = (
            [first + second] * 3,
            first,
            np.stack([column, column], axis=1),
            np.zeros(2),
        )
        for value, want in zip(got, expected, strict=True):
            np.testing.assert_allclose(
                value, -factor * np.array(want), rtol=1e-12
            )


def test_embeddings_reach_the_inner_optimizer_sparse():
    """Only rows of the round; duplicates and other towers' rows added up."""
    seen = []

    class Spy(O.SGD):
        def apply_gradients(self, grads_and_vars):
            pairs = list(grads_and_vars)
            seen.append(pairs[0][0])
            return super().apply_gradients(pairs)

    weight = keras.Variable(np.zeros((6, 1)))
    optimizer = tf_xshard.TowerOptimizer(Spy(1.0), 2, "sum")

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


def test_an_open_round_stays_for_the_next_fit_and_is_saved(tmp_path):
    """Steps of sixteen rows; the first training ends in mid-round."""
    strategy = replicas.mirrored(2)
    batches = [
        [rows[first : first + 16] for rows in training.data()]
        for first in range(0, 256, 16)
    ]
    with strategy.scope():
        model = training.model()
        model.compile(_towers(_momentum, 4)(), "mse")
        model.optimizer.build(model.trainable_variables)
    training.run_steps(model, batches[:6])
    model.save(tmp_path / "model.keras")
    with strategy.scope():
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    reference = training.alone(_momentum, num_steps=4)
    for one in (model, loaded):
        training.run_steps(one, batches[6:])
        assert one.optimizer.iterations.numpy() == 4
        got = training.weights(one, strategy)
        assert training.deviation(got, reference) <= 1e-6


def test_apply_towers():
    """tower_train_step_test.py has it under strategies and on devices."""
    optimizer = tf_xshard.TowerOptimizer(O.SGD(1.0), 2)
    weight = keras.Variable(1.0)
    with pytest.raises(ValueError, match="has 2 towers, got gradients of 1"):
        optimizer.apply_towers([[tf.ones([])]], [weight])
    optimizer.apply([tf.ones([])], [weight])
    with pytest.raises(tf.errors.InvalidArgumentError, match="reset"):
        optimizer.apply_towers([[tf.ones([])]] * 2, [weight])
    assert float(weight) == 1.0
    optimizer.reset()
    optimizer.apply_towers([[None], [tf.ones([])]], [weight])
    assert float(weight) == 0.5


def test_hooks_get_the_unscaled_gradient_of_a_round():
    """In at least float32."""
    seen = []

    def doubled(pairs):
        seen.extend(gradient for gradient, _ in pairs)
        return [(2 * gradient, variable) for gradient, variable in pairs]

    inner = O.LossScaleOptimizer(O.SGD(1.0), initial_scale=64.0)
    optimizer = tf_xshard.TowerOptimizer(
        tf_xshard.CrossShardOptimizer(inner, pre_reduce=doubled), 2
    )
    weight = keras.Variable(1.0, dtype="float16")
    for gradient in (64.0, 3 * 64.0):
        optimizer.apply([tf.constant(gradient, tf.float16)], [weight])
    [mean] = seen
    assert (mean.dtype, float(mean)) == (tf.float32, 2)
    assert float(weight) == 1 - 2 * 2


def test_stacks():
    """One loss_normalization; a wrapper is put around what has none."""
    plain = tf_xshard.TowerOptimizer(O.SGD(1.0), 2)
    assert isinstance(plain.inner_optimizer, tf_xshard.CrossShardOptimizer)
    given = tf_xshard.CrossShardOptimizer(O.SGD(1.0), "sum")
    assert tf_xshard.TowerOptimizer(given, 2).inner_optimizer is given
    calls = []

    def make():
        calls.append(1)
        return O.SGD(0.5)

    optimizer = tf_xshard.TowerOptimizer(make, 2)
    assert calls == [1] and optimizer.learning_rate.numpy() == 0.5


def test_config():
    optimizer = tf_xshard.TowerOptimizer(
        O.Adam(0.1), 3, "sum", loss_normalization="replica", name="mine"
    )
    other = tf_xshard.TowerOptimizer.from_config(optimizer.get_config())
    assert other.get_config() == optimizer.get_config()
    assert (other.num_towers, other.reduction, other.name) == (3, "sum", "mine")


def _of_other_losses():
    return tf_xshard.CrossShardOptimizer(O.SGD(), loss_normalization="replica")


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"num_towers": 0}, ValueError, "must be positive"),
        ({"num_towers": 2.0}, TypeError, "must be an int"),
        ({"reduction": "max"}, ValueError, "reduction must be"),
        ({"optimizer_or_optimizer_fn": lambda: 3}, TypeError, "wraps a keras"),
        ({"clipnorm": 1.0}, ValueError, "set it on the inner"),
        ({"loss_normalization": "mean"}, ValueError, "loss_normalization"),
        (
            {
                "optimizer_or_optimizer_fn": _of_other_losses,
                "loss_normalization": "global",
            },
            ValueError,
            "one value of loss_norm",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(arguments, error, text):
    inner = O.SGD()
    with pytest.raises(error, match=text):
        tf_xshard.TowerOptimizer(
            **{"optimizer_or_optimizer_fn": inner, "num_towers": 2, **arguments}
        )
    # One that was made local would no longer sum.
    assert type(inner) is O.SGD


def test_reset_in_replica_context_is_refused():
    strategy = replicas.mirrored(2)
    with strategy.scope():
        optimizer = tf_xshard.TowerOptimizer(O.SGD(1.0), 2)
    with pytest.raises(RuntimeError, match="outside of strategy.run"):
        strategy.run(optimizer.reset)
