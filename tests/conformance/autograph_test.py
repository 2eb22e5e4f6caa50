"""AutoGraph converts the user's code and leaves ours alone."""

import sys

import keras
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


class _RecordingV1(tf.compat.v1.train.GradientDescentOptimizer):
    def compute_gradients(self, *args, **kwargs):
        self.converted = _converted_functions()
        return super().compute_gradients(*args, **kwargs)

    def apply_gradients(self, *args, **kwargs):
        self.converted |= _converted_functions()
        return super().apply_gradients(*args, **kwargs)


def test_our_code_is_not_converted():
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weights = [keras.Variable(1.0) for _ in range(3)]
        old_weights = [tf.Variable(1.0) for _ in range(2)]
        *inners, center = [_Recording(1.0, name=f"sgd{i}") for i in range(4)]
        cross = tf_xshard.CrossShardOptimizer(inners[0])
        tower = tf_xshard.TowerOptimizer(inners[1], 1)
        agn = tf_xshard.AGNOptimizer(center, local_optimizer=inners[2])
        old_inners = [_RecordingV1(1.0), _RecordingV1(1.0)]
        old_cross = v1.CrossShardOptimizer(old_inners[0])
        old_tower = v1.TowerOptimizer(old_inners[1])

    @tf.function
    def step(x):
        def loss():
            # A tensor: only a converted function can have this.
            if x > 0:
                return old_weights[0] * 2.0 + old_weights[1] * 2.0
            return old_weights[0] * 3.0

        def on_replica():
            one = tf.constant(1.0)
            cross.apply([cross.scale_loss(one)], [weights[0]])
            tower.apply_towers([[tower.scale_loss(one)]], [weights[1]])
            agn.apply_gradients([(agn.scale_loss(one), weights[2])])
            old_cross.apply_gradients(
                old_cross.compute_gradients(loss, old_weights[:1])
            )
            old_tower.minimize(loss, var_list=old_weights[1:])

        strategy.run(on_replica)

    step(tf.constant(1.0))
    # The test can fail: AutoGraph does convert the user's function.
    for inner in (*inners, *old_inners):
        assert inner.converted == {"on_replica"}
    assert replicas.values(strategy, old_weights[0]) == [-1.0, -1.0]
    # Nor is the exchange at the end of `fit`.
    object.__setattr__(center, "converted", {"not called"})
    agn.finalize_variable_values([weights[2]])
    assert center.converted == set()


class _Halving(keras.optimizers.SGD):
    """A user's inner optimizer with a tensor `if`."""

    def apply_gradients(self, grads_and_vars):
        [(gradient, variable)] = grads_and_vars
        if gradient < -0.5:
            gradient = gradient / 2.0
        return super().apply_gradients([(gradient, variable)])


@replicas.on_mirrored_and_tpu
def test_a_tensor_if_in_hooks_and_an_inner_optimizer(kind):
    def small_only(pairs):
        [(gradient, variable)] = pairs
        if gradient > 5.0:
            gradient = tf.zeros_like(gradient)
        return [(gradient, variable)]

    def negative(pairs):
        [(gradient, variable)] = pairs
        if gradient > 0.0:
            gradient = -gradient
        return [(gradient, variable)]

    strategy = replicas.STRATEGIES[kind](2)
    with strategy.scope():
        weight = keras.Variable(0.0)
        cross = tf_xshard.CrossShardOptimizer(
            _Halving(1.0), "sum", pre_reduce=small_only, post_reduce=negative
        )
        optimizer = tf_xshard.TowerOptimizer(cross, 1)

    def on_replica():
        optimizer.apply([replicas.power_of_ten() / 2], [weight])

    tf.function(lambda: strategy.run(on_replica))()
    # 1 + 0 (10 is too large), then -1, and half of it, which SGD subtracts.
    assert replicas.values(strategy, weight) == [0.5] * 2


def _make():
    # A condition that only converted code can have.
    rate = 2.0
    if tf.constant(1.0) > 0.0:
        rate = 1.0
    return tf.compat.v1.train.GradientDescentOptimizer(rate)


def _model_fn(features, labels, mode):
    del labels
    scale = 3.0
    if tf.reduce_sum(features) > 0.0:
        scale = 2.0
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
