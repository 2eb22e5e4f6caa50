"""Variables that are not reduced: each replica trains its own copy."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import filled
from tests.support import replicas
from tests.support import seeds
from tests.support import sharded
from tests.support import steps

O = keras.optimizers  # noqa: E741
SGD = O.SGD
CROSS = tf_xshard.CrossShardOptimizer
T, V = TypeError, ValueError
PAIRS = [[0, 1], [2, 3]]
RNG = np.random.default_rng(3)
X = RNG.normal(size=(12, 2)).astype("float32")
Y = RNG.normal(size=(12, 1)).astype("float32") + np.repeat([[3], [-3]], 6, 0)
VARIABLES = [
    functools.partial(keras.Variable, np.zeros(shape, "float32"), name=name)
    for name, shape in (("shared", 2), ("own", 3))
]


@pytest.mark.parametrize(
    "kind, reduction, normalization, options, factor",
    [
        ("mirrored", "mean", "global", {}, 0.5),
        ("mirrored", "sum", "replica", {}, 1),
        ("mirrored", "mean", "replica", {"scale_local_gradients": False}, 1),
        ("tpu", "mean", "replica", {}, 0.5),
        ("tpu_permuted", "sum", "global", {}, 1),
    ],
)
def test_oracle(kind, reduction, normalization, options, factor):
    divisor = 4 if normalization == "global" else 1
    shared, own = steps.stepped(
        lambda: CROSS(
            SGD(1.0),
            reduction,
            PAIRS,
            local="own",
            loss_normalization=normalization,
            **options,
        ),
        lambda r: [tf.fill([size], 10.0**r / divisor) for size in (2, 3)],
        VARIABLES,
        kind,
    )
    for members in PAIRS:
        total = getattr(np, reduction)([10.0**m for m in members])
        for r in members:
            np.testing.assert_allclose(shared[r], [-total] * 2, rtol=1e-6)
            expected = [-factor * 10.0**r] * 3
            np.testing.assert_allclose(own[r], expected, rtol=1e-6)


def _sgd():
    return SGD(0.1)


def _tower(inner):
    return tf_xshard.TowerOptimizer(inner, 1)


_CLIP = tf_xshard.clip_by_global_norm(1e3)
_BFLOAT16 = tf_xshard.Communication("bfloat16", error_feedback=True)
# The inner optimizer, and what is around it.
WRAPS = {
    "adam": (lambda: O.Adam(0.1), {}),
    "sharded": (lambda: O.Adam(0.1), {"shard_update": True}),
    "lamb": (lambda: O.Lamb(0.1, clipnorm=0.1), {"shard_update": True}),
    "adafactor": (lambda: O.Adafactor(0.1), {"shard_update": True}),
    "residuals": (_sgd, {"communication": _BFLOAT16}),
    "tower_around": (_sgd, {"wrap": _tower}),
    "tower_inside": (lambda: _tower(_sgd()), {}),
    "loss_scale": (lambda: O.LossScaleOptimizer(_sgd()), {}),
    "hooks": (_sgd, {"pre_reduce": _CLIP, "post_reduce": _CLIP}),
}
if hasattr(O, "MultiOptimizer"):  # Keras 3.12 has not.
    _by_path = lambda v: _sgd() if v.path.endswith("bias") else O.Lamb(0.1)
    WRAPS["multi"] = (
        lambda: O.MultiOptimizer(_by_path),
        {"shard_update": True},
    )


@pytest.fixture(scope="module")
def trained():
    """What each of `WRAPS` has trained."""
    result = {
        name: sharded.Trained(
            inner_fn,
            replicas.mirrored(2),
            local="bias",
            **options,
        )
        for name, (inner_fn, options) in WRAPS.items()
    }
    sharded.train([*result.values()])
    return result


@pytest.mark.parametrize("name", WRAPS)
def test_equals_one_device_with_a_copy_for_each_replica(name, trained):
    """The gradient of the mean loss by copy r is g_r / 2."""
    tolerance = 1e-2 if name == "residuals" else 1e-6
    inner_fn, _ = WRAPS[name]
    for r in range(2):
        of_copy = [
            {"kernel": step["kernel"].mean(0), "bias": step["bias"][r] / 2}
            for step in sharded.gradients(2)
        ]
        expected, _ = sharded.one_device(inner_fn, of_copy)
        for got, want in zip(trained[name].weights, expected, strict=True):
            np.testing.assert_allclose(got[r], want.numpy(), atol=tolerance)


def test_kinds_of_slots():
    """ "own_scale"'s slots are not those of the local "own"."""
    names = ("shared", "own", "own_scale")
    for kind, num_slots in (("Lamb", 2), ("Adafactor", 3)):
        with replicas.mirrored(2).scope():
            variables = [
                keras.Variable(np.ones((3, 2)), dtype="float32", name=one)
                for one in names
            ]
            optimizer = CROSS(getattr(O, kind)(), local="own$")
            optimizer.build(variables)
        state = tf_xshard.GroupState(
            {"weights": variables, "optimizer": optimizer}, [[0, 1]]
        )
        kinds = [row["kind"] for row in state.divergence()]
        assert kinds.count("local") == 1 + num_slots
        # Those of the others, the iterations and the rate.
        assert kinds.count("slot") == 2 * num_slots + 2


def test_no_residual_no_bytes():
    with replicas.mirrored(2).scope():
        variables = [make() for make in VARIABLES]
        optimizer = CROSS(SGD(), local=variables[1], communication=_BFLOAT16)
        alone = CROSS(SGD(), communication=_BFLOAT16)
    plan = tf_xshard.communication_plan(optimizer, variables)
    expected = tf_xshard.communication_plan(alone, variables[:1])
    assert plan.bytes_per_step == expected.bytes_per_step > 0
    names = [v.path.split("/")[-1] for v in optimizer.variables]
    assert [n for n in names if "residual" in n] == ["shared_residual"]


def test_rows_and_missing_gradients():
    """An Embedding may be local, and have no gradient on a replica."""

    def gradients(r):
        rows = tf.IndexedSlices([[1.0], [2.0]], [1, 1], [3, 1])
        return [tf.fill([2], 2.0 * r), None if r else rows]

    make = functools.partial(keras.Variable, np.zeros((3, 1)), name="own")
    # Keras warns of the replica that has none.
    with pytest.warns(UserWarning, match="Gradients do not exist for"):
        shared, own = steps.stepped(
            lambda: CROSS(SGD(1.0), local="own"),
            gradients,
            [VARIABLES[0], make],
            num_replicas=2,
        )
    assert own[0].ravel().tolist() == [0, -3, 0] and not own[1].any()
    np.testing.assert_array_equal(shared, np.full([2, 2], -2))


def _model(local=None):
    seeds.seed(5)
    model = keras.Sequential(
        [
            keras.layers.Input((2,)),
            keras.layers.Dense(3, "tanh", name="shared"),
            keras.layers.Dense(1, name="head"),
        ]
    )
    model.compile(CROSS(O.Adam(0.1), local=local or model.layers[-1]), "mse")
    return model


@pytest.fixture(scope="module")
def fitted():
    """The sentinel sees no error."""
    with replicas.mirrored(2).scope():
        model = _model()
        sentinel = tf_xshard.DivergenceSentinel(every=1)
    model.fit(X, Y, batch_size=4, verbose=0, callbacks=[sentinel])
    return model


def test_a_layer_in_fit(fitted):
    """GroupState shows each replica."""
    head, shared = (
        replicas.values(replicas.mirrored(2), layer.kernel)
        for layer in fitted.layers[::-1]
    )
    assert np.abs(head[0] - head[1]).max() > 1e-3
    assert np.ptp(shared, 0).max() == 0
    kinds = [
        one["kind"]
        for one in tf_xshard.GroupState(fitted).divergence()
        if "head" in one["variable"]
    ]
    assert kinds == ["local"] * 6
    alone = tf_xshard.GroupState(fitted, [[0], [1]])
    for r in range(2):
        assert np.array_equal(alone.get_weights(r)["model"][2], head[r])


def test_saved_and_restored_by_replica(fitted, caplog, tmp_path):
    """A file of one value for all replicas says what it loses."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        other = _model()
    tf_xshard.GroupState(fitted).save(tmp_path)
    tf_xshard.GroupState(other).restore(tmp_path)
    for variables in zip(*map(filled.variables, (fitted, other)), strict=True):
        saved, restored = (replicas.values(strategy, v) for v in variables)
        np.testing.assert_array_equal(saved, restored)
    path = tmp_path / "model.keras"
    tf_xshard.GroupState(fitted, [[0], [1]]).export(1, path)
    loaded = keras.models.load_model(path)
    head = replicas.values(strategy, fitted.layers[-1].kernel)
    np.testing.assert_array_equal(loaded.layers[-1].kernel, head[1])
    fitted.save(path)
    assert "trains local variables, which differ by replica" in caplog.text


def test_saved_with_the_model(tmp_path):
    """A variable or a layer is saved by its path."""
    for local, expected in (
        (None, ["head/kernel", "head/bias"]),
        (["head/b", "shared/bias"], ["head/bias", "shared/bias"]),
    ):
        model = _model(local)
        model.optimizer.build(model.trainable_variables)
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras").optimizer
        assert loaded.get_config() == model.optimizer.get_config()
        for one in (model.optimizer, loaded):
            paths = [v.path.split("/")[-2:] for v in one._unreduced]
            assert ["/".join(names) for names in paths] == expected


def test_an_unbuilt_layer_is_saved_by_its_name():
    """Its untrained variables are no part of the config."""
    layer = keras.layers.BatchNormalization(name="norm")
    model = keras.Sequential([keras.layers.Dense(2), layer])
    loaded = CROSS.from_config(CROSS(SGD(), local=layer).get_config())
    model.build((None, 2))
    loaded.build(model.trainable_variables)
    names = [v.path.split("/")[-1] for v in loaded._unreduced]
    assert names == ["gamma", "beta"]


def _built(local, **options):
    CROSS(SGD(**options), local=local).build([make() for make in VARIABLES])


@pytest.mark.parametrize(
    "error, message, call",
    [
        (T, "got 3", lambda: CROSS(SGD(), local=3)),
        (T, "be a bool", lambda: CROSS(SGD(), scale_local_gradients=1)),
        (V, "not a regular expre", lambda: CROSS(SGD(), local="(")),
        (V, "none of the variables", lambda: _built("none")),
        (V, "of all gradients", lambda: _built("own", global_clipnorm=1.0)),
        (V, "Only one optimizer", lambda: CROSS(CROSS(SGD(), local="a"))),
    ],
)
def test_refused(error, message, call):
    with pytest.raises(error, match=message):
        call()


def test_a_value_of_a_whole_group_is_refused(fitted, tmp_path):
    state = tf_xshard.GroupState(fitted)
    state.save(tmp_path)
    for call in (
        lambda: state.get_weights(0),
        lambda: state.set_weights(0, {}),
        lambda: state.merge(),
        lambda: state.evaluate(X, Y),
        lambda: state.predict(X),
        lambda: state.export(0, "model.keras"),
        lambda: state.restore(tmp_path, regroup="mean"),
    ):
        with pytest.raises(ValueError, match="Make each replica a group"):
            call()
