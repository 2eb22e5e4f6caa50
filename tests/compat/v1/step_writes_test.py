"""A step of TF1's wrappers writes nothing before all its gradients exist.

One gradient of a step fails when all others exist, as data that end do. No
variable may then have changed, of no shard, tower or replica.
"""

import time

import numpy as np
import pytest
import tensorflow as tf

from tests.compat.v1 import graphs
from tests.support import replicas
from tf_xshard.compat import v1

tf1 = tf.compat.v1


class _Failure:
    """Makes gradients, the last of which can fail when the others exist."""

    fails = False

    def _value(self, value):
        if self.fails:
            time.sleep(0.3)  # All other operations that can run have run.
            raise ValueError("the data have ended")
        return value

    def apply(self, optimizer, variables, can_fail=True):
        gradients = [tf.ones(v.shape) for v in variables]
        if can_fail:
            late = tf.numpy_function(self._value, gradients[-1:], tf.float32)
            gradients[-1] = tf.ensure_shape(late, variables[-1].shape)
        return optimizer.apply_gradients(
            list(zip(gradients, variables, strict=True)),
            tf1.train.get_or_create_global_step(),
        )


def _cross_shard(groups=None):
    return v1.CrossShardOptimizer(
        tf1.train.AdamOptimizer(0.1), group_assignment=groups
    )


def _tower():
    return v1.TowerOptimizer(tf1.train.AdamOptimizer(0.1))


def _shards(failure, groups=None, outside=False):
    tf1.train.get_or_create_global_step()
    if outside:
        graphs.variables()

    def computation():
        with tf1.variable_scope("", reuse=tf1.AUTO_REUSE):
            variables = graphs.variables()
        is_last = not graphs.is_first("shard_1")
        return failure.apply(_cross_shard(groups), variables, is_last)

    return v1.shard(computation, num_shards=2)


def _towers(failure, make=_tower):
    def model_fn(features, mode):
        is_last = not graphs.is_first("tower_1")
        train = failure.apply(make(), graphs.variables(), is_last)
        return v1.EstimatorSpec(mode, loss=tf.zeros([]), train_op=train)

    replicated = v1.replicate_model_fn(model_fn, devices=["/CPU:0"] * 2)
    return replicated(tf.zeros([2]), None, "train").train_op


def _agn(failure, period=1, use_resource=True):
    getter = v1.AGNCustomGetter("/CPU:0")
    tf1.get_variable_scope().set_use_resource(use_resource)
    with tf1.variable_scope("", custom_getter=getter):
        variables = graphs.variables()
    adam = tf1.train.AdamOptimizer(0.1)
    return failure.apply(v1.AGNOptimizer(adam, 1, getter, period), variables)


def _mirrored(failure, groups):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        variables = graphs.variables()
        tf1.train.get_or_create_global_step()
        optimizer = _cross_shard(groups)

    def on_replica():
        return failure.apply(optimizer, variables, replicas.replica_id() == 1)

    return strategy.group(strategy.run(on_replica))


STEPS = {
    "shards in groups": lambda f: _shards(f, [[0], [1]]),
    "shards that share variables": lambda f: _shards(f, outside=True),
    "one shard": lambda f: f.apply(_cross_shard(), graphs.variables()),
    "replicas": lambda f: _mirrored(f, [[0, 1]]),
    "replicas in groups": lambda f: _mirrored(f, [[0], [1]]),
    "towers": _towers,
    "towers of a wrapper": lambda f: _towers(
        f, lambda: v1.TowerOptimizer(_cross_shard())
    ),
    "one tower": lambda f: f.apply(_tower(), graphs.variables()),
    "agn": _agn,
    "agn, ref variables": lambda f: _agn(f, 2, use_resource=False),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.usefixtures("graph")
def test_writes_wait_for_all_gradients(name):
    failure = _Failure()
    step = STEPS[name](failure)
    variables = [
        *tf1.global_variables(),
        *tf1.local_variables(),
        *tf1.get_collection(v1.SHARD_VARIABLES),
    ]
    with graphs.session(num_cpus=2) as session:
        session.run(step)
        before = session.run(variables)
        failure.fails = True
        with pytest.raises(tf.errors.OpError, match="have ended"):
            session.run(step)
        graphs.check_close(session.run(variables), before, 0, 0)
        failure.fails = False
        session.run(step)
        after = session.run(variables)
    same = list(map(np.array_equal, before, after))
    assert sum(same) < len(same) / 2
