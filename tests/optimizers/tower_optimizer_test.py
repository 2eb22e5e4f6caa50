"""TowerOptimizer: towers and replicas equal one device; rounds; state."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import collective_counts
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


@pytest.mark.parametrize("strategy", [None, "one_device"])
def test_with_no_replicas(strategy):
    strategy = strategy and tf.distribute.OneDeviceStrategy("CPU:2")
    reference = training.alone(SETTINGS["adam"])
    for kwargs in ({}, {"run_eagerly": True}, {"steps_per_execution": 5}):
        _, got = training.train(
            _towers(SETTINGS["adam"], 4),
            strategy,
            batch_size=training.BATCH_SIZE // 4,
            num_steps=training.NUM_STEPS * 4,
            **kwargs,
        )
        assert training.deviation(got, reference) <= 1e-6


@pytest.mark.parametrize(
    "kind, kwargs",
    [
        ("mirrored", {"steps_per_execution": 3}),
        ("tpu", {"steps_per_execution": 3}),
        ("mirrored", {"run_eagerly": True}),
    ],
    ids=str,
)
def test_compile_options(kind, kwargs):
    """Rounds of two straddle executions of three steps."""
    reference = training.alone(SETTINGS["adam"], num_steps=9)
    _, got = training.train(
        _towers(SETTINGS["adam"], 2),
        replicas.STRATEGIES[kind](NUM_REPLICAS),
        batch_size=training.BATCH_SIZE // 2,
        num_steps=18,
        **kwargs,
    )
    assert training.deviation(got, reference) <= 1e-6


def _mutants():
    def wrong_sum():
        return tf_xshard.TowerOptimizer(SETTINGS["sgd"], 2, "sum")

    def twice():
        return tf_xshard.TowerOptimizer(
            tf_xshard.CrossShardOptimizer(SETTINGS["sgd"](), "sum"), 2
        )

    def groups():
        return tf_xshard.TowerOptimizer(
            tf_xshard.CrossShardOptimizer(
                SETTINGS["sgd"](), group_assignment=[[0, 1], [2, 3]]
            ),
            2,
        )

    def one_tower_missing():
        return tf_xshard.TowerOptimizer(SETTINGS["sgd"], 1)

    return [wrong_sum, twice, groups, one_tower_missing]


@pytest.mark.parametrize("mutant", _mutants(), ids=lambda f: f.__name__)
def test_mutants_fail(mutant):
    reference = training.alone(SETTINGS["sgd"])
    _, got = training.train(
        mutant,
        replicas.mirrored(4),
        batch_size=training.BATCH_SIZE // 2,
        num_steps=training.NUM_STEPS * 2,
    )
    assert training.deviation(got, reference) > 1e-3


def _oracle_gradients(call, r):
    """Powers of ten that tell call and replica; None in the second call."""
    value = 10.0 ** (r + 4 * call)
    return (
        tf.fill([3], value),
        None if call % 2 else tf.constant(value),
        tf.IndexedSlices(
            tf.fill([2, 2], value),
            tf.constant([1, 1 + call % 2]),
            tf.constant([4, 2]),
        ),
        None,
    )


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    "reduction, groups, graph",
    list(
        itertools.product(
            ["mean", "sum"], [None, [[0, 1]], [[0], [1]]], [True, False]
        )
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

    def gradients(call):
        def of(r):
            return [
                None
                if g is None
                else tf.IndexedSlices(
                    tf.cast(g.values, tf.float64), g.indices, g.dense_shape
                )
                if isinstance(g, tf.IndexedSlices)
                else tf.cast(g, tf.float64)
                for g in _oracle_gradients(call, r)
            ]

        return of

    steps = [
        replicas.applying(
            strategy, optimizer, gradients(call), variables, graph
        )
        for call in range(2)
    ]
    for round_number in range(3):
        for call, step in enumerate(steps):
            step()
            expected_rounds = round_number + call
            assert inner.iterations.numpy() == expected_rounds
    rows = [[r] for r in range(2)] if groups == [[0], [1]] else [[0, 1]] * 2
    for r, members in enumerate(rows):
        factor = 3 / len(members) / (1 if reduction == "sum" else 2)
        first = sum(10.0**m for m in members)
        both = first * (1 + 10**4)
        dense, partly, table, never = (
            replicas.values(strategy, v)[r] for v in variables
        )
        np.testing.assert_allclose(dense, [-factor * both] * 3, rtol=1e-12)
        np.testing.assert_allclose(partly, -factor * first, rtol=1e-12)
        np.testing.assert_allclose(
            table[:, 0],
            -factor
            * np.array([0, 2 * first + 10**4 * first, 10**4 * first, 0]),
            rtol=1e-12,
        )
        assert not never.any()


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
    for indices in ([1, 1, 4], [4, 0, 1]):
        optimizer.apply(
            [
                tf.IndexedSlices(
                    tf.constant([[1.0], [2.0], [4.0]]),
                    tf.constant(indices),
                    tf.constant([6, 1]),
                )
            ],
            [weight],
        )
    [got] = seen
    assert isinstance(got, tf.IndexedSlices)
    assert dict(
        zip(got.indices.numpy(), got.values.numpy()[:, 0], strict=True)
    ) == {
        0: 2.0,
        1: 7.0,
        4: 5.0,
    }
    # The next round starts with no rows.
    for _ in range(2):
        optimizer.apply(
            [
                tf.IndexedSlices(
                    tf.ones([1, 1]), tf.constant([5]), tf.constant([6, 1])
                )
            ],
            [weight],
        )
    assert seen[1].indices.numpy().tolist() == [5]


@replicas.on_every_strategy
def test_a_round_communicates_once(kind):
    """In the graph: in the branch of the last tower. And when it runs."""
    strategy = replicas.STRATEGIES[kind](2)
    (always, conditional), ran = collective_counts.trained(
        strategy, lambda: tf_xshard.TowerOptimizer(O.SGD(1.0), 4), 9
    )
    assert always == 0
    # A TPU's program is one for all replicas.
    assert conditional == (2 if kind == "mirrored" else 1)
    assert ran == [2, 2]
    # What is counted would show without towers.
    (always, _), ran = collective_counts.trained(
        strategy, lambda: tf_xshard.CrossShardOptimizer(O.SGD(1.0)), 9
    )
    assert always and ran == [9, 9]


@pytest.mark.parametrize("kind", ["mirrored", "tpu"])
def test_an_overflow_in_any_tower_skips_the_round(kind):
    strategy = replicas.STRATEGIES[kind](2)
    with strategy.scope():
        weight = keras.Variable(np.zeros(2), dtype="float32")
        scaler = O.LossScaleOptimizer(
            O.SGD(1.0), initial_scale=8.0, dynamic_growth_steps=100
        )
        optimizer = tf_xshard.TowerOptimizer(
            scaler, 2, loss_normalization="replica"
        )
        optimizer.build([weight])

    @tf.function(autograph=False)
    def step(bad_replica):
        def on_replica(bad):
            gradient = optimizer.scale_loss(tf.ones([2]))
            site = tf.equal(replicas.replica_id_tensor(), bad)
            gradient = tf.where(site, np.inf, gradient)
            optimizer.apply([gradient], [weight])

        strategy.run(on_replica, args=(bad_replica,))

    for bad in (1, -1):  # The first tower, of replica 1.
        step(tf.constant(bad))
    assert not np.any(replicas.values(strategy, weight))
    assert replicas.values(strategy, scaler.dynamic_scale) == [4.0, 4.0]
    assert optimizer.iterations.numpy() == 0
    for _ in range(2):  # The next round is clean.
        step(tf.constant(-1))
    np.testing.assert_array_equal(
        replicas.values(strategy, weight), -np.ones((2, 2))
    )
    assert optimizer.iterations.numpy() == 1


def test_mixed_precision_fit():
    keras.mixed_precision.set_global_policy("mixed_float16")
    model, _ = training.train(
        lambda: tf_xshard.TowerOptimizer(
            O.LossScaleOptimizer(O.SGD(0.01), initial_scale=2.0**20), 2
        ),
        replicas.mirrored(2),
        auto_scale_loss=False,
        num_steps=40,
    )
    scaler = model.optimizer.inner_optimizer.inner_optimizer
    assert scaler.dynamic_scale.numpy() < 2.0**20
    assert 0 < model.optimizer.iterations.numpy() < 20


def test_an_open_round_stays_for_the_next_fit():
    strategy = replicas.mirrored(2)
    x, y = training.data()
    _, reference = training.train(SETTINGS["adam"], num_steps=4)
    with strategy.scope():
        model = training.model()
        model.compile(_towers(SETTINGS["adam"], 4)(), "mse")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    for start, steps in ((0, 6), (6, 10)):  # The first ends in mid-round.
        model.fit(dataset.skip(start).take(steps), shuffle=False, verbose=0)
    got = training.weights(model, strategy)
    assert training.deviation(got, reference) <= 1e-6


@pytest.mark.parametrize(
    "way, kind",
    replicas.in_turn(["keras", "checkpoint", "weights"], ["tpu", "mirrored"]),
)
def test_an_open_round_survives_saving(way, kind, tmp_path):
    strategy = replicas.STRATEGIES[kind](2)
    x, y = training.data()
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)

    def make():
        with strategy.scope():
            model = training.model()
            model.compile(_towers(SETTINGS["adam"], 4)(), "mse")
            model.optimizer.build(model.trainable_variables)
        return model

    def fit(model, start, steps):
        model.fit(batches.skip(start).take(steps), shuffle=False, verbose=0)

    model = make()
    fit(model, 0, 6)
    path = str(tmp_path / "model")
    if way == "keras":
        model.save(path + ".keras")
        with strategy.scope():
            other = keras.saving.load_model(path + ".keras")
    else:
        other = make()
        fit(other, 0, 1)
        if way == "checkpoint":
            tf.train.Checkpoint(model).write(path)
            tf.train.Checkpoint(other).read(path).assert_consumed()
        else:
            weights = [v.numpy() for v in model.optimizer.variables]
            other.set_weights(model.get_weights())
            other.optimizer.set_weights(weights)
    for one in (model, other):
        fit(one, 6, 10)
    assert other.optimizer.iterations.numpy() == 4
    got = training.weights(other, strategy)
    reference = training.weights(model, strategy)
    assert training.deviation(got, reference) <= 1e-6


def test_apply_towers():
    """Towers on two devices, in one train_step."""
    strategy = replicas.mirrored(2)

    class Model(keras.Sequential):
        def train_step(self, data):
            x, y = data
            towers, losses = [], []
            for device, xs, ys in zip(
                ("CPU:4", "CPU:5"), tf.split(x, 2), tf.split(y, 2), strict=True
            ):
                with tf.device(device), tf.GradientTape() as tape:
                    loss = self.compute_loss(y=ys, y_pred=self(xs))
                losses.append(loss)
                towers.append(tape.gradient(loss, self.trainable_variables))
            self.optimizer.apply_towers(towers, self.trainable_variables)
            return {"loss": tf.add_n(losses) / 2}

    reference = training.alone(SETTINGS["clipping"])
    _, got = training.train(
        _towers(SETTINGS["clipping"], 2),
        strategy,
        model_fn=lambda: Model(training.model().layers),
    )
    assert training.deviation(got, reference) <= 1e-6


def test_apply_towers_refuses():
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
    with pytest.raises(ValueError, match="one loss_normalization"):
        tf_xshard.TowerOptimizer(
            tf_xshard.CrossShardOptimizer(
                O.SGD(1.0), loss_normalization="replica"
            ),
            2,
            loss_normalization="global",
        )


@pytest.mark.parametrize("kind", ["mirrored", "tpu"])
def test_cross_shard_around_towers(kind):
    """Communicates on every call, and is right too."""
    strategy = replicas.STRATEGIES[kind](2)

    def around():
        return tf_xshard.CrossShardOptimizer(_towers(SETTINGS["adam"], 2)())

    reference = training.alone(SETTINGS["adam"])
    _, got = training.train(
        around,
        strategy,
        batch_size=training.BATCH_SIZE // 2,
        num_steps=training.NUM_STEPS * 2,
    )
    assert training.deviation(got, reference) <= 1e-6


def test_one_tower_is_the_inner_optimizer():
    reference = training.alone(SETTINGS["adam"])
    _, got = training.train(_towers(SETTINGS["adam"], 1))
    assert training.deviation(got, reference) == 0.0


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
        ({"num_towers": True}, TypeError, "must be an int"),
        ({"reduction": "max"}, ValueError, "reduction must be"),
        ({"optimizer_or_optimizer_fn": None}, TypeError, "wraps a keras"),
        ({"optimizer_or_optimizer_fn": lambda: 3}, TypeError, "wraps a keras"),
        ({"optimizer_or_optimizer_fn": "adam"}, TypeError, "wraps a keras"),
        ({"clipnorm": 1.0}, ValueError, "set it on the inner"),
        ({"loss_normalization": "mean"}, ValueError, "loss_normalization"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(arguments, error, text):
    with pytest.raises(error, match=text):
        tf_xshard.TowerOptimizer(
            **{
                "optimizer_or_optimizer_fn": O.SGD(),
                "num_towers": 2,
                **arguments,
            }
        )


def test_reset_in_replica_context_is_refused():
    strategy = replicas.mirrored(2)
    with strategy.scope():
        optimizer = tf_xshard.TowerOptimizer(O.SGD(1.0), 2)
    with pytest.raises(RuntimeError, match="outside of strategy.run"):
        strategy.run(optimizer.reset)


@pytest.mark.parametrize(
    "arguments",
    [{"reduction": "median"}, {"loss_normalization": "none"}, {"clipnorm": 1}],
    ids=str,
)
def test_a_refused_one_has_changed_nothing(arguments):
    """An inner optimizer that was made local would no longer sum."""
    inner = keras.optimizers.SGD()
    with pytest.raises(ValueError):
        tf_xshard.TowerOptimizer(inner, 2, **arguments)
    assert type(inner) is keras.optimizers.SGD
