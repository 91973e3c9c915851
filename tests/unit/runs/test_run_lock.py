"""Two trainings in one directory. Children are forked: they hold real locks, and die real deaths."""

import fcntl
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lockstep.errors import RunDirectoryError
from lockstep.runs.directory import LOCK_NAME, lock_run

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@contextmanager
def forked(child: Callable[[], None]) -> Iterator[int]:
    """Run something in a child, which then lives for as long as the block, and is killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            child()
            os.write(writing, b"1")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    try:
        assert os.read(reading, 1) == b"1"
        yield pid
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_second_training_is_refused_and_the_error_names_the_first(tmp_path: Path) -> None:
    lock = lock_run(tmp_path)
    with forked(lock.__enter__) as pid:
        said = f"process {pid} on host {socket.gethostname()}"
        with pytest.raises(RunDirectoryError, match=f"{said}.*run_dir=NAME"), lock_run(tmp_path):
            pass
    with lock_run(tmp_path):  # gone with its holder
        pass


def test_the_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(KeyError), lock_run(tmp_path):
            raise KeyError


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    # As a data-loading process that outlives its training would.
    with ExitStack() as children:
        with lock_run(tmp_path):
            children.enter_context(forked(lambda: None))
            with pytest.raises(RunDirectoryError, match=f"process {os.getpid()}"), lock_run(tmp_path):
                pass
        with lock_run(tmp_path):
            pass


def test_a_directory_that_is_gone_is_explained(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="cannot be locked"), lock_run(tmp_path / "gone"):
        pass


def test_a_full_disk_does_not_prevent_locking(tmp_path: Path) -> None:
    # There was no room for the holder's name in the file, and `--resume` ended in a traceback.
    def lock_without_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        lock.__enter__()

    lock = lock_run(tmp_path)
    with forked(lock_without_room), pytest.raises(RunDirectoryError, match="another process"), lock_run(tmp_path):
        pass


def test_a_lock_on_a_file_that_is_gone_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The run before takes its directory's files away between opening and locking, and ends.
    flock = fcntl.flock

    def lose_the_first(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        (tmp_path / LOCK_NAME).unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lose_the_first)
    with lock_run(tmp_path), pytest.raises(RunDirectoryError, match="Another training"), lock_run(tmp_path):
        pass


def test_a_lock_is_waited_for_where_its_holder_is_about_to_end(tmp_path: Path) -> None:
    locked = threading.Event()

    def wait() -> None:
        with lock_run(tmp_path, patience_seconds=50.0):
            locked.set()

    with ExitStack() as held, forked(lambda: held.enter_context(lock_run(tmp_path))):
        thread = threading.Thread(target=wait)
        thread.start()
        with pytest.raises(RunDirectoryError), lock_run(tmp_path):
            pass
        assert not locked.is_set()
    thread.join(50)
    assert locked.is_set()
