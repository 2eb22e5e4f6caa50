"""Steps with nan or infinite gradients leave no trace, on any replica."""

import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import seeds
from tf_xshard.optimizers import saving

O = keras.optimizers  # noqa: E741
CROSS = tf_xshard.CrossShardOptimizer
PAIRS = [[0, 1], [2, 3]]
ADAM = functools.partial(
    O.Adam, 0.1, use_ema=True, ema_overwrite_frequency=3, weight_decay=0.01
)


def _cross(inner=ADAM, **options):
    return CROSS(inner(), skip_nonfinite=True, **options)


def _tower(optimizer, num_towers=2, **options):
    return tf_xshard.TowerOptimizer(optimizer, num_towers, **options)


OPTIMIZERS = {
    "adam_ema": _cross,
    "groups": functools.partial(_cross, group_assignment=PAIRS),
    "sharded": functools.partial(_cross, shard_update=True),
    "owned": functools.partial(
        _cross, functools.partial(O.Lamb, 0.1, use_ema=True), shard_update=True
    ),
    "residuals": functools.partial(
        _cross,
        communication=tf_xshard.Communication("bfloat16", error_feedback=True),
    ),
    "accumulation": functools.partial(
        _cross, functools.partial(O.Adam, 0.1, gradient_accumulation_steps=2)
    ),
    "local": functools.partial(_cross, local="own"),
    "hook": functools.partial(
        _cross, pre_reduce=tf_xshard.clip_by_global_norm(1.0)
    ),
    # The setting of an outer optimizer holds for the whole stack.
    "tower_inside": lambda: CROSS(_tower(ADAM(), 2), skip_nonfinite=True),
}
NUM_STEPS = 6


def _variables():
    return [
        keras.Variable(np.full(shape, 0.5), dtype="float32", name=name)
        for shape, name in (((3,), "w"), ((2, 2), "own"))
    ]


def _values_of(step, r):
    """A dense gradient, and rows of a table, of one replica."""
    rng = np.random.default_rng([step, r])
    return [
        rng.normal(size=shape).astype("float32") for shape in ((3,), (2, 2))
    ]


class _Training:
    """Applies each replica's gradients in a function that is traced once."""

    def __init__(self, optimizer_fn, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.variables = _variables()
            self.optimizer = optimizer_fn()
            self.optimizer.build(self.variables)

        @tf.function(autograph=False)
        def step(*gradients):
            def on_replica():
                r = replicas.replica_id_tensor()
                own = [tf.gather(one, r) for one in gradients]
                self.optimizer.apply(
                    [self.optimizer.scale_loss(g) for g in own],
                    self.variables,
                )

            strategy.run(on_replica)

        self._step = step

    def step(self, number, bad=None):
        """Applies; `bad` is a replica and its value."""
        every = [
            _values_of(number, r)
            for r in range(self.strategy.num_replicas_in_sync)
        ]
        if bad is not None:
            r, value = bad
            every[r][1][1, 0] = value
        columns = zip(*every, strict=True)
        self._step(*(tf.constant(np.stack(one)) for one in columns))

    def state(self):
        """All replicas' values of all variables but the counters."""
        return {
            # Without Keras' number, "adam_3".
            re.sub(r"_\d+", "", one.path): replicas.values(self.strategy, one)
            for one in (*self.variables, *self.optimizer.variables)
            if "skip" not in one.path
        }


def _assert_equal(one, other):
    assert one.keys() == other.keys()
    for path, values in one.items():
        for value, its in zip(values, other[path], strict=True):
            np.testing.assert_array_equal(value, its, err_msg=path)


@pytest.mark.parametrize(
    "name, kind",
    [
        *((name, "mirrored") for name in OPTIMIZERS),
        ("adam_ema", "tpu"),
        ("groups", "tpu_permuted"),
        ("sharded", "tpu"),
        ("tower_inside", "tpu_permuted"),
    ],
)
def test_a_run_with_bad_steps_ends_as_the_run_without(name, kind):
    """Bit by bit, whichever replica has which bad value."""
    strategy = replicas.STRATEGIES[kind](4)
    good, bad = (_Training(OPTIMIZERS[name], strategy) for _ in range(2))
    for number in range(NUM_STEPS):
        good.step(number)
        bad.step(number)
        for r, value in ((number % 4, np.nan), (3 - number % 4, np.inf)):
            bad.step(100 + number, (r, value))
    _assert_equal(bad.state(), good.state())
    assert bad.optimizer.skipped_steps == 2 * NUM_STEPS
    assert good.optimizer.skipped_steps == 0
    # Without the setting the same steps do harm.
    start = _Training(lambda: CROSS(ADAM()), strategy)
    start.step(0, (3, np.nan))
    assert np.isnan(replicas.values(strategy, start.variables[1])[0]).any()


@pytest.mark.parametrize(
    "name, make",
    {
        "cross": lambda inner: _tower(CROSS(inner), 2, skip_nonfinite=True),
        "loss_scale": lambda inner: _tower(
            O.LossScaleOptimizer(inner, initial_scale=4.0),
            2,
            skip_nonfinite=True,
        ),
    }.items(),
)
def test_a_round_of_towers_is_skipped_as_a_whole(name, make):
    strategy = replicas.mirrored(4)
    good, bad = (
        _Training(lambda: make(O.SGD(0.1)), strategy) for _ in range(2)
    )
    for number in range(0, 6, 2):
        for training in (good, bad):
            training.step(number)
            training.step(number + 1)
        bad.step(100 + number, (number % 4, np.inf))
        bad.step(101 + number)
    for one, other in zip(good.variables, bad.variables, strict=True):
        # The loss scale, a power of two, is halved by the skipped rounds.
        np.testing.assert_allclose(
            replicas.values(strategy, one), replicas.values(strategy, other),
            rtol=1e-6,
        )  # fmt: skip
    assert bad.optimizer.skipped_steps == 3
    bad.optimizer.reset()
    assert bad.optimizer.skipped_steps == 3


def test_a_loss_scale_and_one_vote():
    """The LossScaleOptimizer lowers its scale; the counter counts."""
    strategy = replicas.mirrored(4)

    def make():
        return CROSS(
            O.LossScaleOptimizer(O.SGD(0.1), initial_scale=64.0),
            skip_nonfinite=True,
        )

    training = _Training(make, strategy)
    training.step(0)
    before = training.state()
    training.step(1, (2, np.inf))
    after = training.state()
    np.testing.assert_array_equal(before["w"], after["w"])
    assert training.optimizer.skipped_steps == 1
    scale = training.optimizer.inner_optimizer.dynamic_scale
    assert replicas.values(strategy, scale) == [32.0] * 4
    plan = tf_xshard.communication_plan(training.optimizer)
    votes = [one for one in plan.operations if one.purpose == "finite vote"]
    assert len(votes) == 1


def test_the_sum_overflows(capfd):
    """Each replica's gradient is finite, and their sum is not."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(1.0, dtype="float16")
        optimizer = _cross(functools.partial(O.SGD, 1.0), reduction="sum")
    replicas.apply_once(
        strategy, optimizer, lambda r: [tf.constant(6e4, tf.float16)], [weight]
    )
    assert replicas.values(strategy, weight) == [1, 1]
    assert optimizer.skipped_steps == 1
    assert "the reduced gradient of" in capfd.readouterr().err


def _agn(**options):
    return tf_xshard.AGNOptimizer(
        O.SGD(1.0),
        communication_period=3,
        local_optimizer=O.SGD(0.1),
        skip_nonfinite=True,
        **options,
    )


@pytest.mark.parametrize("kind", ["mirrored", "tpu"])
def test_agn_skips_local_steps_by_replica(kind):
    """The other replicas step; the period is that of all."""
    strategy = replicas.STRATEGIES[kind](4)
    training = _Training(_agn, strategy)
    local = np.full((4, 2, 2), 0.5, "float32")
    for number in range(3):
        training.step(number, (number, np.nan))
        if number == 2:
            break
        for r in range(4):
            if r != number:
                local[r] -= np.float32(0.1) * 4 * _values_of(number, r)[1]
        np.testing.assert_allclose(
            replicas.values(strategy, training.variables[1]), local, rtol=1e-5
        )
    total = sum(
        4 * _values_of(number, r)[1]
        for number in range(3)
        for r in range(4)
        if r != number
    )
    center = 0.5 - total / 4 / 3
    for value in replicas.values(strategy, training.variables[1]):
        np.testing.assert_allclose(value, center, rtol=1e-5)
    assert training.optimizer.skipped_steps == 0
    assert training.optimizer.skipped_local_steps == 3


def test_agn_skips_an_exchange(capfd):
    """The sum overflows: all go back to the center, and continue."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(1.0, dtype="float16")
        optimizer = tf_xshard.AGNOptimizer(
            O.SGD(1.0),
            communication_period=2,
            local_optimizer=O.SGD(1e-6),
            reduction="sum",
            normalize=False,
            skip_nonfinite=True,
            loss_normalization="replica",
        )
        optimizer.build([weight])
    apply = replicas.applying(
        strategy, optimizer, lambda r: [tf.constant(3e4, tf.float16)], [weight]
    )
    apply()
    apply()
    assert replicas.values(strategy, weight) == [1, 1]
    assert int(optimizer.exchanges.numpy()) == 1
    assert (optimizer.skipped_steps, optimizer.skipped_local_steps) == (1, 0)
    assert "in exchange 0, counted" in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["mirrored", "tpu"])
def test_agn_skips_a_period_without_any_step(kind, capfd):
    """Nothing reaches the center, not even weight decay; the limit raises."""
    strategy = replicas.STRATEGIES[kind](4)
    limit = {"max_consecutive_skips": 1} if kind == "mirrored" else {}

    def make():
        return tf_xshard.AGNOptimizer(
            O.SGD(1.0, weight_decay=0.5),
            communication_period=2,
            skip_nonfinite=True,
            **limit,
        )

    training = _Training(make, strategy)
    every = np.full((4, 3), np.nan, "float32"), np.zeros((4, 2, 2), "float32")
    training._step(*map(tf.constant, every))
    if limit:
        assert "This replica skips its local step" in capfd.readouterr().err
    training._step(*map(tf.constant, every))
    for variable in training.variables:
        assert (np.array(replicas.values(strategy, variable)) == 0.5).all()
    optimizer = training.optimizer
    assert (optimizer.skipped_steps, optimizer.skipped_local_steps) == (1, 8)
    if limit:
        training._step(*map(tf.constant, every))
        with pytest.raises(tf.errors.InvalidArgumentError, match="skips=1"):
            training._step(*map(tf.constant, every))


def test_the_limit():
    """Raises in the step beyond it. A good step starts the count again."""
    strategy = replicas.mirrored(4)
    training = _Training(
        functools.partial(_cross, max_consecutive_skips=2), strategy
    )
    training.step(0)
    for number in (1, 2):
        training.step(number, (0, np.nan))
        training.step(number, (1, np.nan))
        training.step(number)
    before = training.state()
    training.step(3, (2, np.nan))
    training.step(3, (2, np.nan))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="max_consecutive_skips=2"
    ):
        training.step(3, (2, np.nan))
    _assert_equal(training.state(), before)


def test_what_is_printed(capfd):
    strategy = replicas.mirrored(4)
    training = _Training(_cross, strategy)
    training.step(0)
    training.step(1)
    assert "tf_xshard" not in capfd.readouterr().err
    training.step(2, (3, np.inf))
    [line] = capfd.readouterr().err.strip().splitlines()
    assert line == (
        "tf_xshard: the gradient of 'own' is nan or infinite on replica 3 in"
        " step 2, counted from 0. All replicas skip the step."
    )
    training.step(3, (0, np.nan))
    assert "on replica 0 in step 3" in capfd.readouterr().err


def test_fit_shows_it():
    with replicas.mirrored(2).scope():
        seeds.seed(1)
        model = keras.Sequential(
            [keras.layers.Input((2,)), keras.layers.Dense(1)]
        )
        model.compile(_cross(), "mse")
    x = np.ones((16, 2), "float32")
    x[9] = np.nan
    ledger = tf_xshard.CommunicationLedger()
    history = model.fit(
        x, x[:, :1], 4, 2, verbose=0, shuffle=False, callbacks=[ledger]
    ).history
    assert history["skipped_steps"] == [1, 1]
    assert model.optimizer.skipped_steps == 2
    assert int(model.optimizer.iterations.numpy()) == 6
    assert np.isfinite(model.get_weights()[0]).all()


@pytest.mark.parametrize("make", [_cross, _agn, lambda: _tower(_cross())])
def test_saved_with_the_model(make, tmp_path):
    """The setting, and the count, which goes on."""
    training = _Training(make, replicas.mirrored(1))
    training.step(0, (0, np.nan))
    training.step(0, (0, np.nan))
    optimizer = training.optimizer
    new = type(optimizer).from_config(optimizer.get_config())
    assert new.skip_nonfinite
    new.build(training.variables)
    new.set_weights([v.numpy() for v in optimizer.variables])
    assert new.skipped_steps == optimizer.skipped_steps
    if isinstance(new, tf_xshard.AGNOptimizer):
        assert new.skipped_local_steps == optimizer.skipped_local_steps == 2
    else:
        assert new.skipped_steps >= 1


class _Moving:
    """A model whose optimizer may skip, and its state before and after."""

    def __init__(self, make, skips):
        seeds.seed(1)
        self.model = keras.Sequential(
            [keras.layers.Input((2,)), keras.layers.Dense(1)]
        )
        self.model.compile(make(skip_nonfinite=skips), "mse")
        self.model.optimizer.build(self.model.trainable_variables)

    def fit(self):
        x = np.ones((4, 2), "float32")
        self.model.fit(x, x[:, :1], 2, verbose=0, shuffle=False)

    def values(self):
        return [
            v.numpy()
            for v in (*self.model.variables, *self.model.optimizer.variables)
            if v.path.split("/")[-1] not in saving.OPTIONAL
        ]


def _by_keras_file(one, other, directory):
    one.model.save(directory / "model.keras")
    other.model.load_weights(directory / "model.keras")


def _by_group_state(one, other, directory):
    classes = [type(x.model.optimizer) for x in (one, other)]
    assert classes[0] is classes[1]
    tf_xshard.GroupState(one.model).save(directory)
    tf_xshard.GroupState(other.model).restore(directory)


def _by_checkpoint(one, other, directory):
    def checkpoint(moving):
        return tf.train.Checkpoint(
            model=moving.model, optimizer=moving.model.optimizer
        )

    path = checkpoint(one).write(directory / "checkpoint")
    checkpoint(other).read(path).expect_partial()


MAKERS = {
    "residuals": lambda **options: CROSS(
        O.Adam(),
        communication=tf_xshard.Communication("bfloat16", error_feedback=True),
        **options,
    ),
    "tower": lambda **options: _tower(O.Adam(), 3, **options),
    "agn": lambda **options: tf_xshard.AGNOptimizer(O.Adam(), **options),
}


@pytest.mark.parametrize(
    "move", [_by_keras_file, _by_group_state, _by_checkpoint]
)
@pytest.mark.parametrize("name", MAKERS)
def test_the_setting_can_change_between_runs(name, move, tmp_path, recwarn):
    """A run that diverged goes on with it, and back; nothing starts fresh."""
    for skips in (True, False):
        one, other = (_Moving(MAKERS[name], s) for s in (not skips, skips))
        one.fit()
        directory = tmp_path / str(skips)
        directory.mkdir()
        move(one, other, directory)
        for value, its in zip(one.values(), other.values(), strict=True):
            np.testing.assert_array_equal(value, its)
        assert other.model.optimizer.skipped_steps == 0
        other.fit()
    assert not [w for w in recwarn if "start fresh" in str(w.message)]


def test_off_by_default_and_not_in_the_config():
    optimizer = CROSS(O.SGD())
    assert not optimizer.skip_nonfinite and optimizer.skipped_steps == 0
    assert not {"skip_nonfinite", "max_consecutive_skips"} & set(
        optimizer.get_config()
    )


def _inside_multi_optimizer():
    O.MultiOptimizer(lambda v: _cross()).build(_variables())


def _several_that_reduce():
    inner = O.MultiOptimizer(lambda v: CROSS(O.SGD()))
    _tower(inner, 2, skip_nonfinite=True).build(_variables())


def _limit_in_xla():
    [weight, _] = _variables()
    optimizer = _cross(max_consecutive_skips=1)
    optimizer.build([weight])
    tf.function(
        lambda: optimizer.apply([tf.ones(3)], [weight]), jit_compile=True
    )()


def _limit_on_a_tpu():
    with replicas.tpu(4).scope():
        _cross(max_consecutive_skips=1)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: CROSS(O.SGD(), skip_nonfinite=1),
            TypeError,
            "skip_nonfinite must be a bool",
        ),
        (
            lambda: _cross(max_consecutive_skips=0),
            ValueError,
            "must be positive",
        ),
        (
            lambda: CROSS(O.SGD(), max_consecutive_skips=1),
            ValueError,
            "needs skip_nonfinite=True",
        ),
        (
            lambda: _tower(_cross(), skip_nonfinite=False),
            ValueError,
            "need one value of skip_nonfinite",
        ),
        (_inside_multi_optimizer, ValueError, "whose other optimizers would"),
        (_several_that_reduce, ValueError, "reduce the gradients of different"),
        (
            lambda: _tower(
                O.LossScaleOptimizer(CROSS(O.SGD())), skip_nonfinite=True
            ),
            ValueError,
            "a LossScaleOptimizer is around",
        ),
        (_limit_in_xla, ValueError, "a program that XLA compiles"),
        (_limit_on_a_tpu, ValueError, "can't be used under TPUStrategy"),
    ],
)
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
