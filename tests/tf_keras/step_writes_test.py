"""An optimizer of tf_keras writes after all gradients and reductions exist."""

import pytest
import tensorflow as tf
import tf_keras

import tf_xshard
from tests.support import replicas
from tests.support import writes

_INT8 = tf_xshard.Communication(dtype="int8", error_feedback=True)


@pytest.mark.parametrize(
    "make, options",
    [
        (
            lambda: tf_keras.optimizers.AdamW(0.1, global_clipnorm=1.0),
            {"group_assignment": [[1], [0]]},
        ),
        (lambda: tf_keras.optimizers.legacy.Adam(0.1), {}),
        (lambda: tf_keras.optimizers.SGD(0.1), {"communication": _INT8}),
    ],
    ids=["groups", "legacy", "residuals"],
)
def test_writes_wait_for_all_replicas(make, options):
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weights = [tf.Variable(tf.ones([3, 2]), name=name) for name in "ab"]
        optimizer = tf_xshard.tf_keras.with_aggregator(make(), **options)

    def on_replica(*data):
        pairs = zip(data, weights, strict=True)
        optimizer.apply_gradients([(one * w, w) for one, w in pairs])

    step = tf.function(
        lambda *data: strategy.run(on_replica, args=data), autograph=False
    )
    one = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(1.0)
    )
    function = step.get_concrete_function(one, one)
    state = optimizer.variables
    state = list(state() if callable(state) else state)
    found = writes.read(function, 2 * len(weights), [*weights, *state])
    assert {one.replica for one in found} == {0, 1}
    # The learning rate's variable holds a function of `iterations`.
    assert not [
        one
        for one in found
        if "learning_rate" not in one.variable
        and (one.missing_arguments or one.missing_reductions)
    ]
