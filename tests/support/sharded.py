"""Sharded and owned updates with given gradients, held against plain Keras."""

import functools
import re

import keras
import numpy as np
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import stacks
from tests.support import versions
from tf_xshard.private.keras import shards as keras_shards

O = keras.optimizers  # noqa: E741
NUM_STEPS = 7
# Sizes around the number of replicas, a scalar, an empty variable.
SHAPES = {
    "kernel": (5, 3),
    "bias": (7,),
    "scalar": (),
    "empty": (0,),
    "row": (1, 4),
}
# A step costs as much CPU as it has operations.
ONE, TWO = ("kernel",), ("kernel", "bias")
PAIRS = [[0, 2], [3, 1]]
# The update of the first is divided by element, the other's by variable: each
# has an owner.
KINDS = (O.SGD, stacks.WholeSGD)


@tf_xshard.elementwise
class Signs(O.SGD):
    """A user's optimizer, which may be divided by element."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, 0.01 * tf.sign(gradient))


@tf_xshard.per_variable
class Normalized(O.SGD):
    """A user's optimizer, with a norm that has no reference variable."""

    def build(self, variables):
        super().build(variables)
        self.norms = [
            self.add_variable(v.shape[:1], name="norms") for v in variables
        ]

    def update_step(self, gradient, variable, learning_rate):
        norms = self.norms[self._get_variable_index(variable)]
        square = tf.reduce_sum(tf.square(gradient))
        self.assign_add(norms, tf.fill(norms.shape, square))
        self.assign_sub(variable, 0.01 * gradient / (1e-3 + tf.sqrt(square)))


def _made(*names, **options):
    return [
        functools.partial(getattr(O, name), 0.05, **options.get(name, {}))
        for name in (*names, *options)
        if hasattr(O, name) and name not in versions.BROKEN
    ]


BY_ELEMENT = [
    Signs,
    *_made(
        *("Adamax", "Nadam", "Adagrad", "Adadelta", "Lion"),
        "ScheduleFreeAdamW",
        SGD={"momentum": 0.9, "nesterov": True},
        Adam={"amsgrad": True},
        AdamW={"weight_decay": 0.1},
        RMSprop={"centered": True, "momentum": 0.5},
        Ftrl={"l1_regularization_strength": 0.001},
    ),
]
OWNED = [
    Normalized,
    *_made("Adafactor", Muon={"weight_decay": 0.1}, Lamb={"clipnorm": 0.1}),
]


def multi():
    """Some variables have owners, and others are divided by element."""
    return O.MultiOptimizer(
        O.OptimizerMap(
            O.AdamW(0.05, global_clipnorm=0.05),
            {"kernel": O.Muon(0.02), "row": O.Lamb(0.05)},
        )
    )


def momentum(kind, rate=0.5, **options):
    return kind(rate, momentum=0.5, name="sgd", **options)


def _of_elements(kind):
    optimizer = momentum(
        kind,
        O.schedules.ExponentialDecay(0.5, 3, 0.7),
        clipvalue=0.01,
        weight_decay=0.5,
    )
    optimizer.exclude_from_weight_decay(var_names=["bias", "^row"])
    return optimizer


_EMA = functools.partial(momentum, use_ema=True, ema_momentum=0.9)
_ACCUMULATION = {"gradient_accumulation_steps": 3}
# Each makes an optimizer of a class, which is divided by element or by owner.
SETTINGS = {
    "schedule_decay_clipvalue": _of_elements,
    "static_scale": functools.partial(
        momentum, clipnorm=0.01, loss_scale_factor=16.0
    ),
    "scale": lambda kind: O.LossScaleOptimizer(
        momentum(kind, global_clipnorm=0.1), initial_scale=64.0
    ),
    "averages": _EMA,
    "accumulation": functools.partial(
        momentum, global_clipnorm=0.05, **_ACCUMULATION
    ),
    "accumulation_ema": functools.partial(
        _EMA, ema_overwrite_frequency=2, **_ACCUMULATION
    ),
}


def of_both_kinds(name):
    """A setting, divided by element and by owner."""
    return [functools.partial(SETTINGS[name], kind) for kind in KINDS]


_RNG = np.random.default_rng(7)
START = {
    name: _RNG.normal(size=shape).astype("float32")
    for name, shape in SHAPES.items()
}


def gradients(num_replicas, num_steps=NUM_STEPS):
    """`result[step][name][replica]`, tenfold from replica to replica."""
    rng = np.random.default_rng(8)
    scale = 10.0 ** np.arange(-num_replicas, 0)
    return [
        {
            name: np.moveaxis(
                np.float32(rng.normal(size=(*shape, num_replicas)) * scale),
                -1,
                0,
            )
            for name, shape in SHAPES.items()
        }
        for _ in range(num_steps)
    ]


class Trained:
    """What some steps have made of variables and slots.

    Args:
      inner_fn: Makes the inner optimizer.
      strategy: The strategy.
      groups: The groups, or None.
      constraint: Of the first variable.
      names: Of the variables.
      wrap: Makes an optimizer around CrossShardOptimizer.
      **kwargs: Further arguments of CrossShardOptimizer.

    Attributes:
      strategy: The strategy.
      variables: The variables.
      optimizer: The optimizer.
    """

    def __init__(
        self,
        inner_fn,
        strategy,
        groups=None,
        constraint=None,
        names=TWO,
        wrap=lambda optimizer: optimizer,
        **kwargs,
    ):
        self.strategy = strategy
        with strategy.scope():
            self.variables = [
                keras.Variable(START[name], name=name) for name in names
            ]
            self.variables[0].constraint = constraint
            optimizer = tf_xshard.CrossShardOptimizer(
                inner_fn(),
                "mean",
                groups,
                loss_normalization="replica",
                **kwargs,
            )
            self.optimizer = wrap(optimizer)
            self.optimizer.build(self.variables)

    def _values(self, variables):
        return [np.stack(replicas.values(self.strategy, v)) for v in variables]

    @property
    def weights(self):
        """An array for each variable, [num_replicas, ...]."""
        return self._values(self.variables)

    @property
    def state(self):
        """The same for each of the optimizer's variables."""
        return self._values(self.optimizer.variables)

    def slots(self):
        """The sharded variables of the optimizer."""
        return [
            one
            for one in self.optimizer.variables
            if isinstance(one, keras_shards.Sharded)
        ]


def train(several, num_steps=NUM_STEPS):
    """Applies the same gradients with several optimizers, in one step."""
    strategy = several[0].strategy

    def on_replica(*arriving):
        own = [one[replicas.replica_id_tensor()] for one in arriving]
        for trained in several:
            scale = trained.optimizer.scale_loss(1.0)
            trained.optimizer.apply(
                [one * scale for one in own], trained.variables
            )

    step = tf.function(
        lambda *arriving: strategy.run(on_replica, args=arriving),
        autograph=False,
    )
    for own in gradients(strategy.num_replicas_in_sync, num_steps):
        step(*[tf.constant(own[v.name]) for v in several[0].variables])


def names_of(optimizer):
    """Keras' names of its variables, without the numbers of optimizers."""
    return [
        re.sub(r"_\d+|^CrossShardOptimizer/", "", one.path)
        for one in optimizer.variables
    ]


def one_device(inner_fn, steps, constraint=None):
    """Plain Keras with the given gradients of each step, by name.

    Returns:
      The variables and the optimizer.
    """
    variables = [keras.Variable(START[name], name=name) for name in steps[0]]
    variables[0].constraint = constraint
    optimizer = inner_fn()
    optimizer.build(variables)
    for step in steps:
        scale = optimizer.scale_loss(1.0)
        optimizer.apply([one * scale for one in step.values()], variables)
    # As at the end of `fit`.
    optimizer.finalize_variable_values(variables)
    return variables, optimizer


def of_group(inner_fn, trained, members, num_steps=NUM_STEPS, constraint=None):
    """Plain Keras with the mean gradients of a group."""
    steps = [
        {v.name: step[v.name][list(members)].mean(0) for v in trained.variables}
        for step in gradients(trained.strategy.num_replicas_in_sync, num_steps)
    ]
    return one_device(inner_fn, steps, constraint)


def check(inner_fns, strategy, groups=None, expected=None, **kwargs):
    """Each optimizer ends as one device, on every replica of every group.

    Args:
      inner_fns: Make the inner optimizers, which take part in one step.
      strategy: The strategy.
      groups: The groups, or None.
      expected: Makes plain Keras' optimizer; by default the inner one.
      **kwargs: Further arguments of `Trained`.
    """
    several = [
        Trained(one, strategy, groups, shard_update=True, **kwargs)
        for one in inner_fns
    ]
    train(several)
    groups = groups or [[*range(strategy.num_replicas_in_sync)]]
    for trained, inner_fn in zip(several, inner_fns, strict=True):
        trained.optimizer.finalize_variable_values(trained.variables)
        for members in groups:
            variables, optimizer = of_group(
                expected or inner_fn,
                trained,
                members,
                constraint=kwargs.get("constraint"),
            )
            assert names_of(trained.optimizer) == names_of(optimizer)
            for value, want in zip(
                [*trained.weights, *trained.state],
                [*variables, *optimizer.variables],
                strict=True,
            ):
                assert not np.ptp(value[members], axis=0).any(), want.path
                np.testing.assert_allclose(
                    value[members[0]],
                    want.numpy(),
                    1e-4,
                    3e-6,
                    err_msg=want.path,
                )
        _check_shards(trained, len(groups[0]))


def _check_shards(trained, group_size):
    """Each replica holds its part of what is divided by element."""
    for slot in trained.slots():
        assert group_size > 1
        if not isinstance(slot, keras_shards.Owned):
            size = max(1, -(-slot.shape.num_elements() // group_size))
            for copy in slot.shards.values:
                assert copy.shape == [size]
