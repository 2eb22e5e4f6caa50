"""TowerOptimizer: collect gradients of several towers, apply them once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard import cross_shard_optimizer
from tf_xshard import indexed_slices
from tf_xshard import inner_update
from tf_xshard import reduction as reduction_lib
from tf_xshard import replica_context
from tf_xshard import replica_variables
from tf_xshard import wrapper


@keras.saving.register_keras_serializable("tf_xshard")
class TowerOptimizer(wrapper.OptimizerWrapper):
    """Collects the gradients of several towers; the last one applies them.

    Each call of `apply` or `apply_gradients` is one tower's contribution. The
    call that completes `num_towers` hands the mean (or sum) to the inner
    optimizer, which updates once. In `fit` that is gradient accumulation, which
    works in a `tf.function` under every supported strategy, and communicates
    once per `num_towers` batches.

    ```
    num_towers=3, reduction="mean"

    call                 1          2          3                      4 ...
    gradient             a          b          c
    accumulator          a          a + b      0
    inner optimizer                            applies (a + b + c) / 3
    iterations           0          0          1
    ```

    What is set on the inner optimizer (clipping, moving averages, weight decay,
    schedules, loss scaling) acts on the aggregated gradient and counts updates.
    With a `LossScaleOptimizer` inside, an overflow in any tower of any replica
    makes all replicas skip the whole round.

    A round that is not complete at the end of `fit` is kept for the next one,
    and survives saving and loading; `reset` drops it.

    Args:
      optimizer_or_optimizer_fn: A `keras.optimizers.Optimizer`, or a callable
        without arguments that returns one, which is called once. If no
        tf_xshard optimizer is inside, a `CrossShardOptimizer` is put around it.
      num_towers: How many calls make one update, an int of at least 1.
      reduction: `"mean"` (default) or `"sum"` of the towers' losses.
      loss_normalization: See `CrossShardOptimizer`.
      name: The optimizer's name.

    Raises:
      TypeError: If an argument has a wrong type.
      ValueError: If an argument has a wrong value, belongs on the inner
        optimizer, or the strategy is not supported.

    Example:

    >>> optimizer = tf_xshard.TowerOptimizer(keras.optimizers.SGD(1.0),
    ...                                      num_towers=2)
    >>> weight = keras.Variable(10.0)
    >>> optimizer.apply([tf.constant(1.0)], [weight])
    >>> float(weight)
    10.0
    >>> optimizer.apply([tf.constant(3.0)], [weight])
    >>> float(weight), int(optimizer.iterations)
    (8.0, 1)

    Limits: a variable that had a gradient in an earlier round and has none in
    all calls of this one counts as zero. Accumulators take the memory of the
    trainable variables. tf.train.Checkpoint and files keep the mean of the
    replicas' accumulators, so with several groups an open round is mixed.

    Source: `tf.contrib.estimator.TowerOptimizer` (TensorFlow 1.14).
    """

    def __init__(
        self,
        optimizer_or_optimizer_fn: (
            keras.optimizers.Optimizer
            | Callable[[], keras.optimizers.Optimizer]
        ),
        num_towers: int,
        reduction: str = "mean",
        *,
        loss_normalization: str | None = None,
        name: str = "TowerOptimizer",
        **kwargs: Any,
    ):
        if isinstance(num_towers, bool) or not isinstance(num_towers, int):
            raise TypeError(f"num_towers must be an int, got {num_towers!r}.")
        if num_towers < 1:
            raise ValueError(f"num_towers must be positive, got {num_towers}.")
        reduction = cross_shard_optimizer.checked_reduction(reduction)
        inner = optimizer_or_optimizer_fn
        if callable(inner) and not isinstance(
            inner, (keras.optimizers.Optimizer, tf.compat.v1.train.Optimizer)
        ):
            inner = inner()
        if isinstance(inner, keras.optimizers.Optimizer) and not any(
            inner_update.is_wrapper(one)
            for one in inner_update.descendants(inner)
        ):
            inner = cross_shard_optimizer.CrossShardOptimizer(inner)
        super().__init__(
            inner, loss_normalization=loss_normalization, name=name, **kwargs
        )
        self._num_towers = num_towers
        self._reduction = reduction
        # Variables that have had a gradient: what has one is known when a call
        # is traced, and the accumulators hold those of all calls.
        self._set_untracked("_seen", set())

    @property
    def num_towers(self) -> int:
        """How many calls make one update."""
        return self._num_towers

    @property
    def reduction(self) -> str:
        """`"mean"` or `"sum"`."""
        return self._reduction

    def _build(self, variables) -> None:
        super()._build(variables)
        if self._num_towers == 1:
            return
        with keras.name_scope(self.name, caller=self):
            self._tower = replica_variables.make((), "int32", "tower")
            self._accumulators = [
                replica_variables.accumulator_of(
                    variable,
                    f"{replica_variables.flat_name(variable)}_accumulator",
                )
                for variable in variables
            ]
            # Rows of an embedding that a round has touched.
            self._touched = [
                replica_variables.make(
                    variable.shape[:1],
                    "float32",
                    f"{replica_variables.flat_name(variable)}_touched",
                )
                for variable in variables
                if len(variable.shape) > 1
            ]

    def _step(self, gradients, variables, here: replica_context.Here) -> None:
        gradients = reduction_lib.standardized(gradients, variables)
        if self._num_towers == 1:
            self._hand_over(gradients, variables, here)
            return
        self._collect(gradients, variables)
        count = replica_variables.read(self._tower) + 1
        is_last = tf.equal(count, self._num_towers)
        replica_variables.assign(self._tower, count % self._num_towers)

        def complete():
            self._complete(gradients, variables, here)
            return tf.constant(True)

        if tf.executing_eagerly():
            if is_last:
                complete()
        else:
            tf.cond(is_last, complete, lambda: tf.constant(False))

    def apply_towers(
        self, towers: Sequence[Sequence], trainable_variables=None
    ) -> None:
        """Applies a whole round at once.

        The same as `num_towers` calls of `apply`, without accumulators in
        between: for towers that are computed in one step, such as on several
        devices of one replica.

        Args:
          towers: A list of gradients for each tower, `num_towers` of them.
          trainable_variables: The variables they belong to. None (default) for
            those that the optimizer was built with.

        Raises:
          ValueError: If there is another number of towers; see `apply` for the
            rest.
          tf.errors.InvalidArgumentError: If a round is open. (Not on TPUs,
            which have no assertions: the open round stays as it is.)

        Example:

        >>> optimizer = tf_xshard.TowerOptimizer(keras.optimizers.SGD(1.0), 2)
        >>> weight = keras.Variable(10.0)
        >>> optimizer.apply_towers([[tf.constant(1.0)], [tf.constant(3.0)]],
        ...                        [weight])
        >>> float(weight)
        8.0
        """
        towers = [list(gradients) for gradients in towers]
        if len(towers) != self._num_towers:
            raise ValueError(
                f"{self.name} has {self._num_towers} towers, got gradients of"
                f" {len(towers)}."
            )
        variables = [self._prepare(g, trainable_variables) for g in towers][0]
        here = replica_context.current()
        self._check_strategy(here.strategy)
        with tf.name_scope(self.name):
            towers = [reduction_lib.standardized(g, variables) for g in towers]
            summed = [
                indexed_slices.added(column, variable)
                for column, variable in zip(
                    zip(*towers, strict=True), variables, strict=True
                )
            ]
            with tf.control_dependencies(self._refuse_open_round()):
                self._hand_over(summed, variables, here)

    def _refuse_open_round(self) -> list:
        """What has to run before an update, in a graph."""
        if self._num_towers == 1:
            return []
        check = tf.debugging.assert_equal(
            replica_variables.read(self._tower),
            0,
            "apply_towers() is called while a round of apply() is open."
            " Complete it, or call reset().",
        )
        return [] if check is None else [check]

    def _collect(self, gradients, variables) -> None:
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is None:
                continue
            index = self._index(variable)
            self._seen.add(index)
            replica_variables.add(self._accumulators[index], gradient)
            if isinstance(gradient, tf.IndexedSlices):
                replica_variables.add(
                    self._touched_of(variable),
                    tf.IndexedSlices(
                        tf.ones_like(gradient.indices, tf.float32),
                        gradient.indices,
                    ),
                )

    def _complete(self, gradients, variables, here) -> None:
        sums = []
        for gradient, variable in zip(gradients, variables, strict=True):
            index = self._index(variable)
            if index not in self._seen:
                sums.append(None)
                continue
            accumulator = self._accumulators[index]
            total = tf.cast(replica_variables.read(accumulator), variable.dtype)
            if isinstance(gradient, tf.IndexedSlices):
                touched = self._touched_of(variable)
                [rows] = tf.split(
                    tf.cast(
                        tf.where(replica_variables.read(touched) > 0),
                        gradient.indices.dtype,
                    ),
                    1,
                    axis=1,
                )
                rows = tf.reshape(rows, [-1])
                total = tf.IndexedSlices(
                    tf.gather(total, rows), rows, gradient.dense_shape
                )
                replica_variables.assign(touched, tf.zeros(touched.shape))
            replica_variables.assign(
                accumulator, tf.zeros(accumulator.shape, accumulator.dtype)
            )
            sums.append(total)
        self._hand_over(sums, variables, here)

    def _hand_over(self, sums, variables, here) -> None:
        per_tower = 1 if self._reduction == "sum" else 1 / self._num_towers
        factor = self._arriving_divisor(here) * per_tower
        self.inner_optimizer.apply(
            [
                reduction_lib.scaled(
                    g,
                    # A statistic of the replica, and no gradient of its loss.
                    1 / self._num_towers
                    if inner_update.is_overwritten(v)
                    else factor,
                )
                for g, v in zip(sums, variables, strict=True)
            ],
            variables,
        )

    def _index(self, variable) -> int:
        return self._trainable_variables_indices[self._var_key(variable)]

    def _touched_of(self, variable) -> keras.Variable:
        before = self._trainable_variables[: self._index(variable)]
        return self._touched[sum(len(v.shape) > 1 for v in before)]

    def reset(self) -> None:
        """Drops the open round, on all replicas.

        Call it outside of `strategy.run`.

        Raises:
          RuntimeError: In replica context of a strategy.

        Example:

        >>> optimizer = tf_xshard.TowerOptimizer(keras.optimizers.SGD(1.0), 2)
        >>> weight = keras.Variable(10.0)
        >>> optimizer.apply([tf.constant(100.0)], [weight])
        >>> optimizer.reset()
        >>> for gradient in (1.0, 3.0):
        ...     optimizer.apply([tf.constant(gradient)], [weight])
        >>> float(weight)
        8.0
        """
        if tf.distribute.has_strategy() and not (
            tf.distribute.in_cross_replica_context()
        ):
            raise RuntimeError(
                f"{self.name}.reset() is called in replica context. Call it"
                " outside of strategy.run()."
            )
        for variable in self._own_variables:
            variable.assign(tf.zeros(variable.shape, variable.dtype))

    def get_config(self) -> dict:
        """The arguments, for serialization.

        Returns:
          A dict for `from_config`.

        Example:

        >>> tf_xshard.TowerOptimizer(keras.optimizers.SGD(), 4).get_config()[
        ...     "num_towers"]
        4
        """
        config = super().get_config()
        config["optimizer_or_optimizer_fn"] = config.pop("inner_optimizer")
        return {
            **config,
            "num_towers": self._num_towers,
            "reduction": self._reduction,
        }
