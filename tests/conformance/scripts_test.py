"""Scripts as users write them: two replicas train as one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import seeds

L = keras.layers
ops = keras.ops
CROSS = tf_xshard.CrossShardOptimizer
NUM_ROWS, BATCH_SIZE = 64, 16
# Of what training changes in a variable.
TOLERANCE = 1e-4


def _rng():
    return np.random.default_rng(11)


def _ints(top, *shape):
    return _rng().integers(0, top, size=(NUM_ROWS, *shape))


def _images():
    images = _rng().normal(size=(NUM_ROWS, 8, 8, 3)).astype("float32")
    return images, _ints(4)


def _residual_network():
    """Batch normalization over the global batch, and a regularizer."""
    image = L.Input((8, 8, 3))
    x = L.Conv2D(6, 3, padding="same", kernel_regularizer="l2")(image)
    y = L.BatchNormalization(synchronized=True)(x)
    y = L.Conv2D(6, 3, padding="same")(L.ReLU()(y))
    x = L.Add()([x, y])
    return keras.Model(image, L.Dense(4)(L.GlobalAveragePooling2D()(x)))


def _sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def _sentences():
    """Two kinds of ids, a padding mask, and tokens with weights."""
    tokens = _ints(18, 8)
    # Keras' fit fails on bools under MirroredStrategy, see README.
    padding = np.int32(np.arange(8) <= _ints(8)[:, np.newaxis])
    masked = _rng().random(size=(NUM_ROWS, 8)) < 0.3
    return (tokens, _ints(2, 8), padding), tokens, masked.astype("float32")


class Tied(L.Layer):
    """Logits from the embeddings of the words themselves."""

    def __init__(self, words):
        super().__init__()
        self.words = words

    def call(self, x):
        return ops.matmul(x, ops.transpose(self.words.embeddings))


def _bert():
    inputs = [L.Input((8,), dtype="int32") for _ in range(3)]
    tokens, segments, padding = inputs
    words = L.Embedding(18, 16)
    x = L.Add()([words(tokens), L.Embedding(2, 16)(segments)])
    x = L.LayerNormalization()(x)
    mask = L.Reshape((1, 8))(padding)
    attended = L.MultiHeadAttention(2, 8)(x, x, attention_mask=mask)
    x = L.Add()([x, L.Dense(16, activation="gelu")(attended)])
    return keras.Model(inputs, Tied(words)(L.LayerNormalization()(x)))


def _adamw():
    optimizer = keras.optimizers.AdamW(
        1e-2, weight_decay=0.01, epsilon=1e-3, global_clipnorm=1.0
    )
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return optimizer


def _trained(model_fn, optimizer, data):
    """The model, and its variables' initial values."""
    seeds.seed(5)
    model = model_fn()
    start = [v.numpy() for v in model.variables]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    model.optimizer.build(model.trainable_variables)
    batches = tf.data.Dataset.from_tensor_slices(data).batch(BATCH_SIZE)
    model.fit(batches, shuffle=False, verbose=0)
    return model, start


@pytest.mark.parametrize(
    "model_fn, data, inner_fn, wrap_reference",
    [
        (_residual_network, _images, _sgd, lambda inner: inner),
        # Where rows of an Embedding occur several times in a batch, Keras' own
        # Adam differs, see README.
        pytest.param(_bert, _sentences, _adamw, CROSS, marks=pytest.mark.full),
    ],
    ids=["residual_network", "bert"],
)
def test_two_replicas_train_as_one_device(
    model_fn, data, inner_fn, wrap_reference
):
    reference, start = _trained(model_fn, wrap_reference(inner_fn()), data())
    strategy = replicas.mirrored(2)
    with strategy.scope():
        trained, _ = _trained(model_fn, CROSS(inner_fn()), data())
    changes = []
    for before, theirs, variable in zip(
        start, reference.variables, trained.variables, strict=True
    ):
        if "seed" in variable.path:
            continue
        change = np.abs(theirs.numpy() - before).max()
        if variable.trainable:
            changes.append(change)
        # A gradient that counts twice, or not at all, is far outside.
        np.testing.assert_allclose(
            replicas.values(strategy, variable),
            np.stack([theirs.numpy()] * 2),
            atol=TOLERANCE * max(change, 1e-2),
            rtol=1e-5,
            err_msg=variable.path,
        )
    assert max(changes) > 1e-2 and min(changes) > 0
