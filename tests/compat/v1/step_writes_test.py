"""A step of TF1's wrappers writes nothing before all its gradients exist.

One gradient of a step fails when all others exist, as data that end do. No
variable may then have changed, of no shard, tower or replica.
"""

import time

import keras
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

    def pairs(self, variables, can_fail=True):
        """(gradient, variable) pairs; the last gradient can fail."""
        gradients = [tf.ones(v.shape) for v in variables]
        if can_fail:
            shape = gradients[-1].shape
            late = tf.numpy_function(self._value, gradients[-1:], tf.float32)
            gradients[-1] = tf.ensure_shape(late, shape)
        return list(zip(gradients, variables, strict=True))


def _check(failure, step, values):
    """`step` changes most of the values, and one that fails changes none."""
    step()
    before = values()
    failure.fails = True
    with pytest.raises(tf.errors.OpError, match="have ended"):
        step()
    for old, new in zip(before, values(), strict=True):
        np.testing.assert_array_equal(old, new)
    failure.fails = False
    step()
    changed = [
        not np.array_equal(old, new)
        for old, new in zip(before, values(), strict=True)
    ]
    assert sum(changed) > len(changed) / 2


def _adam():
    return tf1.train.AdamOptimizer(0.1)


def _is_last_shard():
    return "shard_1" in tf1.get_default_graph().get_name_scope()


def _shards(failure, groups=None, outside=False):
    step = tf1.train.get_or_create_global_step()
    if outside:
        w, e = graphs.variables()

    def computation():
        scope = tf1.variable_scope("", reuse=tf1.AUTO_REUSE)
        with scope:
            variables = graphs.variables()
        assert not outside or variables == (w, e)
        optimizer = v1.CrossShardOptimizer(_adam(), group_assignment=groups)
        pairs = failure.pairs(variables, _is_last_shard())
        return optimizer.apply_gradients(pairs, step)

    return v1.shard(computation, num_shards=2)


def _alone(failure, wrapper=v1.CrossShardOptimizer):
    optimizer = wrapper(_adam())
    pairs = failure.pairs(graphs.variables())
    step = tf1.train.get_or_create_global_step()
    return [optimizer.apply_gradients(pairs, step)]


def _towers(failure, wrapped=lambda: v1.TowerOptimizer(_adam())):
    def model_fn(features, mode):
        optimizer = wrapped()
        name = tf1.get_default_graph().get_name_scope()
        pairs = failure.pairs(graphs.variables(), name.startswith("tower_1"))
        train = optimizer.apply_gradients(
            pairs, tf1.train.get_or_create_global_step()
        )
        return v1.EstimatorSpec(mode, loss=tf.zeros([]), train_op=train)

    replicated = v1.replicate_model_fn(model_fn, devices=["/CPU:0"] * 2)
    return [replicated(tf.zeros([2]), None, "train").train_op]


def _agn(failure, period=1, use_resource=True):
    getter = v1.AGNCustomGetter("/CPU:0")
    with tf1.variable_scope(
        "", custom_getter=getter, use_resource=use_resource
    ):
        variables = graphs.variables()
    optimizer = v1.AGNOptimizer(_adam(), 1, getter, period)
    step = tf1.train.get_or_create_global_step()
    return [optimizer.apply_gradients(failure.pairs(variables), step)]


def _mirrored(failure, groups):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        variables = graphs.variables()
        step = tf1.train.get_or_create_global_step()
        optimizer = v1.CrossShardOptimizer(_adam(), group_assignment=groups)

    def on_replica():
        pairs = failure.pairs(variables, replicas.replica_id() == 1)
        return optimizer.apply_gradients(pairs, step)

    return [strategy.group(strategy.run(on_replica))]


STEPS = {
    "shards in groups": lambda f: _shards(f, [[0], [1]]),
    "shards that share variables": lambda f: _shards(f, outside=True),
    "one shard": _alone,
    "replicas": lambda f: _mirrored(f, [[0, 1]]),
    "replicas in groups": lambda f: _mirrored(f, [[0], [1]]),
    "towers": _towers,
    "towers of a wrapper": lambda f: _towers(
        f, lambda: v1.TowerOptimizer(v1.CrossShardOptimizer(_adam()))
    ),
    "one tower": lambda f: _alone(f, v1.TowerOptimizer),
    "agn": _agn,
    "agn, ref variables": lambda f: _agn(f, 2, use_resource=False),
}


@pytest.mark.parametrize("name", STEPS)
def test_writes_wait_for_all_gradients(name):
    failure = _Failure()
    with tf.Graph().as_default():
        step = STEPS[name](failure)
        variables = [
            *tf1.global_variables(),
            *tf1.local_variables(),
            *tf1.get_collection(v1.SHARD_VARIABLES),
        ]
        with graphs.session(num_cpus=2) as session:
            _check(
                failure,
                lambda: session.run(step),
                lambda: session.run(variables),
            )


@pytest.mark.parametrize("place", ["shards", "replicas in groups"])
def test_in_a_function(place):
    """Groups of one replica: an unfinished collective would wait."""
    failure = _Failure()
    in_shards = place == "shards"
    inner = _adam() if in_shards else keras.optimizers.SGD(1.0)
    strategy = tf.distribute.get_strategy()
    if not in_shards:
        strategy = replicas.mirrored(2)
    with strategy.scope():
        variables = [tf.Variable(tf.ones([2])) for _ in range(2)]
        optimizer = v1.CrossShardOptimizer(
            inner, group_assignment=None if in_shards else [[0], [1]]
        )

    def apply(can_fail):
        return optimizer.apply_gradients(failure.pairs(variables, can_fail))

    @tf.function(autograph=False)
    def step():
        if in_shards:
            v1.shard(lambda: apply(_is_last_shard()), num_shards=2)
        else:
            strategy.run(lambda: apply(replicas.replica_id() == 1))

    _check(
        failure,
        step,
        lambda: [
            np.array(replicas.values(strategy, one))
            for one in (*variables, *optimizer.variables())
        ],
    )
