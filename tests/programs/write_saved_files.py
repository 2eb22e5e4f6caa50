"""Writes one small file of every kind that users save, with what is in it.

`python -m tests.programs.write_saved_files DIRECTORY`. The files under
tests/conformance/saved_files were written by it at version 0.1.0, before the
package was divided into folders; saved_files_test.py loads them ever after.
"""

import json
import os
import sys

import keras
import numpy as np
import tensorflow as tf

import tf_xshard

GROUPS = [[0], [1]]
X = np.arange(12, dtype="float32").reshape(4, 3) / 12
Y = np.ones([4, 1], "float32")

# Adam has slots, the clipping function is a registered object of the config.
OPTIMIZERS = {
    "cross_shard": lambda groups: tf_xshard.CrossShardOptimizer(
        keras.optimizers.Adam(0.05),
        group_assignment=groups,
        pre_reduce=tf_xshard.clip_by_global_norm(5.0),
        communication=tf_xshard.Communication(timeout_seconds=60),
    ),
    "tower": lambda groups: tf_xshard.TowerOptimizer(
        tf_xshard.CrossShardOptimizer(
            keras.optimizers.Adam(0.05), group_assignment=groups
        ),
        num_towers=2,
    ),
    "agn": lambda groups: tf_xshard.AGNOptimizer(
        keras.optimizers.SGD(0.5, momentum=0.9),
        local_optimizer=keras.optimizers.Adam(0.05),
        communication_period=2,
        group_assignment=groups,
    ),
}


def compiled(name, strategy=None, is_built=True):
    """A model with fixed weights and an optimizer."""
    scope = (strategy or tf.distribute.get_strategy()).scope()
    with scope:
        model = keras.Sequential(
            [keras.layers.Input((3,)), keras.layers.Dense(1, name="dense")],
            name="model",
        )
        model.compile(OPTIMIZERS[name](strategy and GROUPS), "mse")
        if is_built:
            model.optimizer.build(model.trainable_variables)
    model.set_weights([np.ones([3, 1]), np.zeros([1])])
    return model


def train(model, num_steps=3, first=0):
    """After three steps a round of towers, and a period of AGN, are open."""
    strategy = model.distribute_strategy

    def on_replica(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, [v.value for v in model.weights])
        model.optimizer.apply(gradients, model.trainable_variables)

    @tf.function
    def step(x, y):
        strategy.run(on_replica, (x, y))

    for number in range(first, first + num_steps):
        of_replica = strategy.experimental_distribute_values_from_function(
            lambda c, n=number: X * (1 + n + int(c.replica_id_in_sync_group))
        )
        step(of_replica, tf.constant(Y))


def variables(model):
    """Weights and all state of the optimizer, each once."""
    found = [*model.weights, *model.optimizer.variables]
    if hasattr(model.optimizer, "local_optimizer"):
        found += model.optimizer.local_optimizer.variables
    return list({id(v): v for v in found}.values())


def values(model):
    """What every variable holds on every replica, as nested lists."""
    strategy = model.distribute_strategy
    return [
        [
            np.asarray(one, np.float64).tolist()
            for one in strategy.experimental_local_results(v.value)
        ]
        for v in variables(model)
    ]


def write(name, directory, strategy):
    """Writes one optimizer's files; returns what they hold."""
    model = compiled(name)
    train(model)
    model.save(os.path.join(directory, f"{name}.keras"))
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(
        os.path.join(directory, f"{name}_checkpoint", "state")
    )
    config = keras.saving.serialize_keras_object(model.optimizer)
    with open(os.path.join(directory, f"{name}.json"), "w") as file:
        json.dump(config, file, indent=1)
    groups = compiled(name, strategy)
    train(groups)
    tf_xshard.GroupState(groups).save(
        os.path.join(directory, f"{name}_group_state"), epoch=2, step=1
    )
    return {"one_device": values(model), "groups": values(groups)}


if __name__ == "__main__":
    [cpu] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    held = {name: write(name, sys.argv[1], mirrored) for name in OPTIMIZERS}
    with open(os.path.join(sys.argv[1], "held.json"), "w") as output:
        json.dump(held, output, indent=1)
