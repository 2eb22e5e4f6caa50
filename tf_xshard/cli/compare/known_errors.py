"""Finds an error of Keras or TensorFlow in the troubleshooting page."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterator
from typing import NamedTuple

import tf_xshard

_SECTION = "## Errors of Keras and TensorFlow\n"
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


class KnownError(NamedTuple):
    """A row of the page: its texts, what they mean, and what to do."""

    texts: list[str]
    meaning: str
    advice: str


def find(error: str) -> KnownError | None:
    """Returns the row of an error, or None."""
    for row in _rows():
        for text in row.texts:
            words = [re.escape(part.strip()) for part in text.split("...")]
            if re.search(".*".join(words), error):
                return row
    return None


def _rows() -> Iterator[KnownError]:
    page = importlib.resources.files(tf_xshard) / "docs" / "troubleshooting.md"
    section = page.read_text(encoding="utf-8").split(_SECTION)[1]
    for line in section.split("\n## ")[0].splitlines():
        cells = _LINK.sub(r"\1", line).split(" | ")
        if len(cells) == 3 and "`" in cells[0]:
            meaning, advice = (cell.strip(" |") for cell in cells[1:])
            yield KnownError(re.findall("`([^`]+)`", cells[0]), meaning, advice)
