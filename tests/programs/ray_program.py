"""Checks training on Ray, which restarts after a killed worker: to the bit.

`python -m tests.programs.ray_program`, where `ray[train]` is installed, which
brings much.
"""

import hashlib
import os
import pathlib
import signal
import tempfile

import keras
import ray
import ray.train
import ray.train.tensorflow
import tensorflow as tf

import tf_xshard

NUM_WORKERS = 2
NUM_EPOCHS = 4


class Report(keras.callbacks.Callback):
    """Gives each epoch's metrics and save to Ray."""

    def on_epoch_end(self, epoch, logs=None):
        with tempfile.TemporaryDirectory() as directory:
            tf_xshard.GroupState(self.model).save(
                directory, epoch=epoch + 1, shared=False
            )
            checkpoint = ray.train.Checkpoint.from_directory(directory)
            ray.train.report(dict(logs), checkpoint=checkpoint)


class Kill(keras.callbacks.Callback):
    """Ends worker 1 in its third epoch, the first time."""

    def __init__(self, mark):
        super().__init__()
        self.mark = mark

    def on_epoch_begin(self, epoch, logs=None):
        is_own = ray.train.get_context().get_world_rank() == 1
        if is_own and epoch == 2 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(config):
    """What each worker runs; writes where it began, and a digest."""
    folder = pathlib.Path(config["folder"])
    keras.utils.set_random_seed(1)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((8,)), keras.layers.Dense(1)]
        )
        model.compile(
            tf_xshard.CrossShardOptimizer(keras.optimizers.Adam(0.1)), "mse"
        )
    epoch = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            epoch = tf_xshard.GroupState(model).restore(directory).epoch
    x = tf.random.stateless_normal([64, 8], seed=(0, 0))
    with tf_xshard.multi_worker_fit():
        model.fit(
            x,
            x[:, :1],
            batch_size=16,
            epochs=NUM_EPOCHS,
            initial_epoch=epoch,
            shuffle=False,
            verbose=0,
            callbacks=[Report(), *[Kill(folder / "killed")] * config["kill"]],
        )
    weights = b"".join(w.tobytes() for w in model.get_weights())
    rank = ray.train.get_context().get_world_rank()
    digest = hashlib.sha256(weights).hexdigest()
    (folder / f"rank_{rank}").write_text(f"{epoch} {digest}")


def _finals(kill):
    """Where workers have begun last, and what they hold at the end: sets."""
    with tempfile.TemporaryDirectory() as folder:
        ray.train.tensorflow.TensorflowTrainer(
            train,
            train_loop_config={"kill": kill, "folder": folder},
            scaling_config=ray.train.ScalingConfig(num_workers=NUM_WORKERS),
            run_config=ray.train.RunConfig(
                storage_path=folder,
                name="run",
                failure_config=ray.train.FailureConfig(max_failures=1),
            ),
        ).fit()
        files = [pathlib.Path(folder, f"rank_{r}") for r in range(NUM_WORKERS)]
        found = [file.read_text().split() for file in files]
    return map(set, zip(*found, strict=True))


def main():
    ray.init(num_cpus=NUM_WORKERS, include_dashboard=False, log_to_driver=False)
    epochs, undisturbed = _finals(kill=False)
    assert epochs == {"0"} and len(undisturbed) == 1, (epochs, undisturbed)
    epochs, digests = _finals(kill=True)
    assert len(epochs) == 1 and epochs != {"0"}, epochs
    assert digests == undisturbed, (digests, undisturbed)
    print("Ray has restarted a killed worker: the same bits.")


if __name__ == "__main__":
    main()
