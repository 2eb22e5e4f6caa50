"""v1's AGNOptimizer over gRPC: a parameter server and two workers.

The servers are in this process. A worker that was lost comes back as a new
graph and a new session, which initializes its local variables again.
"""

import numpy as np
import tensorflow as tf

from tests.compat.v1 import graphs
from tests.support import v1_oracle
from tf_xshard.compat import v1
from tf_xshard.multi_worker import local_cluster

tf1 = tf.compat.v1
PERIOD = 2


def _servers():
    ps, *workers = [f"127.0.0.1:{port}" for port in local_cluster.free_ports(3)]
    cluster = tf.train.ClusterSpec({"ps": [ps], "worker": workers})
    jobs = [("ps", 0), ("worker", 0), ("worker", 1)]
    return cluster, [tf.distribute.Server(cluster, *job) for job in jobs]


class _Worker:
    """A graph, and a session of this worker's server."""

    def __init__(self, cluster, server, index):
        device = f"/job:worker/task:{index}"
        getter = v1.AGNCustomGetter(device)
        with tf.Graph().as_default():
            setter = tf1.train.replica_device_setter(
                cluster=cluster, worker_device=device
            )
            scope = tf1.variable_scope("", custom_getter=getter)
            with tf1.device(setter), scope:
                step = tf1.train.get_or_create_global_step()
                # The chief's value, which is -1, is the center's.
                w = tf1.get_variable("w", initializer=[index - 1.0] * 2)
            self._gradient = tf1.placeholder(tf.float32, [2])
            loss = tf.reduce_sum(self._gradient * w)
            adam = tf1.train.AdamOptimizer(0.1)
            optimizer = v1.AGNOptimizer(adam, 2, getter, PERIOD)
            self._train = optimizer.minimize(loss, step)
            copies = getter.copies_of(w)
            shared = [*graphs.with_slots(optimizer, copies.center), step]
            assert copies.local.device.startswith(device)
            for one in shared:
                assert one.device.startswith("/job:ps/task:0")
            self._fetches = [list(copies), shared]
            self.session = tf1.train.MonitoredTrainingSession(
                master=server.target,
                is_chief=index == 0,
                hooks=[optimizer.make_session_run_hook(index == 0, index)],
                config=tf1.ConfigProto(device_filters=["/job:ps", device]),
            )

    def step(self, gradient):
        self.session.run(self._train, {self._gradient: gradient})

    def check(self, oracle, num_exchanges):
        shared = [*oracle.center.values(), num_exchanges]
        expected = [oracle.values(), shared]
        graphs.check_close(self.session.run(self._fetches), expected)


def test_workers_train_one_center_and_one_that_was_lost_adopts_it():
    cluster, (_, *servers) = _servers()
    center = v1_oracle.Adam([-1.0, -1.0])
    workers, oracles = [], []

    def join(index):
        workers[index:] = [_Worker(cluster, servers[index], index)]
        oracles[index:] = [v1_oracle.AGNWorker(center, PERIOD)]

    def train(*turns):
        for index in turns:
            # Gradients differ, so that none is taken twice or lost unseen.
            gradient = np.float32([1 + index, -(oracles[index].num_steps + 1)])
            workers[index].step(gradient)
            oracles[index].step(gradient)

    def check(num_exchanges):
        for worker, oracle in zip(workers, oracles, strict=True):
            worker.check(oracle, num_exchanges)

    join(0)
    join(1)
    check(0)
    train(0, 1, 1, 0, 1, 0)
    check(2)
    workers[1].session.close()  # It had accumulated a gradient.
    train(0)
    join(1)
    check(3)
    train(1, 0, 1, 0)
    check(5)
