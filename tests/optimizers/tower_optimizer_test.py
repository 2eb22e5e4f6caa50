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

SETTINGS = {
    "sgd": lambda: O.SGD(0.1),
    "clipping": lambda: O.SGD(0.1, momentum=0.9, global_clipnorm=0.2),
    "adam": lambda: O.Adam(0.01, clipnorm=0.1),
    "adamw_schedule": lambda: O.AdamW(
        O.schedules.ExponentialDecay(0.01, 4, 0.8), weight_decay=0.1
    ),
    "ema": lambda: O.SGD(
        0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3
    ),
    "adagrad": lambda: O.Adagrad(0.05),
}
NUM_REPLICAS = 2


def _towers(optimizer_fn, num_towers, reduction="mean", **kwargs):
    return lambda: tf_xshard.TowerOptimizer(
        optimizer_fn, num_towers, reduction, **kwargs
    )


@pytest.mark.parametrize(
    "name, num_towers, kind",
    [
        *replicas.in_turn(SETTINGS, [2, 4], ["mirrored"]),
        ("adam", 2, "tpu_permuted"),
        ("ema", 4, "tpu"),
    ],
)
def test_equals_one_device(name, num_towers, kind, report):
    optimizer_fn = SETTINGS[name]
    reference = training.alone(optimizer_fn)
    model, got = training.train(
        _towers(optimizer_fn, num_towers),
        replicas.STRATEGIES[kind](NUM_REPLICAS),
        batch_size=training.BATCH_SIZE // num_towers,
        num_steps=training.NUM_STEPS * num_towers,
        fit=name == "adam",
    )
    difference = training.deviation(got, reference)
    report(f"towers, {name}, {kind}, {num_towers} towers: {difference:.1e}")
    assert difference <= 1e-6
    assert training.deviation(reference, training.initial()) > 1e-2
    assert model.optimizer.iterations.numpy() == training.NUM_STEPS


@pytest.mark.parametrize(
    "strategy, kwargs",
    [
        (
            lambda: tf.distribute.OneDeviceStrategy("CPU:2"),
            {"steps_per_execution": 3},
        ),
        (lambda: None, {"run_eagerly": True}),
        (lambda: replicas.mirrored(2), {"run_eagerly": True}),
        (lambda: replicas.mirrored(2), {"steps_per_execution": 3}),
        (lambda: replicas.tpu(2), {"steps_per_execution": 3}),
    ],
    ids=["one_device", "none", "mirrored_eager", "mirrored", "tpu"],
)
def test_compile_options(strategy, kwargs):
    """Rounds of two straddle executions of three steps."""
    reference = training.alone(SETTINGS["adam"], num_steps=9)
    _, got = training.train(
        _towers(SETTINGS["adam"], 2),
        strategy(),
        batch_size=training.BATCH_SIZE // 2,
        num_steps=18,
        **kwargs,
    )
    assert training.deviation(got, reference) <= 1e-6


MUTANTS = {
    "wrong_sum": lambda: tf_xshard.TowerOptimizer(SETTINGS["sgd"], 2, "sum"),
    "twice": lambda: tf_xshard.TowerOptimizer(
        tf_xshard.CrossShardOptimizer(SETTINGS["sgd"](), "sum"), 2
    ),
    "groups": lambda: tf_xshard.TowerOptimizer(
        tf_xshard.CrossShardOptimizer(
            SETTINGS["sgd"](), group_assignment=[[0], [1]]
        ),
        2,
    ),
    "one_tower_missing": _towers(SETTINGS["sgd"], 1),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name):
    reference = training.alone(SETTINGS["sgd"])
    _, got = training.train(
        MUTANTS[name],
        replicas.mirrored(2),
        batch_size=training.BATCH_SIZE // 2,
        num_steps=training.NUM_STEPS * 2,
    )
    assert training.deviation(got, reference) > 1e-3


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
    replicas.pairwise(
        ["mean", "sum"], [None, [[0, 1]], [[0], [1]]], [True, False]
    ),
    ids=str,
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


@replicas.on_mirrored_and_tpu
def test_an_open_round_stays_for_the_next_fit_and_is_saved(kind, tmp_path):
    """Steps of sixteen rows; the first fit ends in mid-round."""
    strategy = replicas.STRATEGIES[kind](2)
    x, y = training.data()

    def fit(model, rows):
        model.fit(x[rows], y[rows], batch_size=16, shuffle=False, verbose=0)

    with strategy.scope():
        model = training.model()
        model.compile(_towers(SETTINGS["adam"], 4)(), "mse")
    fit(model, slice(6 * 16))
    model.save(tmp_path / "model.keras")
    with strategy.scope():
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    reference = training.alone(SETTINGS["adam"], num_steps=4)
    for one in (model, loaded):
        fit(one, slice(6 * 16, None))
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
    with pytest.raises(ValueError, match="one value of loss_norm"):
        tf_xshard.TowerOptimizer(
            tf_xshard.CrossShardOptimizer(
                O.SGD(1.0), loss_normalization="replica"
            ),
            2,
            loss_normalization="global",
        )


def test_one_tower_is_the_inner_optimizer():
    reference = training.alone(SETTINGS["adam"])
    _, got = training.train(_towers(SETTINGS["adam"], 1))
    assert training.deviation(got, reference) <= replicas.REPEATED


def test_config():
    optimizer = tf_xshard.TowerOptimizer(
        O.Adam(0.1), 3, "sum", loss_normalization="replica", name="mine"
    )
    other = tf_xshard.TowerOptimizer.from_config(optimizer.get_config())
    assert other.get_config() == optimizer.get_config()
    assert (other.num_towers, other.reduction, other.name) == (3, "sum", "mine")


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"num_towers": 0}, ValueError, "must be positive"),
        ({"num_towers": 2.0}, TypeError, "must be an int"),
        ({"reduction": "max"}, ValueError, "reduction must be"),
        ({"optimizer_or_optimizer_fn": lambda: 3}, TypeError, "wraps a keras"),
        ({"clipnorm": 1.0}, ValueError, "set it on the inner"),
        ({"loss_normalization": "mean"}, ValueError, "loss_normalization"),
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
