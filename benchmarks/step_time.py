"""Claim: a step costs no more with CrossShardOptimizer than with plain Keras.

And much less with `shard_update=True` where the update is a large part of it.

One process, MirroredStrategy over logical CPUs, or over one GPU with `--gpu`.
Plain Keras twice, the wrapper without and with `shard_update`, interleaved in
blocks: `python -m benchmarks.step_time`.
"""

from __future__ import annotations

import time

import keras
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags

import tf_xshard
from benchmarks import measuring
from tf_xshard.cli import logical_devices

_REPLICAS = flags.DEFINE_integer("replicas", 4, "logical CPUs")
_GPU = flags.DEFINE_bool("gpu", False, "one GPU in place of logical CPUs")
_BLOCKS = flags.DEFINE_integer("blocks", 9, "interleaved blocks", 5)
_MODELS = flags.DEFINE_list(
    "models",
    ["small", "convolutional", "large", "adam_1m", "adam_12m", "adam_50m"],
    "which models to run; also lamb, adafactor and muon, of a transformer",
)

BASELINE, AGAIN, OURS = "plain Keras", "plain Keras again", "wrapper"
SHARDED = "shard_update=True"
MEAN, SKIPPING = "GlobalMean", "skip_nonfinite=True"
_COMPARED = flags.DEFINE_list(
    "compared",
    [AGAIN, OURS, SHARDED, MEAN, SKIPPING],
    "what is compared with plain Keras",
)


def _small():
    return keras.Sequential(
        [
            keras.layers.Input((16,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(1),
        ]
    )


def _convolutional():
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((32, 32, 3)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, strides=2, activation="relu"),
            layers.Conv2D(64, 3, strides=2, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(1),
        ]
    )


def _large():
    """162 tensors, 52 million parameters."""
    return keras.Sequential(
        [keras.layers.Input((800,))]
        + [keras.layers.Dense(800, activation="relu") for _ in range(80)]
        + [keras.layers.Dense(800)]
    )


def _dense(width, num_layers):
    """About num_layers * width ** 2 parameters."""
    return keras.Sequential(
        [keras.layers.Input((width,))]
        + [
            keras.layers.Dense(width, activation="relu")
            for _ in range(num_layers)
        ]
        + [keras.layers.Dense(10)]
    )


def _transformer(width=384, num_blocks=6, num_heads=6):
    """10.6 million parameters, in matrices that Muon orthogonalizes."""
    layers = keras.layers
    inputs = layers.Input((16, 48))
    x = layers.Dense(width)(inputs)
    for _ in range(num_blocks):
        normal = layers.LayerNormalization()(x)
        query, key, value = (
            layers.Reshape((16, num_heads, -1))(layers.Dense(width)(normal))
            for _ in range(3)
        )
        scores = keras.ops.einsum("bqhd,bkhd->bhqk", query, key)
        weights = keras.ops.softmax(scores / (width / num_heads) ** 0.5)
        mixed = keras.ops.einsum("bhqk,bkhd->bqhd", weights, value)
        x = x + layers.Dense(width)(layers.Reshape((16, width))(mixed))
        hidden = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(width)(hidden)
    pooled = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(10)(pooled))


def _adam():
    return keras.optimizers.Adam(1e-3)


# Model, optimizer, rows per replica, steps per block.
MODELS = {
    "small": (_small, _adam, 8, 150),
    "convolutional": (_convolutional, _adam, 48, 8),
    "large": (_large, lambda: keras.optimizers.SGD(1e-3), 4, 3),
    "adam_1m": (lambda: _dense(512, 4), _adam, 8, 24),
    "adam_12m": (lambda: _dense(1024, 12), _adam, 8, 6),
    "adam_50m": (lambda: _dense(2048, 12), _adam, 8, 3),
    "lamb": (_transformer, lambda: keras.optimizers.Lamb(1e-3), 4, 3),
    "adafactor": (_transformer, lambda: keras.optimizers.Adafactor(1e-3), 4, 3),
    "muon": (_transformer, lambda: keras.optimizers.Muon(1e-3), 4, 2),
}


class _StepTimes(keras.callbacks.Callback):
    """Seconds between the ends of two batches, each waited for."""

    def on_train_begin(self, logs=None):
        self.ends = []

    def on_train_batch_end(self, batch, logs=None):
        float(logs["loss"])  # Waits until the step is done.
        self.ends.append(time.perf_counter())


def batch(model, rows):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, *model.input_shape[1:])).astype("float32")
    y = rng.normal(size=(rows, *model.output_shape[1:])).astype("float32")
    return x, y


def _fit(strategy, model, rows, steps):
    """A function that times `steps` steps of `fit`."""
    dataset = tf.data.Dataset.from_tensors(batch(model, rows)).repeat()
    times = _StepTimes()

    def run():
        model.fit(
            dataset,
            steps_per_epoch=steps + 1,
            shuffle=False,
            verbose=0,
            callbacks=[times],
        )
        return np.diff(times.ends).tolist()

    return run


def _loop(strategy, model, rows, steps):
    """A function that times `steps` steps of a custom loop."""
    dataset = tf.data.Dataset.from_tensors(batch(model, rows)).repeat()
    batches = iter(strategy.experimental_distribute_dataset(dataset))

    @tf.function
    def step(batch):
        def on_replica(x, y):
            with tf.GradientTape() as tape:
                loss = model.loss(y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(
                zip(gradients, model.trainable_variables, strict=True)
            )
            return loss

        return strategy.run(on_replica, args=batch)

    def run():
        seconds = []
        for _ in range(steps):
            batch = next(batches)
            start = time.perf_counter()
            losses = strategy.experimental_local_results(step(batch))
            for loss in losses:
                float(loss)
            seconds.append(time.perf_counter() - start)
        return seconds

    return run


def _variants(strategy, how, model_fn, optimizer_fn, rows, steps):
    variants = {}
    for name in (BASELINE, *_COMPARED.value):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = model_fn()
            optimizer = optimizer_fn()
            loss = keras.losses.MeanSquaredError()
            if name not in (BASELINE, AGAIN):
                optimizer = tf_xshard.CrossShardOptimizer(
                    optimizer,
                    shard_update=name == SHARDED,
                    skip_nonfinite=name == SKIPPING,
                )
            if name == MEAN:
                loss = tf_xshard.GlobalMean(loss)
            model.compile(optimizer=optimizer, loss=loss)
            optimizer.build(model.trainable_variables)
        if name == SHARDED:
            _print_memory(model)
        variants[name] = how(strategy, model, rows, steps)
        variants[name]()  # Traces and warms up, outside the timed blocks.
    return variants


def _print_memory(model):
    """Prints the bytes of slot variables, and the balance of owners."""
    plan = tf_xshard.communication_plan(model)
    every = sum(
        int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size
        for v in model.optimizer.variables
    )
    mean = every / plan.num_replicas
    print(
        f"slots on a replica: {plan.slot_bytes / 1e6:.1f} MB, of"
        f" {every / 1e6:.1f} MB; {plan.slot_bytes / mean:.3f} of the mean"
    )
    if plan.balance is not None:
        print(f"the largest owner's cost: {plan.balance.largest_owner:.3f}")


def _measure(title, how, strategy, name):
    model_fn, optimizer_fn, rows, steps = MODELS[name]
    variants = _variants(
        strategy,
        how,
        model_fn,
        optimizer_fn,
        rows * strategy.num_replicas_in_sync,
        steps,
    )
    medians = measuring.interleaved(variants, _BLOCKS.value)
    base = measuring.quartiles(medians[BASELINE])[1]
    print(f"{name}, {title}: plain Keras {base * 1e3:.2f} ms a step")
    for other in _COMPARED.value:
        low, middle, high = measuring.quartiles(
            measuring.ratios(medians, other, BASELINE)
        )
        more = measuring.quartiles(medians[other])[1] - base
        print(
            f"  {other:19} / plain Keras: {middle:.3f} (quartiles {low:.3f} to"
            f" {high:.3f}), {more * 1e3:+.2f} ms"
        )


def main(argv):
    del argv
    tf.get_logger().setLevel("ERROR")
    if _GPU.value:
        devices = ["GPU:0"]
    else:
        devices = logical_devices.use_logical_cpus(_REPLICAS.value)
    strategy = tf.distribute.MirroredStrategy(devices)
    measuring.print_setting(logical_devices.describe(strategy))
    for name in _MODELS.value:
        for title, how in (("fit", _fit), ("custom loop", _loop)):
            _measure(title, how, strategy, name)
            tf.keras.backend.clear_session()


if __name__ == "__main__":
    app.run(main)
