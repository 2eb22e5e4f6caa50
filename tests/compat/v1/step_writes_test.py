"""A step of TF1's wrappers writes nothing before all its gradients exist.

Each test reads the graph of a step: every write must have all gradients of the
call, of every shard, tower or replica, among its ancestors. It also runs a step
one of whose gradients fails late, as data that end do, and compares all values.
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
MARK = "gradient_of_the_test"
WRITES = ("Assign", "Resource", "Apply", "SparseApply", "Scatter", "If", "Case")
READS = ("ResourceGather",)


class _Failure:
    """Makes gradients, the last of which can fail when the others exist."""

    def __init__(self):
        self.fails = False
        self.num = 0

    def gradient(self, variable, is_last):
        self.num += 1
        value = tf.ones(variable.shape)
        if is_last:
            value = tf.ensure_shape(
                tf.numpy_function(self._value, [value], tf.float32),
                variable.shape,
            )
        return tf.identity(value, name=MARK)

    def _value(self, value):
        if self.fails:
            time.sleep(0.3)  # All other operations that can run have run.
            raise ValueError("the data have ended")
        return value

    def pairs(self, variables, is_last=True):
        """(gradient, variable) pairs; the last gradient can fail."""
        *first, last = variables
        return [(self.gradient(v, False), v) for v in first] + [
            (self.gradient(last, is_last), last)
        ]


def _ancestors(operations):
    seen, stack = set(), list(operations)
    while stack:
        one = stack.pop()
        if one not in seen:
            seen.add(one)
            stack += [tensor.op for tensor in one.inputs]
            stack += one.control_inputs
    return seen


def _is_write(one):
    """Returns True if an operation of a step changes a variable that stays."""
    if not one.type.startswith(WRITES) or one.type.startswith(READS):
        return False
    # A copy takes its first value from shard 0.
    if "initialize/" in one.name or not one.inputs:
        return False
    of = one.inputs[0].op
    while of.type in ("Identity", "Enter", "Switch", "RefSwitch", "RefEnter"):
        of = of.inputs[0].op
    # `shard` copies shared variables before each step.
    temporary = (
        of.get_attr("shared_name").decode() if of.type == "VarHandleOp" else ""
    )
    return not temporary.endswith("/before_the_step") and (
        "/of_shard_" not in temporary
    )


def early_writes(operations, num_gradients):
    """Names of the writes that can run before all gradients exist."""
    step = _ancestors(operations)
    gradients = {
        one for one in step if one.name.split("/")[-1].startswith(MARK)
    }
    assert len(gradients) == num_gradients
    writes = [one for one in step if _is_write(one)]
    assert len(writes) >= 2
    return sorted(w.name for w in writes if gradients - _ancestors([w]))


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
        operations = [getattr(one, "op", one) for one in step]
        assert early_writes(operations, failure.num) == []
        variables = [
            *tf1.global_variables(),
            *tf1.local_variables(),
            *tf1.get_collection(v1.SHARD_VARIABLES),
        ]
        with graphs.session(num_cpus=2) as session:
            session.run(step)
            before = session.run(variables)
            failure.fails = True
            for _ in range(2):
                with pytest.raises(tf.errors.OpError, match="have ended"):
                    session.run(step)
            after = session.run(variables)
            failure.fails = False
            session.run(step)
            last = session.run(variables)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    changed = [
        not np.array_equal(old, new)
        for old, new in zip(before, last, strict=True)
    ]
    assert sum(changed) > len(changed) / 2


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

    def apply(is_last):
        return optimizer.apply_gradients(failure.pairs(variables, is_last))

    @tf.function(autograph=False)
    def step():
        failure.num = 0
        if in_shards:
            v1.shard(lambda: apply(_is_last_shard()), num_shards=2)
        else:
            strategy.run(lambda: apply(replicas.replica_id() == 1))

    def values():
        return [
            np.array(replicas.values(strategy, one))
            for one in (*variables, *optimizer.variables())
        ]

    step()  # Traces twice, as TensorFlow does when variables are made.
    operations = step.get_concrete_function().graph.get_operations()
    assert early_writes(operations, failure.num) == []
    before = values()
    failure.fails = True
    with pytest.raises(tf.errors.OpError, match="have ended"):
        step()
    for old, new in zip(before, values(), strict=True):
        np.testing.assert_array_equal(old, new)
