"""Makes checkpoints of wrappers and of plain Keras optimizers compatible.

A wrapper's node in a tf.train.Checkpoint has the children of the wrapped
optimizer's node, and one more child with the wrapper's own state. So plain
Keras's checkpoints load into wrappers, and vice versa:

plain Keras                 CrossShardOptimizer
optimizer                   optimizer
  _iterations                 _iterations             Adam's
  _learning_rate              _learning_rate          Adam's
  _variables                  _variables              Adam's
  ...                         ...
                              tf_xshard_CrossShardOptimizer    its own
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any

import keras
import tensorflow as tf

from tf_xshard import dependencies
from tf_xshard.private import frames
from tf_xshard.private import names
from tf_xshard.private.keras import moving_averages

_TRACKABLE = "tensorflow.__internal__.tracking.Trackable."
# tf.train.Checkpoint calls these methods on each object. No public API lets an
# object have another object's children. Present in TensorFlow 2.20 to 2.22.
_NODES = names.PrivateNames(
    "tf.train.Checkpoint of a tf_xshard optimizer",
    {
        # The children by name, when a checkpoint is written and when it is
        # read.
        "children": _TRACKABLE + "_trackable_children",
        # The object into which a node's child is read.
        "lookup": _TRACKABLE + "_lookup_dependency",
        # The values that were read for children that do not exist yet, and
        # their assignment when the children are created.
        "deferred": _TRACKABLE + "_deferred_dependencies",
        "handle_deferred": _TRACKABLE + "_handle_deferred_dependencies",
        # The constructor calls this method.
        "initialize": _TRACKABLE + "_maybe_initialize_trackable",
        # Called first when a node is read. An argument of the caller has the
        # node.
        "adapter": _TRACKABLE + "_checkpoint_adapter",
        # A variable's value, when it is written and when it is read.
        "serialize": "keras.Variable._serialize_to_tensors",
        "restore": "keras.Variable._restore_from_tensors",
    },
)
# The caller's argument that has the node that is read, in 2.20 to 2.22.
_POSITION = "checkpoint_position"
_PREFIX = "tf_xshard_"
_VALUE = "VARIABLE_VALUE"
# The children of a MultiOptimizer that are its optimizers. A plain
# MultiOptimizer does not save them, so each wrapper around it tracks them.
_OF_MULTI_OPTIMIZER = "optimizer_"
# Up to version 0.1.0, a wrapper's node had the wrapper's own children,
# including this child.
_FIRST_FORMAT = "notice_of_saving"
# Children of the base class that a wrapper does not use.
_UNUSED = (
    "_iterations",
    "_variables",
    "_trainable_variables",
    "_trainable_variables_indices",
)


class OwnPart(tf.train.experimental.PythonState):
    """The node of a wrapper's own state in a checkpoint."""

    def __init__(self, children: Callable[[], dict]) -> None:
        self._maybe_initialize_trackable()
        self._children = children

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict:
        return self._children()


class Counter(keras.Variable):
    """An int64 variable, of which checkpoints have 32 bits, as they always had.

    TensorFlow keeps int32 variables on the CPU, where a step that XLA compiles
    for a GPU can't read them. On one GPU, `fit` compiles steps with XLA.
    """

    def _serialize_to_tensors(self) -> dict:
        return {_VALUE: tf.cast(self.value, tf.int32)}

    def _restore_from_tensors(self, restored_tensors: dict) -> Any:
        self.assign(tf.cast(restored_tensors[_VALUE], tf.int64))
        return self.value


class WrapperInternals(keras.optimizers.Optimizer):
    """An optimizer that has the node of its inner optimizer in a checkpoint.

    Subclasses return the inner optimizer in `_checkpointed_as`, and set
    `_own_part`.
    """

    _model_variables_moving_average = moving_averages.FORWARDED
    _own_part: OwnPart
    _reads_first_format = False
    _starts_fresh: tuple[str, ...] = ()
    # Maps each part to the names of its children in the checkpoint.
    _saved_children: dict[str, set[str]] = {}

    def _checkpointed_as(self) -> Any:
        """Returns the inner optimizer, which may be another wrapper."""
        raise NotImplementedError

    @property
    def _required_variables(self) -> list:
        """The variables that every save of the wrapper has."""
        raise NotImplementedError

    def _create_named(self, names: Collection[str]) -> None:
        """Creates the variables with these names that only steps create."""

    def _own_children(self) -> dict:
        """Returns the wrapper's children, without the inner optimizer."""
        inner = self._checkpointed_as()
        return {
            name: child
            for name, child in super()._trackable_children().items()
            if name not in _UNUSED and child is not inner
        }

    def _parts(self) -> dict[str, WrapperInternals]:
        """Returns the wrappers that one node stands for, by names of parts."""
        inner = self._checkpointed_as()
        parts = dict(inner._parts()) if _is_wrapper(inner) else {}
        name = _PREFIX + type(self).__name__
        while name in parts:
            name += "_"
        return {**parts, name: self}

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict:
        if save_type != "checkpoint":
            return super()._trackable_children(save_type, **kwargs)
        _NODES.check()
        inner = self._checkpointed_as()
        while _is_wrapper(inner):
            inner = inner._checkpointed_as()
        parts = self._parts().items()
        return {
            **inner._trackable_children(save_type, **kwargs),
            **{name: wrapper._own_part for name, wrapper in parts},
        }

    def _checkpoint_adapter(self, path: str) -> Any:
        _NODES.check()
        # `path` does not say which of the checkpoint's nodes is read.
        position = next(frames.callers()).f_locals.get(_POSITION)
        if position is None:
            raise RuntimeError(
                f"TensorFlow {tf.__version__} reads checkpoints in a way that"
                f" tf_xshard does not support, so {self.name} can't be restored"
                f" from {path}. Tested: TensorFlow"
                f" {dependencies.tested_range('tensorflow')}."
            )
        nodes = {
            child.local_name: position.checkpoint.object_graph_proto.nodes[
                child.node_id
            ]
            for child in position.object_proto.children
        }
        parts = self._parts()
        is_first_format = _FIRST_FORMAT in nodes
        self.__dict__["_reads_first_format"] = is_first_format
        fresh = () if is_first_format else tuple(set(parts) - set(nodes))
        self.__dict__["_starts_fresh"] = fresh
        graph_nodes = position.checkpoint.object_graph_proto.nodes
        self.__dict__["_saved_children"] = {
            name: {
                child.local_name
                for child in nodes[name].children
                if graph_nodes[child.node_id].children
                or graph_nodes[child.node_id].attributes
            }
            for name in set(parts) & set(nodes)
        }
        self._warn_of_fresh_parts()
        lost = sorted(
            name.removeprefix(_PREFIX)
            for name, node in nodes.items()
            if name.startswith(_PREFIX)
            and name not in parts
            and not all(
                child.local_name.startswith(_OF_MULTI_OPTIMIZER)
                for child in node.children
            )
        )
        if lost:
            self._warn_of_other_optimizers(
                f"There is no place for the state of {lost}."
            )
        return super()._checkpoint_adapter(path)

    def _warn_of_fresh_parts(self) -> None:
        """Warns once of parts that start fresh, and of state that is lost."""
        if not self.built:
            return  # `build` calls this method again.
        parts = self._parts()
        # One part is enough for the optimizers of a MultiOptimizer.
        no_part = len(self._starts_fresh) == len(parts)
        fresh = [
            parts[name].name
            for name in self._starts_fresh
            if parts[name]._required_variables
            or (no_part and _has_multi_optimizer(parts[name]._own_children()))
        ]
        self.__dict__["_starts_fresh"] = ()
        for name, children in self._saved_children.items():
            parts[name]._create_named({child.strip("_") for child in children})
        if fresh:
            self._warn_of_other_optimizers(f"{sorted(fresh)} start fresh.")
        lost = sorted(
            f"{parts[name].name}.{child.strip('_')}"
            for name, children in self._saved_children.items()
            for child in children - set(parts[name]._own_children())
            if not child.startswith(_OF_MULTI_OPTIMIZER)
        )
        self.__dict__["_saved_children"] = {}
        if lost:
            self._warn_of_other_optimizers(
                f"There is no place for the state of {lost}."
            )

    def _warn_of_other_optimizers(self, what: str) -> None:
        warnings.warn(
            "The checkpoint was saved with other optimizers than"
            f" {self.name}. {what}",
            stacklevel=3,
        )

    def _lookup_dependency(
        self, name: str, cached_dependencies: dict | None = None
    ) -> Any:
        if cached_dependencies and self._reads_first_format:
            if name == _FIRST_FORMAT:
                return self._own_part
            return super()._trackable_children().get(name)
        return super()._lookup_dependency(name, cached_dependencies)

    @property
    def _deferred_dependencies(self) -> dict:
        # Children of the node that do not exist yet will belong to the object
        # whose attribute is returned.
        if self._reads_first_format:
            return self._own_part._deferred_dependencies
        return self._checkpointed_as()._deferred_dependencies

    def _handle_deferred_dependencies(self, name: str, trackable: Any) -> None:
        self._own_part._handle_deferred_dependencies(name, trackable)


def _has_multi_optimizer(children: Iterable[str]) -> bool:
    return any(name.startswith(_OF_MULTI_OPTIMIZER) for name in children)


def _is_wrapper(optimizer: Any) -> bool:
    return isinstance(optimizer, WrapperInternals)
