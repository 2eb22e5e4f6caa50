"""What can't be honoured is refused by name, and nothing has changed then."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import training
from tests.support.versions import needs_multi_optimizer
from tf_xshard import dependencies
from tf_xshard.distribute import site as site_lib

SGD = keras.optimizers.SGD
CrossShardOptimizer = tf_xshard.CrossShardOptimizer


@pytest.mark.parametrize(
    "argument, value",
    [
        ("learning_rate", 0.1),
        ("weight_decay", 0.1),
        ("clipnorm", 1.0),
        ("clipvalue", 1.0),
        ("global_clipnorm", 1.0),
        ("use_ema", True),
        ("ema_momentum", 0.9),
        ("ema_overwrite_frequency", 2),
        ("loss_scale_factor", 8.0),
        ("gradient_accumulation_steps", 2),
    ],
)
def test_base_arguments(argument, value):
    with pytest.raises(
        ValueError, match=f"does not take '{argument}': set it on the inner"
    ):
        CrossShardOptimizer(SGD(), **{argument: value})


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(nonsense=1), TypeError, "unknown argument 'nonsense'"),
        (dict(reduction="avg"), ValueError, '"mean" or "sum", got \'avg\''),
        (dict(reduction=None), ValueError, '"mean" or "sum", got None'),
        (dict(reduction=["mean"]), ValueError, '"mean" or "sum"'),
        (
            dict(reduction=tf.compat.v1.losses.Reduction.NONE),
            ValueError,
            '"mean" or "sum"',
        ),
        (dict(loss_normalization="none"), ValueError, "must be one of"),
        (dict(pre_reduce=1.0), TypeError, "pre_reduce must be a callable"),
        (dict(post_reduce="clip"), TypeError, "post_reduce must be a callable"),
        (
            dict(communication={}),
            TypeError,
            "must be a tf_xshard.Communication",
        ),
        (dict(group_assignment=[[0, 0]]), ValueError, "replica 0 twice"),
    ],
    ids=str,
)
def test_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        CrossShardOptimizer(SGD(), **arguments)


@pytest.mark.parametrize(
    "inner, message",
    [
        (
            tf.compat.v1.train.GradientDescentOptimizer(0.1),
            "Use tf_xshard.compat.v1.CrossShardOptimizer",
        ),
        ("adam", r"wraps a keras.optimizers.Optimizer, got 'adam' \(str\)"),
        (SGD, "wraps a keras.optimizers.Optimizer"),
        (None, "wraps a keras.optimizers.Optimizer"),
    ],
    ids=["v1", "name", "class", "none"],
)
def test_inner_optimizers(inner, message):
    with pytest.raises(TypeError, match=message):
        CrossShardOptimizer(inner)


@pytest.mark.parametrize(
    "reduction, expected",
    [
        (tf.compat.v1.losses.Reduction.MEAN, "mean"),
        (tf.compat.v1.losses.Reduction.SUM, "sum"),
    ],
)
def test_v1_reductions(reduction, expected):
    assert CrossShardOptimizer(SGD(), reduction).reduction == expected


class _OverridesTheSum(SGD):
    def _all_reduce_sum_gradients(self, grads_and_vars):
        return grads_and_vars


def test_an_inner_optimizer_that_overrides_the_reduction():
    with pytest.raises(TypeError, match="would be reduced twice"):
        CrossShardOptimizer(_OverridesTheSum())


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


@pytest.mark.parametrize("method", ["apply", "update_step"])
@pytest.mark.parametrize(
    "kind, run, reduce",
    [
        ("mirrored", tf.function, _all_reduce),
        ("mirrored", lambda step: step, _all_reduce),
        ("mirrored", lambda step: step, _batch_reduce),
        ("tpu", tf.function, _all_reduce),
    ],
    ids=["function", "eager", "eager_merge_call", "tpu"],
)
@pytest.mark.parametrize(
    "wrap",
    [
        CrossShardOptimizer,
        lambda inner: tf_xshard.TowerOptimizer(inner, 1),
        lambda inner: CrossShardOptimizer(
            keras.optimizers.LossScaleOptimizer(inner)
        ),
        lambda inner: CrossShardOptimizer(CrossShardOptimizer(inner)),
        lambda inner: tf_xshard.AGNOptimizer(SGD(), local_optimizer=inner),
    ],
    ids=["cross", "tower", "scale", "nested", "agn"],
)
def test_an_inner_optimizer_that_reduces(wrap, kind, run, reduce, method):
    """In a helper, where reading the method's code would not show it."""
    _check_that_it_is_refused(wrap, kind, run, reduce, method)


@pytest.mark.parametrize(
    "wrap",
    [
        CrossShardOptimizer,
        lambda inner: CrossShardOptimizer(CrossShardOptimizer(inner)),
    ],
)
@pytest.mark.parametrize("method", ["apply", "update_step"])
def test_an_inner_optimizer_that_sums_with_an_operation(wrap, method):
    _check_that_it_is_refused(
        wrap, "tpu", tf.function, _cross_replica_sum, method
    )


def _check_that_it_is_refused(wrap, kind, run, reduce, method):
    strategy = replicas.STRATEGIES[kind](4)
    with strategy.scope():
        weight = keras.Variable(1.0)
        optimizer = wrap(_Reduces(reduce, method))
        optimizer.build([weight])

    def step():
        strategy.run(lambda: optimizer.apply([tf.constant(1.0)], [weight]))

    with pytest.raises(TypeError, match="would be reduced twice"):
        run(step)()
    assert replicas.values(strategy, weight) == [1.0] * 4


def test_group_assignment_of_another_strategy():
    message = "is for 8 replicas, but the strategy MirroredStrategy has 4"
    groups = tf_xshard.GroupAssignment.contiguous(8, 2)
    with replicas.mirrored(4).scope():
        with pytest.raises(ValueError, match=message):
            CrossShardOptimizer(SGD(), group_assignment=groups)
    # Outside any scope nothing is known yet: a saved model can be loaded.
    optimizer = CrossShardOptimizer(SGD(1.0), group_assignment=groups)
    weight = keras.Variable(1.0)
    with pytest.raises(ValueError, match="is for 8 replicas"):
        optimizer.apply([tf.constant(1.0)], [weight])
    assert float(weight) == 1.0


@pytest.mark.parametrize("auto", [True, False], ids=["compile", "loop"])
def test_an_outer_loss_scale_optimizer(auto):
    strategy = replicas.mirrored(2)
    message = (
        r"CrossShardOptimizer\(keras.optimizers.LossScaleOptimizer\(inner\)\)"
    )
    if auto:
        keras.mixed_precision.set_global_policy("mixed_float16")
        with pytest.raises(ValueError, match=message):
            training.train(
                lambda: CrossShardOptimizer(SGD(0.1)), strategy, fit=True
            )
        return
    with strategy.scope():
        weight = keras.Variable(1.0)
        outer = keras.optimizers.LossScaleOptimizer(CrossShardOptimizer(SGD()))
    with pytest.raises(ValueError, match=message):
        replicas.apply_once(
            strategy, outer, lambda r: [tf.constant(1.0)], [weight]
        )
    assert replicas.values(strategy, weight) == [1.0, 1.0]


def test_agn_under_mixed_float16_names_a_way_that_works():
    """The remedy is not another error, and compile adds the wrapper."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    make = lambda: tf_xshard.AGNOptimizer(SGD(0.1))
    with pytest.raises(ValueError, match="AGNOptimizer") as caught:
        training.train(make, replicas.mirrored(2), fit=True)
    message = str(caught.value)
    assert "compile() adds a LossScaleOptimizer by itself" in message
    assert "AGNOptimizer(keras.optimizers.LossScale" not in message
    assert "mixed_bfloat16" in message and "auto_scale_loss=False" in message
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    training.train(make, replicas.mirrored(2), fit=True)


def test_an_outer_loss_scale_optimizer_on_one_device_is_fine():
    keras.mixed_precision.set_global_policy("mixed_float16")
    reference = training.train(lambda: SGD(0.05))[1]
    got = training.train(lambda: CrossShardOptimizer(SGD(0.05)))[1]
    assert training.deviation(got, reference) == 0.0


@needs_multi_optimizer
def test_an_outer_loss_scale_optimizer_around_a_multi_optimizer():
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(1.0)
        outer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.MultiOptimizer(
                keras.optimizers.OptimizerMap(CrossShardOptimizer(SGD(1.0)))
            )
        )
    with pytest.raises(ValueError, match="LossScaleOptimizer wraps"):
        replicas.apply_once(
            strategy, outer, lambda r: [tf.constant(1.0)], [weight]
        )
    assert replicas.values(strategy, weight) == [1.0, 1.0]


@needs_multi_optimizer
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_loss_scale_optimizer_in_a_wrapper_in_a_multi_optimizer(is_wrapped):
    """MultiOptimizer does not scale the loss, and sees no such wrapper."""

    def inside(_):
        return CrossShardOptimizer(
            keras.optimizers.LossScaleOptimizer(SGD(1.0))
        )

    outer = keras.optimizers.MultiOptimizer(inside)
    if is_wrapped:
        outer = CrossShardOptimizer(outer)
    with pytest.raises(ValueError, match="would not scale the loss"):
        outer.build([keras.Variable(1.0)])


def test_two_loss_scale_optimizers_on_one_device():
    keras.mixed_precision.set_global_policy("mixed_float16")
    with pytest.raises(ValueError, match="both scale the loss"):
        training.train(
            lambda: CrossShardOptimizer(
                keras.optimizers.LossScaleOptimizer(SGD(0.1))
            )
        )


def test_a_refused_wrapper_leaves_the_inner_optimizer_as_it_was():
    strategy = replicas.mirrored(2)
    with strategy.scope():
        plain, wrapped = SGD(1.0), CrossShardOptimizer(SGD(1.0))
        for inner in (plain, wrapped):
            weight = keras.Variable(0.0)
            with pytest.raises(ValueError, match="is for 4 replicas"):
                CrossShardOptimizer(inner, group_assignment=[[0, 1], [2, 3]])
            inner.build([weight])
    for inner in (plain, wrapped):
        weight = inner._trainable_variables[0]
        replicas.apply_once(
            strategy, inner, lambda r: [tf.constant(r + 1.0)], [weight]
        )
        # "global" arrives halved: the mean of 2 and 4; plain Keras sums.
        assert replicas.values(strategy, weight) == [-3.0, -3.0]


@pytest.mark.parametrize(
    "local, text",
    [
        (lambda: _OverridesTheSum(), "would be reduced twice"),
        (
            lambda: _built(SGD()),
            "local optimizer '(?i:sgd).*' has been built",
        ),
    ],
)
def test_a_refused_local_optimizer_leaves_the_inner_one_as_it_was(local, text):
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight, inner = keras.Variable(0.0), SGD(1.0)
        with pytest.raises((TypeError, ValueError), match=text):
            tf_xshard.AGNOptimizer(inner, local_optimizer=local())
        inner.build([weight])
    replicas.apply_once(
        strategy, inner, lambda r: [tf.constant(r + 1.0)], [weight]
    )
    assert replicas.values(strategy, weight) == [-3.0, -3.0]


def _built(optimizer):
    optimizer.build([keras.Variable(0.0)])
    return optimizer


def test_a_local_optimizer_of_another_scope():
    local = SGD()
    with replicas.mirrored(2).scope():
        with pytest.raises(
            ValueError, match="local optimizer .* was created outs"
        ):
            tf_xshard.AGNOptimizer(SGD(), local_optimizer=local)


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
    pairs = [[0, 1], [2, 3]]
    alone = [-1111.0] * 4
    with strategy.scope():
        weight, cross = keras.Variable(0.0), CrossShardOptimizer(SGD(1.0))
        towers = tf_xshard.TowerOptimizer(cross, 2)
        assert _steps(strategy, cross, weight) == alone
        assert _steps(strategy, towers, weight, 2) == alone
        assert _steps(strategy, cross, weight) == alone
        agn = tf_xshard.AGNOptimizer(SGD(1.0), communication_period=1)
        outer = CrossShardOptimizer(agn, group_assignment=pairs)
        in_pairs = [-22.0, -22.0, -2200.0, -2200.0]
        assert _steps(strategy, outer, weight) == in_pairs
        assert _steps(strategy, agn, weight) == alone
        assert agn.group_assignment is None
        assert _steps(strategy, outer, weight) == in_pairs


@needs_multi_optimizer
def test_a_refused_build_is_refused_again():
    strategy = replicas.mirrored(2)

    def optimizer_of(variable):
        if variable.name == "own":
            return CrossShardOptimizer(SGD(1.0), group_assignment=[[0], [1]])
        return SGD(1.0)

    with strategy.scope():
        variables = [keras.Variable(0.0, name=n) for n in ("own", "all")]
        optimizer = tf_xshard.TowerOptimizer(
            keras.optimizers.MultiOptimizer(optimizer_of), 1
        )
    for _ in range(2):
        with pytest.raises(ValueError, match="Wrap each of them"):
            replicas.apply_once(
                strategy, optimizer, lambda r: [tf.constant(1.0)] * 2, variables
            )
        assert not optimizer.built
    assert replicas.values(strategy, variables[0]) == [0.0, 0.0]


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
        for make in (
            lambda: CrossShardOptimizer(SGD()),
            lambda: tf_xshard.TowerOptimizer(SGD(), 2),
            lambda: tf_xshard.AGNOptimizer(SGD()),
        ):
            with pytest.raises(
                ValueError, match="does not support CentralStorageStrategy"
            ):
                make()


def test_another_scope():
    strategy = replicas.mirrored(2)
    inner = SGD()
    with strategy.scope():
        with pytest.raises(ValueError, match="Create both"):
            CrossShardOptimizer(inner)
        weight = keras.Variable(1.0)
    outside = CrossShardOptimizer(inner)
    with pytest.raises(RuntimeError, match="outside any strategy's scope"):
        replicas.apply_once(
            strategy, outside, lambda r: [tf.constant(1.0)], [weight]
        )
    with replicas.mirrored(4).scope():
        other = CrossShardOptimizer(SGD())
    with pytest.raises(RuntimeError, match="in the scope of another Mirrored"):
        replicas.apply_once(
            strategy, other, lambda r: [tf.constant(1.0)], [weight]
        )
    assert replicas.values(strategy, weight) == [1.0, 1.0]


def test_cross_replica_context():
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(1.0)
        optimizer = CrossShardOptimizer(SGD())
        with pytest.raises(RuntimeError, match="inside the function that you"):
            optimizer.apply([tf.constant(1.0)], [weight])


def test_a_nested_function_is_named():
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(1.0)
        optimizer = CrossShardOptimizer(SGD())

    @tf.function(autograph=False)
    def nested():
        optimizer.apply([tf.constant(1.0)], [weight])

    def on_replica():
        nested()

    for run in (tf.function(strategy.run), strategy.run):
        with pytest.raises(RuntimeError, match="remove the decorator"):
            run(on_replica)
    assert replicas.values(strategy, weight) == [1.0, 1.0]


@pytest.mark.parametrize(
    "grads, variables, error, message",
    [
        ([1.0], None, ValueError, "has not been built"),
        ([1.0, 2.0], ["weight"], ValueError, "got 2 gradients for 1 variables"),
        (
            [np.zeros(2, np.float32)],
            ["weight"],
            ValueError,
            r"has shape \(2,\), but the variable has \(\)",
        ),
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


def test_an_unknown_variable():
    optimizer = CrossShardOptimizer(SGD())
    optimizer.build([keras.Variable(1.0)])
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply([tf.constant(1.0)], [keras.Variable(1.0)])


def test_replicas_that_apply_something_else():
    strategy = replicas.mirrored(2)
    with strategy.scope():
        variables = [keras.Variable(1.0), keras.Variable(1.0)]
        optimizer = CrossShardOptimizer(SGD())
        optimizer.build(variables)

    def more_on_replica_1():
        count = 1 + replicas.replica_id()
        optimizer.apply([tf.constant(1.0)] * count, variables[:count])

    def other_types():
        dtype = [tf.float32, tf.float64][replicas.replica_id()]
        optimizer.apply([tf.constant(1.0, dtype)], variables[:1])

    for on_replica, message in (
        (more_on_replica_1, "Replica 1 passes 2 values but replica 0"),
        (other_types, r"different types \['float32', 'float64'\]"),
    ):
        for run in (tf.function(strategy.run), strategy.run):
            with pytest.raises(ValueError, match=message):
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


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: tf_xshard.clip_by_norm(0), ValueError, "positive and finite"),
        (
            lambda: tf_xshard.clip_by_global_norm(float("nan")),
            ValueError,
            "positive and finite",
        ),
        (lambda: tf_xshard.clip_by_norm("1"), TypeError, "must be a number"),
        (
            lambda: tf_xshard.clip_by_global_norm([1.0]),
            TypeError,
            "must be a number",
        ),
        (lambda: tf_xshard.clip_by_value(1, 1), ValueError, "below"),
        (
            lambda: tf_xshard.clip_by_value(0, float("inf")),
            ValueError,
            "finite",
        ),
        (
            lambda: tf_xshard.clip_by_value(True, 2),
            TypeError,
            "must be a number",
        ),
        (
            lambda: tf_xshard.Communication(dtype="int16"),
            ValueError,
            "Supported",
        ),
        (lambda: tf_xshard.Communication(dtype=1), TypeError, "a string"),
        (
            lambda: tf_xshard.Communication(bytes_per_bucket=0),
            ValueError,
            "must be positive",
        ),
        (
            lambda: tf_xshard.Communication(bytes_per_bucket=1.5),
            TypeError,
            "must be an int",
        ),
        (
            lambda: tf_xshard.Communication(timeout_seconds=-1),
            ValueError,
            "must be positive",
        ),
        (
            lambda: tf_xshard.Communication(timeout_seconds=None),
            TypeError,
            "must be a number",
        ),
    ],
)
def test_values(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_loss_normalization_of_a_stack():
    inner = CrossShardOptimizer(SGD(), loss_normalization="replica")
    with pytest.raises(ValueError, match="has one loss_normalization"):
        CrossShardOptimizer(inner, loss_normalization="global")
    assert CrossShardOptimizer(inner).loss_normalization == "replica"


def test_devices_that_do_not_exist():
    """TensorFlow accepts them, and its collectives wait forever."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:9"])
    with strategy.scope(), pytest.raises(ValueError, match="CPU:9.*logical"):
        tf_xshard.CrossShardOptimizer(keras.optimizers.SGD())
    step = tf.function(lambda: strategy.run(tf_xshard.group_reduce, ([1.0],)))
    with pytest.raises(ValueError, match="CPU:9.*logical"):
        step()


@pytest.mark.parametrize(
    "version, outcome",
    [
        ("2.19.1", ImportError),
        ("2.20.0", None),
        ("2.21.3", None),
        ("2.22.0rc0", None),
        ("3.0.0", UserWarning),
    ],
)
def test_versions(version, outcome):
    def check():
        dependencies.check_range(
            "tensorflow", version, dependencies.tested("tensorflow")
        )

    if outcome is ImportError:
        with pytest.raises(ImportError, match="needs tensorflow 2.20 to 2.22"):
            check()
    elif outcome is UserWarning:
        with pytest.warns(UserWarning, match="is tested with tensorflow 2.20"):
            check()
    else:
        check()


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
