"""Lists the interpreter's frames that called a function, as a last resort.

A comment on each use says what no argument, attribute or public API tells.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator


def callers() -> Iterator[types.FrameType]:
    """Yields the frames around the calling function, the innermost first."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
