"""What each process of two_processes_test.py runs, by `support/cluster.py`.

Each case asserts what a process can see alone, and returns what it holds. No
case before the first sets a seed.
"""

import os
import re
import resource

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import cluster
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


def model(optimizer, loss="mse", num_inputs=3):
    """Begins the same in every process and under every strategy."""
    dense = keras.layers.Dense(1, kernel_initializer="ones")
    result = keras.Sequential([keras.layers.Input((num_inputs,)), dense])
    result.compile(optimizer, loss)
    return result


def flat(trained):
    """All weights, as one list."""
    return np.concatenate([*map(np.ravel, trained.get_weights())]).tolist()


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def _compiled(strategy):
    with strategy.scope():
        communication = tf_xshard.Communication(timeout_seconds=TIMEOUT_SECONDS)
        return model(
            tf_xshard.CrossShardOptimizer(sgd(), communication=communication),
            tf_xshard.GlobalMean("mse"),
        )


class _PageFaults(keras.callbacks.Callback):
    """Counts what clearing new memory costs, in `fit`."""

    def on_train_batch_end(self, batch, logs=None):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(NUM_ARRAYS):
            np.ones(1 << 18, np.float32)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self.number = after - before


def each_row_is_trained_on_once(strategy):
    """However the processes are seeded, or not; `fit` leaves that as it is.

    Returns the page faults of a batch.
    """
    with strategy.scope():
        optimizer = tf_xshard.CrossShardOptimizer(keras.optimizers.SGD(8.0))
        trained = model(optimizer, lambda y, outputs: -outputs, 32)
    before, faults = runtime.GlobalSeed(), _PageFaults()
    for seed in (None, tf_xshard.rank(strategy) + 7):
        if seed is not None:
            tf.random.set_seed(seed)
        trained.set_weights([np.zeros([32, 1]), np.zeros([1])])
        rows = np.eye(32), np.zeros(32)
        trained.fit(*rows, batch_size=8, verbose=0, callbacks=[faults])
        np.testing.assert_allclose(trained.get_weights()[0], 1, rtol=1e-6)
        assert _seed() == seed
    before.restore()
    return faults.number


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


def _fit(strategy, pipeline):
    trained, batches = _compiled(strategy), []
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
        "weights": flat(trained),
        "steps": int(trained.optimizer.iterations.numpy()),
        "batches": [float(one) for one in batches],
        "history": {k: [float(v) for v in vs] for k, vs in history.items()},
    }


def different_batches(strategy):
    """The workers' pipelines have 4 and 3 batches."""
    pipeline = _pipeline(strategy)
    untrained = _compiled(strategy)
    return {
        "fit": _fit(strategy, pipeline),
        "undivided": _fit(strategy, _undivided(strategy)),
        "evaluate": float(untrained.evaluate(pipeline, verbose=0)),
        "predict": np.ravel(untrained.predict(pipeline, verbose=0)).tolist(),
    }


def unknown_size(strategy):
    """The weights after three epochs of three batches, by optimizer.

    Keras does not know their number. The step that meets the end of the data
    changes nothing.
    """
    x, y = data()
    rows = fitting.untuned(tf.data.Dataset.from_tensor_slices((x[:24], y[:24])))
    rows, result = rows.filter(lambda x, y: True).batch(8), {}
    for make, num_steps in (
        (lambda: tf_xshard.CrossShardOptimizer(sgd()), 9),
        (lambda: tf_xshard.TowerOptimizer(sgd(), num_towers=2), 4),
        (lambda: tf_xshard.AGNOptimizer(sgd(), communication_period=4), 9),
    ):
        with strategy.scope():
            trained = model(make())
        trained.fit(rows, epochs=3, shuffle=False, verbose=0)
        assert int(trained.optimizer.iterations.numpy()) == num_steps
        result[type(trained.optimizer).__name__] = flat(trained)
    return result


def different_counts_are_refused(strategy):
    """On both, where one worker's optimizer is a step ahead, as by a file."""
    trained = _compiled(strategy)
    trained.optimizer.build(trained.trainable_variables)
    [own] = strategy.experimental_local_results(
        trained.optimizer.iterations.value
    )
    count = 3 + tf_xshard.rank(strategy)
    own.assign(count)
    text = r"different numbers of steps.*by worker: \[\[3\], \[4\]\]\. Restore"
    with pytest.raises(ValueError, match=text):
        trained.fit(*data(), batch_size=16, verbose=0)
    assert int(own) == count


def different_data_are_refused(strategy):
    """On both workers; so are different numbers of steps."""
    rank = tf_xshard.rank(strategy)
    x, y = (one[: (61, 60)[rank]] for one in data())
    arrays = {"x": x, "y": y, "batch_size": 16}
    dataset = _rows().take((61, 40)[rank])
    pipeline = _rows().batch(4)
    infinite = strategy.distribute_datasets_from_function(
        lambda _: pipeline.repeat() if rank else pipeline
    )
    trained = _compiled(strategy)
    rows = (
        "worker 0 has 61 rows in batches of {0}, worker 1 has 60 rows in"
        " batches of {0}. Pass the same data on all workers."
    )
    for call, text in (
        (lambda: trained.fit(**arrays), rows.format(16)),
        (lambda: trained.evaluate(**arrays), rows.format(16)),
        (lambda: trained.predict(x, batch_size=16), rows.format(16)),
        (
            lambda: trained.fit(*data(), validation_data=(x, y), verbose=0),
            rows.format(32),
        ),
        (
            lambda: trained.fit(dataset.batch(16), shuffle=False),
            "worker 0 has 4 batches, worker 1 has 3 batches. Pass",
        ),
        (
            lambda: trained.fit(infinite, steps_per_epoch=2, shuffle=False),
            "infinite: worker 0 has 16 batches, worker 1 has infinitely many"
            " batches. Call repeat()",
        ),
        (
            lambda: trained.fit(*data(), steps_per_epoch=1 + rank),
            "differs between the workers: [1, 2]. Pass the same number",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            call()
        assert _seed() is None


def saves(strategy):
    """Saves by the code in many_machines.md, on all workers, to one path."""
    page = (paths.ROOT / "tf_xshard/docs/many_machines.md").read_text()
    [code] = [
        block
        for block in re.findall(r"```python\n(.*?)```", page, re.S)
        if "def save(" in block and "model.save(path)" in block
    ]
    with strategy.scope():
        trained = model(
            tf_xshard.CrossShardOptimizer(
                keras.optimizers.Adam(), shard_update=True
            )
        )
    trained.fit(*data(), batch_size=16, verbose=0)
    for ending, call in (
        (".keras", "model.save(path)"),
        # The other call that the page names.
        (".weights.h5", "model.save_weights(path)"),
    ):
        scope = {}
        exec(code.replace("model.save(path)", call), scope)
        for number in range(NUM_SAVES):
            scope["save"](trained, f"{number}{ending}")
            # All workers find the chief's files.
            assert os.path.exists(f"{number}{ending}")
    return flat(trained)


CASES = (
    *(each_row_is_trained_on_once, different_batches, unknown_size),
    *(different_counts_are_refused, different_data_are_refused, saves),
)


def main(directory):
    os.chdir(directory)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    communication = tf_xshard.Communication(timeout_seconds=TIMEOUT_SECONDS)
    with tf_xshard.multi_worker_fit(communication):
        return cluster.attempted(CASES, strategy)
