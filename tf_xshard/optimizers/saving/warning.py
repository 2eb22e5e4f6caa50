"""Warns if a save loses state; Keras and TensorFlow see replica 0 only."""

from __future__ import annotations

from collections.abc import Callable

from absl import logging

from tf_xshard.private.keras import optimizer_state
from tf_xshard.private.keras import wrapper_internals


class LossySaveWarning(wrapper_internals.OwnPart):
    """A part of an optimizer that warns when a checkpoint is written."""

    def __init__(
        self,
        name: str,
        unsaved_state: Callable[[], str | None],
        children: Callable[[], dict],
    ) -> None:
        super().__init__(children)
        self._optimizer_name = name
        self._unsaved_state = unsaved_state
        self._has_warned = False

    def warn(self) -> None:
        """Warns once if a save would lose state."""
        lost = self._unsaved_state()
        if lost and not self._has_warned:
            self._has_warned = True
            logging.warning(
                "%s %s Keras and TensorFlow save those of replica 0 only;"
                " tf_xshard.GroupState(model).save(directory) keeps all, and"
                " .export(group, path) saves one group as a model.",
                self._optimizer_name,
                lost,
            )

    def warn_in_legacy_save(self) -> None:
        """Calls `warn` if the config is read to write a legacy .h5 file."""
        if optimizer_state.is_writing_legacy_file():
            self.warn()

    def serialize(self) -> str:
        """Warns when a checkpoint is written, and stores nothing."""
        self.warn()
        return ""

    def deserialize(self, string_value: str) -> None:
        """Does nothing when a checkpoint is read."""
