"""shard_update=True: state that is whole wherever it is seen or saved."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import seeds
from tests.support import sharded
from tests.support import versions

O = keras.optimizers  # noqa: E741
GROUPS = [[0, 2], [3, 1]]


def _momentum():
    return O.SGD(0.5, momentum=0.5, global_clipnorm=0.1)


# The first divides variables by shards, the others by owners.
INNERS = {
    "momentum": _momentum,
    "lamb": lambda: O.Lamb(0.05, global_clipnorm=0.1),
    "adafactor": lambda: O.Adafactor(0.05),
}
of_each_kind = pytest.mark.parametrize("inner", INNERS)


def _trained(
    shard_update,
    num_replicas=4,
    groups=GROUPS,
    num_steps=3,
    inner="momentum",
    devices=None,
):
    return sharded.Trained(
        INNERS[inner],
        replicas.mirrored_on(devices or tuple(range(num_replicas))),
        groups,
        num_steps=num_steps,
        shard_update=shard_update,
    )


# Read, and not changed.
_shared = functools.cache(_trained)


def _holder(trained):
    return {
        "weights": list(trained.variables),
        "optimizer": trained.optimizer,
    }


@of_each_kind
def test_variables_are_whole_outside_of_a_step(inner):
    mine, whole = (
        _shared(one, inner=inner).optimizer.variables for one in (True, False)
    )
    names = [v.path.split("/")[-1] for v in mine]
    assert names == [v.path.split("/")[-1] for v in whole]
    assert {"kernel_momentum", "kernel_velocity"} & set(names)
    for one, other in zip(mine, whole, strict=True):
        assert one.shape == other.shape and one.ndim == other.ndim
        for read in (
            np.asarray,
            lambda v: v.numpy(),
            tf.convert_to_tensor,
            lambda v: v.value,
            lambda v: v + 1,
        ):
            np.testing.assert_allclose(
                np.asarray(read(one)), np.asarray(read(other)), atol=1e-6
            )


@of_each_kind
def test_slots_can_not_be_read_in_a_graph(inner):
    slot = _shared(True, inner=inner).slots()[0]
    read = tf.function(lambda: slot.value, autograph=False)
    with pytest.raises(RuntimeError, match="outside of the tf.function"):
        read()


@of_each_kind
def test_set_weights_and_assign(inner):
    trained = _trained(True, num_steps=0, inner=inner)
    values = [
        np.arange(v.numpy().size, dtype="float32").reshape(v.shape)
        if len(v.shape)
        else v.numpy()
        for v in trained.optimizer.variables
    ]
    trained.optimizer.set_weights(values)
    for variable, value in zip(
        trained.optimizer.variables, values, strict=True
    ):
        for one in replicas.values(trained.strategy, variable):
            np.testing.assert_array_equal(one, value)
    slot = trained.slots()[0]
    with pytest.raises(ValueError, match="shape"):
        slot.assign(np.zeros([4]))
    before = slot.numpy()
    slot.assign_add(tf.ones(slot.shape))
    np.testing.assert_array_equal(slot.numpy(), before + 1)


def _assert_holds(state, group, expected):
    """Holds a group's optimizer against arrays, bit by bit."""
    for value, want in zip(
        state.get_weights(group)["optimizer"], expected, strict=True
    ):
        np.testing.assert_array_equal(value, want)


@of_each_kind
def test_group_state_of_whole_slots(inner, tmp_path):
    """Into the whole update and back, each group its own; in other numbers."""
    model = _trained(True, inner=inner)
    moved = _trained(False, num_steps=0, inner=inner)
    for source, target, path in (
        (model, moved, tmp_path / "sharded"),
        (moved, model, tmp_path / "whole"),
    ):
        state, other = (
            tf_xshard.GroupState(_holder(one)) for one in (source, target)
        )
        assert not any(row["within_group"] for row in state.divergence())
        state.save(path)
        expected = [state.get_weights(g)["optimizer"] for g in range(2)]
        source.run(3)
        other.restore(path)
        for group in range(2):
            _assert_holds(other, group, expected[group])
        target.run(3)
        assert sharded.difference(moved.weights, model.weights) < 1e-6
        moved.run(1)  # Apart from the sharded one, which is restored next.

    last = tf_xshard.GroupState(
        _holder(_trained(True, 2, [[0, 1]], num_steps=0, inner=inner))
    )
    last.restore(tmp_path / "whole", regroup={0: 1})
    _assert_holds(last, 0, expected[1])

    state = tf_xshard.GroupState(_holder(model))
    weights = state.get_weights(1)
    state.set_weights(0, weights)
    for group in range(2):
        _assert_holds(state, group, weights["optimizer"])
    model.run(1)
    first, second = (state.get_weights(g)["optimizer"] for g in range(2))
    state.merge()
    for value, a, b in zip(
        state.get_weights(1)["optimizer"], first, second, strict=True
    ):
        if value.dtype == np.float32:
            np.testing.assert_allclose(value, (a + b) / 2, rtol=1e-5)


@of_each_kind
@pytest.mark.parametrize(
    "order",
    [(replicas.MIXED, (0, 1, 2, 3)), ((0, 1, 2, 3), replicas.REVERSED)],
    ids=str,
)
def test_files_do_not_depend_on_the_order_of_devices(inner, order, tmp_path):
    """A state and a checkpoint, read by a strategy with other devices."""
    source, target = (
        _trained(True, inner=inner, devices=devices, num_steps=num_steps)
        for devices, num_steps in zip(order, (3, 0), strict=True)
    )
    whole = _trained(False, inner=inner)
    for mine, others in zip(
        source.state().values(), whole.state().values(), strict=True
    ):
        np.testing.assert_allclose(mine, others, atol=1e-5)
    expected = source.state()

    tf_xshard.GroupState(_holder(source)).save(tmp_path / "state")
    tf_xshard.GroupState(_holder(target)).restore(tmp_path / "state")
    for name, value in target.state().items():
        np.testing.assert_array_equal(value, expected[name], name)
    for one in (source, target):
        one.run(2)
    assert sharded.difference(source.weights, target.weights) == 0

    # TensorFlow's own files have the values of replica 0.
    path = tf.train.Checkpoint(**_listed(source)).write(str(tmp_path / "file"))
    expected = source.state()
    target.run(1)
    tf.train.Checkpoint(**_listed(target)).read(path).assert_consumed()
    for name, value in target.state().items():
        for one in value:
            np.testing.assert_array_equal(one, expected[name][0], name)


def _listed(trained):
    return {
        "optimizer": trained.optimizer,
        **{f"weight_{i}": v for i, v in enumerate(trained.variables)},
    }


@pytest.mark.parametrize("kind", [O.SGD, O.Lamb])
def test_averages_at_the_end_of_fit(kind):
    """`fit` calls finalize_variable_values; each group has its own average."""
    found = []
    for shard_update in (False, True):
        trained = sharded.Trained(
            functools.partial(kind, 0.5, use_ema=True, ema_momentum=0.5),
            replicas.mirrored(4),
            GROUPS,
            num_steps=4,
            shard_update=shard_update,
        )
        trained.optimizer.finalize_variable_values(trained.variables)
        found.append(
            [
                np.stack(replicas.values(trained.strategy, v))
                for v in trained.variables
            ]
        )
        before = trained.weights
    assert sharded.difference(*found) < 1e-6
    assert sharded.difference(found[1], before) > 1e-3


def _model(strategy, inner_fn=lambda: O.SGD(0.5, momentum=0.5), **kwargs):
    seeds.seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((3,)), keras.layers.Dense(2)]
        )
        model.compile(
            tf_xshard.CrossShardOptimizer(inner_fn(), **kwargs), "mse"
        )
    return model


X = np.linspace(-1, 1, 24, dtype="float32").reshape(8, 3)


def _fit(model, epochs, **kwargs):
    model.fit(
        X,
        X[:, :2],
        batch_size=8,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        **kwargs,
    )
    return [
        np.stack(replicas.values(model.distribute_strategy, v))
        for v in model.weights
    ]


@pytest.mark.parametrize(
    "inner_fn", [lambda: O.SGD(0.5, momentum=0.5), lambda: O.Adafactor(0.1)]
)
def test_a_whole_model_and_its_config(inner_fn, tmp_path):
    """A .keras file, on another number of replicas and without a strategy."""
    model = _model(replicas.mirrored(2), inner_fn, shard_update=True)
    _fit(model, 3)
    model.save(tmp_path / "model.keras")
    expected = _fit(model, 2)
    for num_replicas in (1, 2, 4):
        with replicas.mirrored(num_replicas).scope():
            again = keras.saving.load_model(tmp_path / "model.keras")
        assert again.optimizer.shard_update
        assert int(again.optimizer.iterations.numpy()) == 3
        got = _fit(again, 2)
        want = [np.stack([value[0]] * num_replicas) for value in expected]
        assert sharded.difference(got, want) < 1e-6
        if num_replicas == 2:
            assert not sharded.difference(got, expected)


@pytest.mark.parametrize("shard_update", [True, False])
def test_callbacks_that_save(shard_update, tmp_path):
    """Interrupted and resumed: as if it had gone through."""
    makers = [
        lambda: keras.callbacks.BackupAndRestore(tmp_path / "backup"),
        lambda: tf_xshard.GroupCheckpoint(tmp_path / "groups"),
    ]
    if not shard_update:  # group_checkpoint_test.py has the other.
        del makers[1]

    begun = []

    class Note(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            begun.append(epoch)

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def trained(*callbacks):
        model = _model(replicas.mirrored(2), shard_update=shard_update)
        begun.clear()
        return _fit(model, 4, callbacks=[*callbacks, Note()])

    with pytest.raises(KeyboardInterrupt):
        trained(
            *(make() for make in makers),
            keras.callbacks.ModelCheckpoint(tmp_path / "best.keras"),
            tf_xshard.DivergenceSentinel(every=1),
            Interrupt(),
        )
    expected = trained()
    for make in makers:
        got = trained(make())
        assert begun == [2, 3]
        assert not sharded.difference(got, expected)
    loaded = keras.saving.load_model(tmp_path / "best.keras")
    assert int(loaded.optimizer.iterations.numpy()) == 2


class Unknown(O.Adam):
    pass


class Lookahead(O.SGD):
    """Wraps another optimizer, and may look at whole variables."""

    def __init__(self, inner_optimizer):
        super().__init__()
        self.inner_optimizer = inner_optimizer


class HiddenSlots(O.SGD):
    def build(self, variables):
        super().build(variables)
        self.own = [self.add_variable([2], name="own") for _ in variables]


@pytest.mark.parametrize(
    "inner_fn, error",
    [
        (Unknown, r"elementwise\(Unknown\).*per_variable\(Unknown\)"),
        (lambda: O.LossScaleOptimizer(Unknown()), "Unknown"),
        (lambda: Lookahead(O.SGD()), r"tf_xshard.elementwise\(Lookahead\)"),
        (
            lambda: tf_xshard.TowerOptimizer(O.SGD(), 2),
            "TowerOptimizer can't be inside.*innermost",
        ),
        (
            lambda: tf_xshard.CrossShardOptimizer(O.SGD()),
            "CrossShardOptimizer can't be inside",
        ),
        (
            lambda: tf_xshard.AGNOptimizer(O.SGD()),
            "AGNOptimizer can't be inside.*different variables",
        ),
    ],
)
def test_what_can_not_be_sharded_is_refused_when_it_is_wrapped(inner_fn, error):
    inner = inner_fn()
    with pytest.raises(ValueError, match=error):
        tf_xshard.CrossShardOptimizer(inner, shard_update=True)
    # It has not been changed: it can still be wrapped.
    tf_xshard.CrossShardOptimizer(inner)


@versions.needs_multi_optimizer
def test_what_multi_optimizer_chooses_is_checked():
    with replicas.mirrored(2).scope():
        optimizer = tf_xshard.CrossShardOptimizer(
            O.MultiOptimizer(lambda v: Unknown()), shard_update=True
        )
        with pytest.raises(ValueError, match="Unknown"):
            optimizer.build([keras.Variable(tf.ones([3]))])


def test_what_is_found_out_when_it_is_built():
    with replicas.mirrored(2).scope():
        weight = keras.Variable(tf.ones([4]))
        inner = O.SGD()
        inner.build([weight])
        optimizer = tf_xshard.CrossShardOptimizer(inner, shard_update=True)
        with pytest.raises(ValueError, match="has been built with whole"):
            optimizer.build([weight])
        optimizer = tf_xshard.CrossShardOptimizer(
            tf_xshard.elementwise(HiddenSlots)(), shard_update=True
        )
        with pytest.raises(ValueError, match="add_variable_from_reference"):
            optimizer.build([weight])


def test_arguments():
    with pytest.raises(TypeError, match="shard_update must be a bool"):
        tf_xshard.CrossShardOptimizer(O.SGD(), shard_update="yes")
    for declare in (tf_xshard.elementwise, tf_xshard.per_variable):
        with pytest.raises(TypeError, match="takes a class of Keras"):
            declare(O.SGD())


@pytest.mark.parametrize("divide", ["elementwise", "per_variable"])
def test_tensorflow_variables_instead_of_keras_variables(divide):
    """Both name the same variable; TensorFlow's own have no path."""

    class Momentum(O.SGD):
        pass

    getattr(tf_xshard, divide)(Momentum)
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(tf.ones([5]))
        other = tf.Variable(tf.ones([3]), name="other")
        optimizer = tf_xshard.CrossShardOptimizer(
            Momentum(0.5, momentum=0.5), shard_update=True
        )
        optimizer.build([weight, other])
    strategy.run(
        lambda: optimizer.apply(
            [tf.ones([5]), tf.ones([3])], [weight.value, other]
        )
    )
    for variable in (weight, other):
        for value in replicas.values(strategy, variable):
            np.testing.assert_array_equal(value, np.zeros(variable.shape))


def test_export_leaves_the_optimizer_out(tmp_path):
    model = _model(replicas.mirrored(2), shard_update=True)
    _fit(model, 1)
    with pytest.raises(RuntimeError, match=r"use model.export\(\)"):
        tf.saved_model.save(model, str(tmp_path / "all"))
    model.export(tmp_path / "exported", verbose=False)


@pytest.mark.parametrize(
    "inner_fn", [lambda: O.SGD(0.5, momentum=0.5), lambda: O.Adafactor(0.1)]
)
def test_a_model_in_groups_loads_outside_its_strategy(inner_fn, tmp_path):
    """With whole slots, which it saves again; only a step needs the groups."""
    groups, strategy = [[1, 0]], replicas.mirrored(2)
    model = _model(
        strategy, inner_fn, group_assignment=groups, shard_update=True
    )
    _fit(model, 3)
    model.save(tmp_path / "model.keras")
    outside = keras.saving.load_model(tmp_path / "model.keras")
    variables = [*model.weights, *model.optimizer.variables]
    for mine, other in zip(
        [*outside.weights, *outside.optimizer.variables], variables, strict=True
    ):
        np.testing.assert_array_equal(mine.numpy(), np.asarray(other.numpy()))
    with pytest.raises(ValueError, match="is for 2 replicas, but"):
        outside.fit(X, X[:, :2], verbose=0)
    outside.save(tmp_path / "again.keras")
    with strategy.scope():
        again = keras.saving.load_model(tmp_path / "again.keras")
    assert sharded.difference(_fit(again, 2), _fit(model, 2)) == 0
