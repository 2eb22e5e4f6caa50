"""Prints rows of results as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tf_xshard import text_table


class Table(list):
    """Holds a list of dicts with the same keys, and prints as a table.

    Example:

    >>> from tf_xshard.group_state import table
    >>> table.Table([{"group": 0, "loss": 0.5}, {"group": 1, "loss": None}])
    group  loss
    0      0.5
    1      -
    """

    def __repr__(self) -> str:
        if not self:
            return "(no rows)"
        columns = list(self[0])
        cells = [columns] + [
            [_shown(row[column]) for column in columns] for row in self
        ]
        return "\n".join(text_table.aligned(cells))

    __str__ = __repr__

    def column(self, name: str) -> list:
        """Returns the values of one column.

        Args:
          name: A key of the rows.

        Returns:
          A list with one value per row.
        """
        return [row[name] for row in self]


def row_of(group: Any, values: Mapping[str, Any]) -> dict:
    """Returns a row that starts with its group, with scalars as floats."""
    row = {"group": group}
    for name, value in values.items():
        value = np.asarray(value)
        # A metric named "group" must not overwrite the group's index.
        name = "group (metric)" if name == "group" else name
        row[name] = float(value) if value.ndim == 0 else value
    return row


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, np.ndarray):
        return " ".join(f"{one:.4g}" for one in value.ravel())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
