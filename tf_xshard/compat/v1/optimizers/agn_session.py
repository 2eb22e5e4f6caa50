"""AGNOptimizer's session hook, and its saver of the center."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_xshard.compat.v1.optimizers import agn_custom_getter
from tf_xshard.private.tensorflow import v1 as tensorflow_v1


class InitHook(tf.compat.v1.train.SessionRunHook):
    """A hook that runs an operation in each new session."""

    def __init__(self, make_init_op: Callable[[], tf.Operation | None]) -> None:
        self._make_init_op = make_init_op
        self._init_op: tf.Operation | None = None

    def begin(self) -> None:
        """Builds the operation."""
        self._init_op = self._make_init_op()

    def after_create_session(
        self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
    ) -> None:
        """Runs the operation."""
        del coord
        session.run(self._init_op)


def swapping_saver(
    variables: list[tf.Variable] | dict[str, Any],
    name: str,
    **kwargs: Any,
) -> tf.compat.v1.train.Saver:
    """Makes a saver that stores the center under plain variable names."""
    if not isinstance(variables, dict):
        by_name: dict[str, list[tf.Variable]] = {}
        for variable in variables:
            # All slices of a partitioned variable have the same name.
            whole = tensorflow_v1.saved_name(variable)
            by_name.setdefault(whole, []).append(variable)
        variables = {
            key: values[0] if len(values) == 1 else values
            for key, values in by_name.items()
        }
    prefix = agn_custom_getter.GLOBAL_VARIABLE_NAME + "/"
    return tf.compat.v1.train.Saver(
        {key.removeprefix(prefix): value for key, value in variables.items()},
        name=name,
        **kwargs,
    )
