"""An optimizer of tf_keras writes after all gradients and reductions exist."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_xshard
from tests.support import replicas
from tests.support import writes

GROUPS = [[0, 3], [1, 2]]
NUM_REPLICAS, NUM_VARIABLES = 4, 3
MAKE = {
    "adam": lambda: tf_keras.optimizers.Adam(0.1),
    "decay, clip": lambda: tf_keras.optimizers.AdamW(0.1, global_clipnorm=1.0),
    "legacy": lambda: tf_keras.optimizers.legacy.Adam(0.1),
}


def _early(make, **options):
    strategy = replicas.mirrored(NUM_REPLICAS)
    with strategy.scope():
        weights = [
            tf.Variable(np.ones((3, 2), "float32"), name=f"w{i}")
            for i in range(NUM_VARIABLES)
        ]
        optimizer = tf_xshard.tf_keras.with_aggregator(make(), **options)

    @tf.function(autograph=False)
    def step(*data):
        def on_replica(*data):
            optimizer.apply_gradients(
                [(one * w, w) for one, w in zip(data, weights, strict=True)]
            )

        strategy.run(on_replica, args=data)

    data = [
        strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(1.0)
        )
        for _ in weights
    ]
    function = step.get_concrete_function(*data)
    state = optimizer.variables
    state = list(state() if callable(state) else state)
    found = writes.read(
        function, NUM_VARIABLES * NUM_REPLICAS, [*weights, *state]
    )
    assert {one.replica for one in found} == set(range(NUM_REPLICAS))
    # The learning rate's variable holds a function of `iterations`.
    return [
        one
        for one in found
        if "learning_rate" not in one.variable
        and (one.missing_arguments or one.missing_reductions)
    ]


@pytest.mark.parametrize("groups", [None, GROUPS], ids=["all", "groups"])
@pytest.mark.parametrize("name", MAKE)
def test_writes_wait_for_all_replicas(name, groups):
    assert not _early(MAKE[name], group_assignment=groups)


def test_residuals_wait_for_all_replicas():
    communication = tf_xshard.Communication(dtype="int8", error_feedback=True)
    assert not _early(MAKE["adam"], communication=communication)
