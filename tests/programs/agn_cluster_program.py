"""A task of a TF1 cluster that trains the digits with v1's AGNOptimizer.

python -m tests.programs.agn_cluster_program JOB INDEX CLUSTER NUM_STEPS

Workers wait for a line on stdin, or its end: the chief when it has initialized
the variables, the others before they ask whether it has, since TensorFlow waits
for 30 seconds before it asks again.
"""

import json
import sys

import numpy as np
import tensorflow as tf
from sklearn import datasets

from tf_xshard.compat import v1

tf1 = tf.compat.v1
PERIOD = 5
BATCH_SIZE = 32


def model(images, labels):
    """A network of two layers, with variables from get_variable."""
    w = tf1.get_variable("w", [64, 32])
    k = tf1.get_variable("k", [32, 10])
    b = tf1.get_variable("b", [10], initializer=tf.zeros_initializer())
    logits = tf.nn.relu(images @ w) @ k + b
    loss = tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    )
    correct = tf.equal(tf.argmax(logits, 1), labels)
    return loss, tf.reduce_mean(tf.cast(correct, tf.float32))


def data():
    """The digits: images in [0, 1] with 64 numbers each, and labels."""
    x, y = datasets.load_digits(return_X_y=True)
    return (x / 16).astype(np.float32), y.astype(np.int64)


def _say(**values):
    print(json.dumps(values), flush=True)


def work(server, cluster, index, num_steps):
    """Trains; reports what it starts from and what it ends with."""
    worker_device = f"/job:worker/task:{index}"
    getter = v1.AGNCustomGetter(worker_device)
    with tf.Graph().as_default():
        tf1.set_random_seed(index)
        with (
            tf1.device(
                tf1.train.replica_device_setter(
                    cluster=cluster, worker_device=worker_device
                )
            ),
            tf1.variable_scope("", custom_getter=getter),
        ):
            step = tf1.train.get_or_create_global_step()
            images = tf1.placeholder(tf.float32, [None, 64])
            labels = tf1.placeholder(tf.int64, [None])
            loss, _ = model(images, labels)
            optimizer = v1.AGNOptimizer(
                tf1.train.MomentumOptimizer(0.1, 0.9), 2, getter, PERIOD
            )
            train = optimizer.minimize(loss, global_step=step)
        copies = getter.all_copies()
        x, y = data()
        x, y = x[index::2], y[index::2]
        is_chief = index == 0
        if not is_chief:
            sys.stdin.readline()
        with tf1.train.MonitoredTrainingSession(
            master=server.target,
            is_chief=is_chief,
            hooks=[optimizer.make_session_run_hook(is_chief, index)],
            config=tf1.ConfigProto(device_filters=["/job:ps", worker_device]),
        ) as session:
            local, centers, accumulators = session.run(
                list(zip(*copies, strict=True))
            )
            _say(
                worker=index,
                apart=max(
                    float(np.abs(one - other).max())
                    for one, other in zip(local, centers, strict=True)
                ),
                size=float(sum(np.abs(v).sum() for v in centers)),
                accumulated=float(sum(np.abs(v).sum() for v in accumulators)),
                global_step=int(session.run(step)),
            )
            if is_chief:
                sys.stdin.readline()
            for i in range(num_steps):
                start = i * BATCH_SIZE % (len(x) - BATCH_SIZE)
                rows = slice(start, start + BATCH_SIZE)
                session.run(train, {images: x[rows], labels: y[rows]})
                _say(worker=index, step=i)
            centers, slots, exchanges = session.run(
                [
                    {c.local.op.name: c.center for c in copies},
                    [optimizer.get_slot(c.center, "momentum") for c in copies],
                    step,
                ]
            )
            _say(
                worker=index,
                devices=sorted({c.center.device for c in copies}),
                centers={k: v.tolist() for k, v in centers.items()},
                slots=float(sum(np.abs(v).sum() for v in slots)),
                global_step=int(exchanges),
            )


def main():
    """Starts this task's server, and what the task does."""
    job, index, cluster, num_steps = sys.argv[1:]
    cluster = tf.train.ClusterSpec(json.loads(cluster))
    server = tf.distribute.Server(cluster, job_name=job, task_index=int(index))
    if job == "ps":
        server.join()
    work(server, cluster, int(index), int(num_steps))


if __name__ == "__main__":
    main()
