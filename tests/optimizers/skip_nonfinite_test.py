"""Steps with nan or infinite gradients leave no trace, on any replica."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import training as training_lib
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
    "groups": functools.partial(_cross, group_assignment=PAIRS),
    "sharded": functools.partial(_cross, shard_update=True),
    "owned": functools.partial(
        _cross, functools.partial(O.Lamb, 0.1, use_ema=True), shard_update=True
    ),
    "residuals_hook": functools.partial(
        _cross,
        communication=tf_xshard.Communication("bfloat16", error_feedback=True),
        pre_reduce=tf_xshard.clip_by_global_norm(1.0),
    ),
    "local_accumulation": functools.partial(
        _cross,
        functools.partial(O.Adam, 0.1, gradient_accumulation_steps=2),
        local="own",
    ),
    # The setting of an outer optimizer holds for the whole stack.
    "tower_inside": lambda: CROSS(_tower(ADAM()), skip_nonfinite=True),
}


def _values_of(step, r):
    """A gradient of a vector, and one of a table, of one replica."""
    rng = np.random.default_rng([step, r])
    return [
        rng.normal(size=shape).astype("float32") for shape in ((3,), (2, 2))
    ]


class _Training:
    """Applies each replica's gradients in a function that is traced once."""

    def __init__(self, optimizer_fn, num_replicas=2, kind="mirrored"):
        self.strategy = replicas.STRATEGIES[kind](num_replicas)
        with self.strategy.scope():
            self.variables = [
                keras.Variable(np.full(shape, 0.5), dtype="float32", name=name)
                for shape, name in (((3,), "w"), ((2, 2), "own"))
            ]
            self.optimizer = optimizer_fn()
            self.optimizer.build(self.variables)

        @tf.function(autograph=False)
        def step(*gradients):
            def on_replica():
                r = replicas.replica_id_tensor()
                self.optimizer.apply(
                    [
                        self.optimizer.scale_loss(tf.gather(one, r))
                        for one in gradients
                    ],
                    self.variables,
                )

            self.strategy.run(on_replica)

        self.apply = step
        self._all = [*self.variables, *self.optimizer.variables]
        self._initial = [one.numpy() for one in self._all]

    def reset(self):
        for variable, value in zip(self._all, self._initial, strict=True):
            variable.assign(value)

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
        self.apply(*(tf.constant(np.stack(one)) for one in columns))

    def state(self):
        """All replicas' values of all variables but the counters."""
        return {
            one.path: replicas.values(self.strategy, one)
            for one in self._all
            if "skip" not in one.path
        }


def _assert_equal(one, other):
    for path, values in one.items():
        np.testing.assert_array_equal(values, other[path], err_msg=path)


@pytest.mark.parametrize(
    "name, num_replicas, kind",
    [
        ("groups", 4, "tpu_permuted"),
        ("sharded", 2, "mirrored"),
        ("residuals_hook", 2, "mirrored"),
        ("local_accumulation", 2, "mirrored"),
        *(
            pytest.param(name, 4, kind, marks=replicas.in_full)
            for name, kind in (
                ("groups", "mirrored"),
                ("owned", "mirrored"),
                ("sharded", "tpu"),
                ("tower_inside", "mirrored"),
                ("tower_inside", "tpu_permuted"),
            )
        ),
    ],
)
def test_a_run_with_bad_steps_ends_as_the_run_without(name, num_replicas, kind):
    """Bit by bit, whichever replica has which bad value."""
    training = _Training(OPTIMIZERS[name], num_replicas, kind)
    for number in range(6):
        training.step(number)
    good = training.state()
    assert training.optimizer.skipped_steps == 0
    differs = np.any(good["own"][0] != good["own"][1])
    assert differs == (name == "local_accumulation")
    training.reset()
    for number in range(6):
        training.step(number)
        for r, value in ((number, np.nan), (number + 1, np.inf)):
            training.step(100 + number, (r % num_replicas, value))
    _assert_equal(training.state(), good)
    assert training.optimizer.skipped_steps == 12


@pytest.mark.parametrize(
    "wrap",
    [
        CROSS,
        lambda inner: O.LossScaleOptimizer(inner, initial_scale=4.0),
    ],
    ids=["cross", "loss_scale"],
)
def test_a_round_of_towers_is_skipped_as_a_whole(wrap):
    training = _Training(lambda: _tower(wrap(O.SGD(0.1)), skip_nonfinite=True))
    states = []
    for is_bad in (False, True):
        training.reset()
        for number in range(0, 6, 2):
            training.step(number)
            training.step(number + 1)
            if is_bad:
                training.step(100 + number, (number % 4 // 2, np.inf))
                training.step(101 + number)
        states.append(
            [replicas.values(training.strategy, v) for v in training.variables]
        )
    for one, other in zip(*states, strict=True):
        # The loss scale, a power of two, is halved by the skipped rounds.
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert training.optimizer.skipped_steps == 3
    training.optimizer.reset()
    assert training.optimizer.skipped_steps == 3


def test_a_loss_scale_and_one_vote():
    """The LossScaleOptimizer lowers its scale; the counter counts."""
    training = _Training(
        lambda: CROSS(
            O.LossScaleOptimizer(O.SGD(0.1), initial_scale=64.0),
            skip_nonfinite=True,
        )
    )
    training.step(0)
    before = training.state()
    training.step(1, (1, np.inf))
    np.testing.assert_array_equal(before["w"], training.state()["w"])
    assert training.optimizer.skipped_steps == 1
    scale = training.optimizer.inner_optimizer.dynamic_scale
    assert replicas.values(training.strategy, scale) == [32.0] * 2
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


def test_agn_skips_local_steps_by_replica():
    """The other replica steps; the period is that of all."""
    training = _Training(_agn)
    local, total = np.full((2, 2, 2), 0.5, "float32"), 0
    for number, bad in enumerate((0, 1, 0)):
        training.step(number, (bad, np.nan))
        # Undoing 1/N doubles it.
        gradient = 2 * _values_of(number, 1 - bad)[1]
        local[1 - bad] -= np.float32(0.1) * gradient
        total += gradient / 2
        # The center takes the mean gradient of its period.
        want = local if number < 2 else [0.5 - total / 3] * 2
        np.testing.assert_allclose(
            replicas.values(training.strategy, training.variables[1]),
            want,
            rtol=1e-5,
        )
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


def test_agn_skips_a_period_without_any_step(capfd):
    """Nothing reaches the center, not even weight decay; the limit raises."""
    training = _Training(
        lambda: tf_xshard.AGNOptimizer(
            O.SGD(1.0, weight_decay=0.5),
            communication_period=2,
            skip_nonfinite=True,
            max_consecutive_skips=1,
        )
    )
    optimizer = training.optimizer
    every = tf.fill([2, 3], np.nan), tf.zeros([2, 2, 2])
    training.apply(*every)
    assert "This replica skips its local step" in capfd.readouterr().err
    training.apply(*every)
    for variable in training.variables:
        values = replicas.values(training.strategy, variable)
        assert (np.array(values) == 0.5).all()
    assert (optimizer.skipped_steps, optimizer.skipped_local_steps) == (1, 4)
    training.apply(*every)
    with pytest.raises(tf.errors.InvalidArgumentError, match="skips=1"):
        training.apply(*every)


def test_the_limit_and_what_is_printed(capfd):
    """Raises in the step beyond it. A good step starts the count again."""
    training = _Training(functools.partial(_cross, max_consecutive_skips=2))
    training.step(0)
    assert "tf_xshard" not in capfd.readouterr().err
    training.step(1, (1, np.inf))
    [line] = capfd.readouterr().err.strip().splitlines()
    assert line == (
        "tf_xshard: the gradient of 'own' is nan or infinite on replica 1 in"
        " step 1, counted from 0. All replicas skip the step."
    )
    training.step(2, (0, np.nan))
    assert "on replica 0 in step 2" in capfd.readouterr().err
    training.step(3)
    before = training.state()
    for _ in range(2):
        training.step(4, (1, np.nan))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="max_consecutive_skips=2"
    ):
        training.step(4, (1, np.nan))
    _assert_equal(training.state(), before)


# skipped_steps.md has it by default.
@replicas.in_full
def test_fit_shows_it():
    with replicas.mirrored(2).scope():
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
    for weight in model.weights:
        values = replicas.values(model.distribute_strategy, weight)
        assert np.isfinite(values).all()


@pytest.mark.parametrize("make", [_cross, _agn, lambda: _tower(_cross())])
def test_saved_with_the_model(make, tmp_path):
    """The setting, and the count, which goes on."""
    training = _Training(make, 1)
    optimizer = training.optimizer
    for _ in range(2):
        training.step(0, (0, np.nan))
    new = type(optimizer).from_config(optimizer.get_config())
    assert new.skip_nonfinite
    new.build(training.variables)
    new.set_weights([v.numpy() for v in optimizer.variables])
    assert new.skipped_steps == optimizer.skipped_steps
    if isinstance(new, tf_xshard.AGNOptimizer):
        assert new.skipped_local_steps == optimizer.skipped_local_steps == 2
    else:
        assert new.skipped_steps >= 1


def _by_checkpoint(one, other, directory):
    made, read = (
        tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        for model in (one, other)
    )
    read.read(made.write(directory / "checkpoint")).expect_partial()


MAKERS = {
    "residuals": lambda **options: CROSS(
        O.Adam(),
        communication=tf_xshard.Communication("bfloat16", error_feedback=True),
        **options,
    ),
    "tower": lambda **options: _tower(O.Adam(), 3, **options),
    "agn": lambda **options: tf_xshard.AGNOptimizer(O.Adam(), **options),
}


@pytest.mark.parametrize("skips", [False, True], ids=["off", "on"])
@pytest.mark.parametrize(
    "move",
    [training_lib.by_keras_file, training_lib.by_group_state, _by_checkpoint],
)
@pytest.mark.parametrize("name", MAKERS)
def test_the_setting_can_change_between_runs(
    name, move, skips, tmp_path, recwarn
):
    """A run that diverged goes on with it, and back; nothing starts fresh."""
    models = []
    for setting in (not skips, skips):
        model = keras.Sequential(
            [keras.layers.Input((2,)), keras.layers.Dense(1)]
        )
        model.compile(MAKERS[name](skip_nonfinite=setting), "mse")
        model.optimizer.build(model.trainable_variables)
        models.append(model)
    saved, restored = models
    gradients = [tf.ones(v.shape) for v in saved.trainable_variables]
    saved.optimizer.apply(gradients, saved.trainable_variables)
    move(saved, restored, tmp_path)
    values, its = (
        [
            v.numpy()
            for v in (*model.variables, *model.optimizer.variables)
            if not saving.is_optional(v.path)
        ]
        for model in models
    )
    for one, other in zip(values, its, strict=True):
        np.testing.assert_array_equal(one, other)
    assert restored.optimizer.skipped_steps == 0
    restored.optimizer.apply(gradients, restored.trainable_variables)
    assert not [w for w in recwarn if "start fresh" in str(w.message)]


def test_off_by_default_and_not_in_the_config():
    optimizer = CROSS(O.SGD())
    assert not {"skip_nonfinite", "max_consecutive_skips"} & set(
        optimizer.get_config()
    )
    weight = keras.Variable(1.0)
    optimizer.apply([tf.constant(np.nan)], [weight])
    assert np.isnan(float(weight))
    assert not optimizer.skip_nonfinite and optimizer.skipped_steps == 0


def _inside_multi_optimizer():
    O.MultiOptimizer(lambda v: _cross()).build([keras.Variable(1.0)])


def _several_that_reduce():
    inner = O.MultiOptimizer(lambda v: CROSS(O.SGD()))
    variables = [keras.Variable(1.0) for _ in range(2)]
    _tower(inner, skip_nonfinite=True).build(variables)


def _limit_in_xla():
    weight, optimizer = keras.Variable(1.0), _cross(max_consecutive_skips=1)
    optimizer.build([weight])
    tf.function(
        lambda: optimizer.apply([tf.ones([])], [weight]), jit_compile=True
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
