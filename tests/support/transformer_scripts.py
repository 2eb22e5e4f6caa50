"""Scripts with embeddings and attention, in the manner of keras.io's."""

import keras
import numpy as np

from tests.support import scripts

L = keras.layers
ops = keras.ops


def _encoder(x, width, heads, mask):
    """A transformer block, with the normalization first."""
    normal = L.LayerNormalization(epsilon=1e-6)(x)
    attended = L.MultiHeadAttention(heads, width // heads)(
        normal, normal, attention_mask=mask
    )
    x = L.Add()([x, attended])
    normal = L.LayerNormalization(epsilon=1e-6)(x)
    hidden = L.Dense(2 * width, activation="gelu")(normal)
    return L.Add()([x, L.Dense(width)(hidden)])


class Positions(L.Layer):
    """Adds a learned vector to each position."""

    def build(self, shape):
        self.table = self.add_weight(
            shape=shape[1:], initializer="random_normal", name="positions"
        )

    def call(self, x):
        return x + self.table


class RecurrentClassifier(scripts.Script):
    """Words through an Embedding and LSTMs in both directions, with Adam."""

    loss = keras.losses.BinaryCrossentropy()
    reference_is_wrapped = True

    def optimizer(self):
        return keras.optimizers.Adam(0.03, epsilon=1e-3)

    def model(self):
        return keras.Sequential(
            [
                L.Input((10,), dtype="int32"),
                L.Embedding(20, 8),
                L.Bidirectional(L.LSTM(6, return_sequences=True)),
                L.Bidirectional(L.LSTM(6)),
                L.Dense(1, activation="sigmoid"),
            ]
        )

    def data(self):
        return scripts.ints(20, 10), scripts.ints(2, 1).astype("float32")


class Bert(scripts.Script):
    """Three embeddings, a padding mask, a tied head and weighted tokens."""

    loss = scripts.CLASSES
    reference_is_wrapped = True

    def optimizer(self):
        optimizer = keras.optimizers.AdamW(
            1e-2, weight_decay=0.01, epsilon=1e-3, global_clipnorm=1.0
        )
        optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
        return optimizer

    def model(self):
        tokens = L.Input((8,), dtype="int32", name="token_ids")
        segments = L.Input((8,), dtype="int32", name="segment_ids")
        padding = L.Input((8,), dtype="int32", name="padding_mask")
        words = L.Embedding(18, 16)
        x = Positions()(L.Add()([words(tokens), L.Embedding(2, 16)(segments)]))
        x = L.LayerNormalization(epsilon=1e-12)(x)
        x = _encoder(x, 16, 2, mask=L.Reshape((1, 8))(padding))
        x = L.Dense(16, activation="gelu")(x)
        logits = Tied(words)(L.LayerNormalization(epsilon=1e-12)(x))
        return keras.Model([tokens, segments, padding], logits)

    def fit(self, model):
        tokens = scripts.ints(18, 8)
        data = {
            "token_ids": tokens,
            "segment_ids": scripts.ints(2, 8),
            # Keras' fit fails on bools under MirroredStrategy, see README.
            "padding_mask": np.int32(np.arange(8) <= scripts.ints(8)[:, None]),
        }
        masked = scripts.rng().random(size=(scripts.NUM_ROWS, 8)) < 0.3
        model.fit(
            data,
            tokens,
            sample_weight=masked.astype("float32"),
            batch_size=scripts.BATCH_SIZE,
            shuffle=False,
            verbose=0,
        )


class Tied(L.Layer):
    """Logits from the embeddings of the words themselves."""

    def __init__(self, words):
        super().__init__()
        self.words = words

    def call(self, x):
        return ops.matmul(x, ops.transpose(self.words.embeddings))
