"""A script with embeddings and attention, in the manner of keras.io's."""

import keras
import numpy as np

from tests.support import scripts

L = keras.layers
ops = keras.ops


class Tied(L.Layer):
    """Logits from the embeddings of the words themselves."""

    def __init__(self, words):
        super().__init__()
        self.words = words

    def call(self, x):
        return ops.matmul(x, ops.transpose(self.words.embeddings))


class Bert(scripts.Script):
    """Two embeddings, a padding mask, a tied head and weighted tokens."""

    loss = scripts.CLASSES
    reference_is_wrapped = True

    def optimizer(self):
        optimizer = keras.optimizers.AdamW(
            1e-2, weight_decay=0.01, epsilon=1e-3, global_clipnorm=1.0
        )
        optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
        return optimizer

    def model(self):
        names = ("token_ids", "segment_ids", "padding_mask")
        inputs = [L.Input((8,), dtype="int32", name=name) for name in names]
        tokens, segments, padding = inputs
        words = L.Embedding(18, 16)
        x = L.Add()([words(tokens), L.Embedding(2, 16)(segments)])
        x = L.LayerNormalization()(x)
        mask = L.Reshape((1, 8))(padding)
        attended = L.MultiHeadAttention(2, 8)(x, x, attention_mask=mask)
        x = L.Add()([x, L.Dense(16, activation="gelu")(attended)])
        return keras.Model(inputs, Tied(words)(L.LayerNormalization()(x)))

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
