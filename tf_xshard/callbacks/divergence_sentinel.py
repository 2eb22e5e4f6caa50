"""A callback that finds replicas of one group that differ and should not."""

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
    """Finds replicas of one group that differ and should not.

    A wrong collective, an operation that is not deterministic, or a bad restore
    lets replicas of one group drift apart, and nothing says so. This compares
    them when `fit` begins and every so many batches: trainable weights, slots
    and AGN's center, whose bits are equal. What is meant to differ (moving
    statistics, random states, what AGN trains between exchanges, open rounds of
    towers) it leaves alone.

    Args:
      every: A number of batches. A check reads all variables of all replicas.
        Default: 100.
      action: `"raise"` (default) a RuntimeError; `"warn"`, in the log; or
        `"repair"`: warn, and give all replicas of the group the value that most
        of them hold, of equally many the first one's.

    Raises:
      ValueError: If an argument has a wrong value.
      RuntimeError: In `fit`, with the variables, the replicas and the size of
        the difference.

    Example:

    >>> model = keras.Sequential([keras.layers.Input((2,)),
    ...                           keras.layers.Dense(1)])
    >>> model.compile(tf_xshard.CrossShardOptimizer(keras.optimizers.SGD(0.1)),
    ...               "mse")
    >>> history = model.fit(np.ones([8, 2]), np.ones([8, 1]), verbose=0,
    ...                     callbacks=[tf_xshard.DivergenceSentinel(every=1)])

    Source: Keras makes mirrored variables with aggregation NONE, so an update
    that differs by replica goes unnoticed.
    """

    def __init__(self, every: int = 100, action: str = "raise") -> None:
        super().__init__()
        checks.count("every", every)
        if action not in _ACTIONS:
            raise ValueError(
                f"action must be one of {_ACTIONS}, got {action!r}."
            )
        self._every = every
        self._action = action
        self._num_since_check = 0
        self._state: Any = None

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Checks what training begins with.

        Args:
          logs: From Keras; not used.
        """
        del logs
        self._state = state.GroupState(self.model)
        self._check("When training began")

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Checks, if so many batches are through.

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
        catalog = self._state.catalog()
        if catalog.groups.group_size == 1:
            return
        found = divergence.unequal(
            catalog, self._state.replicas, repair=self._action == "repair"
        )
        if not found:
            return
        named = [
            f"{row['variable']!r} in group {row['group']}: replicas"
            f" {row['replicas']} by up to {row['largest_difference']:.3g}"
            for row in found[:_NUM_SHOWN]
        ]
        more = len(found) - len(named)
        text = (
            f"{when}, replicas of one group differ that should not:"
            f" {'; '.join(named)}{f'; and {more} more' if more else ''}."
        )
        if self._action == "raise":
            raise RuntimeError(
                f"{text} A restore or an assignment that did not reach all"
                " replicas, an operation that is not deterministic, or a wrong"
                ' collective does that. DivergenceSentinel(action="repair")'
                " makes them equal."
            )
        if self._action == "repair":
            text += " They have the value that most hold now."
        logging.warning("%s", text)
