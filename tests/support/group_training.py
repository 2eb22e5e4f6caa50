"""Models whose groups learn different things, for the tests of GroupState."""

import keras
import numpy as np

import tf_xshard
from tests.support import replicas
from tests.support import seeds
from tf_xshard.group_state import inventory

GROUPS = [[0, 2], [1, 3]]


def data(num_rows=64):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_rows, 4)).astype("float32")
    return x, (x[:, :1] > 0).astype("float32")


def network(seed=1):
    """Dropout and BatchNormalization: random states and moving statistics."""
    seeds.seed(seed)
    return keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(6, activation="relu"),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dropout(0.25, seed=3),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )


OPTIMIZERS = {
    # Takes less time to be traced than Adam.
    "momentum": lambda groups: tf_xshard.CrossShardOptimizer(
        keras.optimizers.SGD(0.2, momentum=0.9), group_assignment=groups
    ),
    "towers": lambda groups: tf_xshard.TowerOptimizer(
        tf_xshard.CrossShardOptimizer(
            keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True),
                initial_scale=8.0,
            ),
            group_assignment=groups,
        ),
        num_towers=3,
    ),
    "agn": lambda groups: tf_xshard.AGNOptimizer(
        keras.optimizers.SGD(0.5, momentum=0.9),
        local_optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        communication_period=3,
        group_assignment=groups,
    ),
}


def compiled(strategy, optimizer="momentum", groups=GROUPS, seed=1):
    with strategy.scope():
        model = network(seed)
        model.compile(
            optimizer=OPTIMIZERS[optimizer](groups),
            loss="binary_crossentropy",
            metrics=["accuracy"],
            auto_scale_loss=False,
        )
        model.optimizer.build(model.trainable_variables)
    return model


def filled(strategy, optimizer="momentum"):
    """A model whose groups differ, and what is local by replica, untrained."""
    model = compiled(strategy, optimizer)
    state = tf_xshard.GroupState(model)
    rng = np.random.default_rng(0)
    for one in state.variables(inventory.LEARNED):
        if one.numpy_type != np.float32:
            continue
        values = rng.uniform(size=(strategy.num_replicas_in_sync, *one.shape))
        if one.kind in inventory.EQUAL_IN_A_GROUP:
            state.assign(one.variable, values[: state.num_groups])
        else:
            state.replicas.assign(one.variable, values)
    return model


def variables(model):
    """All that a training step reads."""
    local = getattr(model.optimizer, "local_optimizer", model.optimizer)
    found = [*model.variables, *model.metrics_variables]
    found += [*model.optimizer.variables, *local.variables]
    return list({id(v): v for v in found}.values())


def outputs(weights, x):
    """What the network predicts, in NumPy, from `model.get_weights()`."""
    kernel, bias, scale, offset, mean, variance, head, last = weights
    hidden = np.maximum(x @ kernel + bias, 0)
    hidden = (hidden - mean) / np.sqrt(variance + 1e-3) * scale + offset
    return 1 / (1 + np.exp(-hidden @ head - last))


def metrics(predicted, y):
    """The loss and the accuracy."""
    loss = -np.log(np.where(y > 0, predicted, 1 - predicted)).ravel()
    accuracy = np.mean((predicted > 0.5) == y)
    return {"loss": np.mean(loss), "accuracy": accuracy}


def values(model):
    """The value of every variable on every replica of this process."""
    return [
        replicas.values(model.distribute_strategy, v) for v in variables(model)
    ]


def assert_same(found, expected, tolerance=0.0):
    """The same bits, everywhere, or values that differ by the tolerance."""
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape
            if tolerance:
                np.testing.assert_allclose(one, other, 0, tolerance)
            else:
                assert one.tobytes() == other.tobytes(), (one, other)
