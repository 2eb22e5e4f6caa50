"""Trains optimizers of tf_keras on groups of replicas and on one device.

Each replica gets other gradients, and each group must end with the weights of
one device that gets the group's mean or sum.
"""

import functools
import types
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf
import tf_keras

import tf_xshard
from tests.support import cluster
from tests.support import replicas
from tf_xshard.distribute import site
from tf_xshard.private.tf_keras import optimizers as private

NUM_REPLICAS = 4
NUM_STEPS = 3
GROUPS = [[0, 2], [3, 1]]
SHAPES = [(3, 2), (4, 2)]
LEGACY = tf_keras.optimizers.legacy


class Case(NamedTuple):
    """An optimizer, and how it gets an aggregator."""

    make: Callable
    reduction: str = "mean"
    groups: list | None = GROUPS
    # The aggregator is the argument of a legacy optimizer.
    is_argument: bool = False
    # A LossScaleOptimizer is around it, and replica 1 overflows in one step.
    is_scaled: bool = False
    # Further arguments of the aggregator.
    options: Mapping = types.MappingProxyType({})
    # Replica 1 has no gradient of the first variable.
    lacks_one: bool = False
    # The optimizer to compare with, if it is another one.
    reference: Callable | None = None

    def optimizer(self):
        arguments = (self.reduction, self.groups)
        if self.is_argument:
            aggregator = tf_xshard.tf_keras.gradient_aggregator(*arguments)
            return self.make(gradient_aggregator=aggregator)
        return tf_xshard.tf_keras.with_aggregator(
            self.scaled(self.make()), *arguments, **self.options
        )

    def scaled(self, optimizer):
        if not self.is_scaled:
            return optimizer
        return tf_keras.mixed_precision.LossScaleOptimizer(
            optimizer, initial_scale=8.0
        )


_MOMENTUM = functools.partial(tf_keras.optimizers.SGD, 0.1, momentum=0.9)
_LEGACY_SGD = functools.partial(LEGACY.SGD, 0.1, momentum=0.9)
_ADAMW = functools.partial(
    tf_keras.optimizers.AdamW, 0.1, weight_decay=0.1, global_clipnorm=0.5
)
_LEGACY_ADAM = functools.partial(LEGACY.Adam, 0.1, global_clipnorm=0.5)
_REPLICA = {"loss_normalization": "replica"}
CASES = {
    "legacy_adam": Case(_LEGACY_ADAM, is_argument=True),
    # Adam, or a clipped norm, would hide a factor of the gradients.
    "legacy_sgd": Case(_LEGACY_SGD, "sum"),
    "adamw": Case(_ADAMW),
    "replica": Case(_MOMENTUM, "sum", options=_REPLICA),
    "clipped": Case(
        _MOMENTUM,
        groups=None,
        options={"post_reduce": tf_xshard.clip_by_global_norm(0.5)},
        reference=functools.partial(_MOMENTUM, global_clipnorm=0.5),
    ),
}
# tf_keras refuses a LossScaleOptimizer under TPUStrategy, where all replicas
# run one program.
ALL_CASES = {
    **CASES,
    "legacy_sgd scaled": Case(_LEGACY_SGD, is_scaled=True),
    "adamw scaled": Case(_ADAMW, is_scaled=True),
    "none": Case(_MOMENTUM, lacks_one=True),
}


def gradients():
    """`result[step][variable][replica]`; the last variable has rows."""
    rng, shapes = np.random.default_rng(8), [(NUM_REPLICAS, *s) for s in SHAPES]
    return [
        [np.float32(rng.normal(size=shape)) for shape in shapes]
        for _ in range(NUM_STEPS)
    ]


def variables():
    rng = np.random.default_rng(7)
    return [tf.Variable(np.float32(rng.normal(size=s))) for s in SHAPES]


def _as_rows(value):
    """Makes IndexedSlices, in which rows 0 and 1 occur twice."""
    half = 0.5 * value[:2]
    return tf.IndexedSlices(
        tf.concat([half, half, value[2:]], 0),
        tf.constant([0, 1, 0, 1, 2, 3]),
        tf.constant(SHAPES[-1]),
    )


def _apply(case, optimizer, values, given, sparse):
    """Applies gradients; the last one as IndexedSlices, if `sparse`."""
    if case.is_scaled:
        scale = optimizer.get_scaled_loss(tf.constant(1.0))
        values = [one * scale for one in values]
    if sparse:
        values = [*values[:-1], _as_rows(values[-1])]
    if case.is_scaled:
        values = optimizer.get_unscaled_gradients(values)
    optimizer.apply_gradients(list(zip(values, given, strict=True)))


def _trained(strategy, cases):
    """Each case's variables on every replica; one function trains all."""
    with strategy.scope():
        given = {name: variables() for name in cases}
        optimizers = {name: case.optimizer() for name, case in cases.items()}
        for name, optimizer in optimizers.items():
            # In the function, new variables would make it trace twice.
            private.created_variables(optimizer, given[name])

    def on_replica(number, *arriving):
        replica = replicas.replica_id_tensor()
        is_bad = tf.logical_and(
            tf.equal(tf.cast(replica, tf.int32), 1), tf.equal(number, 1)
        )
        for name, case in cases.items():
            divisor = 1 if case.options == _REPLICA else NUM_REPLICAS
            own = [one[replica] / divisor for one in arriving]
            if case.is_scaled:
                own[0] = tf.where(is_bad, np.inf, own[0])
            if case.lacks_one and tf.get_static_value(replica) == 1:
                own[0] = None
            _apply(case, optimizers[name], own, given[name], sparse=True)

    @tf.function(autograph=False)
    def train(*all_steps):
        """Takes all steps in one function, as Orbit does."""

        def body(number):
            arriving = [one[number] for one in all_steps]
            strategy.run(on_replica, args=(number, *arriving))
            return number + 1

        tf.while_loop(lambda number: number < NUM_STEPS, body, [0])

    train(*map(tf.stack, zip(*gradients(), strict=True)))
    return {
        name: [replicas.values(strategy, v) for v in of_case]
        for name, of_case in given.items()
    }


def _one_device(case, members):
    """Returns each variable after plain tf_keras with a group's gradients."""
    given = variables()
    optimizer = case.scaled((case.reference or case.make)())
    combine = np.mean if case.reduction == "mean" else np.sum
    for number, one in enumerate(gradients()):
        if case.lacks_one:
            one[0][1] = 0
        values = [tf.constant(combine(v[members], axis=0)) for v in one]
        if case.is_scaled and number == 1:  # No group takes the step.
            values[0] *= np.inf
        # tf_keras would clip by the norm of the repeated rows.
        _apply(case, optimizer, values, given, sparse=False)
    return [v.numpy() for v in given]


def differences(strategy, cases):
    """For each case, the largest difference of a replica from one device."""
    trained = _trained(strategy, cases)
    return {
        name: largest_difference(
            strategy,
            trained[name],
            case.groups,
            functools.partial(_one_device, case),
        )
        for name, case in cases.items()
    }


def largest_difference(strategy, got, groups, expected_of):
    """The largest |difference| of a replica's variables from its group's."""
    ids = site.local_replica_ids(strategy)
    return max(
        float(np.max(np.abs(values[ids.index(replica)] - want)))
        for members in groups or [[*range(NUM_REPLICAS)]]
        if set(members) & set(ids)
        for values, want in zip(got, expected_of(members), strict=True)
        for replica in set(members) & set(ids)
    )


def strategy_of(kind):
    """For a program: "workers" are four processes with a replica each."""
    if kind == "workers":
        return tf.distribute.MultiWorkerMirroredStrategy()
    replicas.set_up_cpus(NUM_REPLICAS)
    return replicas.STRATEGIES[kind](NUM_REPLICAS)


def found_by(program, kind):
    """Largest differences, by case, that the processes of a program find."""
    count = NUM_REPLICAS if kind == "workers" else 1
    program = f"tests.programs.{program}"
    found = cluster.results_of(program, count, [kind], seconds=2500)
    return {name: max(one[name] for one in found) for name in found[0]}
