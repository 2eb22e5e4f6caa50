"""What `tests/multi_worker/faults_test.py` launches: training that may fail.

`python -m tf_xshard launch ... -m tests.programs.launched_job DIRECTORY
[FAULT:RANK:STEP ...]`. One group of two workers, whose moving statistics and
dropout are their own. In the n-th start the worker RANK has the n-th fault, at
a step. Prints digests of all that the worker holds at the end. In the last
start it trains twice more: without saves, and with a signal to worker 1.
"""

import functools
import hashlib
import json
import os
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tf_xshard
from tests.support import fitting
from tests.support import group_training
from tests.support import processes

TIMEOUT_SECONDS = 15
SECONDS_CUT_OFF = 45
NUM_WORKERS = 2
NUM_EPOCHS = 3
STEPS_PER_EPOCH = 8
NUM_STEPS = NUM_EPOCHS * STEPS_PER_EPOCH


def _signal(number):
    return lambda: os.kill(os.getpid(), number)


def hang():
    """Alive, as its heartbeats say, and doing nothing."""
    time.sleep(3600)


def cut():
    """Off the network, alive, until after all workers have given up."""
    again = f"sleep {SECONDS_CUT_OFF}; ip link set eth0 up"
    os.system(f"ip link set eth0 down; setsid sh -c '{again}' &")


def requeue():
    """What an administrator of Slurm does."""
    job = os.environ["SLURM_JOB_ID"]
    processes.run(["scontrol", "requeue", job], check=True, tensorflow=0)


FAULTS = {
    "kill": _signal(signal.SIGKILL),
    "stop": _signal(signal.SIGSTOP),
    # What Slurm or a cloud does.
    "preempt": _signal(signal.SIGTERM),
    "hang": hang,
    "load": hang,
    "cut": cut,
    "requeue": requeue,
}


def _be_at_fault(fault):
    # The test takes the time from here.
    print("fault", fault, time.time(), flush=True)
    FAULTS[fault]()


def _at_step(step, act):
    """A callback that calls a function at the start of a step."""
    epochs = [0]

    def look(batch, logs):
        if epochs[-1] * STEPS_PER_EPOCH + batch == step:
            act()

    return keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: epochs.append(epoch),
        on_train_batch_begin=look,
    )


def _hanging_loader(dataset, step):
    """The same data, of which a batch never comes."""

    def look(index):
        if index == step:
            _be_at_fault("load")

    def of_batch(index, batch):
        tf.py_function(look, [index], [])
        return batch

    return dataset.enumerate().map(of_batch)


def _trained(strategy, callbacks=(), changed=lambda dataset: dataset):
    """Digests of all that this worker holds after training, and its metrics."""
    communication = tf_xshard.Communication(timeout_seconds=TIMEOUT_SECONDS)
    with strategy.scope():
        model = group_training.network()
        model.compile(
            optimizer=tf_xshard.CrossShardOptimizer(
                keras.optimizers.SGD(0.2, momentum=0.9),
                communication=communication,
            ),
            loss="binary_crossentropy",
            metrics=["accuracy"],
        )
    rows = group_training.data(16 * STEPS_PER_EPOCH)
    with tf_xshard.multi_worker_fit(communication):
        history = model.fit(
            changed(fitting.batches(*rows)),
            epochs=NUM_EPOCHS,
            shuffle=False,
            verbose=0,
            callbacks=[*callbacks],
        )
    digests = [
        hashlib.sha256(np.asarray(v).tobytes()).hexdigest()
        for v in [*model.weights, *model.optimizer.variables]
    ]
    return digests, {k: v[-1] for k, v in history.history.items()}


def _preempted(strategy, directory):
    """How training ends by a signal to worker 1, and what it goes on to."""
    own = strategy.cluster_resolver.task_id

    def checkpoint():
        return tf_xshard.GroupCheckpoint(directory, on_preemption=True)

    asking = [_at_step(4, FAULTS["preempt"])] * (own == 1)
    code = None
    try:
        _trained(strategy, [checkpoint(), *asking])
    except SystemExit as ended:
        code = ended.code
    position = tf_xshard.GroupCheckpoint.position(directory)
    return [[code, *position], *_trained(strategy, [checkpoint()])]


def main(directory, *faults):
    tf_xshard.connect(60)
    restart = int(os.environ["TF_XSHARD_RESTART"])
    position = tf_xshard.GroupCheckpoint.position(directory)
    print("started", restart, [*(position or ())], flush=True)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    callbacks = [
        tf_xshard.GroupCheckpoint(directory, every=3, on_preemption=True)
    ]
    own, changed = strategy.cluster_resolver.task_id, lambda dataset: dataset
    if restart < len(faults):
        fault, rank, step = faults[restart].split(":")
        if own == int(rank) and fault == "load":
            changed = lambda dataset: _hanging_loader(dataset, int(step))
        elif own == int(rank):
            at_fault = functools.partial(_be_at_fault, fault)
            callbacks.append(_at_step(int(step), at_fault))

    def say(word, values):
        print(word, json.dumps([own, *values]), flush=True)

    say("final", _trained(strategy, callbacks, changed))
    if restart >= len(faults):
        say("undisturbed", _trained(strategy))
        say("preempted", _preempted(strategy, f"{directory}_preempted"))


if __name__ == "__main__":
    main(*sys.argv[1:])
