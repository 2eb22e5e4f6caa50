"""What each process of two_processes_test.py runs, by `support/cluster.py`.

No case before `shuffled`, the first, sets a seed.
"""

import os
import re
import resource

import keras
import numpy as np
import tensorflow as tf

import tf_xshard
from tests.support import fitting
from tests.support import paths
from tf_xshard.private.tensorflow import runtime

NUM_WORKERS = 2
NUM_ROWS = 61  # 31 and 30 rows, so that the workers have 4 and 3 batches.
BATCH_SIZE = 10  # Of a worker.
NUM_SAVES = 2
NUM_ARRAYS = 20  # Of 1 MiB, each with 256 pages.
TIMEOUT_SECONDS = 60


def data():
    x = np.sin(np.arange(3 * NUM_ROWS, dtype="float32")).reshape(NUM_ROWS, 3)
    return x, x[:, :1] - 2 * x[:, 1:2] + 1


def model(optimizer, loss="mse", **options):
    """Begins the same in every process and under every strategy."""
    result = keras.Sequential(
        [
            keras.layers.Input((3,)),
            keras.layers.Dense(1, kernel_initializer="ones"),
        ]
    )
    result.compile(optimizer, loss, **options)
    return result


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def _compiled(strategy, **options):
    with strategy.scope():
        communication = tf_xshard.Communication(timeout_seconds=TIMEOUT_SECONDS)
        return model(
            tf_xshard.CrossShardOptimizer(sgd(), communication=communication),
            tf_xshard.GlobalMean("mse"),
            **options,
        )


class _PageFaults(keras.callbacks.Callback):
    """Counts what clearing new memory costs, in `fit`."""

    def on_train_batch_end(self, batch, logs=None):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(NUM_ARRAYS):
            np.ones(1 << 18, np.float32)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self.number = after - before


def shuffled(strategy):
    """How often `fit` has trained on each of 32 rows, in its own order.

    Returns:
      For no seed, and for one of each process: the rows' counts, and whether
      `fit` has left the seed as it was. And the page faults of a batch.
    """
    with strategy.scope():
        trained = keras.Sequential(
            [
                keras.layers.Input((32,)),
                keras.layers.Dense(
                    1, use_bias=False, kernel_initializer="zeros"
                ),
            ]
        )
        trained.compile(
            tf_xshard.CrossShardOptimizer(keras.optimizers.SGD(8.0)),
            loss=lambda y, outputs: -outputs,
        )
    before, result, faults = runtime.GlobalSeed(), [], _PageFaults()
    for seed in (None, tf_xshard.rank(strategy) + 7):
        if seed is not None:
            tf.random.set_seed(seed)
        trained.set_weights([np.zeros([32, 1])])
        trained.fit(
            *(np.eye(32), np.zeros(32)),
            batch_size=8,
            verbose=0,
            callbacks=[faults],
        )
        counts = trained.get_weights()[0].ravel().tolist()
        result.append([counts, _seed() == seed])
    before.restore()
    return result, faults.number


def _seed():
    return runtime.GlobalSeed().seed


def _rows():
    return fitting.untuned(tf.data.Dataset.from_tensor_slices(data()))


def _pipeline(strategy):
    whole = _rows()
    return strategy.distribute_datasets_from_function(
        lambda context: whole.shard(
            context.num_input_pipelines, context.input_pipeline_id
        ).batch(BATCH_SIZE)
    )


def _undivided(strategy):
    """A worker's rows, as a dataset that Keras must not divide."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    whole = _rows()
    own = whole.shard(NUM_WORKERS, tf_xshard.rank(strategy))
    # TensorFlow divides the batches by the number of workers.
    return own.batch(BATCH_SIZE * NUM_WORKERS).with_options(options)


def _fit(strategy, pipeline, **options):
    trained, batches = _compiled(strategy, **options), []
    history = trained.fit(
        pipeline,
        epochs=2,
        validation_data=pipeline,
        shuffle=False,
        verbose=0,
        callbacks=keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: batches.append(logs["loss"])
        ),
    ).history
    return {
        "weights": [np.float64(v).tolist() for v in trained.get_weights()],
        "steps": int(trained.optimizer.iterations.numpy()),
        "batches": [float(one) for one in batches],
        "history": {k: [float(v) for v in vs] for k, vs in history.items()},
    }


def different_batches(strategy, full):
    """The workers' pipelines have 4 and 3 batches."""
    pipeline = _pipeline(strategy)
    untrained = _compiled(strategy)
    return {
        "fit": _fit(strategy, pipeline),
        "in_twos": full and _fit(strategy, pipeline, steps_per_execution=2),
        "undivided": _fit(strategy, _undivided(strategy)),
        "evaluate": float(untrained.evaluate(pipeline, verbose=0)),
        "predict": np.ravel(untrained.predict(pipeline, verbose=0)).tolist(),
    }


UNKNOWN_SIZE = {
    "cross": lambda: tf_xshard.CrossShardOptimizer(sgd()),
    "tower": lambda: tf_xshard.TowerOptimizer(sgd(), num_towers=2),
    "agn": lambda: tf_xshard.AGNOptimizer(sgd(), communication_period=4),
}


def unknown_size(strategy, optimizer):
    """Three epochs of three batches, whose number Keras does not know."""
    x, y = data()
    rows = fitting.untuned(tf.data.Dataset.from_tensor_slices((x[:24], y[:24])))
    with strategy.scope():
        trained = model(optimizer())
    trained.fit(
        rows.filter(lambda x, y: True).batch(8),
        epochs=3,
        shuffle=False,
        verbose=0,
    )
    return {
        "weights": [np.float64(v).tolist() for v in trained.get_weights()],
        "steps": int(trained.optimizer.iterations.numpy()),
    }


def different_counts(strategy):
    """The error of a worker whose optimizer is a step ahead, as by a file."""
    trained = _compiled(strategy)
    trained.optimizer.build(trained.trainable_variables)
    [own] = strategy.experimental_local_results(
        trained.optimizer.iterations.value
    )
    own.assign(3 + tf_xshard.rank(strategy))
    error = _error(lambda: trained.fit(*data(), batch_size=16, verbose=0))
    return error, int(own)


def refused(strategy):
    """The errors of workers that pass different data or numbers of steps."""
    rank = tf_xshard.rank(strategy)
    x, y = (one[: (61, 60)[rank]] for one in data())
    arrays = {"x": x, "y": y, "batch_size": 16}
    dataset = _rows().take((61, 40)[rank])
    pipeline = _rows().batch(4)
    infinite = strategy.distribute_datasets_from_function(
        lambda _: pipeline.repeat() if rank else pipeline
    )
    trained = _compiled(strategy)
    calls = {
        "arrays": lambda: trained.fit(**arrays),
        "evaluate": lambda: trained.evaluate(**arrays),
        "predict": lambda: trained.predict(x, batch_size=16),
        "validation": lambda: trained.fit(
            *data(), validation_data=(x, y), verbose=0
        ),
        "dataset": lambda: trained.fit(dataset.batch(16), shuffle=False),
        "infinite": lambda: trained.fit(
            infinite, steps_per_epoch=2, shuffle=False
        ),
        "steps": lambda: trained.fit(*data(), steps_per_epoch=1 + rank),
    }
    return {name: [_error(call), _seed()] for name, call in calls.items()}


def _error(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


def saves(strategy, directory):
    """Saves by the code in many_machines.md, on all workers, to one path."""
    page = (paths.ROOT / "tf_xshard/docs/many_machines.md").read_text()
    [code] = [
        block
        for block in re.findall(r"```python\n(.*?)```", page, re.S)
        if "def save(" in block
    ]
    scope = {}
    exec(code, scope)
    # The same code with the other call that it names.
    weights_scope = {}
    assert "model.save(path)" in code
    exec(code.replace("model.save(", "model.save_weights("), weights_scope)
    with strategy.scope():
        trained = model(
            tf_xshard.CrossShardOptimizer(
                keras.optimizers.Adam(), shard_update=True
            )
        )
    trained.fit(*data(), batch_size=16, verbose=0)
    for number in range(NUM_SAVES):
        path = os.path.join(directory, str(number))
        scope["save"](trained, f"{path}.keras")
        weights_scope["save"](trained, f"{path}.weights.h5")
        # All workers find the chief's files.
        assert os.path.exists(f"{path}.keras")
        assert os.path.exists(f"{path}.weights.h5")
    return [np.float64(v).tolist() for v in trained.get_weights()]


def main(directory, *options):
    """All cases; `--full` has more of them."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with tf_xshard.multi_worker_fit(
        tf_xshard.Communication(timeout_seconds=TIMEOUT_SECONDS)
    ):
        return {
            "shuffled": shuffled(strategy),
            "different_batches": different_batches(
                strategy, "--full" in options
            ),
            "unknown_size": {
                name: unknown_size(strategy, optimizer)
                for name, optimizer in UNKNOWN_SIZE.items()
            },
            "different_counts": different_counts(strategy),
            "refused": refused(strategy),
            "saved": saves(strategy, directory),
        }
