"""Reduced gradients -> inner optimizer -> variables, without communication."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from absl import logging

from tf_xshard.distribute import indexed_slices
from tf_xshard.distribute import reduction_guard
from tf_xshard.distribute import site as site_lib
from tf_xshard.optimizers import tree
from tf_xshard.private import keras_optimizers
from tf_xshard.private import keras_sharded_updates
from tf_xshard.private import tensorflow as private_tensorflow
from tf_xshard.reduction import group_sum


def make_local(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes an optimizer and all inside it update this replica only.

    Idempotent; called again after `build`, where a MultiOptimizer may create
    its optimizers.

    Args:
      optimizer: The inner optimizer.

    Raises:
      TypeError: If an optimizer reduces gradients by itself in a way that
        can't be disabled.
    """
    keras_optimizers.make_local(_foreign(optimizer))


def refuse_own_reductions(optimizer: keras.optimizers.Optimizer) -> None:
    """Checks what `make_local` checks, and changes nothing.

    Args:
      optimizer: The inner optimizer.

    Raises:
      TypeError: As `make_local`.
    """
    keras_optimizers.refuse_own_reductions(_foreign(optimizer))


def _foreign(optimizer: Any) -> list[keras.optimizers.Optimizer]:
    return [
        one for one in tree.descendants(optimizer) if not tree.is_wrapper(one)
    ]


@contextlib.contextmanager
def changing_when_chosen(
    optimizer: keras.optimizers.Optimizer, change: Callable
) -> Iterator[None]:
    """A context in which an optimizer is built, and MultiOptimizers may choose.

    Args:
      optimizer: The inner optimizer.
      change: Called with each optimizer that a MultiOptimizer inside chooses,
        before that is built.

    Yields:
      None.
    """
    with contextlib.ExitStack() as stack:
        for one in tree.with_local_optimizers(optimizer):
            stack.enter_context(
                keras_sharded_updates.changes_when_chosen(one, change)
            )
        yield


def note_summed_rows(optimizer: keras.optimizers.Optimizer) -> None:
    """Logs once for each class what differs from plain Keras for embeddings.

    Args:
      optimizer: The inner optimizer, which gets IndexedSlices.
    """
    for one in tree.descendants(optimizer):
        # SGD is linear in the gradient, so it does not matter there.
        if not any(tree.children(one)) and not isinstance(
            one, keras.optimizers.SGD
        ):
            _log_summed_rows(type(one).__name__)


@functools.cache
def _log_summed_rows(name: str) -> None:
    logging.warning(
        "tf_xshard sums the gradients of a row that occurs several times in a"
        " batch (an Embedding) before %s uses them. Keras itself does not, so"
        " the numbers differ from plain Keras; they equal those of the dense"
        " gradient, tf.convert_to_tensor(gradient).",
        name,
    )


def is_overwritten(variable: Any) -> bool:
    """Whether Keras assigns a variable its "gradient", as float8 training does.

    Such a value is a statistic of the replica, not a gradient of its loss.
    """
    return getattr(variable, "overwrite_with_gradient", False)


class Statistics(NamedTuple):
    """Variables that are overwritten, and their new values.

    Attributes:
      values: A value for each variable, or None.
      variables: The variables.
    """

    values: list
    variables: list


def split_statistics(
    gradients: Sequence, variables: Sequence
) -> tuple[list, list, Statistics]:
    """Separates gradients of a loss from statistics passed as gradients.

    Args:
      gradients: Tensors of the variables' shapes, IndexedSlices or None.
      variables: The variables.

    Returns:
      The gradients, their variables, and the `Statistics`.
    """
    pairs = list(zip(gradients, variables, strict=True))
    ours, others = (
        [pair for pair in pairs if is_overwritten(pair[1]) == wanted]
        for wanted in (False, True)
    )
    return (
        [gradient for gradient, _ in ours],
        [variable for _, variable in ours],
        Statistics([value for value, _ in others], [v for _, v in others]),
    )


class Update(abc.ABC):
    """The stages from the group reduction to the updated variables.

    Args:
      optimizer: The inner optimizer, already made local.
      reducer: The reducer.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        reducer: group_sum.GroupReducer,
    ) -> None:
        self._optimizer = optimizer
        self._reducer = reducer

    @abc.abstractmethod
    def reduced(
        self,
        gradients: Sequence,
        variables: Sequence,
        site: site_lib.Site,
        reduction: str,
        multiplier: float,
        post_hook: Callable[[list], list] | None,
    ) -> list:
        """The group's gradients, after the user's hook.

        Args:
          gradients: This replica's: tensors of the variables' shapes,
            IndexedSlices or None.
          variables: The variables.
          site: Where the code runs.
          reduction: `"mean"` or `"sum"`.
          multiplier: See `GroupReducer.reduce`.
          post_hook: Called with the whole reduced gradients, or None.

        Returns:
          What `apply` takes, one for each variable.
        """

    @abc.abstractmethod
    def apply(
        self,
        gradients: Sequence,
        variables: Sequence,
        site: site_lib.Site,
        is_applied: tf.Tensor | None,
    ) -> None:
        """Updates the variables.

        Args:
          gradients: As from `reduced`.
          variables: The variables.
          site: Where the code runs.
          is_applied: Whether the inner optimizer will not skip this step, a
            scalar bool tensor; None if it never does.
        """


class WholeUpdate(Update):
    """Every replica has whole gradients and updates whole variables."""

    def reduced(
        self,
        gradients: Sequence,
        variables: Sequence,
        site: site_lib.Site,
        reduction: str,
        multiplier: float,
        post_hook: Callable[[list], list] | None,
    ) -> list:
        """See the base class; tensors, IndexedSlices or None."""
        result = self._reducer.reduce(
            gradients, variables, site, reduction, multiplier
        )
        return result if post_hook is None else post_hook(result)

    def apply(
        self,
        gradients: Sequence,
        variables: Sequence,
        site: site_lib.Site,
        is_applied: tf.Tensor | None,
    ) -> None:
        """See the base class."""
        apply(self._optimizer, gradients, variables)


def apply(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence,
    variables: Sequence,
) -> None:
    """Applies reduced gradients with the inner optimizer on this replica.

    Calls `apply_gradients`, as `fit` does, since a subclass may override it.

    Args:
      optimizer: The inner optimizer, already made local.
      gradients: A tensor or IndexedSlices of each variable's shape, or None.
      variables: The variables.

    Raises:
      TypeError: If the optimizer reduces gradients by itself.
    """
    if any(one.loss_scale_factor for one in tree.descendants(optimizer)):
        # Keras divides gradients by it; IndexedSlices can't be divided.
        gradients = [
            indexed_slices.dense(gradient, variable)
            if isinstance(gradient, tf.IndexedSlices)
            else gradient
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
    # A subclass of the user's is converted as the user's own code is.
    apply_gradients = private_tensorflow.as_called_by_user(
        optimizer.apply_gradients
    )
    with reduction_guard.guarded(optimizer):
        apply_gradients(list(zip(gradients, variables, strict=True)))
