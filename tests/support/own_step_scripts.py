"""Scripts with a train_step or a loss of their own, in keras.io's manner."""

import keras
import tensorflow as tf

from tests.support import scripts
from tests.support import seeds

L = keras.layers
ops = keras.ops


class OwnStep(keras.Model):
    """A model with a train_step; losses are divided by N, as those of Keras."""

    def train_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        for losses, variables, optimizer in self.parts():
            with tf.GradientTape() as tape:
                loss = losses(x) / scripts.num_replicas()
            gradients = tape.gradient(loss, [v.value for v in variables()])
            optimizer().apply_gradients(
                zip(gradients, variables(), strict=True)
            )
        return {"loss": loss}


class AdversarialModel(OwnStep):
    """Two models with an optimizer each; `compile` gets the generator's."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [L.Input((3,)), L.Dense(8, activation="relu"), L.Dense(6)]
        )
        self.critic = keras.Sequential(
            [L.Input((6,)), L.Dense(8, activation="tanh"), L.Dense(1)]
        )
        self.built = True

    def compile(self, optimizer):
        super().compile(optimizer=optimizer)
        again = type(optimizer)
        self.critic_optimizer = again.from_config(optimizer.get_config())
        self.critic_optimizer.build(self.critic.trainable_variables)

    def parts(self):
        yield (
            self.critic_loss,
            lambda: self.critic.trainable_variables,
            lambda: self.critic_optimizer,
        )
        yield (
            self.generator_loss,
            lambda: self.generator.trainable_variables,
            lambda: self.optimizer,
        )

    def critic_loss(self, x):
        real, noise = x[:, :6], x[:, 6:]
        fake = ops.stop_gradient(self.generator(noise))
        return ops.mean(
            ops.softplus(-self.critic(real)) + ops.softplus(self.critic(fake))
        )

    def generator_loss(self, x):
        return ops.mean(ops.softplus(-self.critic(self.generator(x[:, 6:]))))


class AdversarialNetwork(scripts.Script):
    loss = None

    def train(self, wrap):
        seeds.seed(5)
        model = self.model()
        model.compile(wrap(self.optimizer()))
        model.optimizer.build(model.generator.trainable_variables)
        self.fit(model)
        return model

    def model(self):
        return AdversarialModel()

    def data(self):
        return scripts.floats(9), None
