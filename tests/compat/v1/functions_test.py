"""TF1's wrappers in a tf.function and eagerly, with v1 and Keras inside."""

import keras
import pytest
import tensorflow as tf

from tf_xshard.compat import v1

tf1 = tf.compat.v1
INNER = {
    "v1": lambda: tf1.train.MomentumOptimizer(1.0, 0.5),
    "keras": lambda: keras.optimizers.SGD(1.0, momentum=0.5),
}


def _shards(inner, w, step):
    optimizer = v1.CrossShardOptimizer(inner)

    def computation(x):
        loss = lambda: tf.reduce_mean(x) * w
        return [optimizer.minimize(loss, step, [w]), x]

    return lambda x: tf.reduce_mean(v1.shard(computation, [x], 2)[0])


def _towers(inner, w, step):
    optimizer = v1.TowerOptimizer(inner)

    def model_fn(features, mode):
        loss = lambda: tf.reduce_mean(features) * w
        train = optimizer.minimize(loss, step, [w])
        return v1.EstimatorSpec(
            mode, loss=tf.reduce_mean(features), train_op=train or True
        )

    replicated = v1.replicate_model_fn(
        model_fn, tf1.losses.Reduction.MEAN, devices=["/CPU:0"] * 2
    )
    return lambda x: replicated(x, None, "train").loss


@pytest.mark.parametrize(
    "build, inner, is_function",
    [
        (_shards, "v1", True),
        (_shards, "keras", True),
        (_towers, "v1", True),
        (_towers, "v1", False),
        (_towers, "keras", False),
    ],
)
def test_two_steps(build, inner, is_function):
    w, step = tf.Variable(10.0), tf.Variable(0)
    update = build(INNER[inner](), w, step)
    if is_function:
        update = tf.function(update, autograph=False)
    for _ in range(2):
        assert float(update(tf.constant([1.0, 3.0]))) == 2.0
    # Mean gradient 2: 10 - 2 - (1 + 2).
    assert [float(w), int(step)] == [5.0, 2]


def test_a_keras_optimizer_without_shards():
    w = keras.Variable([1.0, 2.0])
    optimizer = v1.CrossShardOptimizer(keras.optimizers.SGD(0.5))
    assert optimizer.get_slot(w, "momentum") is None
    step = tf.Variable(0)
    assert optimizer.minimize(lambda: tf.reduce_sum(w * w), step, [w]) is None
    assert w.numpy().tolist() == [0.0, 0.0]
    assert step.numpy() == 1
    with pytest.raises(ValueError, match="No gradients provided"):
        optimizer.apply_gradients([(None, w)])
    with tf.Graph().as_default():
        with pytest.raises(TypeError, match="no operation that a Session"):
            v1.CrossShardOptimizer(keras.optimizers.SGD(0.5))
        with pytest.raises(TypeError, match="no operation that a Session"):
            optimizer.apply_gradients([(1.0, tf.Variable(1.0))])
