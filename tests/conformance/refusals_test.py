"""What can't be honoured is refused by name, and nothing has changed then."""

import math
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import steps
from tests.support import training
from tf_xshard import dependencies

O = keras.optimizers  # noqa: E741
SGD = O.SGD
train = tf.compat.v1.train
Scale = O.LossScaleOptimizer
Cross = tf_xshard.CrossShardOptimizer
Tower = tf_xshard.TowerOptimizer
AGN = tf_xshard.AGNOptimizer
PAIRS = [[0, 1], [2, 3]]
group_reduce = tf_xshard.group_reduce
REPLICA = {"loss_normalization": "replica"}
V, T, R = ValueError, TypeError, RuntimeError
BASE_ARGUMENTS = (
    "learning_rate weight_decay clipnorm clipvalue global_clipnorm use_ema"
    " ema_momentum ema_overwrite_frequency loss_scale_factor"
    " gradient_accumulation_steps"
).split()
HAS_MULTI = hasattr(O, "MultiOptimizer")


class _OverridesTheSum(SGD):
    def _all_reduce_sum_gradients(self, grads_and_vars):
        return grads_and_vars


def _cross(**kwargs):
    return lambda: Cross(SGD(1.0), **kwargs)


def _agn(**kwargs):
    return lambda: AGN(SGD(1.0), **kwargs)


def _wire(**kwargs):
    return partial(tf_xshard.Communication, **kwargs)


def _built(optimizer):
    optimizer.build([keras.Variable(0.0)])
    return optimizer


def _multi(make):
    return O.MultiOptimizer(lambda variable: make())


def _scaled():
    return Cross(Scale(SGD()))


class _Container(SGD):
    """A user's optimizer that contains another one."""

    def __init__(self, inner_optimizer):
        super().__init__()
        self.inner_optimizer = inner_optimizer


def _partly_reducing():
    return O.MultiOptimizer(
        O.OptimizerMap(SGD(name="plain"), {"a": Cross(SGD())})
    )


def _same_twice():
    one = SGD()
    return AGN(one, local_optimizer=one)


def _overwritten():
    scale = keras.Variable(1.0, name="amax")
    scale.overwrite_with_gradient = True
    AGN(SGD(1.0)).build([keras.Variable(1.0), scale])


ARGUMENTS = [
    (
        V,
        "a _Container that contains",
        lambda: Tower(_Container(Cross(SGD())), 2),
    ),
    (T, "unknown argument 'nonsense'", _cross(nonsense=1)),
    (T, "pre_reduce must be a callable", _cross(pre_reduce=1.0)),
    (T, "post_reduce must be a callable", _cross(post_reduce="clip")),
    (T, "must be a tf_xshard.Communication", _cross(communication={})),
    (T, "Use tf_xshard.compat.v1", lambda: Cross(train.AdamOptimizer())),
    (T, r"Optimizer, got 'adam' \(str\)", partial(Cross, "adam")),
    (T, "would be reduced twice", lambda: Cross(_OverridesTheSum())),
    (T, "must be a number", partial(tf_xshard.clip_by_value, True, 2)),
    (T, "a string", _wire(dtype=1)),
    (T, "must be an int", _wire(bytes_per_bucket=1.5)),
    (V, "does not take 'clipnorm': set it on the inner", _agn(clipnorm=1.0)),
    *(
        (V, f"does not take '{name}': set it on the inner", _cross(**{name: 1}))
        for name in BASE_ARGUMENTS
    ),
    (V, '"mean" or "sum", got \'avg\'', _cross(reduction="avg")),
    (V, '"mean" or "sum"', _cross(reduction=["mean"])),
    (V, "must be one of", _cross(loss_normalization="none")),
    (
        V,
        "need one value of loss_normalization",
        lambda: Cross(Cross(SGD(), **REPLICA), loss_normalization="global"),
    ),
    (V, "replica 0 twice", _cross(group_assignment=[[0, 0]])),
    (V, "positive and finite", partial(tf_xshard.clip_by_norm, 0)),
    (V, "positive and fin", partial(tf_xshard.clip_by_global_norm, math.nan)),
    (V, "below", partial(tf_xshard.clip_by_value, 1, 1)),
    (V, "finite", partial(tf_xshard.clip_by_value, 0, math.inf)),
    (V, "Supported", _wire(dtype="int16")),
    (V, "must be positive", _wire(bytes_per_bucket=0)),
    (V, "must be positive", _wire(timeout_seconds=-1)),
    (V, "smaller dtype loses.*one of", _wire(error_feedback=True)),
    (V, "is not supported", _wire(rounding="up")),
    (V, 'needs dtype="int8"', _wire(dtype="bfloat16", rounding="stochastic")),
    (V, "must be positive", _agn(communication_period=0)),
    (T, "must be an int", _agn(communication_period=2.0)),
    (V, "the strategy has 1", _agn(num_worker=3)),
    (T, "must be an int", _agn(num_worker="1")),
    (V, "reduction must", lambda: group_reduce([1.0], reduction="median")),
    (V, "accumulate must be", _agn(accumulate="deltas")),
    (V, "reduction must be", _agn(reduction="max")),
    (T, "normalize must be", _agn(normalize=1)),
    (T, "local_optimizer must", _agn(local_optimizer="sgd")),
    (V, "Use bfloat16", lambda: AGN(Scale(SGD()))),
    (V, "Use bfloat16", lambda: AGN(SGD(loss_scale_factor=8.0))),
    (V, "already reduces gradients", lambda: AGN(Cross(SGD()))),
    (V, "inner optimizer itself", _same_twice),
    (V, "' has been built", lambda: AGN(SGD(), local_optimizer=_built(SGD()))),
    (V, "amax is overwritten by its gradient", _overwritten),
    (V, "has not been built", lambda: Cross(SGD()).apply([1.0])),
]
if HAS_MULTI:
    # MultiOptimizer does not scale the loss, and sees no such wrapper.
    ARGUMENTS += [
        (
            V,
            "a MultiOptimizer that contains",
            lambda: Tower(_partly_reducing(), 2),
        ),
        (V, "would not scale the loss", lambda: _built(_multi(_scaled))),
        (V, "a Multi.* that contains", lambda: _built(Cross(_multi(_scaled)))),
    ]


@pytest.mark.parametrize("error, message, make", ARGUMENTS)
def test_arguments(error, message, make):
    with pytest.raises(error, match=message):
        make()


def test_what_stacks_and_v1_reductions_accept():
    for name in ("MEAN", "SUM"):
        reduction = getattr(tf.compat.v1.losses.Reduction, name)
        assert Cross(SGD(), reduction).reduction == name.lower()
    inner = Cross(SGD(), **REPLICA)
    assert Cross(inner).loss_normalization == "replica"


def _check_refused(make, error, message, kind="mirrored", graph=True):
    """Two steps raise, and leave the variables of ones as they are."""
    strategy = replicas.STRATEGIES[kind](2)
    with strategy.scope():
        variables = [keras.Variable(1.0), keras.Variable([1.0])]
        optimizer = make()
    ones = lambda r: [tf.ones(v.shape) for v in variables]
    for _ in range(2):
        with pytest.raises(error, match=message):
            replicas.apply_once(strategy, optimizer, ones, variables, graph)
    for variable in variables:
        assert replicas.values(strategy, variable) == [1.0, 1.0]


def _all_reduce(gradient):
    return tf.distribute.get_replica_context().all_reduce("SUM", gradient)


def _all_gather(gradient):
    return tf.distribute.get_replica_context().all_gather(gradient[None], 0)


def _merging(function):
    """Calls a function of the strategy and the gradients in merge_call."""
    return lambda gradient: tf.distribute.get_replica_context().merge_call(
        function, args=(gradient,)
    )


class _Reduces(SGD):
    """Reduces in a helper, where reading its own code would not show it."""

    def __init__(self, reduce):
        super().__init__(1.0)
        self._reduce = reduce

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(self._reduce(gradient), variable, learning_rate)


class _PassesOn(keras.optimizers.Optimizer):
    """An optimizer of a user's, around another one."""

    def __init__(self, attribute):
        super().__init__(learning_rate=0.1, name="passes_on")
        self.attribute = attribute
        setattr(self, attribute, SGD(0.1))

    def build(self, variables):
        super().build(variables)
        getattr(self, self.attribute).build(variables)

    def apply(self, grads, trainable_variables=None):
        getattr(self, self.attribute).apply(grads, trainable_variables)


WRAPPERS = {
    "cross": Cross,
    "tower": lambda inner: Tower(inner, 1),
    "scale": lambda inner: Cross(Scale(inner)),
    "nested": lambda inner: Cross(Cross(inner)),
    "agn": lambda inner: AGN(SGD(), local_optimizer=inner),
}


@pytest.mark.parametrize(
    "wrapper, kind, graph, reduce",
    [
        ("cross", "mirrored", True, _all_reduce),
        ("cross", "mirrored", False, _all_gather),
        *(
            ("cross", "mirrored", False, _merging(function))
            for function in (
                lambda strategy, x: strategy.reduce("SUM", x, None),
                lambda strategy, x: strategy.gather(x, 0),
                lambda strategy, x: strategy.extended.reduce_to("SUM", x, x),
                lambda strategy, x: strategy.extended.batch_reduce_to(
                    "SUM", [(x, x)]
                )[0],
            )
        ),
        ("cross", "multi_worker", False, _all_reduce),
        ("tower", "mirrored", True, _all_reduce),
        ("scale", "mirrored", True, _all_reduce),
        ("nested", "tpu", True, tf.compat.v1.tpu.cross_replica_sum),
        ("agn", "mirrored", True, _all_reduce),
    ],
)
def test_an_inner_optimizer_that_reduces(wrapper, kind, graph, reduce):
    make = lambda: WRAPPERS[wrapper](_Reduces(reduce))
    _check_refused(make, T, "would be reduced twice", kind, graph)


def test_an_inner_optimizer_that_updates_in_merge_call():
    with replicas.mirrored(2).scope():
        count = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)

    def counted(gradient):
        update = lambda strategy: strategy.extended.update(
            count, lambda one: one.assign_add(1.0)
        )
        tf.distribute.get_replica_context().merge_call(update)
        return gradient

    [weights] = steps.stepped(
        lambda: Cross(_Reduces(counted), **REPLICA),
        lambda r: [tf.constant(1.0)],
        [1.0],
        num_replicas=2,
    )
    assert [float(count.numpy()), *weights] == [1.0, 0.0, 0.0]


def _grouped_in_part(variable):
    return _cross(group_assignment=[[0], [1]])() if variable.ndim else SGD()


STACKS = [
    (lambda: Scale(Cross(SGD())), V, r"\(keras.*LossScaleOptimizer\(inner\)\)"),
    (lambda: Cross(_PassesOn("base")), T, "base is an .* to inner_optimizer"),
]
if HAS_MULTI:
    STACKS += [
        (lambda: Scale(_multi(_cross())), V, "LossScaleOptimizer wraps"),
        (
            lambda: Tower(O.MultiOptimizer(_grouped_in_part), 1),
            V,
            "contains a Multi.* that contains Cross",
        ),
    ]


@pytest.mark.parametrize("make, error, message", STACKS)
def test_steps_of_stacks(make, error, message):
    _check_refused(make, error, message)


def test_an_optimizer_of_users_around_another_that_is_found():
    [weights] = steps.stepped(
        lambda: Cross(_PassesOn("inner_optimizer")),
        lambda r: [tf.constant((1.0 + r) / 2)],
        [1.0],
        num_replicas=2,
    )
    np.testing.assert_allclose(weights, [1 - 0.1 * 1.5] * 2, rtol=1e-6)


def test_loss_scales_under_mixed_float16():
    """The remedy for AGN is not another error; compile adds the wrapper."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    remedy = r"compile\(\) adds .*mixed_bfloat16.*auto_scale_loss=False"
    for make, num_replicas, message in (
        (lambda: Cross(SGD(0.1)), 2, STACKS[0][2]),
        (_scaled, 1, "both scale the loss"),
        (_agn(), 2, f"AGNOptimizer.*{remedy}"),
    ):
        with pytest.raises(V, match=message):
            training.train(make, replicas.mirrored(num_replicas))
    # An outer one on one device sees all gradients.
    trained = [
        training.train(make, num_steps=2)[1]
        for make in (lambda: SGD(0.05), lambda: Cross(SGD(0.05)))
    ]
    assert training.deviation(*trained) == 0.0
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    training.train(_agn(), replicas.mirrored(2), num_steps=2)


def test_a_refused_wrapper_leaves_the_inner_optimizer_as_it_was():
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight, inner = keras.Variable(0.0), SGD(1.0)
        with pytest.raises(V, match="for 4 replicas, but .*Strategy has 2"):
            Cross(inner, group_assignment=PAIRS)
        with pytest.raises(T, match="would be reduced twice"):
            AGN(inner, local_optimizer=_OverridesTheSum())
        inner.build([weight])
    replicas.apply_once(
        strategy, inner, lambda r: [tf.constant(10.0**r)], [weight]
    )
    # Plain Keras sums.
    assert replicas.values(strategy, weight) == [-11.0, -11.0]


def _check_refused_in(strategy, make, message):
    with strategy.scope(), pytest.raises(V, match=message):
        make()


def test_other_strategies_and_devices():
    central = tf.distribute.experimental.CentralStorageStrategy(
        ["CPU:0", "CPU:1"], "CPU:0"
    )
    for wrap in WRAPPERS.values():
        make = lambda wrap=wrap: wrap(SGD())
        _check_refused_in(central, make, "not support CentralStorage")
    # TensorFlow accepts them, and its collectives wait forever.
    missing = tf.distribute.MirroredStrategy(["CPU:0", "CPU:99"])
    step = tf.function(lambda: missing.run(tf_xshard.group_reduce, ([1.0],)))
    for make in (_cross(), step):
        _check_refused_in(missing, make, "CPU:99.*logical")


def test_8_bit_integers_elsewhere():
    """On TPUs, and feedback without an optimizer that keeps it."""
    wire = tf_xshard.Communication(dtype="int8", error_feedback=True)
    make = _cross(communication=wire)
    _check_refused_in(replicas.tpu(2), make, r"can't be used under \w*TPUSt")
    with pytest.raises(V, match="only an optimizer has"):
        replicas.mirrored(2).run(
            lambda: tf_xshard.group_reduce(tf.ones([3]), communication=wire)
        )


@pytest.mark.parametrize("aggregation", ["mean", "sum", "only_first_replica"])
def test_a_trained_variable_with_an_aggregation(aggregation):
    """TensorFlow would combine the replicas' updates once more."""
    make = lambda: _cross()().build(
        [keras.Variable(1.0, aggregation=aggregation, name="w")]
    )
    message = "can't train 'w', which has the aggre"
    _check_refused_in(replicas.mirrored(2), make, message)
    make()  # One replica has nothing to combine.


def test_another_scope():
    strategy, inner = replicas.mirrored(2), SGD()
    _check_refused_in(strategy, lambda: Cross(inner), "Create both")
    make = _agn(local_optimizer=inner)
    _check_refused_in(strategy, make, "local optimizer .* was created outs")
    outside = Cross(inner)
    _check_refused(lambda: outside, R, "outside any strategy's scope")
    with replicas.mirrored(4).scope():
        other = _cross()()
    _check_refused(lambda: other, R, "in the scope of another Mirrored")


@pytest.mark.parametrize("wrapper", ["cross", "tower", "agn"])
def test_a_step_in_another_context(wrapper):
    """Outside the scope, in cross-replica context, in a function in a replica.

    Outside, Keras would write to all copies of a weight, and to one counter.
    """
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight, optimizer = keras.Variable(1.0), WRAPPERS[wrapper](SGD())

    def step():
        optimizer.apply([tf.constant(1.0)], [weight])

    with pytest.raises(R, match="applied outside of it, where there"):
        step()
    assert not optimizer.built
    with strategy.scope(), pytest.raises(R, match="the function that you"):
        step()
    nested = tf.function(step, autograph=False)
    for run in (tf.function(strategy.run), strategy.run):
        with pytest.raises(R, match="remove the decorator"):
            run(lambda: nested())
    assert replicas.values(strategy, weight) == [1.0, 1.0]


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("has_loss_scale", [False, True])
def test_an_inner_optimizer_is_not_applied_directly(
    has_loss_scale, num_replicas
):
    """Except on one replica, where there is nothing to sum."""
    strategy = replicas.mirrored(num_replicas)
    with strategy.scope():
        weight = keras.Variable(1.0)
        inner = SGD(0.5)
        if has_loss_scale:
            # The loss scale starts at 2 ** 15.
            inner = Scale(SGD(0.5 * 2**15))
        outer = Cross(inner)
        outer.build([weight])

    def step(optimizer):
        strategy.run(lambda: optimizer.apply([tf.constant(1.0)], [weight]))

    if num_replicas == 2:
        with pytest.raises(R, match="no longer sums gradients"):
            step(inner)
        assert replicas.values(strategy, weight) == [1.0, 1.0]
        assert inner.iterations.numpy() == 0
    else:
        step(inner)
    step(outer)
    assert replicas.values(strategy, weight) == [0.0] * num_replicas


@pytest.mark.parametrize(
    "make, grads, error, message",
    [
        (_cross(), [1.0] * 3, V, "got 3 gradients for 2 variables"),
        (_cross(), [1.0, np.zeros(2, "f")], V, r"shape \(2,\), but the"),
        (_cross(), [1.0, np.int32(1)], T, "has type int32"),
        (_cross(), [None, None], V, "No gradients provided"),
        (lambda: _built(_cross()()), [1.0, 1.0], V, "Unknown variable"),
        # Outside its strategy nothing is known: a saved model can be loaded.
        (_cross(group_assignment=PAIRS), [1.0, 1.0], V, "is for 4 replicas"),
        *(
            (_cross(pre_reduce=hook), [1.0, 1.0], V, "pre_reduce must return")
            for hook in (
                lambda pairs: [],
                lambda pairs: pairs[::-1],
                lambda pairs: [(g,) for g, _ in pairs],
                lambda pairs: [(v, g) for g, v in pairs],
            )
        ),
    ],
)
def test_a_step_on_one_device(make, grads, error, message):
    variables = [keras.Variable(1.0), keras.Variable(1.0)]
    grads = [one if one is None else tf.constant(one) for one in grads]
    with pytest.raises(error, match=message):
        make().apply(grads, variables)
    assert [float(one) for one in variables] == [1.0, 1.0]


def test_replicas_that_apply_something_else_or_nothing():
    """An error, and no hang."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        variables = [keras.Variable(1.0), keras.Variable(1.0)]
        optimizer = _cross()()
        optimizer.build(variables)

    def apply(more):
        count = more + replicas.replica_id()
        if count:
            optimizer.apply([tf.constant(1.0)] * count, variables[:count])

    for run in (tf.function(strategy.run), strategy.run):
        with pytest.raises(V, match="1 passes 2 values but replica 0"):
            run(apply, (1,))
    with pytest.raises(R, match="different number of"):
        tf.function(strategy.run)(apply, (0,))
    for variable in variables:
        assert replicas.values(strategy, variable) == [1.0, 1.0]


def test_versions():
    def check(version):
        tested = dependencies.tested("tensorflow")
        dependencies.check_range("tensorflow", version, tested)

    with pytest.raises(ImportError, match="needs tensorflow 2.20 to 2.22"):
        check("2.19.1")
    check("2.20.0")
    check("2.22.0rc0")
    with pytest.warns(UserWarning, match="is tested with tensorflow 2.20"):
        check("3.0.0")


def test_no_tensorflow_or_another_keras_backend(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ImportError, match="Set KERAS_BACKEND=tensorflow"):
        dependencies.check()
    monkeypatch.setattr(
        dependencies.importlib.util, "find_spec", lambda name: None
    )
    with pytest.raises(ImportError, match=r"pip install 'tf_xshard\[cpu\]'"):
        dependencies.check()
