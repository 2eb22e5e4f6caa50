"""The number of a loss's items reaches the step that applies its gradient."""

import keras
import pytest
import tensorflow as tf

import tf_xshard

ROWS = ([1.0], [2.0, 3.0, 6.0])


def _gradient(weight, loss, rows):
    with tf.GradientTape() as tape:
        y = tf.constant(rows)[:, tf.newaxis]
        value = loss(y, weight * tf.ones_like(y))
    return [tape.gradient(value, weight.value)]


@pytest.mark.parametrize("in_one_step", [True, False])
def test_each_tower_weighs_as_much_as_its_rows(in_one_step):
    weight = keras.Variable(0.0)
    optimizer = tf_xshard.TowerOptimizer(keras.optimizers.SGD(1.0), 2)
    loss = tf_xshard.GlobalMean("mse")
    if in_one_step:
        gradients = [_gradient(weight, loss, rows) for rows in ROWS]
        optimizer.apply_towers(gradients, [weight])
    else:
        for rows in ROWS:
            optimizer.apply(_gradient(weight, loss, rows), [weight])
    # The gradient of (w - y)^2 at 0 is -2 y, and the mean of y is 3.
    assert float(weight) == 6.0
