"""Steps with nan or infinite gradients leave no trace, on any replica."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import filled
from tests.support import replicas
from tests.support import traced
from tests.support import training
from tf_xshard.optimizers import saving

O = keras.optimizers  # noqa: E741
CROSS = tf_xshard.CrossShardOptimizer
RESIDUALS = tf_xshard.Communication("bfloat16", error_feedback=True)
T, V = TypeError, ValueError
SHAPES = ((3,), (2, 2))
ADAM = functools.partial(
    O.Adam, 0.1, use_ema=True, ema_overwrite_frequency=3, weight_decay=0.01
)


def _cross(inner=ADAM, **options):
    return CROSS(inner(), skip_nonfinite=True, **options)


def _tower(optimizer, num_towers=2, **options):
    return tf_xshard.TowerOptimizer(optimizer, num_towers, **options)


def _agn(**options):
    return tf_xshard.AGNOptimizer(
        O.SGD(1.0),
        communication_period=3,
        local_optimizer=O.SGD(0.1),
        skip_nonfinite=True,
        **options,
    )


def _traced(make, num_replicas=2, kind="mirrored"):
    initial = [np.full(shape, 0.5) for shape in SHAPES]
    return traced.Traced(make, initial, kind, num_replicas)


def _gradients(number, num_replicas=2, bad=None, value=np.nan):
    """All replicas' gradients of a step; of the replica `bad`, one is bad."""
    rng = np.random.default_rng(number)
    vector, table = (
        rng.normal(size=(num_replicas, *shape)).astype("float32")
        for shape in SHAPES
    )
    if bad is not None:
        table[bad % num_replicas, 1, 0] = value
    return vector, table


def _state(one):
    """All replicas' values of all variables but the counters."""
    return [
        replicas.values(one.strategy, variable)
        for variable in one.variables
        if "skip" not in variable.path
    ]


def _assert_equal(states, others):
    for one, other in zip(states, others, strict=True):
        np.testing.assert_array_equal(one, other)


RUNS = {
    "groups": lambda: _cross(group_assignment=[[0, 1], [2, 3]]),
    "sharded": lambda: _cross(shard_update=True),
    "residuals_hook": lambda: _cross(
        communication=RESIDUALS,
        pre_reduce=tf_xshard.clip_by_global_norm(1.0),
    ),
    "local_accumulation": lambda: _cross(
        functools.partial(O.Adam, 0.1, gradient_accumulation_steps=2),
        local=".*",
    ),
    # The setting of an outer optimizer holds for the whole stack.
    "tower_inside": lambda: CROSS(_tower(ADAM()), skip_nonfinite=True),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_bad_steps_ends_as_the_run_without(name):
    """Bit by bit, whichever replica has which bad value."""
    in_groups = name == "groups"
    num_replicas, kind = (4, "tpu_permuted") if in_groups else (2, "mirrored")
    one = _traced(RUNS[name], num_replicas, kind)
    good = [_gradients(number, num_replicas) for number in range(6)]
    mixed = []
    for number, step in enumerate(good):
        nan = _gradients(100 + number, num_replicas, number)
        inf = _gradients(100 + number, num_replicas, number + 1, np.inf)
        mixed += [step, nan, inf]
    _, table = one.run(*zip(*good, strict=True))
    expected = _state(one)
    assert one.optimizer.skipped_steps == 0
    assert np.any(table[0] != table[1]) == (name == "local_accumulation")
    one.run(*zip(*mixed, strict=True))
    _assert_equal(_state(one), expected)
    assert one.optimizer.skipped_steps == 12


@pytest.mark.parametrize("has_scale", [False, True])
def test_a_round_of_towers_is_skipped_as_a_whole(has_scale):
    """A LossScaleOptimizer lowers its scale."""
    wrap = CROSS
    if has_scale:
        wrap = functools.partial(O.LossScaleOptimizer, initial_scale=4.0)
    one = _traced(lambda: _tower(wrap(O.SGD(0.1)), skip_nonfinite=True))
    good, mixed = [], []
    for number in range(3):
        step = [_gradients(2 * number), _gradients(2 * number + 1)]
        good += step
        mixed += [*step, _gradients(9, 2, number, np.inf), _gradients(10)]
    expected, got = (one.run(*zip(*run, strict=True)) for run in (good, mixed))
    for values, others in zip(got, expected, strict=True):
        # The scale is a power of two.
        np.testing.assert_allclose(values, others, rtol=1e-6)
    optimizer = one.optimizer
    assert optimizer.skipped_steps == 3
    optimizer.reset()
    assert optimizer.skipped_steps == 3
    if has_scale:
        scale = optimizer.inner_optimizer.inner_optimizer.dynamic_scale
        assert replicas.values(one.strategy, scale) == [4 / 2**3] * 2


def _float16(make):
    return traced.Traced(make, [1.0], num_replicas=2, dtype="float16")


def test_the_sum_overflows(capfd):
    """Each replica's gradient is finite, and their sum is not."""
    one = _float16(
        lambda: _cross(functools.partial(O.SGD, 1.0), reduction="sum")
    )
    one.step([6e4, 6e4])
    assert one.values()[0].tolist() == [1, 1]
    assert one.optimizer.skipped_steps == 1
    assert "the reduced gradient of" in capfd.readouterr().err


def test_without_a_vote_replica_0_reports_the_sum(capfd):
    one = _traced(_cross)
    one.step(*_gradients(1, 2, 1, np.inf))
    lines = sorted(capfd.readouterr().err.strip().splitlines())
    name = one.weights[1].name
    assert [line.split(" is nan")[0] for line in lines] == [
        f"tf_xshard: the gradient of {name!r}",
        f"tf_xshard: the reduced gradient of {name!r}",
    ]
    assert "replica 1" in lines[0] and "replica 0" in lines[1]


def test_agn_skips_local_steps_by_replica():
    """The other replica steps; the period is that of all."""
    one = _traced(_agn)
    local, total = np.full((2, 2, 2), 0.5, "float32"), 0
    for number, bad in enumerate((0, 1, 0)):
        _, gradients = arriving = _gradients(number, 2, bad)
        one.step(*arriving)
        # Undoing 1/N doubles it.
        gradient = 2 * gradients[1 - bad]
        local[1 - bad] -= np.float32(0.1) * gradient
        total += gradient / 2
        # The center takes the mean gradient of its period.
        want = local if number < 2 else [0.5 - total / 3] * 2
        np.testing.assert_allclose(one.values()[1], want, rtol=1e-5)
    assert one.optimizer.skipped_steps == 0
    assert one.optimizer.skipped_local_steps == 3


def test_agn_skips_an_exchange(capfd):
    """The sum overflows: all go back to the center, and continue."""
    one = _float16(
        lambda: tf_xshard.AGNOptimizer(
            O.SGD(1.0),
            communication_period=2,
            local_optimizer=O.SGD(1e-6),
            reduction="sum",
            normalize=False,
            skip_nonfinite=True,
            loss_normalization="replica",
        )
    )
    for _ in range(2):
        one.step([3e4, 3e4])
    assert one.values()[0].tolist() == [1, 1]
    optimizer = one.optimizer
    assert int(optimizer.exchanges.numpy()) == 1
    assert (optimizer.skipped_steps, optimizer.skipped_local_steps) == (1, 0)
    assert "in exchange 0, counted" in capfd.readouterr().err


def test_agn_skips_a_period_without_any_step(capfd):
    """Nothing reaches the center, not even weight decay; the limit raises."""
    one = _traced(
        lambda: tf_xshard.AGNOptimizer(
            O.SGD(1.0, weight_decay=0.5),
            communication_period=2,
            skip_nonfinite=True,
            max_consecutive_skips=1,
        )
    )
    every = np.full([2, 3], np.nan), np.zeros([2, 2, 2])
    one.step(*every)
    assert "This replica skips its local step" in capfd.readouterr().err
    one.step(*every)
    for values in one.values():
        assert (values == 0.5).all()
    optimizer = one.optimizer
    assert (optimizer.skipped_steps, optimizer.skipped_local_steps) == (1, 4)
    one.step(*every)
    with pytest.raises(tf.errors.InvalidArgumentError, match="skips=1"):
        one.step(*every)


def test_the_limit_and_what_is_printed(capfd):
    """Raises in the step beyond it. A good step starts the count again."""
    one = _traced(
        lambda: _cross(max_consecutive_skips=2, communication=RESIDUALS)
    )
    one.step(*_gradients(0))
    assert "tf_xshard" not in capfd.readouterr().err
    one.step(*_gradients(1, 2, 1, np.inf))
    [line] = capfd.readouterr().err.strip().splitlines()
    assert line == (
        f"tf_xshard: the gradient of {one.weights[1].name!r} is nan or infinite"
        " on replica 1 in step 1, counted from 0. All replicas skip the step."
    )
    one.step(*_gradients(2, 2, 0))
    assert "on replica 0 in step 2" in capfd.readouterr().err
    one.step(*_gradients(3))
    before = _state(one)
    for _ in range(2):
        one.step(*_gradients(4, 2, 1))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="max_consecutive_skips=2"
    ):
        one.step(*_gradients(4, 2, 1))
    _assert_equal(_state(one), before)


MAKERS = {
    "residuals": lambda **options: CROSS(
        O.Adam(), communication=RESIDUALS, **options
    ),
    "tower": lambda **options: _tower(O.Adam(), 3, **options),
    "agn": lambda **options: tf_xshard.AGNOptimizer(O.Adam(), **options),
}


@pytest.mark.parametrize(
    "name, move, settings",
    replicas.pairwise(
        [*MAKERS],
        training.MOVES,
        [(True, True), (False, True), (True, False)],
    ),
)
def test_the_setting_can_change_between_runs(
    name, move, settings, tmp_path, recwarn
):
    """A run that diverged goes on with it, and back; nothing starts fresh."""
    saved, restored = models = [
        filled.model(functools.partial(MAKERS[name], skip_nonfinite=setting))
        for setting in settings
    ]
    variables = saved.trainable_variables
    for value in (1.0, np.nan) if all(settings) else (1.0,):
        saved.optimizer.apply([tf.fill(v.shape, value) for v in variables])
    move(saved, restored, tmp_path)
    states = (
        [
            v.numpy()
            for v in filled.variables(model)
            # With both, the counts go on.
            if all(settings) or not saving.is_optional(v.path)
        ]
        for model in models
    )
    _assert_equal(*states)
    optimizer = restored.optimizer
    assert all(settings) or optimizer.skipped_steps == 0
    optimizer.apply([tf.ones(v.shape) for v in restored.trainable_variables])
    assert not [w for w in recwarn if "start fresh" in str(w.message)]


def test_off_by_default_and_in_the_config():
    optimizer = CROSS(O.SGD())
    config = optimizer.get_config()
    assert config["skip_nonfinite"] is config["max_consecutive_skips"] is None
    weight = keras.Variable(1.0)
    optimizer.apply([tf.constant(np.nan)], [weight])
    assert np.isnan(float(weight))
    assert not optimizer.skip_nonfinite and optimizer.skipped_steps == 0
    for other in (_cross(), _agn(), _tower(_cross())):
        assert type(other).from_config(other.get_config()).skip_nonfinite


def _inside_multi_optimizer():
    O.MultiOptimizer(lambda v: _cross()).build([keras.Variable(1.0)])


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
    "error, message, call",
    [
        (T, "must be a bool", lambda: CROSS(O.SGD(), skip_nonfinite=1)),
        (V, "must be positive", lambda: _cross(max_consecutive_skips=0)),
        (V, "needs skip", lambda: CROSS(O.SGD(), max_consecutive_skips=1)),
        (V, "need one value", lambda: _tower(_cross(), skip_nonfinite=False)),
        (V, "whose other optimizers would", _inside_multi_optimizer),
        (V, "a program that XLA compiles", _limit_in_xla),
        (V, "can't be used under TPUStrategy", _limit_on_a_tpu),
    ],
)
def test_refused(error, message, call):
    with pytest.raises(error, match=message):
        call()
