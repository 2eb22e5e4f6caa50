"""Says what a save loses, where Keras and TensorFlow see replica 0 only."""

from __future__ import annotations

import sys
from collections.abc import Callable

import tensorflow as tf
from absl import logging


class NoticeOfSaving(tf.train.experimental.PythonState):
    """A part of an optimizer's checkpoint, which hears when it is written.

    Args:
      name: The optimizer's name.
      what_is_lost: Returns what a save would lose now, or None.
    """

    def __init__(self, name: str, what_is_lost: Callable[[], str | None]):
        self._name = name
        self._what_is_lost = what_is_lost
        self._has_told = False

    def tell(self) -> None:
        """Warns once, if something is lost."""
        lost = self._what_is_lost()
        if lost and not self._has_told:
            self._has_told = True
            logging.warning(
                "%s %s Keras and TensorFlow save those of replica 0 only;"
                " tf_xshard.GroupState(model).save(directory) keeps all, and"
                " .export(group, path) saves one group as a model.",
                self._name,
                lost,
            )

    def tell_in_legacy_save(self) -> None:
        """The same, if a legacy .h5 file is what asks for a config.

        Keras' writer of those asks an optimizer for nothing that others do not.
        """
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name == "save_model_to_hdf5":
                self.tell()
                return
            frame = frame.f_back

    def serialize(self) -> str:
        """Called when a checkpoint is written; there is nothing to keep."""
        self.tell()
        return ""

    def deserialize(self, string_value: str) -> None:
        """Called when a checkpoint is read."""
