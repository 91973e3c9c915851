"""Atomic file writes: a file under its final name is complete, even if the writing process is killed.

    0  remove each TEMP of NAME that has no writer       see below
    1  create TEMP = .NAME.<random>.tmp, flock(TEMP)     killed from here on: TEMP stays behind, NAME is unchanged
    2  write the data, fsync(TEMP)
    3  rename TEMP -> NAME                               NAME is the new file, complete
    4  fsync(directory)                                  the rename survives a power failure

[Note: stale temporary files] The writer holds a lock (flock) on TEMP until the rename. The kernel releases the lock
when the writer ends. So a temporary file that can be locked has no writer any more and can be removed. Writing a pid to
the file instead would not do, because it means nothing on another host.
"""

import errno
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_TAIL_BYTES = 1 << 18
"""How much of the end of a file is read to find the lines in it."""
_TEMP_NAME = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")


@contextmanager
def atomic_write(path: Path) -> Iterator[int]:
    """Yield the descriptor of a new file, which replaces `path` when the block ends without an exception.

    If the block raises, or fsync or rename fails, the file at `path` is unchanged. OSError if `path` is not a regular
    file: the rename would replace a device such as /dev/null.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "it exists and is not a regular file", str(path))
    remove_stale_temp_files(path.parent, re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{32}}\.tmp"))
    temp, descriptor = _create_locked_temp(path)
    try:
        yield descriptor
        os.fsync(descriptor)
        temp.replace(path)
    except BaseException:
        with suppress(OSError):  # the directory may have been removed
            temp.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)  # not before the rename, because closing releases the lock
    fsync_path(path.parent)


def atomic_write_text(path: Path, text: str) -> None:
    with atomic_write(path) as descriptor, os.fdopen(os.dup(descriptor), "w", encoding="utf-8") as file:
        file.write(text)


@contextmanager
def atomic_replace(target: Path) -> Iterator[Path]:
    """Yield a path in the same directory for a file or folder, which replaces `target` unless the block raises.

    Others write it by its name, so it is not locked, and what a killed writer leaves is nobody's to remove.
    """
    path = target.with_name(f".{target.name}.{uuid.uuid4().hex}.new")
    old = path.with_suffix(".old")
    try:
        yield path
        fsync_path(path)
        if target.is_dir():  # rename(2) does not replace a directory that is not empty
            target.rename(old)
        path.replace(target)
        fsync_path(target.parent)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    finally:
        for leftover in (path, old):
            if leftover.is_dir():
                shutil.rmtree(leftover)
            leftover.unlink(missing_ok=True)


def is_temp_name(name: str) -> bool:
    """Return whether a file of this name is one of ours that has not got its final name yet."""
    return _TEMP_NAME.fullmatch(name) is not None


def remove_stale_temp_files(directory: Path, name: re.Pattern[str] = _TEMP_NAME) -> None:
    """Remove the temporary files of killed writers from a directory. [Note: stale temporary files]."""
    found: list[Path] = []
    with suppress(OSError):  # a directory in which files can be made, but that cannot be read
        found = [path for path in directory.iterdir() if name.fullmatch(path.name)]
    for path in found:
        _remove_if_stale(path)


def _create_locked_temp(path: Path) -> tuple[Path, int]:
    while True:
        temp = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        descriptor = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with suppress(OSError):  # if the file system has no locks, no other process can lock and remove the file either
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return temp, descriptor
        os.close(descriptor)  # another process removed it as stale before it was locked here


def _remove_if_stale(path: Path) -> None:
    with suppress(OSError):  # its writer is alive, or it was removed, or the file system has no locks
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            os.close(descriptor)


def fsync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_half_line(path: Path) -> list[str]:
    """Remove what follows the last end of a line; return the last whole lines."""
    with path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - _TAIL_BYTES)
        file.seek(start)
        tail = file.read()
        whole = tail[: tail.rfind(b"\n") + 1]
        if whole or not start:
            file.truncate(start + len(whole))
        else:
            file.write(b"\n")
    lines = whole.decode("utf-8", errors="replace").splitlines()
    return lines[1:] if start else lines
