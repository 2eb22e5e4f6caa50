"""Defines `tf.contrib.opt.AGNOptimizer`, which exchanges every T steps.

each step      local variable  <-  optimizer(gradient)
               accumulator     <-  accumulator + gradient
each T steps   center          <-  optimizer(accumulator / T)
               local variable  <-  center
               accumulator     <-  0
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_xshard import checks
from tf_xshard.compat.v1.optimizers import agn_custom_getter
from tf_xshard.compat.v1.optimizers import base as wrapper
from tf_xshard.compat.v1.optimizers import inner_optimizers
from tf_xshard.compat.v1.optimizers.agn_custom_getter import AGNCustomGetter
from tf_xshard.distribute import indexed_slices
from tf_xshard.optimizers import commit
from tf_xshard.private.tensorflow import autograph
from tf_xshard.private.tensorflow import v1 as tensorflow_v1

_GLOBAL = tf.compat.v1.GraphKeys.GLOBAL_VARIABLES
_LOCAL = tf.compat.v1.GraphKeys.LOCAL_VARIABLES


class Operations:
    """Assigns AGNOptimizer's variables, with or without locks."""

    def __init__(self, use_locking: bool) -> None:
        self._locked = use_locking

    def accumulate(
        self,
        gradient: tf.Tensor | tf.IndexedSlices,
        copies: agn_custom_getter.Copies,
    ) -> Any:
        """Adds a gradient, of the variable's shape, to the accumulator."""
        if isinstance(gradient, tf.IndexedSlices):
            gradient = indexed_slices.dense(gradient, copies.accumulator)
        return tf.compat.v1.assign_add(
            copies.accumulator, gradient, use_locking=self._locked
        )

    def start_from_center(
        self, copies: agn_custom_getter.Copies
    ) -> tuple[Any, Any]:
        """Copies the center to the local variable; zeroes the accumulator."""
        return (
            self._assign(copies.local, read(copies.center)),
            self._assign(
                copies.accumulator, tf.zeros_like(read(copies.accumulator))
            ),
        )

    def increment(self, variable: tf.Variable) -> Any:
        """Adds one to a scalar variable."""
        with tf.compat.v1.colocate_with(variable):
            return tf.compat.v1.assign_add(
                variable,
                tf.constant(1, variable.dtype.base_dtype),
                use_locking=self._locked,
            )

    def _assign(self, variable: tf.Variable, value: tf.Tensor) -> Any:
        return tf.compat.v1.assign(variable, value, use_locking=self._locked)


def read(variable: tf.Variable) -> tf.Tensor:
    """Reads a variable's current value, of the variable's shape."""
    return tf.identity(variable.read_value())


def creating_local_variables() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which new variables are local to the worker."""

    def creator(
        next_creator: Callable[..., tf.Variable], **kwargs: Any
    ) -> tf.Variable:
        collections = kwargs.get("collections") or [_GLOBAL]
        kwargs["collections"] = [
            _LOCAL if name == _GLOBAL else name for name in collections
        ]
        return next_creator(**kwargs)

    return tf.variable_creator_scope(creator)


def cond(
    is_due: tf.Tensor,
    exchange: Callable[[], tf.Tensor],
    variables: Sequence[tf.Variable | None],
) -> tf.Tensor:
    """Calls `tf.cond`, in control flow v1 if a variable is a ref variable."""
    # Control flow v2 does not support ref variables.
    in_v2 = tf.compat.v1.control_flow_v2_enabled()
    of_refs = any(
        v is not None and v.dtype != v.dtype.base_dtype for v in variables
    )
    if in_v2 and of_refs:
        tf.compat.v1.disable_control_flow_v2()
    try:
        return tf.cond(is_due, exchange, lambda: tf.constant(False))
    finally:
        if in_v2 and of_refs:
            tf.compat.v1.enable_control_flow_v2()


class InitHook(tf.compat.v1.train.SessionRunHook):
    """Runs an operation in each new session."""

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


class AGNOptimizer(wrapper.Wrapper):
    """Trains by accumulated gradient normalization (AGN).

    Each worker trains its own variables. Every `communication_period` steps, it
    divides the sum of its gradients by the period. With the same optimizer, it
    applies the result to the center, and then copies the center. No worker
    waits for another worker.

    The optimizer has slots for the worker's variables and for the center. State
    that is not per variable, such as Adam's beta powers, belongs to the worker.
    As in the original, this state counts local and center updates.

    Args:
      optimizer: The v1 optimizer for the local variables and the center.
      num_worker: The number of workers. It has no effect, as in the original; a
        worker normalizes by its own number of steps.
      custom_getter: The `AGNCustomGetter` that made the variables.
      communication_period: Steps per exchange, at least 1. Default: 10.
      use_locking: Whether this class locks ref variables in its own updates
        (accumulators, copies of the center). It does not affect resource
        variables or the inner optimizer, which has its own flag. Default: True.
      name: Prefix of the operations' names. Default: "AGNOptimizer".

    Raises:
      TypeError: If an argument has the wrong type.
      ValueError: If a number is not positive or the name is empty.

    Example:

    >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    ...     getter = tf_xshard.compat.v1.AGNCustomGetter("/CPU:0")
    ...     with tf.compat.v1.variable_scope("", custom_getter=getter):
    ...         w = tf.compat.v1.get_variable("w", initializer=10.0)
    ...     agn = tf_xshard.compat.v1.AGNOptimizer(
    ...         tf.compat.v1.train.GradientDescentOptimizer(1.0), 1, getter,
    ...         communication_period=2)
    ...     step = agn.minimize(3.0 * w)
    ...     session.run(tf.group(tf.compat.v1.global_variables_initializer(),
    ...                          tf.compat.v1.local_variables_initializer()))
    ...     session.run(agn.get_init_op(0))
    ...     values = []
    ...     for _ in range(2):
    ...         session.run(step)
    ...         values.append(float(session.run(w)))
    >>> values  # after a local step; the center, after one with the mean
    [7.0, 7.0]

    Source: tf.contrib.opt.AGNOptimizer (TensorFlow 1.14); Joeri Hermans et al.,
    Accumulated Gradient Normalization, arXiv 1710.02368.
    """

    def __init__(
        self,
        optimizer: tf.compat.v1.train.Optimizer,
        num_worker: int,
        custom_getter: AGNCustomGetter,
        communication_period: int = 10,
        use_locking: bool = True,
        name: str = "AGNOptimizer",
    ) -> None:
        if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
            raise TypeError(
                "optimizer must be a tf.compat.v1.train.Optimizer, got"
                f" {type(optimizer).__name__}."
            )
        if not isinstance(custom_getter, AGNCustomGetter):
            raise TypeError(
                "custom_getter must be an AGNCustomGetter, got"
                f" {type(custom_getter).__name__}."
            )
        checks.positive_integer("num_worker", num_worker)
        self._period = checks.positive_integer(
            "communication_period", communication_period
        )
        super().__init__(use_locking, name)
        self._inner = inner_optimizers.V1(optimizer)
        self._getter = custom_getter
        self._operations = Operations(use_locking)
        with tf.device(custom_getter.worker_device), tf.init_scope():
            self._local_step = tf.compat.v1.Variable(
                0,
                trainable=False,
                collections=[_LOCAL],
                dtype=tf.int32,
                name="local_step",
            )
        self._track(self._inner)
        tensorflow_v1.track(self, self._local_step, "local_step")

    @autograph.entry_point
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: tf.Variable | None = None,
        name: str | None = None,
    ) -> tf.Operation | None:
        """Takes a local step, and exchanges every `communication_period` steps.

        Args:
          grads_and_vars: An iterable of (gradient, variable) pairs of equal
            shapes, such as `compute_gradients` returns, for variables that the
            custom getter made. IndexedSlices stay sparse in the local step.
          global_step: A scalar variable to increment by one at each exchange,
            after the center is updated. Default: None.
          name: Prefix of the operations' names. Default: the constructor's.

        Returns:
          An operation for the step and for an exchange if one is due. None in
          eager mode.

        Raises:
          ValueError: If grads_and_vars is empty, malformed or has no gradient,
            or if the getter did not make one of the variables.
          TypeError: If a gradient can't be converted to a tensor.

        Example: see the class.
        """
        pairs = wrapper.tensors_of(wrapper.pairs_of(grads_and_vars))
        copies = [
            (gradient, self._getter.copies_of(variable))
            for gradient, variable in pairs
            if gradient is not None
        ]
        if not copies:
            raise ValueError(
                "No gradients provided for any variable:"
                f" {[v.name for _, v in pairs]}. The loss must depend on them."
            )
        gradients = [gradient for gradient, _ in copies]
        with creating_local_variables():
            local = self._apply_inner(gradients, pairs, None)
        with tf.name_scope(name or self.get_name()):
            # An inner wrapper's reductions have ended once `local` has run.
            with commit.gate([*gradients, local]):
                accumulated = [
                    self._operations.accumulate(gradient, of)
                    for gradient, of in copies
                ]
                counted = self._operations.increment(self._local_step)
            done = [
                operation
                for operation in (local, counted, *accumulated)
                if operation is not None
            ]
            with tf.control_dependencies(done):
                num_steps = read(self._local_step)
                exchange = cond(
                    tf.equal(tf.math.floormod(num_steps, self._period), 0),
                    lambda: self._exchange(
                        [of for _, of in copies], global_step
                    ),
                    [*copies[0][1], self._local_step, global_step],
                )
            if tf.executing_eagerly():
                return None
            return tf.group(exchange)

    def _exchange(
        self,
        copies: Sequence[agn_custom_getter.Copies],
        global_step: tf.Variable | None,
    ) -> tf.Tensor:
        """Updates and then copies the center; returns a scalar bool tensor."""
        # Each accumulator is read once, so that the center never gets the
        # undivided sum.
        averages = [
            read(of.accumulator)
            / tf.cast(self._period, of.accumulator.dtype.base_dtype)
            for of in copies
        ]
        updated = self._inner.apply(
            zip(averages, [of.center for of in copies], strict=True), None
        )
        with tf.control_dependencies([] if updated is None else [updated]):
            after = [
                operation
                for of in copies
                for operation in self._operations.start_from_center(of)
            ]
            if global_step is not None:
                after.append(self._operations.increment(global_step))
        with tf.control_dependencies([op for op in after if op is not None]):
            return tf.constant(True)

    def get_init_op(self, task_index: int) -> tf.Operation | None:
        """Makes an operation that lets a worker start from the center.

        The operation copies the center and sets the accumulators to zero.

        Args:
          task_index: The worker's number. It has no effect, as in the original;
            the operation is for the worker that builds it.

        Returns:
          The operation. None in eager mode.

        Raises:
          ValueError: If the getter has made no variable in this graph.
        """
        del task_index
        copies = self._getter.all_copies()
        if not copies:
            raise ValueError(
                "The AGNCustomGetter has made no trainable variable in this"
                " graph. Build the model in its variable_scope first."
            )
        operations = [
            operation
            for of in copies
            for operation in self._operations.start_from_center(of)
        ]
        return None if tf.executing_eagerly() else tf.group(*operations)

    def make_session_run_hook(
        self, is_chief: bool, task_index: int
    ) -> tf.compat.v1.train.SessionRunHook:
        """Makes a hook that lets each new session start from the center.

        Args:
          is_chief: Whether the worker is the chief. It has no effect, because a
            chief's session initializes global variables automatically.
          task_index: The worker's number; see `get_init_op`.

        Returns:
          A `SessionRunHook`. With it, a worker that was restarted copies the
          center, drops the gradients that it had accumulated, and continues.
        """
        del is_chief
        return InitHook(lambda: self.get_init_op(task_index))

    def swapping_saver(
        self,
        var_list: list[tf.Variable] | dict[str, Any] | None = None,
        name: str = "swapping_saver",
        **kwargs: Any,
    ) -> tf.compat.v1.train.Saver:
        """Makes a `Saver` that stores the center under plain variable names.

        An evaluation graph, built without the custom getter, loads these files
        with a plain `Saver`. To continue training, restore with a swapping
        saver in a new training graph, and run the operation of `get_init_op`
        (the hook runs it).

        Args:
          var_list: The variables to save. Default: all global variables,
            including the center and its slots.
          name: Prefix of the operations' names. Default: "swapping_saver".
          **kwargs: Further arguments of `tf.compat.v1.train.Saver`.

        Returns:
          A `Saver`.
        """
        if var_list is None:
            var_list = tf.compat.v1.global_variables()
        return swapping_saver(var_list, name, **kwargs)

    def _inner_here(self) -> inner_optimizers.V1:
        return self._inner

    def variables(self) -> list[tf.Variable]:
        """Lists the inner optimizer's state, accumulators and local step."""
        return [
            *super().variables(),
            *[of.accumulator for of in self._getter.all_copies()],
            self._local_step,
        ]
