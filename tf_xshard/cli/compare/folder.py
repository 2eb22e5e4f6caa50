"""Keeps the files of the script's working folder as they were."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import stat

State = dict[str, tuple[int, int] | None]


def state(folder: pathlib.Path) -> State:
    """Returns the size and the time of change of each file and folder.

    The files that this process writes its output to are left out.
    """
    outputs = []
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            status = os.fstat(descriptor)
            outputs.append((status.st_dev, status.st_ino))
    found: State = {}
    for directory, names, files in os.walk(folder):
        for name in [*names, *files]:
            path = os.path.join(directory, name)
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                continue
            if (status.st_dev, status.st_ino) in outputs:
                continue
            # The time of a folder changes with its files.
            is_folder = stat.S_ISDIR(status.st_mode)
            found[os.path.relpath(path, folder)] = (
                None if is_folder else (status.st_size, status.st_mtime_ns)
            )
    return found


def changed(before: State, after: State) -> list[str]:
    """Lists files that were changed, and what was removed."""
    return sorted(
        name
        for name, one in before.items()
        if name not in after or after[name] != one
    )


def move_new(
    folder: pathlib.Path, before: State, after: State, target: pathlib.Path
) -> list[str]:
    """Moves new files and folders to another folder; returns their names."""
    new = set(after) - set(before)
    # A new folder takes its files along.
    outermost = sorted(
        name
        for name in new
        if not any(str(parent) in new for parent in pathlib.Path(name).parents)
    )
    for name in outermost:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(folder / name, target / name)
    return outermost
