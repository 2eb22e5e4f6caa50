"""The frames of the interpreter that called a function: a last resort.

Each use says what no argument, attribute or public API tells.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator


def callers() -> Iterator[types.FrameType]:
    """The frames around the function that calls this, the innermost first."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
