"""Training scripts in the manner of TensorFlow's guides and keras.io.

Each is a class: `model` makes what is trained, in the scope of a strategy, and
`fit` trains it on global batches. `optimizer` is the inner optimizer; what
wraps it is the caller's choice.
"""

import keras
import numpy as np
import tensorflow as tf

from tests.support import seeds

L = keras.layers
BATCH_SIZE = 16
NUM_STEPS = 4
NUM_ROWS = BATCH_SIZE * NUM_STEPS


def rng():
    return np.random.default_rng(11)


def floats(*shape):
    return rng().normal(size=(NUM_ROWS, *shape)).astype("float32")


def ints(top, *shape):
    return rng().integers(0, top, size=(NUM_ROWS, *shape))


def num_replicas():
    return tf.distribute.get_strategy().num_replicas_in_sync


class Script:
    """What all have in common: `compile` and `fit`."""

    loss = keras.losses.MeanSquaredError()
    # The reference on one device is plain Keras, unless rows of an Embedding
    # occur several times in a batch: there Keras' own Adam differs, see README.
    reference_is_wrapped = False

    def optimizer(self):
        return keras.optimizers.SGD(0.05, momentum=0.9)

    def seeded_model(self):
        seeds.seed(5)
        return self.model()

    def train(self, wrap):
        """Trains in the current scope; returns the model."""
        model = self.seeded_model()
        model.compile(optimizer=wrap(self.optimizer()), loss=self.loss)
        model.optimizer.build(model.trainable_variables)
        self.fit(model)
        return model

    def fit(self, model):
        x, y = self.data()
        dataset = tf.data.Dataset.from_tensor_slices(x if y is None else (x, y))
        model.fit(dataset.batch(BATCH_SIZE), shuffle=False, verbose=0)


CLASSES = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class ResidualNetwork(Script):
    """Batch normalization over the global batch, and a regularizer."""

    loss = CLASSES

    def model(self):
        image = L.Input((8, 8, 3))
        x = L.Conv2D(6, 3, padding="same", kernel_regularizer="l2")(image)
        y = L.BatchNormalization(synchronized=True)(x)
        y = L.Conv2D(6, 3, padding="same")(L.ReLU()(y))
        x = L.Add()([x, y])
        return keras.Model(image, L.Dense(4)(L.GlobalAveragePooling2D()(x)))

    def data(self):
        return floats(8, 8, 3), ints(4)
