"""One training per run directory at a time.

The lock is the kernel's (flock), held by the process that opened the run: it is gone with that process, whatever kills
it, and that the file is there says nothing. On NFS the server keeps it, so that it holds between hosts, unless it was
mounted with `nolock` or `local_lock`. A file system without locks, as that of some object stores, is warned of: there
two trainings are the user's to keep apart.
"""

import errno
import fcntl
import os
import socket
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


@contextmanager
def lock_run(run_dir: Path) -> Iterator[None]:
    """Keep every other training out of a run's directory.

    Raises:
        RunDirectoryError: Another one is in it, or no lock can be made there.
    """
    while True:
        try:
            file = (run_dir / LOCK_NAME).open("a+b", buffering=0)
        except OSError as error:
            raise RunDirectoryError(
                f"The run directory {run_dir} cannot be locked: {error}. Make it writable, or choose another run_dir."
            ) from error
        with file:
            _close_in_children(file)
            _lock(file.fileno(), run_dir)
            if not os.fstat(file.fileno()).st_nlink:
                continue  # a run that ended before it began took its directory away: nobody else would meet this lock
            with suppress(OSError):  # a full disk; who holds the lock is a help and no more
                file.truncate(0)
                file.write(f"process {os.getpid()} on host {socket.gethostname()}".encode())
            yield
            return


def _lock(descriptor: int, run_dir: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, _HOLDER_BYTES, 0).decode(errors="replace") or "another process"
        raise RunDirectoryError(
            f"Another training is in the run directory {run_dir}: {holder}. Two in one directory would remove each "
            "other's checkpoints. Wait until it has ended, or stop it, or choose another name: run_dir=NAME."
        ) from error
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise RunDirectoryError(f"The run directory {run_dir} cannot be locked: {error}.") from error
        warnings.warn(
            f"The file system of {run_dir} has no locks ({error}): start no second training in this directory.",
            stacklevel=4,
        )


def _close_in_children(file: FileIO) -> None:
    """Close the file in forked children, who would keep the lock for as long as they live."""
    found = weakref.ref(file)

    def close() -> None:
        if (inherited := found()) is not None:
            inherited.close()  # which leaves the parent's lock; to unlock it here would not

    os.register_at_fork(after_in_child=close)
