"""Reads the checkpoints in a TPUEstimator's model_dir."""

from __future__ import annotations

import os

import numpy as np
import tensorflow as tf


class ModelDirectory:
    """Reads checkpoints, as a part of TPUEstimator."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        if not path:
            raise ValueError(
                "There is no model_dir. train() saves there, and evaluate() and"
                " predict() read from there. Pass model_dir, or set"
                " RunConfig.model_dir."
            )
        self._model_dir = os.fspath(path)

    @property
    def model_dir(self) -> str:
        """The directory of checkpoints and summaries."""
        return self._model_dir

    def latest_checkpoint(self) -> str | None:
        """Returns the path of the newest checkpoint in model_dir, or None."""
        return tf.train.latest_checkpoint(self._model_dir)

    def get_variable_names(self) -> list[str]:
        """Lists the names of the variables in the newest checkpoint.

        Raises:
          ValueError: If there is no checkpoint.
        """
        reader = tf.train.load_checkpoint(self._checkpoint())
        return sorted(reader.get_variable_to_shape_map())

    def get_variable_value(self, name: str) -> np.ndarray:
        """Returns a variable's value in the newest checkpoint.

        Args:
          name: The variable's name.

        Returns:
          An array.

        Raises:
          ValueError: If there is no checkpoint.
        """
        return tf.train.load_checkpoint(self._checkpoint()).get_tensor(name)

    def _checkpoint(self) -> str:
        path = self.latest_checkpoint()
        if path is None:
            raise ValueError(
                f"There is no checkpoint in {self._model_dir}. Call train()"
                " first, or pass checkpoint_path."
            )
        return path

    def _saved_step(self) -> int:
        path = self.latest_checkpoint()
        if path is None:
            return 0
        return int(tf.train.load_variable(path, "global_step"))
