"""Defines `TowerOptimizer`, which applies gradients of several towers once."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard import checks
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard import reductions
from tf_xshard.collectives import recorder
from tf_xshard.distribute import indexed_slices
from tf_xshard.distribute import reduction_guard
from tf_xshard.distribute import replica_variables
from tf_xshard.distribute import site as site_lib
from tf_xshard.distribute import variable_role
from tf_xshard.optimizers import accumulator
from tf_xshard.optimizers import arguments
from tf_xshard.optimizers import base
from tf_xshard.optimizers import commit
from tf_xshard.optimizers import cross_shard
from tf_xshard.optimizers import run as run_lib
from tf_xshard.optimizers import saving
from tf_xshard.optimizers import stack
from tf_xshard.optimizers.fit import global_mean
from tf_xshard.private.keras import fit_internals
from tf_xshard.private.keras import optimizer_state
from tf_xshard.private.keras import wrapper_internals
from tf_xshard.private.tensorflow import autograph
from tf_xshard.private.tensorflow import tracing
from tf_xshard.reduction import gradients as gradients_lib
from tf_xshard.reduction import loss_records


@keras.saving.register_keras_serializable("tf_xshard")
class TowerOptimizer(base.GradientWrapper):
    """Accumulates gradients of several towers, and applies them in one update.

    Each call of `apply` or `apply_gradients` adds one tower's gradients. Every
    `num_towers`-th call completes a round and passes the mean (or sum) to the
    inner optimizer, which updates once. In `fit`, this is gradient accumulation
    that works in a `tf.function` under every supported strategy, and
    communicates once per `num_towers` batches.

    ```
    num_towers=3, reduction="mean"

    call                 1          2          3                      4 ...
    gradient             a          b          c
    accumulator          a          a + b      0
    inner optimizer                            applies (a + b + c) / 3
    iterations           0          0          1
    ```

    With `tf_xshard.GlobalMean` and `reduction="mean"`, the update uses the mean
    over the items of all calls, even if calls have different numbers of items.

    The inner optimizer's clipping, moving averages, weight decay, schedules and
    loss scaling act on the aggregated gradient and count updates. With a
    `LossScaleOptimizer` inside, an overflow in any tower of any replica makes
    all replicas skip the whole round.

    If `fit` ends within a round, the partial sum is kept for the next `fit` and
    saved in files. `reset` discards it.

    Args:
      optimizer_or_optimizer_fn: A `keras.optimizers.Optimizer`, or a callable
        without arguments that returns an optimizer and is called once. If no
        tf_xshard optimizer is inside, a `CrossShardOptimizer` wraps it.
      num_towers: The number of calls per update, an int of at least 1.
      reduction: `"mean"` (default) or `"sum"` of the towers' losses.
      loss_normalization: See `CrossShardOptimizer`.
      skip_nonfinite: See `CrossShardOptimizer`. A round is skipped as a whole.
      max_consecutive_skips: See `CrossShardOptimizer`.
      name: The optimizer's name.

    Raises:
      TypeError: If an argument has the wrong type.
      ValueError: If an argument is invalid or belongs on the inner optimizer,
        or the strategy is not supported.

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

    Limits: A variable that had a gradient in an earlier round, but has none in
    this round, gets a gradient of zero. A variable that is frozen during a
    round loses its gradients of this round. Accumulators take as much memory as
    the trainable variables. tf.train.Checkpoint and files store the mean of the
    replicas' accumulators, which mixes the groups of an open round.

    Source: `tf.contrib.estimator.TowerOptimizer` (TensorFlow 1.14).
    """

    has_own_reducer = False
    _accumulator: accumulator.GradientAccumulator | None = None
    _items: keras.Variable | None = None

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
        skip_nonfinite: bool | None = None,
        max_consecutive_skips: int | None = None,
        name: str = "TowerOptimizer",
        **kwargs: Any,
    ) -> None:
        # Check all arguments before changing an optimizer.
        num_towers = checks.positive_integer("num_towers", num_towers)
        inner = optimizer_or_optimizer_fn
        if callable(inner) and not isinstance(
            inner, (keras.optimizers.Optimizer, tf.compat.v1.train.Optimizer)
        ):
            inner = inner()
        arguments.check(
            type(self).__name__, inner, reduction, loss_normalization, kwargs
        )
        if not stack.wrappers(inner):
            inner = cross_shard.implicit(inner)
        super().__init__(
            inner,
            reduction=reduction,
            # The nearest wrapper inside reduces over replicas.
            reducer=stack.wrappers(inner)[0]._reducer,
            loss_normalization=loss_normalization,
            skip_nonfinite=skip_nonfinite,
            max_consecutive_skips=max_consecutive_skips,
            name=name,
            **kwargs,
        )
        self._num_towers = num_towers
        # True if traced calls count items (GlobalMean); None before the first.
        self._set_untracked("_counts_items", None)
        self._set_untracked("_seen", accumulator.SeenVariables(name))

    @property
    def num_towers(self) -> int:
        """The number of calls per update."""
        return self._num_towers

    @property
    def weights_by_items(self) -> bool:
        """True if a round is a mean that numbers of items can weight."""
        return self._num_towers > 1 and self._reduction is reductions.MEAN

    @property
    def group_assignment(self) -> group_assignment_lib.GroupAssignment | None:
        """The groups given to the first tf_xshard optimizer inside."""
        return stack.wrappers(self.inner_optimizer)[0].group_assignment

    def forgetting_traces(self) -> contextlib.AbstractContextManager:
        """See the base class."""
        return self._seen.unchanged()

    def _counts(self) -> list[commit.Count]:
        if self._num_towers == 1:
            return []
        return [commit.Count("tower", self._tower, is_common=True)]

    def _create_state(self, variables: list, plan: stack.StackPlan) -> None:
        super()._create_state(variables, plan)
        if self._num_towers == 1:
            return
        with self._named():
            self._tower = replica_variables.make(
                (), "int64", "tower", wrapper_internals.Counter
            )
            sums = accumulator.GradientAccumulator(
                variables, "accumulator", self._seen, counts_rows=True
            )
        self._set_untracked("_accumulator", sums)
        # Checkpoints store the variables under these names.
        self._accumulators = sums.sums
        self._touched = sums.touched

    def _step(
        self, batch: gradients_lib.GradientBatch, run: run_lib.Run
    ) -> None:
        undo = run.plan.undo(self, run.site)
        if self._num_towers == 1:
            run.then(self, self._of_round(_contribution(batch, undo), 1))
            return
        num_items = self._num_items(run)
        weight = run.plan.weight_inside(self, run.site)
        indices = optimizer_state.indices_of(self, batch.variables)
        factor = undo * weight
        if num_items is not None:
            factor *= num_items
        gradients = _contribution(batch, factor).values
        sums = self._accumulator
        assert sums is not None
        sums.note(gradients, indices)
        count = replica_variables.read(self._tower) + 1
        counted, check = [(self._tower, count)], None
        if self._items is not None and num_items is None:
            check = self._refuse_open_items()
        elif self._items is not None:
            num_items += replica_variables.read(self._items)
            counted.append((self._items, num_items))

        def continue_round() -> None:
            sums.add(gradients, indices)
            for variable, value in counted:
                replica_variables.assign(variable, value)

        def start_round() -> None:
            sums.reset()
            for variable, _ in counted:
                replica_variables.assign(variable, 0)

        def complete_round() -> None:
            self._seen.note_update()
            self._note_restored(sums.note_restored)
            totals = gradients_lib.GradientBatch(
                *sums.totals(gradients, indices)
            )
            with recorder.labelled(every=self._num_towers):
                behind.then(
                    self,
                    self._of_round(totals, count, num_items, weight),
                    num_items=num_items,
                    writes=[start_round],
                )

        with run.after([check]).behind_gate() as behind:
            # A file with more towers may have set `count` above `num_towers`.
            replica_variables.cond(
                count >= self._num_towers, complete_round, continue_round
            )

    def _refuse_open_items(self) -> tf.Operation | None:
        """Asserts that no round of a GlobalMean is open, as in a file."""
        if tracing.in_xla():
            return None
        before = replica_variables.read(self._items)
        return tf.debugging.assert_equal(
            before,
            tf.zeros_like(before),
            f"{self.name}: the open round holds gradients of a GlobalMean, and"
            " this call has another loss. Call optimizer.reset() to discard the"
            " round.",
        )

    def _num_items(self, run: run_lib.Run) -> tf.Tensor | None:
        """Returns the weight of a call in its round; None for equal weights."""
        if self._reduction is not reductions.MEAN:
            return None
        num_items = run.num_items
        if num_items is None:
            num_items = loss_records.common_num_items(run.losses)
        if not recorder.is_recording():
            self._check_same_weighting(run, num_items is not None)
        if num_items is None:
            return None
        return tf.cast(num_items, self._create_items().dtype)

    def _check_same_weighting(
        self, run: run_lib.Run, counts_items: bool
    ) -> None:
        if counts_items and optimizer_state.has_caller_of(
            keras.optimizers.Optimizer, stack.is_multi_optimizer
        ):
            raise ValueError(
                f"{self.name} is inside a MultiOptimizer, which does not pass"
                " on the number of items of a GlobalMean. Put the"
                " TowerOptimizer around the MultiOptimizer."
            )
        if not counts_items and run.other_call_has_losses:
            raise ValueError(
                f"{self.name} gets gradients without a GlobalMean, but another"
                " call of apply() in the same tf.function took the number of"
                " items of a GlobalMean. Compute each gradient directly before"
                " you apply it, and use a GlobalMean for all losses."
            )
        if self._counts_items not in (None, counts_items):
            names = [f"GlobalMean({one.name})" for one in run.losses]
            raise ValueError(
                f"{self.name} gets gradients of {names or 'another loss'},"
                f" but its earlier gradients were"
                f" {'not ' if counts_items else ''}computed from a GlobalMean."
                " All calls of a round need losses of one kind. To discard the"
                " open round and change the kind of loss, call"
                " optimizer.reset()."
            )
        self._set_untracked("_counts_items", counts_items)

    def _create_optional(self) -> None:
        """See the base class."""
        if self._accumulator is not None:
            self._create_items()

    def _create_named(self, names: Collection[str]) -> None:
        """See the base class."""
        if saving.ITEMS in names:
            self._create_optional()

    def _create_items(self) -> keras.Variable:
        """Returns the sum of an open round's numbers of items; creates it."""
        # Only files of rounds that count items have this variable.
        if self._items is not None:
            return self._items
        dtypes = {one.dtype for one in self._accumulators}
        dtype = "float64" if "float64" in dtypes else "float32"
        with self._creating_variables(), self._named():
            self._items = replica_variables.make((), dtype, saving.ITEMS)
        return self._items

    def _of_round(
        self,
        totals: gradients_lib.GradientBatch,
        num_towers: int | tf.Tensor,
        num_items: tf.Tensor | None = None,
        weight: int = 1,
    ) -> gradients_lib.GradientBatch:
        """Returns the mean or sum of several towers."""
        divisor = self._reduction.of_sum(num_towers)
        if num_items is not None:
            # A round without items has gradients of 0.
            divisor = tf.where(num_items > 0, num_items, 1)
        return totals.with_values(
            indexed_slices.map_values(
                functools.partial(
                    _divided,
                    divisor=divisor * weight
                    if variable_role.role_of(variable).has_loss_gradient
                    else num_towers,
                    dtype=variable.dtype,
                ),
                total,
            )
            for total, variable in totals.pairs()
        )

    def _check_losses_of_fit(self) -> None:
        """See the base class."""
        if self.weights_by_items:
            global_mean.refuse_beside_other_losses(
                [one for one, *_ in fit_internals.losses_of_the_step()]
            )

    @autograph.entry_point
    def apply_towers(
        self,
        towers: Sequence[Sequence],
        trainable_variables: Sequence | None = None,
        weights: Sequence | None = None,
    ) -> None:
        """Applies a whole round at once.

        Use it for towers that are computed in one step. It does the same as
        `num_towers` calls of `apply`, without accumulators.

        Args:
          towers: `num_towers` lists of gradients, one for each tower. If the
            losses are a `GlobalMean`, list the towers in the order in which
            their gradients were computed.
          trainable_variables: The gradients' variables. None (default) for the
            variables that `build` got.
          weights: A number or scalar tensor >= 0 for each tower. With
            `reduction="mean"`, the result is the weighted mean. None (default)
            for the numbers of items if all losses are a `GlobalMean`, else for
            equal weights.

        Raises:
          RuntimeError, ValueError: See `apply`.
          ValueError: If the number of towers or weights is wrong, or `weights`
            is given with `reduction="sum"`.
          tf.errors.InvalidArgumentError: If a round is open. XLA has no
            assertions, so in XLA programs the open round stays unchanged.

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
                f" {len(towers)}. Pass a list of gradients for each tower."
            )
        is_mean = self._reduction is reductions.MEAN
        if weights is not None and (
            not is_mean or len(weights) != self._num_towers
        ):
            raise ValueError(
                f"{self.name} has {self._num_towers} towers and"
                f" reduction={self.reduction!r}, got {len(weights)} weights."
                ' Pass weights only with reduction="mean", one for each tower.'
            )
        site = self._checked_site()
        for gradients in towers:
            variables = self._checked_variables(gradients, trainable_variables)
        with reduction_guard.lifted(), tf.name_scope(self.name):
            run = run_lib.begin(self, towers, site)
            num_items = None
            if weights is None and is_mean:
                weights = loss_records.num_items_of_towers(
                    run.losses, self._num_towers
                )
                num_items = tf.add_n(weights) if weights else None
            undo = run.plan.undo(self, site)
            contributions = [
                _contribution(
                    gradients_lib.GradientBatch(
                        gradients_lib.standardized(gradients, variables),
                        variables,
                    ),
                    undo * weight,
                ).values
                for gradients, weight in zip(
                    towers, weights or [1] * len(towers), strict=True
                )
            ]
            summed = gradients_lib.GradientBatch(
                [
                    indexed_slices.added(column, variable)
                    for *column, variable in zip(
                        *contributions, variables, strict=True
                    )
                ],
                variables,
            )
            run.after([self._refuse_open_round()]).then(
                self,
                self._of_round(
                    summed,
                    self._num_towers,
                    tf.convert_to_tensor(sum(weights)) if weights else None,
                ),
                num_items=num_items,
            )

    def _refuse_open_round(self) -> tf.Operation | None:
        """Asserts that no round is open; returns a graph's assertion."""
        if self._num_towers == 1:
            return None
        return tf.debugging.assert_equal(
            replica_variables.read(self._tower),
            tf.constant(0, tf.int64),
            "apply_towers() is called while a round of apply() is open."
            " Complete the round, or call reset().",
        )

    def reset(self) -> None:
        """Discards the open round on all replicas.

        Call it outside `strategy.run`.

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
        site_lib.refuse_replica_context(f"{self.name}.reset()")
        self._set_untracked("_counts_items", None)
        if self._accumulator is None:
            return
        of_round = [self._tower, *self._accumulators, *self._touched]
        if self._items is not None:
            of_round.append(self._items)
        for variable in of_round:
            variable.assign(tf.zeros(variable.shape, variable.dtype))

    def get_config(self) -> dict:
        """Returns the arguments, for serialization.

        Returns:
          A dict for `from_config`.

        Example:

        >>> tf_xshard.TowerOptimizer(keras.optimizers.SGD(), 4).get_config()[
        ...     "num_towers"]
        4
        """
        config = super().get_config()
        inner = config.pop("inner_optimizer")
        if getattr(self.inner_optimizer, "is_implicit", False):
            # Save the optimizer that the implicit wrapper wraps. The
            # constructor wraps it again, to suit the optimizers around it.
            inner = inner["config"]["inner_optimizer"]
        return {
            **config,
            "optimizer_or_optimizer_fn": inner,
            "num_towers": self._num_towers,
            "reduction": self.reduction,
        }


def _contribution(
    batch: gradients_lib.GradientBatch, factor: float
) -> gradients_lib.GradientBatch:
    """Returns a tower's gradients times a factor, in at least float32."""
    # 16-bit sums would lose digits or overflow.
    return batch.with_values(
        gradients_lib.scaled(
            indexed_slices.map_values(_widened, gradient),
            factor if variable_role.role_of(variable).has_loss_gradient else 1,
        )
        for gradient, variable in batch.pairs()
    )


def _widened(values: tf.Tensor) -> tf.Tensor:
    return tf.cast(values, tf.float32) if values.dtype.size < 4 else values


def _divided(
    total: tf.Tensor, *, divisor: int | tf.Tensor, dtype: str
) -> tf.Tensor:
    """Returns `total / divisor` as `dtype`."""
    if tf.is_tensor(divisor) or divisor != 1:
        total /= gradients_lib.as_dtype(divisor, total.dtype)
    return tf.cast(total, dtype)
