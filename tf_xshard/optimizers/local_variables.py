"""Finds the variables whose gradients a CrossShardOptimizer does not reduce."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard.distribute import replica_variables
from tf_xshard.distribute import variable_role

# The key of a variable's path in a config.
_PATH = "path"


class LocalVariables:
    """Holds the `local` argument: variables, layers and patterns of paths."""

    def __init__(self, given: Any) -> None:
        if not isinstance(given, (list, tuple)):
            given = () if given is None else (given,)
        for one in given:
            is_saved = isinstance(one, dict) and list(one) == [_PATH]
            if not is_saved and not isinstance(
                one, (str, keras.Layer, keras.Variable, tf.Variable)
            ):
                raise TypeError(
                    "local must be variables, layers or regular expressions of"
                    f" variables' paths, or a list of these, got {one!r}."
                )
            if isinstance(one, str):
                _compiled(one)
        self._given = tuple(given)
        self._found: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._given)

    def __contains__(self, variable: Any) -> bool:
        return replica_variables.key(variable) in self._found

    def __iter__(self) -> Any:
        return iter(self._found.values())

    def role_of(self, variable: Any) -> variable_role.VariableRole:
        """Returns a variable's role, with these variables unreduced."""
        if variable in self:
            return variable_role.UNREDUCED
        return variable_role.role_of(variable)

    def find(self, variables: Sequence) -> None:
        """Finds the local variables among the variables to train."""
        found = {}
        for one in self._given:
            matches = _matching(one, variables)
            if not matches:
                raise ValueError(
                    f"local={one!r} is or contains none of the variables to"
                    f" train: {[_path(v) for v in variables]}."
                )
            found.update({replica_variables.key(v): v for v in matches})
        for variable in found.values():
            if not variable_role.role_of(variable).has_loss_gradient:
                raise ValueError(
                    f"{_path(variable)} is overwritten by its gradient (float8"
                    " training), a statistic that is averaged. Leave it out of"
                    " local."
                )
        self._found = found

    def get_config(self) -> list[str | dict]:
        """Returns a description of the variables for a config."""
        result: list[str | dict] = []
        for one in self._given:
            if isinstance(one, (str, dict)):
                result.append(one)
            elif found := _matching(one, list(self)):
                # A layer also owns variables that are not trained.
                result += [{_PATH: _path(v)} for v in found]
            elif isinstance(one, keras.Layer):
                result.append(f"(^|/){re.escape(one.name)}/")
            else:
                result.append({_PATH: _path(one)})
        return result


def _compiled(pattern: str) -> re.Pattern:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"local={pattern!r} is not a regular expression: {error}."
        ) from error


def _matching(given: Any, variables: Sequence) -> list:
    """Returns the variables that an element of the argument means."""
    if isinstance(given, str):
        return [v for v in variables if re.search(given, _path(v))]
    if isinstance(given, dict):
        path = given[_PATH]
        # A path has the model's name or not, depending on how the model was
        # made.
        return [v for v in variables if _path(v) == path] or [
            v
            for v in variables
            if _path(v) == _inside_model(path)
            or _inside_model(_path(v)) == path
        ]
    owned = given.variables if isinstance(given, keras.Layer) else [given]
    keys = {replica_variables.key(one) for one in owned}
    return [v for v in variables if replica_variables.key(v) in keys]


def _inside_model(path: str) -> str:
    """Returns a path without the model's name at its beginning."""
    return path.partition("/")[2]


def _path(variable: Any) -> str:
    return getattr(variable, "path", None) or variable.name
