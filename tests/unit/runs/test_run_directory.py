import fcntl
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lockstep.checkpoint.step_files import find_checkpoints
from lockstep.errors import RunDirectoryError
from lockstep.runs.directory import LOCK_NAME, discard_unused, find_run_directory, lock_run, make_run_directory


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_runs_without_a_name_are_numbered() -> None:
    made = [make_run_directory(None, "digits").as_posix() for _ in range(3)]
    assert made == ["runs/digits", "runs/digits-2", "runs/digits-3"]


def test_runs_that_begin_at_once_get_directories_of_their_own() -> None:
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(lambda _: make_run_directory(None, "digits"), range(16)))
    assert len(set(made)) == 16


def test_a_named_run_is_never_written_over() -> None:
    (make_run_directory("runs/mine", "digits") / "step-1.ckpt").touch()
    with pytest.raises(RunDirectoryError, match=r"exists already.*--resume.*run_dir=NAME"):
        make_run_directory("runs/mine", "digits")


def test_a_run_that_loses_the_race_for_a_directory_is_told_who_has_it() -> None:
    # The loser was told to delete the directory, under the run that trains there.
    won = make_run_directory("mine", "a")
    with lock_run(won), pytest.raises(RunDirectoryError, match=r"Another training uses.*process \d+ on host"):
        make_run_directory("mine", "a")


def test_a_directory_that_a_killed_run_has_left_before_its_first_step_is_used_again() -> None:
    # SIGHUP while the workers started left a directory that blocked its own name.
    left = make_run_directory("mine", "a")
    for name in (".lock", "config.yaml", "environment.json", "uncommitted-1.patch", f".config.yaml.{'a' * 32}.tmp"):
        (left / name).touch()
        assert make_run_directory("mine", "a") == left  # also where there is the lock alone
    (left / "metrics.jsonl").touch()
    with pytest.raises(RunDirectoryError, match="exists already"):
        make_run_directory("mine", "a")


def test_a_directory_that_is_gone_hides_no_other_error() -> None:
    discard_unused(Path("gone"))


def test_a_directory_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="cannot be created"):
        make_run_directory("file/run", "digits")


@pytest.mark.parametrize("name", ["digits", "lr[0.1]", "lr*", "a?"])
def test_the_newest_numbered_run_is_resumed(name: str) -> None:
    # A name with brackets was taken for a pattern, which does not match itself: the first run was resumed.
    for _ in range(11):
        (make_run_directory(None, name) / "step-1.ckpt").touch()
    make_run_directory(None, name)  # one that failed before it saved anything
    make_run_directory(None, f"{name}-extra")
    assert find_run_directory(None, name) == Path(f"runs/{name}-11")


def test_no_run_to_resume_is_explained() -> None:
    with pytest.raises(RunDirectoryError, match="no run directory runs/digits"):
        find_run_directory(None, "digits")


def test_a_run_without_a_checkpoint_is_nothing_to_go_on_from() -> None:
    make_run_directory("runs/mine", "digits")
    with pytest.raises(RunDirectoryError, match=r"no checkpoint to resume from: delete it"):
        make_run_directory("runs/mine", "digits")
    with pytest.raises(RunDirectoryError, match=r"holds no checkpoint to resume from.*Delete it"):
        find_run_directory("runs/mine", "digits")


def test_checkpoints_are_found_newest_first(tmp_path: Path) -> None:
    for name in ("step-00000012.ckpt", "step-00000100.ckpt", "config.yaml", ".step-00000200.ckpt.x.tmp"):
        (tmp_path / name).touch()
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-00000100.ckpt", "step-00000012.ckpt"]


def test_only_an_unused_directory_is_discarded() -> None:
    unused, used = make_run_directory("unused", "x"), make_run_directory("used", "x")
    (unused / "config.yaml").touch()
    (used / "config.yaml").touch()
    (used / "metrics.jsonl").touch()
    discard_unused(unused)
    discard_unused(used)
    assert not unused.exists()
    assert (used / "config.yaml").exists()


# -- Two trainings in one directory. Children are forked: they hold real locks, and die real deaths --------------------


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
