"""What can't be honoured is refused by name, and nothing has changed then."""

import contextlib
import math
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import training
from tf_xshard import dependencies
from tf_xshard.distribute import site as site_lib

O = keras.optimizers  # noqa: E741
SGD = O.SGD
_sgd = partial(SGD, 1.0)
CrossShardOptimizer = tf_xshard.CrossShardOptimizer
PAIRS = [[0, 1], [2, 3]]
BASE_ARGUMENTS = (
    "learning_rate weight_decay clipnorm clipvalue global_clipnorm use_ema"
    " ema_momentum ema_overwrite_frequency loss_scale_factor"
    " gradient_accumulation_steps"
).split()


class _OverridesTheSum(SGD):
    def _all_reduce_sum_gradients(self, grads_and_vars):
        return grads_and_vars


def _cross(**kwargs):
    return lambda: CrossShardOptimizer(SGD(1.0), **kwargs)


def _wire(**kwargs):
    return partial(tf_xshard.Communication, **kwargs)


def _built(optimizer):
    optimizer.build([keras.Variable(0.0)])
    return optimizer


def _multi(make):
    return O.MultiOptimizer(lambda variable: make())


def _partly_reducing():
    reducing = {"a": CrossShardOptimizer(SGD())}
    return O.MultiOptimizer(O.OptimizerMap(SGD(name="plain"), reducing))


def _scaled():
    return CrossShardOptimizer(O.LossScaleOptimizer(SGD()))


def _grouped_in_part(variable):
    return (
        _cross(group_assignment=[[0], [1]])() if len(variable.shape) else SGD()
    )


WRONG_TYPES = [
    (_cross(nonsense=1), "unknown argument 'nonsense'"),
    (_cross(pre_reduce=1.0), "pre_reduce must be a callable"),
    (_cross(post_reduce="clip"), "post_reduce must be a callable"),
    (_cross(communication={}), "must be a tf_xshard.Communication"),
    (
        lambda: CrossShardOptimizer(tf.compat.v1.train.AdamOptimizer()),
        "Use tf_xshard.compat.v1.CrossShardOptimizer",
    ),
    (partial(CrossShardOptimizer, "adam"), r"Optimizer, got 'adam' \(str\)"),
    (lambda: CrossShardOptimizer(_OverridesTheSum()), "would be reduced twice"),
    (partial(tf_xshard.clip_by_value, True, 2), "must be a number"),
    (_wire(dtype=1), "a string"),
    (_wire(bytes_per_bucket=1.5), "must be an int"),
]
WRONG_VALUES = [
    *(
        (_cross(**{name: 1}), f"does not take '{name}': set it on the inner")
        for name in BASE_ARGUMENTS
    ),
    (_cross(reduction="avg"), '"mean" or "sum", got \'avg\''),
    (_cross(reduction=["mean"]), '"mean" or "sum"'),
    (_cross(loss_normalization="none"), "must be one of"),
    (
        lambda: CrossShardOptimizer(
            _cross(loss_normalization="replica")(), loss_normalization="global"
        ),
        "need one value of loss_normalization",
    ),
    (_cross(group_assignment=[[0, 0]]), "replica 0 twice"),
    (partial(tf_xshard.clip_by_norm, 0), "positive and finite"),
    (partial(tf_xshard.clip_by_global_norm, math.nan), "positive and finite"),
    (partial(tf_xshard.clip_by_value, 1, 1), "below"),
    (partial(tf_xshard.clip_by_value, 0, math.inf), "finite"),
    (_wire(dtype="int16"), "Supported"),
    (_wire(bytes_per_bucket=0), "must be positive"),
    (_wire(timeout_seconds=-1), "must be positive"),
    (_wire(error_feedback=True), "smaller dtype loses.*one of"),
    (_wire(rounding="up"), "is not supported"),
    (_wire(dtype="bfloat16", rounding="stochastic"), 'needs dtype="int8"'),
]
STEPS_OF_STACKS = [
    (
        lambda: O.LossScaleOptimizer(CrossShardOptimizer(SGD())),
        r"CrossShardOptimizer\(keras.optimizers.LossScaleOptimizer\(inner\)\)",
    ),
]
if hasattr(O, "MultiOptimizer"):
    WRONG_VALUES += [
        (
            lambda: tf_xshard.TowerOptimizer(_partly_reducing(), 2),
            "reduce gradients .* do not: .'plain'",
        ),
        # MultiOptimizer does not scale the loss, and sees no such wrapper.
        (lambda: _built(_multi(_scaled)), "would not scale the loss"),
        (
            lambda: _built(CrossShardOptimizer(_multi(_scaled))),
            "would not scale the loss",
        ),
    ]
    STEPS_OF_STACKS += [
        (
            lambda: O.LossScaleOptimizer(_multi(_cross())),
            "LossScaleOptimizer wraps",
        ),
        (
            lambda: tf_xshard.TowerOptimizer(
                O.MultiOptimizer(_grouped_in_part), 1
            ),
            "Wrap each of them",
        ),
    ]


@pytest.mark.parametrize("make, message", WRONG_TYPES)
def test_wrong_types(make, message):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize("make, message", WRONG_VALUES)
def test_wrong_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_what_stacks_and_v1_reductions_accept():
    for name in ("MEAN", "SUM"):
        reduction = getattr(tf.compat.v1.losses.Reduction, name)
        made = CrossShardOptimizer(SGD(), reduction)
        assert made.reduction == name.lower()
    inner = CrossShardOptimizer(SGD(), loss_normalization="replica")
    assert CrossShardOptimizer(inner).loss_normalization == "replica"


def _check_refused(strategy, optimizer, variables, error, message, graph=True):
    """A step raises, and leaves variables of one as they are."""
    with pytest.raises(error, match=message):
        replicas.apply_once(
            strategy,
            optimizer,
            lambda r: [tf.ones(v.shape) for v in variables],
            variables,
            graph,
        )
    for variable in variables:
        for value in replicas.values(strategy, variable):
            assert value == 1.0


def _all_reduce(gradients):
    context = tf.distribute.get_replica_context()
    return [context.all_reduce("SUM", one) for one in gradients]


def _cross_replica_sum(gradients):
    return [tf.compat.v1.tpu.cross_replica_sum(one) for one in gradients]


def _batch_reduce(gradients):
    def merge(strategy, gradients):
        return strategy.extended.batch_reduce_to(
            "SUM", [(one, one) for one in gradients]
        )

    context = tf.distribute.get_replica_context()
    return context.merge_call(merge, args=(gradients,))


class _Reduces(SGD):
    def __init__(self, reduce, method):
        super().__init__(1.0)
        self._reduce = reduce
        self._method = method

    def apply(self, grads, trainable_variables=None):
        if self._method == "apply":
            grads = self._reduce(grads)
        super().apply(grads, trainable_variables)

    def update_step(self, gradient, variable, learning_rate):
        if self._method == "update_step":
            [gradient] = self._reduce([gradient])
        super().update_step(gradient, variable, learning_rate)


WRAPPERS = {
    "cross": CrossShardOptimizer,
    "tower": lambda inner: tf_xshard.TowerOptimizer(inner, 1),
    "scale": lambda inner: CrossShardOptimizer(O.LossScaleOptimizer(inner)),
    "nested": lambda inner: CrossShardOptimizer(CrossShardOptimizer(inner)),
    "agn": lambda inner: tf_xshard.AGNOptimizer(SGD(), local_optimizer=inner),
}
METHODS = ["apply", "update_step"]


@pytest.mark.parametrize(
    "wrapper, method, kind, graph, reduce",
    [
        *replicas.in_turn(
            WRAPPERS, METHODS, ["mirrored"], [True], [_all_reduce]
        ),
        *(
            ("cross", method, *how)
            for method in METHODS
            for how in (
                ("mirrored", False, _all_reduce),
                ("mirrored", False, _batch_reduce),
                ("tpu", True, _all_reduce),
                ("tpu", True, _cross_replica_sum),
            )
        ),
        ("nested", "apply", "tpu", True, _cross_replica_sum),
    ],
)
def test_an_inner_optimizer_that_reduces(wrapper, method, kind, graph, reduce):
    """In a helper, where reading the method's code would not show it."""
    strategy = replicas.STRATEGIES[kind](2)
    with strategy.scope():
        variables = [keras.Variable(1.0)]
        optimizer = WRAPPERS[wrapper](_Reduces(reduce, method))
        optimizer.build(variables)
    message = "would be reduced twice"
    _check_refused(strategy, optimizer, variables, TypeError, message, graph)


class _PassesOn(keras.optimizers.Optimizer):
    """An optimizer of a user's, around another one."""

    def __init__(self, attribute, optimizer):
        super().__init__(learning_rate=0.1, name="passes_on")
        self.attribute = attribute
        setattr(self, attribute, optimizer)

    def build(self, variables):
        super().build(variables)
        getattr(self, self.attribute).build(variables)

    def apply(self, grads, trainable_variables=None):
        getattr(self, self.attribute).apply(grads, trainable_variables)


def test_an_optimizer_of_users_around_another():
    """The error says what to do, which gives one device's weight."""
    strategy = replicas.mirrored(2)
    message = r"_PassesOn.base is an .* Rename the attribute to inner_optimizer"
    for attribute in ("base", "inner_optimizer"):
        with strategy.scope():
            variables = [keras.Variable(1.0)]
            optimizer = CrossShardOptimizer(
                _PassesOn(attribute, SGD(0.1)), loss_normalization="replica"
            )
            optimizer.build(variables)
        if attribute == "base":
            _check_refused(strategy, optimizer, variables, TypeError, message)
            continue
        replicas.apply_once(
            strategy, optimizer, lambda r: [tf.constant(1.0 + r)], variables
        )
        for value in replicas.values(strategy, variables[0]):
            np.testing.assert_allclose(value, 1 - 0.1 * 1.5, rtol=1e-6)


@pytest.mark.parametrize("make, message", STEPS_OF_STACKS)
def test_steps_of_stacks(make, message):
    """A second build says so again."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        variables = [keras.Variable(1.0), keras.Variable([1.0])]
        optimizer = make()
    for _ in range(2):
        _check_refused(strategy, optimizer, variables, ValueError, message)


@pytest.mark.parametrize(
    "make, num_replicas, message",
    [
        (lambda: CrossShardOptimizer(SGD(0.1)), 2, STEPS_OF_STACKS[0][1]),
        (_scaled, 1, "both scale the loss"),
    ],
)
def test_two_loss_scales_by_compile(make, num_replicas, message):
    keras.mixed_precision.set_global_policy("mixed_float16")
    with pytest.raises(ValueError, match=message):
        training.train(make, replicas.mirrored(num_replicas))


def test_agn_under_mixed_float16_names_a_way_that_works():
    """The remedy is not another error, and compile adds the wrapper."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    make = lambda: tf_xshard.AGNOptimizer(SGD(0.1))
    with pytest.raises(ValueError, match="AGNOptimizer") as caught:
        training.train(make, replicas.mirrored(2))
    message = str(caught.value)
    assert "compile() adds a LossScaleOptimizer automatically" in message
    assert "AGNOptimizer(keras.optimizers.LossScale" not in message
    assert "mixed_bfloat16" in message and "auto_scale_loss=False" in message
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    training.train(make, replicas.mirrored(2), num_steps=2)


def test_an_outer_loss_scale_optimizer_on_one_device_is_fine():
    keras.mixed_precision.set_global_policy("mixed_float16")
    reference = training.train(lambda: SGD(0.05))[1]
    got = training.train(lambda: CrossShardOptimizer(SGD(0.05)))[1]
    assert training.deviation(got, reference) == 0.0


@pytest.mark.parametrize(
    "make_inner, refused, message",
    [
        *(
            (
                make_inner,
                lambda inner: CrossShardOptimizer(
                    inner, group_assignment=PAIRS
                ),
                "is for 4 replicas, but the strategy MirroredStrategy has 2",
            )
            for make_inner in (_sgd, _cross())
        ),
        (
            _sgd,
            lambda inner: tf_xshard.AGNOptimizer(
                inner, local_optimizer=_OverridesTheSum()
            ),
            "would be reduced twice",
        ),
        (
            _sgd,
            lambda inner: tf_xshard.AGNOptimizer(
                inner, local_optimizer=_built(SGD())
            ),
            "local optimizer '(?i:sgd).*' has been built",
        ),
    ],
)
def test_a_refused_wrapper_leaves_the_inner_optimizer_as_it_was(
    make_inner, refused, message
):
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight, inner = keras.Variable(0.0), make_inner()
        with pytest.raises((TypeError, ValueError), match=message):
            refused(inner)
        inner.build([weight])
    replicas.apply_once(
        strategy, inner, lambda r: [tf.constant(r + 1.0)], [weight]
    )
    # "global" arrives halved: the mean of 2 and 4; plain Keras sums.
    assert replicas.values(strategy, weight) == [-3.0, -3.0]


def _steps(strategy, optimizer, weight, num_steps=1):
    """The weight on all replicas, whose gradients are powers of ten."""
    with strategy.scope():
        weight.assign(0.0)
    for _ in range(num_steps):
        replicas.apply_once(
            strategy, optimizer, lambda r: [tf.constant(10.0**r)], [weight]
        )
    return replicas.values(strategy, weight)


def test_an_optimizer_that_was_inside_another_one():
    """Alone it undoes 1/N again; inside others it takes their place."""
    strategy = replicas.mirrored(4)
    alone = [-1111.0] * 4
    with strategy.scope():
        weight, cross = keras.Variable(0.0), CrossShardOptimizer(SGD(1.0))
        towers = tf_xshard.TowerOptimizer(cross, 2)
        assert _steps(strategy, towers, weight, 2) == alone
        assert _steps(strategy, cross, weight) == alone
        agn = tf_xshard.AGNOptimizer(SGD(1.0), communication_period=1)
        outer = CrossShardOptimizer(agn, group_assignment=PAIRS)
        in_pairs = [-22.0, -22.0, -2200.0, -2200.0]
        assert _steps(strategy, outer, weight) == in_pairs
        assert _steps(strategy, agn, weight) == alone
        assert agn.group_assignment is None
        assert _steps(strategy, outer, weight) == in_pairs


def test_parameter_server_strategy():
    class Unconnected(tf.distribute.ParameterServerStrategy):
        def __init__(self):  # No server runs in this test.
            pass

    with pytest.raises(
        ValueError, match="does not support Unconnected. Supported: no strategy"
    ):
        site_lib.kind_of(Unconnected())


def test_central_storage_strategy():
    strategy = tf.distribute.experimental.CentralStorageStrategy(
        ["CPU:0", "CPU:1"], "CPU:0"
    )
    with strategy.scope():
        for wrap in WRAPPERS.values():
            with pytest.raises(ValueError, match="not support CentralStorage"):
                wrap(SGD())


def test_8_bit_integers_elsewhere():
    """On TPUs, and feedback without an optimizer that keeps it."""
    wire = tf_xshard.Communication(dtype="int8", error_feedback=True)
    with (
        replicas.tpu(2).scope(),
        pytest.raises(ValueError, match=r"can't be used under \w*TPUStrategy"),
    ):
        _cross(communication=wire)()
    with pytest.raises(ValueError, match="only an optimizer has"):
        replicas.mirrored(2).run(
            lambda: tf_xshard.group_reduce(tf.ones([3]), communication=wire)
        )


def test_another_scope():
    strategy = replicas.mirrored(2)
    inner = SGD()
    with strategy.scope():
        with pytest.raises(ValueError, match="Create both"):
            CrossShardOptimizer(inner)
        with pytest.raises(
            ValueError, match="local optimizer .* was created outs"
        ):
            tf_xshard.AGNOptimizer(SGD(), local_optimizer=inner)
        variables = [keras.Variable(1.0)]
    with replicas.mirrored(4).scope():
        other = _cross()()
    for optimizer, message in (
        (CrossShardOptimizer(inner), "outside any strategy's scope"),
        (other, "in the scope of another Mirrored"),
    ):
        _check_refused(strategy, optimizer, variables, RuntimeError, message)


def test_a_step_in_another_context():
    """In cross-replica context, and in a function inside the replica's."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight, optimizer = keras.Variable(1.0), _cross()()
        with pytest.raises(RuntimeError, match="inside the function that you"):
            optimizer.apply([tf.constant(1.0)], [weight])

    @tf.function(autograph=False)
    def nested():
        optimizer.apply([tf.constant(1.0)], [weight])

    for run in (tf.function(strategy.run), strategy.run):
        with pytest.raises(RuntimeError, match="remove the decorator"):
            run(lambda: nested())
    assert replicas.values(strategy, weight) == [1.0, 1.0]


@pytest.mark.parametrize(
    "grads, variables, error, message",
    [
        ([1.0], None, ValueError, "has not been built"),
        ([1.0, 2.0], ["weight"], ValueError, "got 2 gradients for 1 variables"),
        ([np.zeros(2, "f")], ["weight"], ValueError, r"shape \(2,\), but the"),
        ([np.int32(1)], ["weight"], TypeError, "has type int32"),
        ([None], ["weight"], ValueError, "No gradients provided"),
    ],
    ids=str,
)
def test_gradients(grads, variables, error, message):
    weight = keras.Variable(1.0)
    optimizer = CrossShardOptimizer(SGD())
    variables = variables and [weight]
    with pytest.raises(error, match=message):
        optimizer.apply(grads, variables)
    assert float(weight) == 1.0


def test_variables_and_groups_of_others():
    weight = keras.Variable(1.0)
    for optimizer, message in (
        (_built(_cross()()), "Unknown variable"),
        # Outside its strategy nothing is known: a saved model can be loaded.
        (_cross(group_assignment=PAIRS)(), "is for 4 replicas"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.apply([tf.constant(1.0)], [weight])
    assert float(weight) == 1.0


def test_replicas_that_apply_something_else():
    strategy = replicas.mirrored(2)
    with strategy.scope():
        variables = [keras.Variable(1.0), keras.Variable(1.0)]
        optimizer = _cross()()
        optimizer.build(variables)

    def on_replica():
        count = 1 + replicas.replica_id()
        optimizer.apply([tf.constant(1.0)] * count, variables[:count])

    for run in (tf.function(strategy.run), strategy.run):
        with pytest.raises(ValueError, match="1 passes 2 values but replica 0"):
            run(on_replica)
    for variable in variables:
        assert replicas.values(strategy, variable) == [1.0, 1.0]


@pytest.mark.parametrize(
    "returned",
    [
        lambda pairs: [],
        lambda pairs: pairs[::-1],
        lambda pairs: [(g,) for g, _ in pairs],
        lambda pairs: [(v, g) for g, v in pairs],
    ],
)
def test_a_hook_that_returns_something_else(returned):
    variables = [keras.Variable(1.0), keras.Variable(2.0)]
    optimizer = CrossShardOptimizer(SGD(), pre_reduce=returned)
    with pytest.raises(ValueError, match="pre_reduce must return"):
        optimizer.apply([tf.constant(1.0), tf.constant(2.0)], variables)
    assert [float(v) for v in variables] == [1.0, 2.0]


def test_devices_that_do_not_exist():
    """TensorFlow accepts them, and its collectives wait forever."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:99"])
    with strategy.scope(), pytest.raises(ValueError, match="CPU:99.*logical"):
        tf_xshard.CrossShardOptimizer(keras.optimizers.SGD())
    step = tf.function(lambda: strategy.run(tf_xshard.group_reduce, ([1.0],)))
    with pytest.raises(ValueError, match="CPU:99.*logical"):
        step()


@pytest.mark.parametrize(
    "version, outcome",
    [
        (
            "2.19.1",
            pytest.raises(ImportError, match="needs tensorflow 2.20 to 2.22"),
        ),
        ("2.20.0", contextlib.nullcontext()),
        ("2.22.0rc0", contextlib.nullcontext()),
        (
            "3.0.0",
            pytest.warns(UserWarning, match="is tested with tensorflow 2.20"),
        ),
    ],
)
def test_versions(version, outcome):
    with outcome:
        dependencies.check_range(
            "tensorflow", version, dependencies.tested("tensorflow")
        )


def test_no_tensorflow(monkeypatch):
    monkeypatch.setattr(
        dependencies.importlib.util, "find_spec", lambda name: None
    )
    with pytest.raises(ImportError, match=r"pip install 'tf_xshard\[cpu\]'"):
        dependencies.check()


def test_another_keras_backend(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ImportError, match="Set KERAS_BACKEND=tensorflow"):
        dependencies.check()


@pytest.mark.parametrize("aggregation", ["mean", "sum", "only_first_replica"])
def test_a_trained_variable_with_an_aggregation(aggregation):
    """TensorFlow would combine the replicas' updates once more."""
    with replicas.mirrored(2).scope():
        variable = keras.Variable(1.0, aggregation=aggregation, name="w")
        optimizer = tf_xshard.CrossShardOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(
        ValueError, match="can't train 'w', which has the aggre"
    ):
        optimizer.build([variable])
    assert not optimizer.built and not optimizer.inner_optimizer.built
    alone = tf_xshard.CrossShardOptimizer(keras.optimizers.SGD(0.1))
    alone.apply([tf.constant(1.0)], [keras.Variable(1.0, aggregation="sum")])
