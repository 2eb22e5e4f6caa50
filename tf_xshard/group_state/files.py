"""Saving and restoring every group, as `GroupState` offers it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tf_xshard.group_state import checkpoint
from tf_xshard.group_state import values


class GroupFiles(values.GroupValues):
    """The part of `GroupState` that writes and reads a directory: see there."""

    def save(
        self, directory: str | os.PathLike, *, epoch: int = 0, step: int = 0
    ) -> None:
        """Saves every variable of every replica, atomically.

        Everything that a training step reads: weights, moving statistics,
        random states, metrics, and all optimizer state. Equal values of several
        replicas are saved once. A crash leaves the previous save or this one.

        Args:
          directory: A path, created if missing. It holds one save, the latest.
            All processes must see the same directory.
          epoch: The number of completed epochs. Default: 0.
          step: The number of completed steps of the next epoch. Default: 0.

        Raises:
          OSError, tf.errors.OpError or ValueError: If it can't be written, or
            the processes don't share the directory; the previous save is kept,
            and with several processes the others raise a RuntimeError.

        Example:

        >>> import tempfile
        >>> directory = tempfile.mkdtemp()
        >>> weight = keras.Variable(1.0)
        >>> state = tf_xshard.GroupState([weight])
        >>> state.save(directory, epoch=3)
        >>> _ = weight.assign(7.0)
        >>> state.restore(directory)
        Position(epoch=3, step=0)
        >>> float(weight)
        1.0
        """
        checkpoint.save(
            self._built_catalog(),
            self.replicas,
            os.fspath(directory),
            int(epoch),
            int(step),
        )

    def restore(
        self,
        directory: str | os.PathLike,
        *,
        regroup: str | Mapping[int, int] | None = None,
    ) -> checkpoint.Position:
        """Restores what `save` saved, on every replica, bit by bit.

        Everything is read and checked before anything changes. Metrics that are
        not built yet are left out.

        Args:
          directory: The directory of the save.
          regroup: None (default) if groups and replicas are those of the save.
            Otherwise `"mean"`: every group takes the mean of the saved groups;
            `"first"`: every group takes the values of the first saved group; or
            a dict from every group to the saved group that it takes.

        Returns:
          A `Position` with the `epoch` and `step` given to `save`.

        Raises:
          FileNotFoundError: If nothing was saved there.
          ValueError: If the save is damaged, or of another model or other
            groups; the message names what differs.
          RuntimeError: If it failed on another process.

        Example:

        See `save`.
        """
        return checkpoint.restore(
            self._built_catalog(), self.replicas, os.fspath(directory), regroup
        )

    @staticmethod
    def position(directory: str | os.PathLike) -> checkpoint.Position:
        """How far training was when a state was saved.

        For an input pipeline that has to start there; needs no model.

        Args:
          directory: The directory of the save.

        Returns:
          A `Position`: `epoch` and `step`, ints.

        Raises:
          FileNotFoundError: If nothing was saved there.
          ValueError: If the save is damaged.

        Example:

        >>> import tempfile
        >>> directory = tempfile.mkdtemp()
        >>> tf_xshard.GroupState([keras.Variable(1.0)]).save(directory, epoch=2)
        >>> tf_xshard.GroupState.position(directory).epoch
        2
        """
        return checkpoint.position(os.fspath(directory))
