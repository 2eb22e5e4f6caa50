"""Defines `DivergenceSentinel`, which compares the replicas of each group."""

from __future__ import annotations

from typing import Any

import keras
from absl import logging

from tf_xshard import checks
from tf_xshard.group_state import divergence
from tf_xshard.group_state import state

_ACTIONS = ("raise", "warn", "repair")
_NUM_SHOWN = 5


class DivergenceSentinel(keras.callbacks.Callback):
    """Finds unexpected differences between replicas of one group.

    A wrong collective, a nondeterministic operation or a bad restore makes
    replicas of one group diverge silently. This callback compares the replicas
    when `fit` begins and every few batches. Trainable weights, slot variables
    and AGN's center must be bitwise equal. The callback ignores state that
    differs by design (moving statistics, random states, AGN's local variables
    between exchanges, open rounds of towers).

    Args:
      every: The number of batches between checks. Each check reads all these
        variables on all replicas. Default: 100.
      action: `"raise"` (default) raises a RuntimeError. `"warn"` logs a
        warning. `"repair"` logs a warning, and assigns the most frequent value
        to all replicas of the group. If several values are equally frequent, it
        assigns the first of these values.

    Raises:
      ValueError: If an argument is invalid.
      RuntimeError: In `fit`, if replicas differ and `action` is `"raise"`. The
        message names the variables, the replicas and the largest difference.

    Example:

    >>> model = keras.Sequential([keras.layers.Input((2,)),
    ...                           keras.layers.Dense(1)])
    >>> model.compile(tf_xshard.CrossShardOptimizer(keras.optimizers.SGD(0.1)),
    ...               "mse")
    >>> history = model.fit(np.ones([8, 2]), np.ones([8, 1]), verbose=0,
    ...                     callbacks=[tf_xshard.DivergenceSentinel(every=1)])

    Source: Keras creates mirrored variables with aggregation NONE, so an update
    that differs by replica goes unnoticed.
    """

    def __init__(self, every: int = 100, action: str = "raise") -> None:
        super().__init__()
        if action not in _ACTIONS:
            raise ValueError(
                f"action must be one of {_ACTIONS}, got {action!r}."
            )
        self._every = checks.count("every", every)
        self._action = action
        self._num_since_check = 0
        self._state: Any = None

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Checks the initial state.

        Args:
          logs: From Keras; not used.
        """
        del logs
        self._state = state.GroupState(self.model)
        self._check("When training began")

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Checks if `every` batches have passed.

        Args:
          batch: Index of the last batch.
          logs: From Keras; not used.
        """
        del logs
        self._num_since_check += self.model.steps_per_execution
        if self._num_since_check >= self._every:
            self._check(f"After batch {batch}")

    def _check(self, when: str) -> None:
        self._num_since_check = 0
        # On one device, the first step may build the model.
        if self._state.group_assignment.group_size == 1:
            return
        catalog = self._state.catalog()
        found = divergence.unequal(
            catalog, self._state.replicas, repair=self._action == "repair"
        )
        if not found:
            return
        named = [
            f"{row['variable']!r} in group {row['group']}: replicas"
            f" {row['replicas']} differ by up to"
            f" {row['largest_difference']:.3g}"
            for row in found[:_NUM_SHOWN]
        ]
        more = len(found) - len(named)
        text = (
            f"{when}, replicas of one group differ unexpectedly:"
            f" {'; '.join(named)}{f'; and {more} more' if more else ''}."
        )
        if self._action == "raise":
            raise RuntimeError(
                f"{text} Possible causes are a restore or an assignment that"
                " did not reach all replicas, a nondeterministic operation, or"
                " a wrong result of a collective. Nothing was changed. To make"
                " the replicas equal, use"
                ' DivergenceSentinel(action="repair").'
            )
        if self._action == "repair":
            text += (
                " Each variable was set to the value that most replicas held."
            )
        logging.warning("%s", text)
