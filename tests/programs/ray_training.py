"""Training on Ray, of which a worker may be killed; run by ray_program.py.

`python -m tests.programs.ray_training FOLDER [--kill]`. Prints a digest of the
weights at the end of each worker.
"""

import hashlib
import json
import os
import signal
import sys
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

    def __init__(self, folder):
        super().__init__()
        self.mark = os.path.join(folder, "killed")

    def on_epoch_begin(self, epoch, logs=None):
        is_own = ray.train.get_context().get_world_rank() == 1
        if is_own and epoch == 2 and not os.path.exists(self.mark):
            with open(self.mark, "w"):
                os.kill(os.getpid(), signal.SIGKILL)


def train(config):
    """What each worker runs."""
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
    callbacks = [Report()]
    if config["kill"]:
        callbacks.append(Kill(config["folder"]))
    with tf_xshard.multi_worker_fit():
        model.fit(
            x,
            x[:, :1],
            batch_size=16,
            epochs=NUM_EPOCHS,
            initial_epoch=epoch,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )
    weights = b"".join(w.tobytes() for w in model.get_weights())
    rank = ray.train.get_context().get_world_rank()
    with open(os.path.join(config["folder"], f"rank_{rank}"), "w") as file:
        digest = hashlib.sha256(weights).hexdigest()
        json.dump([epoch, digest], file)


def main(folder, *options):
    ray.init(num_cpus=NUM_WORKERS, include_dashboard=False, log_to_driver=False)
    trainer = ray.train.tensorflow.TensorflowTrainer(
        train,
        train_loop_config={"kill": "--kill" in options, "folder": folder},
        scaling_config=ray.train.ScalingConfig(num_workers=NUM_WORKERS),
        run_config=ray.train.RunConfig(
            storage_path=folder,
            name="run",
            failure_config=ray.train.FailureConfig(max_failures=1),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
