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


class VariationalModel(OwnStep):
    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential(
            [L.Input((12,)), L.Dense(8, activation="relu"), L.Dense(4)]
        )
        self.decoder = keras.Sequential(
            [L.Input((2,)), L.Dense(8, activation="relu"), L.Dense(12)]
        )
        self.built = True

    def parts(self):
        yield self.loss_of, lambda: self.trainable_variables, self._own

    def _own(self):
        return self.optimizer

    def loss_of(self, x):
        # The noise comes with the row: the same row gets the same.
        x, noise = x[:, :12], x[:, 12:]
        mean, log_variance = ops.split(self.encoder(x), 2, axis=1)
        z = mean + ops.exp(0.5 * log_variance) * noise
        squared = ops.sum(ops.square(self.decoder(z) - x), axis=1)
        kl = -0.5 * ops.sum(
            1 + log_variance - ops.square(mean) - ops.exp(log_variance), axis=1
        )
        return ops.mean(squared + kl)


class VariationalAutoencoder(scripts.Script):
    loss = None

    def optimizer(self):
        return keras.optimizers.SGD(0.002, momentum=0.9)

    def model(self):
        return VariationalModel()

    def data(self):
        return scripts.floats(14), None


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


class Student(keras.Model):
    """Learns from labels and from a teacher, in `compute_loss`."""

    def __init__(self):
        super().__init__()
        self.teacher = scripts.dense(6, 12, 4)
        self.teacher.trainable = False
        self.student = scripts.dense(6, 5, 4)
        self.built = True

    def call(self, x):
        return self.student(x)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        soft = ops.softmax(self.teacher(x, training=False) / 3)
        distilled = keras.losses.KLDivergence()(soft, ops.softmax(y_pred / 3))
        return 0.3 * scripts.CLASSES(y, y_pred) + 0.7 * 9 * distilled


class Distillation(scripts.Script):
    def model(self):
        return Student()

    def data(self):
        return scripts.floats(6), scripts.ints(4)
