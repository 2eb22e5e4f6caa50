"""Keeps the files of the script's working folder as they were."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil

_State = dict[str, tuple[int, int]]


def state(folder: pathlib.Path) -> _State:
    """Returns the size and the time of change of each file.

    The files that this process writes its output to are left out.
    """
    outputs = []
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            status = os.fstat(descriptor)
            outputs.append((status.st_dev, status.st_ino))
    found = {}
    for directory, names, files in os.walk(folder):
        names[:] = [one for one in names if one != "__pycache__"]
        for name in files:
            path = os.path.join(directory, name)
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                continue
            if (status.st_dev, status.st_ino) in outputs:
                continue
            relative = os.path.relpath(path, folder)
            found[relative] = status.st_size, status.st_mtime_ns
    return found


def changed(before: _State, after: _State) -> list[str]:
    """Lists files that were changed or removed."""
    return sorted(
        name for name, one in before.items() if after.get(name) != one
    )


def move_new(
    folder: pathlib.Path, before: _State, after: _State, target: pathlib.Path
) -> list[str]:
    """Moves new files to another folder, and returns their names."""
    new = sorted(set(after) - set(before))
    for name in new:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(folder / name, target / name)
    for name in sorted({os.path.dirname(one) for one in new}, reverse=True):
        # The folders that held nothing else.
        while name and not any((folder / name).iterdir()):
            (folder / name).rmdir()
            name = os.path.dirname(name)
    return new
