"""`tf.contrib.opt.AGNOptimizer`: local steps, and an exchange now and then.

each step             local variable  <-  optimizer(gradient)
                      accumulator     <-  accumulator + gradient
each communication_   center          <-  optimizer(accumulator / period)
period steps          local variable  <-  center
                      accumulator     <-  0
"""

from __future__ import annotations

import tensorflow as tf

from tf_xshard import checks
from tf_xshard.compat.v1 import agn_custom_getter
from tf_xshard.compat.v1 import inner_optimizers
from tf_xshard.compat.v1 import wrapper
from tf_xshard.compat.v1.agn_custom_getter import AGNCustomGetter
from tf_xshard.distribute import indexed_slices
from tf_xshard.private import tensorflow as private_tensorflow
from tf_xshard.private import tensorflow_v1

_GLOBAL = tf.compat.v1.GraphKeys.GLOBAL_VARIABLES
_LOCAL = tf.compat.v1.GraphKeys.LOCAL_VARIABLES


class AGNOptimizer(wrapper.Wrapper):
    """Accumulated gradient normalization.

    Every worker trains its own variables. Every `communication_period` steps
    the sum of its gradients, divided by the period, is applied to the center as
    one gradient, with the same optimizer, and the worker takes over the center.
    Workers do not wait for each other.

    The optimizer's slots exist for the worker's variables and for the center.
    What it has once, such as Adam's beta powers, is the worker's and counts
    local and center updates, as in the original.

    Args:
      optimizer: The v1 optimizer of local variables and center.
      num_worker: The number of workers. It has no effect, as in the original: a
        worker normalizes by the number of its own steps.
      custom_getter: The `AGNCustomGetter` that made the variables.
      communication_period: The number of steps from one exchange to the next,
        at least 1. Default: 10.
      use_locking: If True (default), updates of ref variables by this class
        (accumulators, taking over the center) use locks. Resource variables
        have no such choice, and the inner optimizer has its own flag.
      name: Prefix of the operations' names. Default: "AGNOptimizer".

    Raises:
      TypeError: If an argument is of the wrong type.
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
    ):
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
        self._locks = use_locking
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

    @private_tensorflow.entry_point
    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        """Makes a local step, and every communication_period steps an exchange.

        Args:
          grads_and_vars: (gradient, variable) pairs such as `compute_gradients`
            returns, of variables that the custom getter made; anything that can
            be iterated over once. IndexedSlices stay sparse in the local step.
          global_step: A variable that is incremented by one after the global
            variables have been updated, that is at each exchange. Default:
            none.
          name: Prefix of the operations' names. Default: the constructor's.

        Returns:
          An operation, after which all of this has happened. None in eager
          mode.

        Raises:
          ValueError: If grads_and_vars is empty, malformed or has no gradient,
            or the getter has not made a variable.
          TypeError: If a gradient can't be a tensor.

        Example: see the class.
        """
        pairs = inner_optimizers.tensors_of(
            inner_optimizers.pairs_of(grads_and_vars)
        )
        copies = [
            (gradient, self._getter.copies_of(variable))
            for gradient, variable in pairs
            if gradient is not None
        ]
        if not copies:
            raise ValueError(
                "No gradients provided for any variable:"
                f" {[v.name for _, v in pairs]}"
            )
        with _creating_local_variables():
            local = self._inner.apply(pairs, None)
        with tf.name_scope(name or self.get_name()):
            accumulated = [
                _accumulated(gradient, of, self._locks)
                for gradient, of in copies
            ]
            counted = self._assign_add(self._local_step, 1)
            done = [
                operation
                for operation in (local, counted, *accumulated)
                if operation is not None
            ]
            with tf.control_dependencies(done):
                is_due = tf.equal(
                    tf.math.floormod(_read(self._local_step), self._period), 0
                )
                exchange = _cond(
                    is_due,
                    lambda: self._exchange(
                        [of for _, of in copies], global_step
                    ),
                    [*copies[0][1], self._local_step, global_step],
                )
            if tf.executing_eagerly():
                return None
            return tf.group(exchange)

    def _exchange(self, copies, global_step):
        # Read once, so that the center never gets the undivided sum.
        averages = [
            _read(of.accumulator)
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
                for operation in (
                    self._assign(of.local, _read(of.center)),
                    self._assign(
                        of.accumulator, tf.zeros_like(_read(of.accumulator))
                    ),
                )
            ]
            if global_step is not None:
                after.append(self._assign_add(global_step, 1))
        with tf.control_dependencies([op for op in after if op is not None]):
            return tf.constant(True)

    def _assign(self, variable, value):
        return tf.compat.v1.assign(variable, value, use_locking=self._locks)

    def _assign_add(self, variable, value):
        with tf.compat.v1.colocate_with(variable):
            return tf.compat.v1.assign_add(
                variable,
                tf.constant(value, variable.dtype.base_dtype),
                use_locking=self._locks,
            )

    def get_init_op(self, task_index: int):
        """An operation that makes a worker start from the center.

        Local variables take the center's values, accumulators become zero.

        Args:
          task_index: The worker's number. It has no effect, as in the original:
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
        operations = []
        for of in copies:
            operations.append(self._assign(of.local, _read(of.center)))
            operations.append(
                self._assign(
                    of.accumulator, tf.zeros_like(_read(of.accumulator))
                )
            )
        return None if tf.executing_eagerly() else tf.group(*operations)

    def make_session_run_hook(
        self, is_chief: bool, task_index: int
    ) -> tf.compat.v1.train.SessionRunHook:
        """A hook that makes each new session start from the center.

        Args:
          is_chief: Whether the worker is the chief. It has no effect: the
            session initializes global variables on the chief by itself.
          task_index: The worker's number; see `get_init_op`.

        Returns:
          A `SessionRunHook`. A worker that was restarted adopts the center,
          drops its accumulation and goes on.
        """
        del is_chief
        return _AGNHook(self, task_index)

    def swapping_saver(
        self,
        var_list: list | dict | None = None,
        name: str = "swapping_saver",
        **kwargs,
    ) -> tf.compat.v1.train.Saver:
        """A saver that stores the center under the variables' plain names.

        A graph for evaluation, built without the custom getter, loads it with
        a plain `Saver`. To continue training, restore it with such a saver in
        a new training graph and run `get_init_op` (the hook does).

        Args:
          var_list: The variables to save. Default: all global variables, the
            center and its slots included.
          name: Prefix of the operations' names. Default: "swapping_saver".
          **kwargs: Further arguments of `tf.compat.v1.train.Saver`.

        Returns:
          A `Saver`.
        """
        if var_list is None:
            var_list = tf.compat.v1.global_variables()
        if not isinstance(var_list, dict):
            by_name = {}
            for variable in var_list:
                # The slices of a partitioned variable have one name.
                name_of = tensorflow_v1.saved_name(variable)
                by_name.setdefault(name_of, []).append(variable)
            var_list = {
                key: values[0] if len(values) == 1 else values
                for key, values in by_name.items()
            }
        prefix = agn_custom_getter.GLOBAL_VARIABLE_NAME + "/"
        return tf.compat.v1.train.Saver(
            {
                key.removeprefix(prefix): value
                for key, value in var_list.items()
            },
            name=name,
            **kwargs,
        )

    def _inner_here(self):
        return self._inner

    def variables(self) -> list:
        """Returns the state: the inner optimizer's, accumulators, local step.

        Returns:
          A list.
        """
        return [
            *super().variables(),
            *[of.accumulator for of in self._getter.all_copies()],
            self._local_step,
        ]


class _AGNHook(tf.compat.v1.train.SessionRunHook):
    def __init__(self, optimizer, task_index):
        self._optimizer = optimizer
        self._task_index = task_index
        self._init_op = None

    def begin(self):
        self._init_op = self._optimizer.get_init_op(self._task_index)

    def after_create_session(self, session, coord):
        del coord
        session.run(self._init_op)


def _creating_local_variables():
    """What is created inside is the worker's."""

    def creator(next_creator, **kwargs):
        collections = kwargs.get("collections") or [_GLOBAL]
        kwargs["collections"] = [
            _LOCAL if name == _GLOBAL else name for name in collections
        ]
        return next_creator(**kwargs)

    return tf.variable_creator_scope(creator)


def _cond(is_due, exchange, variables):
    """`tf.cond`, in control flow v1 where variables can't be used in v2."""
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


def _read(variable) -> tf.Tensor:
    return tf.identity(variable.read_value())


def _accumulated(gradient, copies: agn_custom_getter.Copies, use_locking: bool):
    if isinstance(gradient, tf.IndexedSlices):
        gradient = indexed_slices.dense(gradient, copies.accumulator)
    return tf.compat.v1.assign_add(
        copies.accumulator, gradient, use_locking=use_locking
    )
