"""Steps with given gradients, of a sharded update and of what it must equal."""

import re

import keras
import numpy as np
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tf_xshard.distribute import site as site_lib
from tf_xshard.private.keras import shards as keras_shards

NUM_STEPS = 20
# Sizes around the number of replicas, a scalar, an empty variable.
SHAPES = [(5, 3), (7,), (), (0,), (1, 4)]
NAMES = ["kernel", "bias", "scalar", "empty", "row"]


def start_weights():
    rng = np.random.default_rng(7)
    return [rng.normal(size=shape).astype("float32") for shape in SHAPES]


def gradients(num_replicas, num_steps=NUM_STEPS):
    """`result[step][variable][replica]`, tenfold from replica to replica."""
    rng = np.random.default_rng(8)
    scale = 10.0 ** np.arange(num_replicas) / 10**num_replicas
    return [
        [
            (
                rng.normal(size=(num_replicas, *shape))
                * scale.reshape([-1] + [1] * len(shape))
            ).astype("float32")
            for shape in SHAPES
        ]
        for _ in range(num_steps)
    ]


class Trained:
    """What `NUM_STEPS` steps have made of variables and slots.

    Args:
      inner_fn: Makes the inner optimizer.
      strategy: The strategy.
      groups: The groups, or None.
      graph: Whether the step is a tf.function.
      constraint: Of the first variable.
      **kwargs: Further arguments of CrossShardOptimizer.

    Attributes:
      optimizer: The optimizer.
      weights: An array for each variable, [num_replicas, ...].
    """

    def __init__(
        self,
        inner_fn,
        strategy,
        groups=None,
        graph=True,
        constraint=None,
        num_steps=NUM_STEPS,
        around=lambda optimizer: optimizer,
        **kwargs,
    ):
        # TensorFlow can't broadcast an empty variable to other processes.
        spans = site_lib.spans_processes(strategy)
        self._indices = [
            i for i, name in enumerate(NAMES) if not (spans and name == "empty")
        ]
        values = start_weights()
        with strategy.scope():
            self.variables = [
                keras.Variable(values[i], name=NAMES[i]) for i in self._indices
            ]
            self.variables[0].constraint = constraint
            self.optimizer = around(
                tf_xshard.CrossShardOptimizer(
                    inner_fn(),
                    "mean",
                    groups,
                    loss_normalization="replica",
                    **kwargs,
                )
            )
            self.optimizer.build(self.variables)
        self.strategy = strategy

        def on_replica(*arriving):
            own = [one[replicas.replica_id_tensor()] for one in arriving]
            scale = self.optimizer.scale_loss(1.0)
            self.optimizer.apply([one * scale for one in own], self.variables)

        def step(*arriving):
            strategy.run(on_replica, args=arriving)

        self._step = tf.function(step, autograph=False) if graph else step
        self.run(num_steps)

    def run(self, num_steps):
        for one in gradients(self.strategy.num_replicas_in_sync, num_steps):
            self._step(*[tf.constant(one[i]) for i in self._indices])
        self.weights = [
            np.stack(replicas.values(self.strategy, v)) for v in self.variables
        ]

    def state(self):
        """The optimizer's variables by name, [num_replicas, ...]."""
        return {
            _name(one): np.stack(replicas.values(self.strategy, one))
            for one in self.optimizer.variables
        }

    def slots(self):
        """The sharded variables of the optimizer."""
        return [
            one
            for one in self.optimizer.variables
            if isinstance(one, keras_shards.Sharded)
        ]


def _name(variable):
    """Plain Keras' name, without the numbers of optimizers and variables."""
    return re.sub(r"_\d+|^CrossShardOptimizer/", "", variable.path)


def one_device(inner_fn, members, num_replicas, constraint=None):
    """Plain Keras with the mean gradients of a group.

    Returns:
      The weights, and the optimizer's variables by name.
    """
    variables = [
        keras.Variable(value, name=name)
        for value, name in zip(start_weights(), NAMES, strict=True)
    ]
    variables[0].constraint = constraint
    optimizer = inner_fn()
    optimizer.build(variables)
    for one in gradients(num_replicas):
        scale = optimizer.scale_loss(1.0)
        optimizer.apply(
            [
                tf.constant(np.mean(value[list(members)], axis=0)) * scale
                for value in one
            ],
            variables,
        )
    return (
        [one.numpy() for one in variables],
        {_name(one): one.numpy() for one in optimizer.variables},
    )


def difference(some, others):
    """The largest |difference|; infinite if one is not finite."""
    largest = 0.0
    for a, b in zip(some, others, strict=True):
        assert a.shape == b.shape, (a.shape, b.shape)
        if a.size:
            with np.errstate(invalid="ignore"):
                error = np.max(np.abs(a.astype("float64") - b))
            largest = max(largest, float(error if error == error else np.inf))
    return largest


TOLERANCE = 1e-6


def check(inner_fn, strategy, groups, graph=True, whole=False, **kwargs):
    """Equal to one device's, on every replica, and to the whole update."""
    got = Trained(
        inner_fn, strategy, groups, graph, shard_update=True, **kwargs
    )
    state = got.state()
    num_replicas = strategy.num_replicas_in_sync
    for members in groups or [range(num_replicas)]:
        first = members[0]
        for value in (*got.weights, *state.values()):
            for r in members:
                np.testing.assert_array_equal(value[r], value[first])
        weights, slots = one_device(
            inner_fn, members, num_replicas, kwargs.get("constraint")
        )
        own = [value[first] for value in got.weights]
        assert difference(own, weights) < 3 * _tolerance(weights)
        assert state.keys() == slots.keys()
        for name, value in slots.items():
            _assert_slot(state[name][first], value, name)
    group_size = len(groups[0]) if groups else num_replicas
    for slot in got.slots():
        if isinstance(slot, keras_shards.Owned):
            continue
        size = max(1, -(-slot.shape.num_elements() // group_size))
        for copy in slot.shards.values:
            assert copy.shape == [size]
    if whole:
        _check_whole(got, Trained(inner_fn, strategy, groups, graph, **kwargs))
    return got


def _check_whole(got, whole):
    """Slots have the names, shapes and values of the whole update's."""
    error = difference(got.weights, whole.weights)
    assert error < _tolerance(whole.weights)
    mine, others = got.state(), whole.state()
    assert mine.keys() == others.keys()
    for name, value in mine.items():
        _assert_slot(value, others[name], name)


def _assert_slot(value, expected, name):
    np.testing.assert_allclose(
        value, expected, rtol=1e-4, atol=1e-5, err_msg=name
    )


def _tolerance(weights):
    return TOLERANCE * max(1.0, *(np.abs(w).max(initial=0) for w in weights))
