"""Horovod's side of benchmarks/fit_on_one_host.py, in its own environment.

`horovodrun -np 4 --gloo python horovod_fit.py MODEL EPOCHS`. Horovod 0.28.1
needs an older TensorFlow, so nothing of this project is imported here.
"""

import sys

import fit_model
import horovod.tensorflow.keras as hvd
import tensorflow as tf


def main(name, epochs):
    hvd.init()
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(1e-4))
    model = fit_model.model(name, optimizer)
    data = fit_model.examples(name).shard(hvd.size(), hvd.rank())
    model.fit(
        data.batch(fit_model.BATCH_SIZE, drop_remainder=True),
        epochs=epochs,
        verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            fit_model.StepSeconds(prints=hvd.rank() == 0),
        ],
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
