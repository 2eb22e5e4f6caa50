"""AutoGraph converts the user's code and leaves ours alone."""

import itertools
import sys

import keras
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tf_xshard.compat import v1


def _converted_functions():
    """The functions of ours on the stack that AutoGraph has converted."""
    found, frame = set(), sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if "__autograph_generated_file" in code.co_filename:
            found.add(code.co_name.removeprefix("tf__"))
        frame = frame.f_back
    # What AutoGraph makes of an `if` is a part of the function.
    return {one for one in found if not one.startswith(("if_", "else_"))}


class _Recording(keras.optimizers.SGD):
    """Remembers what was converted when it was called."""

    def update_step(self, *args, **kwargs):
        object.__setattr__(self, "converted", _converted_functions())
        return super().update_step(*args, **kwargs)


WRAPPERS = {
    "cross_shard": tf_xshard.CrossShardOptimizer,
    "tower": lambda inner: tf_xshard.TowerOptimizer(inner, 1),
    "agn": lambda inner: tf_xshard.AGNOptimizer(
        keras.optimizers.SGD(1.0), local_optimizer=inner
    ),
}


@pytest.mark.parametrize("how", ["apply", "apply_gradients", "apply_towers"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_our_code_is_not_converted(wrapper, how):
    if how == "apply_towers" and wrapper != "tower":
        return
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(1.0)
        inner = _Recording(1.0)
        optimizer = WRAPPERS[wrapper](inner)

    @tf.function
    def step():
        def on_replica():
            gradient = optimizer.scale_loss(tf.constant(1.0))
            if how == "apply":
                optimizer.apply([gradient], [weight])
            elif how == "apply_gradients":
                optimizer.apply_gradients([(gradient, weight)])
            else:
                optimizer.apply_towers([[gradient]], [weight])

        strategy.run(on_replica)

    step()
    # The test can fail: AutoGraph does convert the user's function.
    assert inner.converted == {"on_replica"}


def test_the_exchange_at_the_end_of_fit_is_not_converted():
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(1.0)
        inner = _Recording(1.0, name="recording")
        optimizer = tf_xshard.AGNOptimizer(
            inner, local_optimizer=keras.optimizers.SGD(1.0)
        )
    replicas.apply_once(
        strategy, optimizer, lambda r: [tf.constant(1.0)], [weight]
    )
    optimizer.finalize_variable_values([weight])
    assert inner.converted == set()


class _RecordingV1(tf.compat.v1.train.GradientDescentOptimizer):
    def compute_gradients(self, *args, **kwargs):
        self.converted = _converted_functions()
        return super().compute_gradients(*args, **kwargs)

    def apply_gradients(self, *args, **kwargs):
        self.converted |= _converted_functions()
        return super().apply_gradients(*args, **kwargs)


@pytest.mark.parametrize("how", ["minimize", "two_calls"])
@pytest.mark.parametrize("wrapper", [v1.CrossShardOptimizer, v1.TowerOptimizer])
def test_compat_v1(wrapper, how):
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = tf.Variable(1.0)
        inner = _RecordingV1(1.0)
        optimizer = wrapper(inner)

    @tf.function
    def step(x):
        def loss():
            # A tensor: only a converted function can have this.
            if x > 0:
                return weight * 2.0
            return weight * 3.0

        def on_replica():
            if how == "minimize":
                optimizer.minimize(loss, var_list=[weight])
            else:
                pairs = optimizer.compute_gradients(loss, [weight])
                optimizer.apply_gradients(pairs)

        strategy.run(on_replica)

    step(tf.constant(1.0))
    assert inner.converted == {"on_replica"}
    if wrapper is v1.CrossShardOptimizer:
        assert replicas.values(strategy, weight) == [-1.0, -1.0]


@pytest.mark.parametrize(
    "kind, how",
    [
        *itertools.product(replicas.STRATEGIES, ["plain", "nested"]),
        # TPUStrategy.run takes no variables.
        ("mirrored", "passed_to_run"),
    ],
)
def test_a_tensor_if_in_hooks(kind, how):
    def small_only(pairs):
        [(gradient, variable)] = pairs
        if tf.norm(gradient) > 5.0:
            gradient = tf.zeros_like(gradient)
        return [(gradient, variable)]

    def negative_too(pairs):
        [(gradient, variable)] = pairs
        if tf.reduce_sum(gradient) > 0.0:
            gradient = -gradient
        return [(gradient, variable)]

    strategy = replicas.STRATEGIES[kind](2)
    with strategy.scope():
        weight = keras.Variable([0.0])
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(1.0),
            "sum",
            pre_reduce=small_only,
            post_reduce=negative_too,
            loss_normalization="replica",
        )
        if how == "nested":
            optimizer = tf_xshard.TowerOptimizer(optimizer, 1)

    gradient = strategy.experimental_distribute_values_from_function(
        lambda c: tf.constant([10.0 ** int(c.replica_id_in_sync_group)])
    )

    @tf.function
    def step():
        if how == "passed_to_run":
            strategy.run(optimizer.apply, args=([gradient], [weight]))
        else:
            strategy.run(
                lambda: optimizer.apply(
                    [replicas.power_of_ten()[None]], [weight]
                )
            )

    step()
    # 1 + 0 (10 is too large), then -1, which SGD subtracts.
    assert [v.tolist() for v in replicas.values(strategy, weight)] == [
        [1.0]
    ] * 2


def _make():
    # A condition that only converted code can have.
    if tf.constant(1.0) > 0.0:
        rate = 1.0
    else:
        rate = 2.0
    return tf.compat.v1.train.GradientDescentOptimizer(rate)


def _model_fn(features, labels, mode):
    del labels
    if tf.reduce_sum(features) > 0.0:
        scale = 2.0
    else:
        scale = 3.0
    w = tf.compat.v1.get_variable("w", initializer=0.0)
    loss = tf.reduce_sum(features) * scale * w
    optimizer = v1.TowerOptimizer(_make)
    return v1.EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss))


def test_a_tensor_if_in_an_optimizer_factory_and_a_model_fn():
    """Both are outside of the function that AutoGraph converts."""

    def build():
        replicated = v1.replicate_model_fn(_model_fn, devices=["/CPU:0"] * 2)
        return replicated(tf.ones([2]), None, "train").train_op

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        train = tf.autograph.to_graph(build)()
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(train)
        [w] = session.run(tf.compat.v1.trainable_variables())
    assert w == -2.0


class _Halving(keras.optimizers.SGD):
    """A user's inner optimizer with a tensor `if`."""

    def apply_gradients(self, grads_and_vars):
        [(gradient, variable)] = grads_and_vars
        if tf.reduce_sum(gradient) > 1.0:
            gradient = gradient / 2.0
        return super().apply_gradients([(gradient, variable)])


def test_a_tensor_if_in_an_inner_optimizer():
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable([0.0])
        optimizer = tf_xshard.CrossShardOptimizer(
            _Halving(1.0), "sum", loss_normalization="replica"
        )

    @tf.function
    def step():
        strategy.run(lambda: optimizer.apply([tf.constant([2.0])], [weight]))

    step()
    assert [v.tolist() for v in replicas.values(strategy, weight)] == [
        [-2.0]
    ] * 2
