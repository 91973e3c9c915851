"""One training per run directory at a time.

The process that opened the run holds a lock of the kernel (flock), which is released when the process ends, even if it
is killed. The existence of the lock file means nothing. On NFS the server keeps the lock, so it works between hosts,
unless the file system was mounted with `nolock` or `local_lock`. On a file system without locks, such as those of some
object stores, there is a warning, and nothing prevents two trainings in one directory.
"""

import errno
import fcntl
import os
import socket
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from lockstep.errors import RunDirectoryError

LOCK_NAME = ".lock"

_WITHOUT_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_HOLDER_BYTES = 200
_POLL_SECONDS = 0.1
_MAKING_SECONDS = 1.0
"""How long a run may take from making its directory to locking it."""
_LOOK_SECONDS = 0.02
_NUM_ATTEMPTS = 10


@contextmanager
def lock_run(run_dir: Path, patience_seconds: float = 0.0) -> Iterator[None]:
    """Lock a run directory, so that no other training uses it; one that uses it has `patience_seconds` to end."""
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            file = (run_dir / LOCK_NAME).open("a+b", buffering=0)
        except OSError as error:
            raise RunDirectoryError(
                f"The run directory {run_dir} cannot be locked: {error}. "
                "Make it writable, or choose another run_dir. (LS811)"
            ) from error
        with file:
            _close_in_children(file)
            while not _lock(file.fileno(), run_dir, must=time.monotonic() >= deadline):
                time.sleep(_POLL_SECONDS)
            if not os.fstat(file.fileno()).st_nlink:
                continue  # a failed run removed its directory with this file, so this lock would protect nothing
            with suppress(OSError):  # the disk may be full; the text is only for messages
                file.truncate(0)
                file.write(f"process {os.getpid()} on host {socket.gethostname()}".encode())
            yield
            return


def find_holder(run_dir: Path) -> str | None:
    """Return the process that has locked a run directory, in words; None if there is none (local).

    A directory that is just being made is not locked yet for a moment. So where it is empty this waits a little.
    """
    deadline = time.monotonic() + _MAKING_SECONDS
    while run_dir.is_dir() and not any(run_dir.iterdir()) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    try:
        descriptor = os.open(run_dir / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_holder(descriptor)
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(descriptor)
    return None


def explain_holder(run_dir: Path, holder: str) -> str:
    return (
        f"Another training uses the run directory {run_dir}: {holder}. Two trainings in one directory would remove "
        "each other's checkpoints. Wait until it has ended, stop it, or choose another name: run_dir=NAME. (LS811)"
    )


def _read_holder(descriptor: int) -> str:
    return os.pread(descriptor, _HOLDER_BYTES, 0).decode(errors="replace") or "another process"


def _lock(descriptor: int, run_dir: Path, *, must: bool) -> bool:
    """Lock the file; return False if another process has locked it, and there is time to try it again."""
    try:
        _lock_now(descriptor)
    except BlockingIOError as error:
        if not must:
            return False
        raise RunDirectoryError(explain_holder(run_dir, _read_holder(descriptor))) from error
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise RunDirectoryError(f"The run directory {run_dir} cannot be locked: {error}. (LS811)") from error
        warnings.warn(
            f"The file system of {run_dir} has no locks ({error}). "
            "Do not start a second training in this directory. (LS811)",
            stacklevel=4,
        )
    return True


def _lock_now(descriptor: int) -> None:
    """Lock a file; not at the first attempt alone, because `find_holder` of another process locks it for a moment."""
    for _ in range(_NUM_ATTEMPTS - 1):
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_LOOK_SECONDS)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _close_in_children(file: FileIO) -> None:
    """Close the file in forked child processes, which would otherwise keep the lock as long as they run."""
    found = weakref.ref(file)

    def close() -> None:
        if (inherited := found()) is not None:
            inherited.close()  # closing keeps the parent's lock; LOCK_UN here would release it

    os.register_at_fork(after_in_child=close)
