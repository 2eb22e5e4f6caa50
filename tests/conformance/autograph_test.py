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


def test_our_code_is_not_converted():
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weights = [keras.Variable(1.0) for _ in range(3)]
        *inners, center = [_Recording(1.0, name=f"sgd{i}") for i in range(4)]
        cross = tf_xshard.CrossShardOptimizer(inners[0])
        tower = tf_xshard.TowerOptimizer(inners[1], 1)
        agn = tf_xshard.AGNOptimizer(center, local_optimizer=inners[2])

    @tf.function
    def step():
        def on_replica():
            one = tf.constant(1.0)
            cross.apply([cross.scale_loss(one)], [weights[0]])
            tower.apply_towers([[tower.scale_loss(one)]], [weights[1]])
            agn.apply_gradients([(agn.scale_loss(one), weights[2])])

        strategy.run(on_replica)

    step()
    # The test can fail: AutoGraph does convert the user's function.
    for inner in inners:
        assert inner.converted == {"on_replica"}
    # Nor is the exchange at the end of `fit`.
    object.__setattr__(center, "converted", {"not called"})
    agn.finalize_variable_values([weights[2]])
    assert center.converted == set()


class _RecordingV1(tf.compat.v1.train.GradientDescentOptimizer):
    def compute_gradients(self, *args, **kwargs):
        self.converted = _converted_functions()
        return super().compute_gradients(*args, **kwargs)

    def apply_gradients(self, *args, **kwargs):
        self.converted |= _converted_functions()
        return super().apply_gradients(*args, **kwargs)


def test_compat_v1():
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weights = [tf.Variable(1.0) for _ in range(2)]
        inners = [_RecordingV1(1.0) for _ in range(2)]
        cross = v1.CrossShardOptimizer(inners[0])
        tower = v1.TowerOptimizer(inners[1])

    @tf.function
    def step(x):
        def loss():
            # A tensor: only a converted function can have this.
            if x > 0:
                return weights[0] * 2.0 + weights[1] * 2.0
            return weights[0] * 3.0

        def on_replica():
            cross.apply_gradients(cross.compute_gradients(loss, weights[:1]))
            tower.minimize(loss, var_list=weights[1:])

        strategy.run(on_replica)

    step(tf.constant(1.0))
    for inner in inners:
        assert inner.converted == {"on_replica"}
    assert replicas.values(strategy, weights[0]) == [-1.0, -1.0]


class _Halving(keras.optimizers.SGD):
    """A user's inner optimizer with a tensor `if`."""

    def apply_gradients(self, grads_and_vars):
        [(gradient, variable)] = grads_and_vars
        if tf.norm(gradient) > 0.5:
            gradient = gradient / 2.0
        return super().apply_gradients([(gradient, variable)])


@replicas.on_mirrored_and_tpu
def test_a_tensor_if_in_hooks_and_an_inner_optimizer(kind):
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
        optimizer = tf_xshard.TowerOptimizer(
            tf_xshard.CrossShardOptimizer(
                _Halving(1.0),
                "sum",
                pre_reduce=small_only,
                post_reduce=negative_too,
                loss_normalization="replica",
            ),
            1,
        )
    gradient = strategy.experimental_distribute_values_from_function(
        lambda c: tf.constant([10.0 ** int(c.replica_id_in_sync_group)])
    )

    @tf.function
    def step(gradient):
        if kind == "tpu":  # TPUStrategy.run takes no variables.
            strategy.run(lambda g: optimizer.apply([g], [weight]), (gradient,))
        else:
            strategy.run(optimizer.apply, args=([gradient], [weight]))

    step(gradient)
    # 1 + 0 (10 is too large), then -1, and half of it, which SGD subtracts.
    assert replicas.values(strategy, weight) == [[0.5]] * 2


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
