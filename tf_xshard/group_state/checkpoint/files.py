"""Writes and reads a directory that holds a saved state, atomically.

    manifest.json                   what is saved, and the checksums of the rest
    state-<save>-<process>.*        values, in TensorFlow's checkpoint format

Each save's files have unique names, and are flushed to disk before a rename
puts the manifest in place. Only then are the previous save's files removed, so
a crash leaves one save or the other. The files hold only JSON and numbers, and
reading them executes nothing.

Several jobs or threads may save to one directory. The first process of each
locks the directory, and the last save wins. Without locks (an object store, or
NFS), each save removes only the files of the save that it replaces.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

try:
    import fcntl
except ImportError:  # Windows has no fcntl.
    fcntl = None  # type: ignore[assignment]

MANIFEST = "manifest.json"
_FORMAT = "tf_xshard group state"
_VERSION = 2
_FILES = re.compile(
    r"(state-[0-9a-f]{16}-\d{5}\.|manifest\.json\.[0-9a-f]{16}\.).*"
)
# The names that a manifest may list. No path leads out of the directory.
_VALUES = re.compile(r"state-[0-9a-f]{16}-\d{5}\.[\w-]+")
_BYTES_AT_ONCE = 16 << 20
LOCK_SECONDS = 60.0
_SECONDS_BETWEEN_TRIES = 0.01
_NO_LOCK = -1


def new_token() -> str:
    """Creates a unique name for a save."""
    return secrets.token_hex(8)


def has_save(directory: str) -> bool:
    """Returns True if a directory holds a completed save."""
    return tf.io.gfile.exists(os.path.join(directory, MANIFEST))


@contextlib.contextmanager
def locked(directory: str) -> Iterator[bool]:
    """Locks a directory against other saves; yields False without locks."""
    _create(directory)
    if not _has_locks(directory):
        yield False
        return
    end = time.monotonic() + LOCK_SECONDS
    while (descriptor := _try_lock(directory)) is None:
        if time.monotonic() > end:
            raise TimeoutError(
                f"Another job or thread has been saving to {directory!r} for"
                f" {LOCK_SECONDS:.0f} seconds. Nothing was saved. Give each job"
                " its own directory."
            )
        time.sleep(_SECONDS_BETWEEN_TRIES)
    try:
        yield descriptor != _NO_LOCK
    finally:
        if descriptor != _NO_LOCK:
            # The operating system ends a lock with its process, but a child
            # process may have inherited the descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _has_locks(directory: str) -> bool:
    # An object store has no locks.
    return fcntl is not None and "://" not in directory


def _try_lock(directory: str) -> int | None:
    """Returns a descriptor that holds the lock, or None to try again."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except FileNotFoundError:  # The lock's holder removed the directory.
        _create(directory)
        return None
    is_kept = False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        opened = os.fstat(descriptor)
        is_kept = os.path.samestat(opened, os.stat(directory))
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        # A file system such as NFS has no locks of directories.
        os.close(descriptor)
        return _NO_LOCK
    if is_kept:
        return descriptor
    os.close(descriptor)
    return None


def _create(directory: str) -> None:
    if not tf.io.gfile.exists(directory):
        tf.io.gfile.makedirs(directory)
        if "://" not in directory:
            _to_disk(os.path.dirname(os.path.abspath(directory)))


def write_values(
    directory: str,
    token: str,
    rank: int,
    values: Mapping[str, np.ndarray],
) -> dict[str, str]:
    """Writes one process's values, and returns the checksum of each file."""
    _create(directory)
    _refuse_foreign(directory)
    if not values:
        return {}
    prefix = f"state-{token}-{rank:05d}"
    # A GPU may have no memory for a second copy.
    with tf.device("CPU"):
        tf.raw_ops.SaveV2(
            prefix=os.path.join(directory, prefix),
            tensor_names=list(values),
            shape_and_slices=[""] * len(values),
            tensors=[tf.constant(value) for value in values.values()],
        )
    names = [
        name
        for name in tf.io.gfile.listdir(directory)
        if name.startswith(f"{prefix}.")
    ]
    for name in names:
        _to_disk(os.path.join(directory, name))
    _to_disk(directory)
    return {name: _checksum(os.path.join(directory, name)) for name in names}


def _refuse_foreign(directory: str) -> None:
    """Raises ValueError if another program wrote the directory's manifest."""
    if has_save(directory) and not _has_own_manifest(directory):
        raise ValueError(
            f"{directory!r} holds a {MANIFEST} that no group state wrote."
            " Nothing was saved. Save to another directory."
        )


def _has_own_manifest(directory: str) -> bool:
    """Returns True if a group state wrote the manifest, damaged or not."""
    with tf.io.gfile.GFile(os.path.join(directory, MANIFEST), "rb") as file:
        content = file.read()
    return b'"sha256"' in content and _FORMAT.encode() in content


def commit(
    directory: str,
    token: str,
    manifest: dict[str, Any],
    here: Iterable[str],
    is_locked: bool,
) -> None:
    """Commits a save to the directory, and removes the previous save.

    `here` are the files that this directory must hold.
    """
    for name in here:
        path = os.path.join(directory, name)
        if not tf.io.gfile.exists(path):
            raise ValueError(
                f"{path}, which another process wrote, is missing here. Save to"
                " a directory that all processes share, or pass shared=False."
            )
    text = json.dumps(
        {"format": _FORMAT, "version": _VERSION, **manifest}, sort_keys=True
    )
    path = os.path.join(directory, MANIFEST)
    before = _listed_files(directory)
    new = f"{path}.{token}.new"
    with tf.io.gfile.GFile(new, "w") as file:
        file.write(
            json.dumps(
                {"sha256": _checksum_of(text.encode()), "manifest": text},
                indent=1,
            )
        )
    _to_disk(new)
    _to_disk(directory)
    tf.io.gfile.rename(new, path, overwrite=True)
    _to_disk(directory)
    if is_locked:
        # Also remove the files of saves that did not complete.
        before = tf.io.gfile.listdir(directory)
    for name in before:
        if _FILES.fullmatch(name) and name not in manifest["files"]:
            with contextlib.suppress(tf.errors.NotFoundError):
                tf.io.gfile.remove(os.path.join(directory, name))


def remove_older(directory: str, rank: int, written: Iterable[str]) -> None:
    """Removes a process's files of earlier saves."""
    own = re.compile(rf"state-[0-9a-f]{{16}}-{rank:05d}\..*")
    for name in set(tf.io.gfile.listdir(directory)) - set(written):
        if own.fullmatch(name):
            tf.io.gfile.remove(os.path.join(directory, name))


def _listed_files(directory: str) -> list[str]:
    """Lists the files of a directory's save, none if the save is damaged."""
    try:
        files = read_manifest(directory).get("files", ())
    except (FileNotFoundError, ValueError):
        return []
    return [name for name in files if _VALUES.fullmatch(name)]


def read_manifest(directory: str) -> dict[str, Any]:
    """Reads the manifest of a directory, and checks it."""
    path = os.path.join(directory, MANIFEST)
    if not has_save(directory):
        raise FileNotFoundError(
            f"{directory!r} holds no saved group state: there is no {MANIFEST}."
            " Pass the directory that GroupState.save() wrote."
        )
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            outer = json.loads(file.read())
        text = outer["manifest"]
        is_whole = outer["sha256"] == _checksum_of(text.encode())
        manifest = json.loads(text) if is_whole else {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged, or not a group state's manifest: {error}."
            " Restore another save."
        ) from error
    if not is_whole:
        raise ValueError(
            f"{path} is damaged: its content does not match its checksum."
            " Restore another save."
        )
    if manifest.get("format") != _FORMAT:
        raise ValueError(
            f"{path} is not a group state's manifest. Restore another save."
        )
    if manifest.get("version") != _VERSION:
        raise ValueError(
            f"{path} has version {manifest.get('version')}, but this tf_xshard"
            f" reads version {_VERSION}. Restore the save with the tf_xshard"
            " that wrote it."
        )
    return manifest


def read_values(
    directory: str, manifest: Mapping[str, Any], names: Sequence[str]
) -> dict[str, np.ndarray]:
    """Checks all files of a save, then reads the named values."""
    for name, checksum in sorted(manifest["files"].items()):
        if not _VALUES.fullmatch(name):
            raise ValueError(
                f"The manifest in {directory!r} names the file {name!r}, which"
                " no save writes. Nothing was restored. Restore another save."
            )
        path = os.path.join(directory, name)
        if not tf.io.gfile.exists(path):
            raise ValueError(
                f"{path} is missing: the save is incomplete. Restore another"
                " save."
            )
        if _checksum(path) != checksum:
            raise ValueError(
                f"{path} is damaged: its content does not match its checksum."
                " Restore another save."
            )
    wanted, values = set(names), {}
    prefixes = {name.partition(".")[0] for name in manifest["files"]}
    for prefix in sorted(prefixes):
        reader = tf.train.load_checkpoint(os.path.join(directory, prefix))
        for name in wanted & set(reader.get_variable_to_shape_map()):
            values[name] = np.asarray(reader.get_tensor(name))
    if missing := wanted - set(values):
        raise ValueError(
            f"{directory!r} has no values for {sorted(missing)[:3]}. Nothing"
            " was restored. Restore another save."
        )
    return values


def remove(directory: str, unless_saved: bool = False) -> None:
    """Removes a save atomically, the manifest first, and no other files."""
    with locked(directory):
        if has_save(directory):
            if unless_saved or not _has_own_manifest(directory):
                return
            tf.io.gfile.remove(os.path.join(directory, MANIFEST))
        for name in tf.io.gfile.listdir(directory):
            if _FILES.fullmatch(name):
                tf.io.gfile.remove(os.path.join(directory, name))
        if not tf.io.gfile.listdir(directory):
            tf.io.gfile.rmtree(directory)


def _checksum_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _checksum(path: str) -> str:
    result = hashlib.sha256()
    with tf.io.gfile.GFile(path, "rb") as file:
        while data := file.read(_BYTES_AT_ONCE):
            result.update(data)
    return result.hexdigest()


def _to_disk(path: str) -> None:
    """Flushes a local file or directory to disk."""
    # An object store flushes a file when the file is closed.
    if "://" not in path:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
