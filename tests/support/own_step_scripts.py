"""Scripts with a train_step or a loss of their own, in keras.io's manner."""

import keras
import tensorflow as tf

from tests.support import scripts

L = keras.layers
ops = keras.ops


class AdversarialModel(keras.Model):
    """Two networks with an optimizer each; losses are divided by N."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [L.Input((3,)), L.Dense(8, activation="relu"), L.Dense(6)]
        )
        self.critic = keras.Sequential(
            [L.Input((6,)), L.Dense(8, activation="tanh"), L.Dense(1)]
        )
        self.built = True

    def compile(self, optimizer, loss):
        """Gets the generator's optimizer."""
        super().compile(optimizer, loss)
        again = type(optimizer)
        self.critic_optimizer = again.from_config(optimizer.get_config())
        self.optimizer.build(self.generator.trainable_variables)
        self.critic_optimizer.build(self.critic.trainable_variables)

    def train_step(self, x):
        real, noise = x[:, :6], x[:, 6:]
        with tf.GradientTape() as tape:
            fake = ops.stop_gradient(self.generator(noise))
            loss = _mean(
                ops.softplus(-self.critic(real))
                + ops.softplus(self.critic(fake))
            )
        _apply(tape, loss, self.critic, self.critic_optimizer)
        with tf.GradientTape() as tape:
            loss = _mean(ops.softplus(-self.critic(self.generator(noise))))
        _apply(tape, loss, self.generator, self.optimizer)
        return {"loss": loss}


def _mean(losses):
    return ops.mean(losses) / scripts.num_replicas()


def _apply(tape, loss, network, optimizer):
    values = [v.value for v in network.trainable_variables]
    optimizer.apply(tape.gradient(loss, values), network.trainable_variables)


class AdversarialNetwork(scripts.Script):
    loss = None

    def model(self):
        return AdversarialModel()

    def data(self):
        return scripts.floats(9), None
