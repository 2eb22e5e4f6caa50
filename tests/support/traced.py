"""A step that is traced once, and runs with many gradients."""

import keras
import numpy as np
import tensorflow as tf

from tests.support import replicas


class Traced:
    """Applies gradients that are its arguments, always from the same start.

    Args:
      make: Makes the optimizer, in the scope of the strategy.
      initial: The initial value of each variable.
      kind: The strategy, or its kind.
      num_replicas: Of a strategy of this kind.
      dtype: Of the variables and gradients, by default float32.
      graph: Whether the step is a tf.function.

    Attributes:
      strategy: The strategy.
      weights: The variables.
      variables: The weights and the optimizer's variables.
      optimizer: The optimizer.
    """

    def __init__(
        self,
        make,
        initial,
        kind="mirrored",
        num_replicas=4,
        dtype="float32",
        graph=True,
    ):
        self.strategy = kind
        if isinstance(kind, str):
            self.strategy = replicas.WITH_ONE_DEVICE[kind](num_replicas)
        with self.strategy.scope():
            self.weights = [
                keras.Variable(value, dtype=dtype, autocast=False)
                for value in initial
            ]
            self.optimizer = make()
            self.optimizer.build(self.weights)
        self._dtype = dtype

        def on_replica(*arriving):
            gradients = [one[replicas.replica_id_tensor()] for one in arriving]
            # As a loss times its scale has it.
            scale = tf.cast(self.optimizer.scale_loss(1.0), dtype)
            self.optimizer.apply([g * scale for g in gradients], self.weights)

        def step(*arriving):
            self.strategy.run(on_replica, args=arriving)

        self._step = tf.function(step, autograph=False) if graph else step
        self.variables = [*self.weights, *self.optimizer.variables]
        self._initial = [one.numpy() for one in self.variables]

    def reset(self):
        """Gives all variables, the optimizer's too, their initial values."""
        for variable, value in zip(self.variables, self._initial, strict=True):
            variable.assign(value)

    def step(self, *arriving):
        """Applies gradients: of each variable, those of all replicas."""
        self._step(*(tf.constant(one, self._dtype) for one in arriving))

    def values(self):
        """Of each variable, an array of its values on all replicas."""
        return [
            np.stack(replicas.values(self.strategy, one))
            for one in self.weights
        ]

    def run(self, *gradients):
        """The values after some steps from the start.

        Args:
          *gradients: Of each variable, what arrives in each step on each
            replica: an array of shape [steps, replicas, *shape].

        Returns:
          See `values`.
        """
        self.reset()
        for arriving in zip(*gradients, strict=True):
            self.step(*arriving)
        return self.values()
