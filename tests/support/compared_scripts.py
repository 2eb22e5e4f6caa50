"""Scripts that train as on one device, and scripts that do not."""

_HEAD = """\
import keras, numpy as np, sys, tensorflow as tf, tf_xshard
L, O = keras.layers, keras.optimizers
x = np.random.default_rng(0).normal(size=(37, 3)).astype("float32")
y = x[:, :1] * x[:, 1:2]
words = np.random.default_rng(1).integers(0, 4, size=(37, 6))
weights = np.arange(37, dtype="float32")
def dense(*layers):
    return keras.Sequential(
        [L.Input((3,)), L.Dense(4, "gelu"), *layers, L.Dense(1)])
def clipped(**options):
    return O.Adam(1e-2, global_clipnorm=0.1, **options)
wrapped = tf_xshard.CrossShardOptimizer
"""
_STRATEGY = """\
strategy = tf.distribute.MirroredStrategy()
N = strategy.num_replicas_in_sync
"""
_FIT = """\
with strategy.scope():
    model = {model}
    model.compile({optimizer}, {loss})
model.fit({x}[:{rows}], y[:{rows}], batch_size=16, epochs=4{more})
"""
_LOOP = """\
with strategy.scope():
    model = dense()
    one = {optimizer}
def on_replica(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y)) {divided}
    one.apply_gradients(zip(
        tape.gradient(loss, model.trainable_variables),
        model.trainable_variables,
    ))
{function}
def step(batch):
    strategy.run(on_replica, args=batch)
data = tf.data.Dataset.from_tensor_slices((x, y))
data = data.batch(4 * N, drop_remainder=True).repeat()
for batch in strategy.experimental_distribute_dataset(data):
    step(batch)
"""
_GAN = """\
class Two(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.second = dense(), dense()
    def compile(self, first, second):
        super().compile()
        self.one, self.two = first, second
    def call(self, x):
        return self.second(self.first(x) * x)
    def train_step(self, data):
        x, y = data
        pairs = (self.first, self.one), (self.second, self.two)
        for part, optimizer in pairs:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2) / {divisor}
            variables = part.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {{"loss": loss}}
with strategy.scope():
    model = Two()
    model.compile({first}, {second})
model.fit(x[:32], y[:32], batch_size=16, epochs=4)
"""
_REAL_NUMBER = "tf.distribute.get_strategy().num_replicas_in_sync"
_EMBEDDED = (
    "keras.Sequential([L.Input((6,)), L.Embedding(4, 3{}), L.LSTM(2),"
    " L.Dense(1)])"
)


def fit(
    model="dense()",
    optimizer="wrapped(clipped())",
    loss="'mse'",
    rows=32,
    x="x",
    more="",
):
    return _FIT.format(
        model=model, optimizer=optimizer, loss=loss, rows=rows, x=x, more=more
    )


def loop(
    optimizer="wrapped(clipped())",
    divided="/ strategy.num_replicas_in_sync",
    function="@tf.function",
):
    return _LOOP.format(optimizer=optimizer, divided=divided, function=function)


def gan(first, second, divisor=_REAL_NUMBER):
    return _GAN.format(first=first, second=second, divisor=divisor)


def whole(text):
    """A script, with a strategy if it uses one."""
    return _HEAD + (_STRATEGY if "strategy" in text else "") + text


RIGHT = {
    "wrapped": fit(),
    "sgd_without_wrapper": fit(optimizer="O.SGD(0.1 * N)"),
    "without_strategy": fit(optimizer="O.SGD(0.1)").replace(
        "with strategy.scope():", "if True:"
    ),
    "global_mean": fit(loss="tf_xshard.GlobalMean('mse')", rows=37),
    "weighted": fit(
        loss="tf_xshard.GlobalMean('mse')",
        more=", sample_weight=weights[:32]",
    ),
    "batch_norm": fit("dense(L.BatchNormalization(synchronized=True))"),
    "dropout": fit("dense(L.Dropout(0.5))"),
    "lstm_dropout": fit(
        _EMBEDDED.format("").replace("LSTM(2", "LSTM(2, dropout=0.5"), x="words"
    ),
    "scalar_loss": fit(
        optimizer="O.SGD(0.1)",
        loss="tf_xshard.ScalarLoss(lambda y, p: tf.reduce_mean((y - p) ** 2))",
    ),
    "towers": fit(optimizer="tf_xshard.TowerOptimizer(clipped(), 2)"),
    "sharded_update": fit(optimizer="wrapped(clipped(), shard_update=True)"),
    "loop": loop("O.SGD(0.1)", divided="/ N"),
    "wrapped_loop": loop(),
    "eager_loop": loop(function=""),
    "two_optimizers": gan("wrapped(clipped())", "O.SGD(0.1)"),
}
# With the cures that make it equal.
WRONG = {
    "clipped": (fit(optimizer="clipped()"), ("wrapper",)),
    "accumulated": (
        fit(optimizer="O.Adam(1e-2, gradient_accumulation_steps=2)"),
        ("wrapper",),
    ),
    "clipped_without_strategy": (
        fit(optimizer="clipped()").replace(
            "with strategy.scope():", "if True:"
        ),
        ("wrapper",),
    ),
    "ragged": (fit(rows=37), ("global mean",)),
    "weighted": (
        fit(
            loss="keras.losses.MeanSquaredError('mean_with_sample_weight')",
            more=", sample_weight=weights[:32]",
        ),
        ("global mean",),
    ),
    "padded": (
        fit(_EMBEDDED.format(", mask_zero=True"), loss="'mse'", x="words")
        .replace("L.LSTM(2), L.Dense(1)", "L.LSTM(1, return_sequences=True)")
        .replace("y[:32]", "words[:32, :, None] * 0.1"),
        ("global mean",),
    ),
    "batch_norm": (
        fit("dense(L.BatchNormalization())"),
        ("batch normalization",),
    ),
    "one_number": (
        fit(
            optimizer="O.SGD(0.1)",
            loss="lambda y, p: tf.reduce_mean((y - p) ** 2)",
        ),
        ("scalar loss",),
    ),
    "ragged_and_batch_norm": (
        fit("dense(L.BatchNormalization())", rows=37),
        ("global mean", "batch normalization"),
    ),
    "undivided_loop": (loop("O.SGD(0.1)", divided=""), ("undivided loss",)),
    "undivided_eager_loop": (
        loop("O.Adam(1e-2)", divided="", function=""),
        ("undivided loss",),
    ),
    "clipped_loop": (loop("clipped()"), ("wrapper",)),
    "two_optimizers": (gan("clipped()", "O.SGD(0.1)"), ("wrapper",)),
    "repeated_words": (
        fit(_EMBEDDED.format(""), optimizer="clipped()", x="words"),
        ("wrapper", "repeated rows"),
    ),
}
ALL = {
    **{f"{name}_right": (text, ()) for name, text in RIGHT.items()},
    **{f"{name}_wrong": one for name, one in WRONG.items()},
}
# Reads what its last run has written, and writes.
RESTORING = (
    fit(
        more=", callbacks=["
        "keras.callbacks.BackupAndRestore('backup', delete_checkpoint=False),"
        "keras.callbacks.ModelCheckpoint('{epoch}.weights.h5',"
        " save_weights_only=True)]"
    ).replace(
        "model.fit",
        "import glob\n"
        "for path in sorted(glob.glob('*.h5')): model.load_weights(path)\n"
        "model.fit",
    )
    + "model.save_weights('last.weights.h5')\n"
)
