"""Makes AGNOptimizer's local variables, centers and accumulators."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tf_xshard.private.tensorflow import v1 as tensorflow_v1

_GLOBAL = tf.compat.v1.GraphKeys.GLOBAL_VARIABLES
_LOCAL = tf.compat.v1.GraphKeys.LOCAL_VARIABLES
GLOBAL_VARIABLE_NAME = "global_center_variable"
GRAD_VARIABLE_NAME = "grad_variable"


class Copies(NamedTuple):
    """Holds the three variables, of one shape, for a trainable variable."""

    local: tf.Variable
    center: tf.Variable
    accumulator: tf.Variable


class AGNCustomGetter:
    """Makes AGNOptimizer's variables, as a custom getter of a variable_scope.

    For each trainable variable NAME, the getter makes:

    - the local variable, NAME: trainable, in LOCAL_VARIABLES, on worker_device;
    - the center, global_center_variable/NAME: in GLOBAL_VARIABLES, placed by
      the surrounding device scope (`replica_device_setter`);
    - the accumulator, grad_variable/NAME: zero, in LOCAL_VARIABLES, on
      worker_device.

    It does not change other variables.

    Args:
      worker_device: The worker's device, such as "/job:worker/task:0".

    Raises:
      TypeError: If worker_device is not a str.

    Example: see `AGNOptimizer`.

    Source: tf.contrib.opt.AGNCustomGetter (TensorFlow 1.14).
    """

    def __init__(self, worker_device: str) -> None:
        if not isinstance(worker_device, str):
            raise TypeError(
                f"worker_device must be a str, got {worker_device!r}."
            )
        self.worker_device = worker_device
        # Of variables that were made eagerly; a graph keeps its own. The keys
        # are the ids of the local variables.
        self._eager_copies: dict[int, Copies] = {}

    def __call__(
        self,
        getter: Callable[..., tf.Variable],
        name: str,
        *args: Any,
        trainable: bool | None = True,
        **kwargs: Any,
    ) -> tf.Variable:
        """Gets a variable, when `tf.compat.v1.get_variable` calls it."""
        if not trainable:
            return getter(name, *args, trainable=trainable, **kwargs)
        # The center and the accumulator are neither regularized nor trained.
        kwargs.pop("collections", None)
        others = {**kwargs, "regularizer": None}
        with tf.device(self.worker_device):
            local = getter(
                name, *args, trainable=True, collections=[_LOCAL], **kwargs
            )
        if kwargs.get("reuse") is True:
            return local
        center = getter(
            f"{GLOBAL_VARIABLE_NAME}/{name}",
            *args,
            trainable=False,
            collections=[_GLOBAL],
            **others,
        )
        zeros = tf.compat.v1.zeros_initializer()
        if kwargs.get("shape") is None:  # The initial value gives the shape.
            value = kwargs["initializer"]
            value = value() if callable(value) else value
            zeros = tf.zeros_like(tf.convert_to_tensor(value))
        with tf.device(self.worker_device):
            accumulator = getter(
                f"{GRAD_VARIABLE_NAME}/{name}",
                *args,
                trainable=False,
                collections=[_LOCAL],
                **{**others, "initializer": zeros, "constraint": None},
            )
        for copies in zip(
            _parts(local), _parts(center), _parts(accumulator), strict=True
        ):
            self._copies()[id(copies[0])] = Copies(*copies)
        return local

    def _copies(self) -> dict[int, Copies]:
        """Returns the copies in the current graph, or the eager copies."""
        with tf.init_scope():
            if tf.executing_eagerly():
                return self._eager_copies
            return tensorflow_v1.kept_by(
                tf.compat.v1.get_default_graph(),
                "tf_xshard_agn_copies",
                weakref.WeakKeyDictionary,
            ).setdefault(self, {})

    def copies_of(self, variable: tf.Variable) -> Copies:
        """Returns the center and the accumulator of a local variable.

        Args:
          variable: The local variable.

        Returns:
          A named tuple of local, center and accumulator, of the same shape.

        Raises:
          ValueError: If this getter did not make the variable.
        """
        copies = self._copies()
        if id(variable) not in copies:
            raise ValueError(
                f"Variable {variable.name!r} was not made by this optimizer's"
                " AGNCustomGetter. Make it with tf.compat.v1.get_variable in"
                " a variable_scope(..., custom_getter=getter)."
            )
        return copies[id(variable)]

    def all_copies(self) -> list[Copies]:
        """Lists the named tuples of the current graph's local variables."""
        return list(self._copies().values())


def _parts(variable: Any) -> list[tf.Variable]:
    """Lists the slices of a partitioned variable, or the variable itself."""
    partitioned = not hasattr(variable, "handle") and hasattr(
        variable, "__iter__"
    )
    if partitioned and not isinstance(variable, tf.Variable):
        return list(variable)
    return [variable]
