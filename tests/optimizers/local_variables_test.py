"""Variables that are not reduced: each replica trains its own copy."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import seeds

SGD = keras.optimizers.SGD
CROSS = tf_xshard.CrossShardOptimizer
PAIRS = [[0, 1], [2, 3]]
RNG = np.random.default_rng(3)
X = RNG.normal(size=(4, 6, 2)).astype("float32")
Y = RNG.normal(size=(4, 6, 1)).astype("float32")


def _variables():
    with keras.name_scope("layer"):
        return [
            keras.Variable(np.zeros(shape), dtype="float32", name=name)
            for name, shape in (("shared", (2,)), ("own", (3,)))
        ]


def _gradients(undo=1):
    power = replicas.power_of_ten() / undo
    return [tf.fill([2], power), tf.fill([3], power)]


@pytest.mark.parametrize(
    "kind, reduction, options, factor",
    [
        ("mirrored", "mean", {}, 0.5),
        ("mirrored", "sum", {}, 1),
        ("mirrored", "mean", {"scale_local_gradients": False}, 1),
        ("tpu", "mean", {}, 0.5),
        ("tpu_permuted", "sum", {}, 1),
    ],
)
@pytest.mark.parametrize("normalization", ["global", "replica"])
def test_oracle(kind, reduction, options, factor, normalization):
    strategy = replicas.STRATEGIES[kind](4)
    with strategy.scope():
        shared, own = _variables()
        optimizer = CROSS(
            SGD(1.0),
            reduction,
            PAIRS,
            local="own",
            loss_normalization=normalization,
            **options,
        )
        optimizer.build([shared, own])
    undo = 4 if normalization == "global" else 1
    tf.function(
        lambda: strategy.run(
            lambda: optimizer.apply(_gradients(undo), [shared, own])
        ),
        autograph=False,
    )()
    of_group = {"mean": 0.5, "sum": 1}[reduction]
    for r in range(4):
        [members] = [group for group in PAIRS if r in group]
        total = of_group * sum(10.0**m for m in members)
        for variable, expected in ((shared, total), (own, factor * 10.0**r)):
            np.testing.assert_allclose(
                replicas.values(strategy, variable)[r], -expected, rtol=1e-6
            )


def _wraps():
    tower = tf_xshard.TowerOptimizer
    return {
        "adam": lambda local: CROSS(keras.optimizers.Adam(0.1), local=local),
        "sharded": lambda local: CROSS(
            keras.optimizers.Adam(0.1, clipnorm=1e3),
            local=local,
            shard_update=True,
        ),
        "residuals": lambda local: CROSS(
            keras.optimizers.Adam(0.1),
            local=local,
            communication=tf_xshard.Communication(
                "bfloat16", error_feedback=True
            ),
        ),
        "tower_around": lambda local: tower(CROSS(SGD(0.1), local=local), 1),
        "tower_inside": lambda local: CROSS(tower(SGD(0.1), 1), local=local),
        "loss_scale": lambda local: CROSS(
            keras.optimizers.LossScaleOptimizer(SGD(0.1), initial_scale=4.0),
            local=local,
        ),
        "hooks": lambda local: CROSS(
            SGD(0.1),
            local=local,
            pre_reduce=tf_xshard.clip_by_global_norm(1e3),
            post_reduce=tf_xshard.clip_by_global_norm(1e3),
        ),
    }


def _train(optimizer, strategy, heads, num_steps=3):
    """y = x w + b_r, with one b for each replica, or with all in `heads`."""
    with strategy.scope():
        w = keras.Variable(np.ones((2, 1)), dtype="float32", name="w")
        b = keras.Variable(np.zeros(heads), dtype="float32", name="b")
        made = optimizer()
        made.build([w, b])
    num_replicas = strategy.num_replicas_in_sync

    def on_replica():
        r = replicas.replica_id_tensor() if heads == 1 else None
        with tf.GradientTape() as tape:
            if heads == 1:
                error = tf.gather(X, r) @ w + b - tf.gather(Y, r)
            else:
                error = X @ w.value + b.value[:, None, None] - Y
            loss = tf.reduce_mean(error**2) / num_replicas
            loss = made.scale_loss(loss)
        made.apply(tape.gradient(loss, [w.value, b.value]), [w, b])

    step = tf.function(lambda: strategy.run(on_replica), autograph=False)
    for _ in range(num_steps):
        step()
    return replicas.values(strategy, w), replicas.values(strategy, b)


@pytest.mark.parametrize("name", _wraps())
def test_equals_one_device_with_a_copy_for_each_replica(name):
    """The gradient of the mean loss by copy r is g_r / 4."""
    tolerance = 1e-2 if name == "residuals" else 1e-6
    inner = (
        functools.partial(keras.optimizers.Adam, 0.1)
        if name in ("adam", "residuals", "sharded")
        else functools.partial(SGD, 0.1)
    )
    [want_w], [want_b] = _train(inner, tf.distribute.get_strategy(), heads=4)
    got_w, got_b = _train(
        lambda: _wraps()[name]("b$"), replicas.mirrored(4), heads=1
    )
    for r in range(4):
        np.testing.assert_allclose(got_w[r], want_w, atol=tolerance)
        np.testing.assert_allclose(got_b[r][0], want_b[r], atol=tolerance)
    assert len({float(one[0]) for one in got_b}) == 4


@pytest.mark.parametrize("kind", ["mirrored", "tpu"])
@pytest.mark.parametrize("name", ["Lamb", "Adafactor"])
def test_whole_variables_of_owners_beside_local_variables(name, kind):
    """Norms and means are of one replica's copy, as in an unsharded update."""
    strategy = replicas.STRATEGIES[kind](4)
    whole, got = (
        _train(
            lambda shard_update=shard_update: CROSS(
                getattr(keras.optimizers, name)(0.1, clipnorm=0.1),
                local="b$",
                shard_update=shard_update,
            ),
            strategy,
            heads=1,
        )
        for shard_update in (False, True)
    )
    for values, expected in zip(got, whole, strict=True):
        np.testing.assert_allclose(values, expected, atol=1e-6)
    # Both normalize a step, so only its sign differs by replica.
    assert len({float(np.sign(one[0])) for one in got[1]}) == 2


@pytest.mark.parametrize("name", ["Lamb", "Adafactor"])
def test_kinds_of_slots_beside_local_variables(name):
    with replicas.mirrored(2).scope():
        variables = [
            keras.Variable(np.ones((3, 2)), dtype="float32", name=one)
            for one in ("shared", "own")
        ]
        optimizer = CROSS(getattr(keras.optimizers, name)(), local="own")
        optimizer.build(variables)
    state = tf_xshard.GroupState(
        {"weights": variables, "optimizer": optimizer}, [[0, 1]]
    )
    kinds = [row["kind"] for row in state.divergence()]
    # A local variable, and its slots: two momentums, or three means.
    assert kinds.count("local") == {"Lamb": 3, "Adafactor": 4}[name]


def test_no_residual_no_bytes():
    communication = tf_xshard.Communication("bfloat16", error_feedback=True)
    with replicas.mirrored(2).scope():
        variables = _variables()
        optimizer = CROSS(
            SGD(), local=variables[1], communication=communication
        )
        alone = CROSS(SGD(), communication=communication)
    plan = tf_xshard.communication_plan(optimizer, variables)
    expected = tf_xshard.communication_plan(alone, variables[:1])
    assert plan.bytes_per_step == expected.bytes_per_step > 0
    names = [v.path.split("/")[-1] for v in optimizer.variables]
    assert [n for n in names if "residual" in n] == ["layer_shared_residual"]


def test_rows_and_missing_gradients():
    """An Embedding may be local, and have no gradient on a replica."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        table = keras.Variable(np.zeros((3, 1)), dtype="float32", name="own")
        shared = keras.Variable(0.0, name="shared")
        optimizer = CROSS(SGD(1.0), local=table)

    def gradients(r):
        rows = tf.IndexedSlices(
            tf.constant([[1.0], [2.0]]), [1, 1], tf.constant([3, 1])
        )
        return [None if r else rows, tf.constant(2.0 * r)]

    # Keras warns of the replica that has none.
    with pytest.warns(UserWarning, match="Gradients do not exist for"):
        replicas.apply_once(strategy, optimizer, gradients, [table, shared])
    assert [v.ravel().tolist() for v in replicas.values(strategy, table)] == [
        [0, -3, 0],
        [0, 0, 0],
    ]
    assert replicas.values(strategy, shared) == [-2, -2]


def _model(local=None, **options):
    seeds.seed(5)
    model = keras.Sequential(
        [
            keras.layers.Input((2,)),
            keras.layers.Dense(3, "tanh", name="shared"),
            keras.layers.Dense(1, name="head"),
        ]
    )
    inner = keras.optimizers.Adam(0.1)
    layer = model.get_layer("head")
    model.compile(CROSS(inner, local=local or layer, **options), "mse")
    return model


def _fit(model):
    x, y = X.reshape(-1, 2), Y.reshape(-1, 1)
    model.fit(x, y, 8, verbose=0, shuffle=False)


@pytest.mark.parametrize("local", [None, "(^|/)head/", ["/head/k", "head/b"]])
def test_a_layer_in_fit(local):
    """The sentinel sees no error, and GroupState shows each replica."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        model = _model(local)
        sentinel = tf_xshard.DivergenceSentinel(every=1)
    x, y = X.reshape(-1, 2), Y.reshape(-1, 1)
    model.fit(x, y, 8, verbose=0, shuffle=False, callbacks=[sentinel])
    head, shared = (model.get_layer(n).kernel for n in ("head", "shared"))
    first, second = replicas.values(strategy, head)
    assert np.abs(first - second).max() > 1e-3
    assert np.ptp(replicas.values(strategy, shared), 0).max() == 0
    kinds = {
        one["variable"].split("/")[-1]: one["kind"]
        for one in tf_xshard.GroupState(model).divergence()
        if "head" in one["variable"]
    }
    assert set(kinds.values()) == {"local"} and len(kinds) == 6
    alone = tf_xshard.GroupState(model, [[0], [1]])
    for r, value in enumerate((first, second)):
        assert np.array_equal(alone.get_weights(r)["model"][2], value)


def test_saved_and_restored_by_replica(tmp_path):
    strategy = replicas.mirrored(2)
    with strategy.scope():
        model, other = _model(), _model()
        _fit(model)
        tf_xshard.GroupState(model).save(tmp_path)
        tf_xshard.GroupState(other).restore(tmp_path)
    every = zip(model.variables, other.variables, strict=True)
    for one, restored in [
        *every,
        *zip(model.optimizer.variables, other.optimizer.variables, strict=True),
    ]:
        for value, its in zip(
            replicas.values(strategy, one),
            replicas.values(strategy, restored),
            strict=True,
        ):
            assert np.array_equal(value, its), one.path
    alone = tf_xshard.GroupState(model, [[0], [1]])
    alone.export(1, tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    head = replicas.values(strategy, model.get_layer("head").kernel)
    assert np.array_equal(loaded.get_layer("head").kernel, head[1])


@pytest.mark.parametrize(
    "local, expected",
    [
        (None, ["head/kernel", "head/bias"]),
        ("head/ker", ["head/kernel"]),
        (["head/b", "shared/bias"], ["head/bias", "shared/bias"]),
    ],
)
def test_saved_with_the_model(local, expected, tmp_path):
    """A variable or a layer is saved by its path."""
    model = _model(local)
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras").optimizer
    config = loaded.get_config()["local"]
    assert config == model.optimizer.get_config()["local"]
    of_both = [
        ["/".join(v.path.split("/")[-2:]) for v in one._unreduced]
        for one in (model.optimizer, loaded)
    ]
    assert of_both == [expected] * 2


@pytest.mark.parametrize("is_built", [True, False])
def test_a_layer_with_untrained_variables(is_built, tmp_path):
    """They are no part of the config; an unbuilt layer is saved by its name."""

    def model(layer):
        result = keras.Sequential(
            [keras.layers.Input((2,)), keras.layers.Dense(2), layer]
            if is_built
            else [keras.layers.Dense(2), layer]
        )
        result.compile(CROSS(SGD(), local=layer), "mse")
        return result

    saved = model(keras.layers.BatchNormalization(name="norm"))
    if is_built:
        saved.optimizer.build(saved.trainable_variables)
    config = saved.optimizer.get_config()
    loaded = CROSS.from_config(config)
    saved.build((None, 2))
    loaded.build(saved.trainable_variables)
    assert [v.path.split("/")[-1] for v in loaded._unreduced] == [
        "gamma",
        "beta",
    ]
    if is_built:
        saved.save(tmp_path / "model.keras")
        again = keras.models.load_model(tmp_path / "model.keras").optimizer
        assert len(list(again._unreduced)) == 2


def test_slots_of_names_that_begin_alike():
    """ "w_scale"'s slots are not those of the local "w"."""
    with replicas.mirrored(2).scope():
        variables = [
            keras.Variable(0.0, name=name) for name in ("w", "w_scale")
        ]
        optimizer = CROSS(keras.optimizers.Adam(), local=variables[0])
        optimizer.build(variables)
    rows = tf_xshard.GroupState({"o": optimizer}).divergence()
    kinds = {row["variable"].split("/")[-1]: row["kind"] for row in rows}
    assert kinds["w_momentum"] == "local"
    assert kinds["w_scale_momentum"] == "slot"


def test_a_lossy_save_warns(caplog, tmp_path):
    with replicas.mirrored(2).scope():
        model = _model()
        _fit(model)
    model.save(tmp_path / "model.keras")
    assert "trains local variables, which differ by replica" in caplog.text


def _built(**options):
    variables = _variables()
    options.setdefault("local", variables[0])
    CROSS(**{"inner_optimizer": SGD(), **options}).build(variables)


def _of_two(call):
    def run():
        with replicas.mirrored(2).scope():
            model = _model()
            model.optimizer.build(model.trainable_variables)
        call(tf_xshard.GroupState(model))

    return run


def _restored_to_other_groups(state):
    import tempfile

    directory = tempfile.mkdtemp()
    state.save(directory)
    state.restore(directory, regroup="mean")


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: CROSS(SGD(), local=3), TypeError, "got 3"),
        (
            lambda: CROSS(SGD(), local="("),
            ValueError,
            "is not a regular expression",
        ),
        (
            lambda: CROSS(SGD(), local="a", scale_local_gradients=1),
            TypeError,
            "must be a bool",
        ),
        (lambda: _built(local="nonsense"), ValueError, "none of the variables"),
        (
            lambda: _built(inner_optimizer=SGD(global_clipnorm=1.0)),
            ValueError,
            "norm of all gradients",
        ),
        (
            lambda: CROSS(CROSS(SGD(), local="a")),
            ValueError,
            "Only one optimizer of a stack may reduce",
        ),
        (
            lambda: CROSS(tf_xshard.AGNOptimizer(SGD()), local="a"),
            ValueError,
            "Only one optimizer of a stack may reduce",
        ),
        *(
            (_of_two(call), ValueError, "Make each replica a group")
            for call in (
                lambda state: state.get_weights(0),
                lambda state: state.set_weights(0, {}),
                lambda state: state.merge(),
                lambda state: state.evaluate(X[0], Y[0]),
                lambda state: state.predict(X[0]),
                lambda state: state.export(0, "model.keras"),
                _restored_to_other_groups,
            )
        ),
    ],
)
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
