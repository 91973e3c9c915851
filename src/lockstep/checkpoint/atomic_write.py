"""Writing a file so that it is whole or not there, whatever kills the writer, and clearing up after killed ones.

    1  beside = .NAME.<random>.tmp, created and locked     a kill here or later leaves `beside`, and NAME as it was
    2  the data, fsync(beside)
    3  rename beside -> NAME                               from here on NAME is the new file, whole
    4  fsync(directory)                                    from here on also after a power cut

[Note: stale temporary files] The writer holds a kernel lock (flock) on `beside` until it is renamed. The lock is
gone with the writer, so a file that can be locked belongs to nobody: no pid is asked, which would say nothing on
another host.
"""

import errno
import fcntl
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_TEMP_NAME = re.compile(r"\..+\.(ckpt|jsonl|yaml)\.[0-9a-f]+\.tmp")


@contextmanager
def atomic_write(path: Path) -> Iterator[int]:
    """Yield the descriptor of a new file, which takes the place of `path` when the block ends well.

    When it does not, or the file cannot be flushed or renamed, the file that was there is still there.

    Raises:
        OSError: The directory or the disk does not take it, or what is there is no file: a device would be replaced.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "is there already, and is no regular file", str(path))
    temp, descriptor = _create_locked_temp(path)
    try:
        yield descriptor
        os.fsync(descriptor)
        temp.replace(path)
    except BaseException:
        with suppress(OSError):  # the directory may be what is gone
            temp.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)  # not before the rename: the lock would go
    _fsync_directory(path.parent)


def atomic_write_text(path: Path, text: str) -> None:
    """Let a file hold a text, in UTF-8, or what it held before.

    Raises:
        OSError: The directory or the disk does not take it.
    """
    with atomic_write(path) as descriptor, os.fdopen(os.dup(descriptor), "w", encoding="utf-8") as file:
        file.write(text)


def remove_stale_temp_files(directory: Path) -> None:
    """Remove what killed writers have left in a directory. [Note: stale temporary files].

    Raises:
        OSError: The directory cannot be read.
    """
    for path in directory.iterdir():
        if _TEMP_NAME.fullmatch(path.name):
            with suppress(OSError):  # of a live writer, or gone by now, or on a file system without locks
                _remove_if_unlocked(path)


def _create_locked_temp(path: Path) -> tuple[Path, int]:
    while True:
        temp = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        descriptor = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with suppress(OSError):  # a file system without locks: then nobody else can lock it either
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return temp, descriptor
        os.close(descriptor)  # somebody took it for a leftover before it was locked


def _remove_if_unlocked(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(descriptor)


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
