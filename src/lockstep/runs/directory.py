"""The run directory: the folder of one run, created once and never overwritten.

runs/digits/
  config.yaml            the resolved config
  environment.json       how and where the run was started, each time; see environment.py
  metrics.jsonl          one JSON object per line: steps and epochs
  audit.jsonl            with audit: true, the bits of each step; see audit.py
  step-00000132.ckpt     the newest checkpoints and the best one, named by the number of updates
  best.ckpt              a link to the best one, if the config names a metric; see saving.py
  report.html            a page about the run, for a browser: curves, where the time went, ...
  recording/             what each worker did last; see lockstep.recording
  tensorboard/, wandb/   what trackers write; see report/trackers
  .tracked               the key of the run for trackers
  .lock                  locked while a training uses the directory; see `lock_run`
  .ended                 how the run ended, once it has; see listing.py
  .control               where `lockstep scale` asks the launcher, while it runs; see launch/control.py
  .job                   which job the run belongs to, with resume: auto; see `find_own_run`
"""

import contextlib
import errno
import fcntl
import glob
import itertools
import json
import os
import re
import shutil
import socket
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from lockstep.checkpoint.atomic_write import atomic_write_text, is_temp_name
from lockstep.checkpoint.step_files import find_checkpoints
from lockstep.errors import ConfigError, RunDirectoryError
from lockstep.launch.control import CONTROL_NAME
from lockstep.processes.forking import call_in_children
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.recording.file_format import RECORDING_NAME
from lockstep.runs.changes import find_changes
from lockstep.runs.config import Config, read_config

CONFIG_NAME = "config.yaml"
ENVIRONMENT_NAME = "environment.json"
METRICS_NAME = "metrics.jsonl"
AUDIT_NAME = "audit.jsonl"
REPORT_NAME = "report.html"
BEST_NAME = "best.ckpt"
JOB_NAME = ".job"
ENDED_NAME = ".ended"
TRACKED_NAME = ".tracked"
LOCK_NAME = ".lock"
_TRACKER_FOLDERS = {"tensorboard", "wandb"}

_RUNS = Path("runs")
_WITHOUT_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_HOLDER_BYTES = 200
_POLL_SECONDS = 0.1
_MAKING_SECONDS = 1.0
"""How long a run may take from making its directory to locking it."""
_LOOK_SECONDS = 0.02
_NUM_ATTEMPTS = 10


def make_run_directory(run_dir: str | None, name: str) -> Path:
    """Create the directory of a new run, without `run_dir` the first free one of runs/NAME, runs/NAME-2, ...

    A `run_dir` of a run that was killed before its first step is used again: lock it before it is written.
    """
    if run_dir is None:
        return _make_numbered(name)
    try:
        Path(run_dir).mkdir(parents=True)
    except FileExistsError as error:
        if not _is_left_over(Path(run_dir)):
            raise RunDirectoryError(_explain_existing(Path(run_dir))) from error
    except OSError as error:
        raise RunDirectoryError(f"The run directory {run_dir} cannot be created: {error}. (LS810)") from error
    return Path(run_dir)


def _make_numbered(name: str) -> Path:
    try:
        _RUNS.mkdir(exist_ok=True)
        for number in itertools.count(1):
            path = _RUNS / (name if number == 1 else f"{name}-{number}")
            with contextlib.suppress(FileExistsError):  # mkdir is atomic, if two runs start at once
                path.mkdir()
                return path
    except OSError as error:
        raise RunDirectoryError(f"A run directory under {_RUNS} cannot be created: {error}. (LS810)") from error
    raise AssertionError("unreachable: the loop ends by return or exception")


def _explain_existing(path: Path) -> str:
    if (holder := find_holder(path)) is not None:
        return explain_holder(path, holder)
    start = f"The run directory {path} exists already, and a run is never overwritten."
    if path.is_dir() and find_checkpoints(path):
        return f"{start} Continue the run with --resume, or choose another name: run_dir=NAME. (LS810)"
    return f"{start} It holds no checkpoint to resume from: delete it, or choose another name: run_dir=NAME. (LS810)"


def write_config(run_dir: Path, config: Config) -> None:
    """Write the resolved config into a run's directory; if that fails, remove the directory of an unused run."""
    path = run_dir / CONFIG_NAME
    head = (
        "# All values of this run. Modules are searched in the folder of the config file: to train with this one,\n"
        f"# copy it to the folder of its modules. The run was started in {Path.cwd()}.\n"
    )
    try:
        with errors_of_writing(path):
            atomic_write_text(path, f"{head}{config.to_yaml()}")
    except RunDirectoryError:
        if not find_checkpoints(run_dir):
            discard_unused(run_dir)
        raise


@contextmanager
def errors_of_writing(path: Path) -> Iterator[None]:
    """Turn an error of the file system into one that names the file of a run, and what to do."""
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(
            f"{path} cannot be written: {error}. Free disk space, or choose another run_dir. (LS810)"
        ) from error


def discard_unused(run_dir: Path) -> None:
    """Remove the directory of a run that failed before its first step, so that its name is free again."""
    with contextlib.suppress(FileNotFoundError):  # the directory was removed under the run, whose error says so
        paths = list(run_dir.iterdir())
        if all(map(_is_made_before_training, paths)):
            for path in paths:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            run_dir.rmdir()


def _is_made_before_training(path: Path) -> bool:
    names = {AUDIT_NAME, CONFIG_NAME, CONTROL_NAME, ENDED_NAME, ENVIRONMENT_NAME, JOB_NAME, LOCK_NAME, RECORDING_NAME}
    names |= {TRACKED_NAME, *_TRACKER_FOLDERS}
    is_written = path.name in names or path.suffix == ".patch"
    return is_written or is_temp_name(path.name)


def _is_left_over(path: Path) -> bool:
    """Whether a run made this directory and was killed before its first step; another one may take it over."""
    paths = list(path.iterdir()) if path.is_dir() else []
    is_of_a_run = LOCK_NAME in {each.name for each in paths}  # a run writes that first
    return is_of_a_run and all(map(_is_made_before_training, paths)) and find_holder(path) is None


def find_numbered(name: str) -> dict[int, Path]:
    numbered = re.compile(rf"{re.escape(name)}(?:-(\d+))?")
    return {
        int(match[1] or 1): path
        for path in _RUNS.glob(f"{glob.escape(name)}*")
        if (match := numbered.fullmatch(path.name))
    }


def find_run_directory(run_dir: str | None, name: str) -> Path:
    """Return the directory to resume from: `run_dir`, or the last with a checkpoint of runs/NAME, runs/NAME-2, ..."""
    found = {number: path for number, path in find_numbered(name).items() if find_checkpoints(path)}
    path = Path(run_dir) if run_dir is not None else found[max(found)] if found else _RUNS / name
    if not path.is_dir():
        raise RunDirectoryError(
            f"There is no run directory {path} to resume. To start a new run, leave --resume out. (LS701)"
        )
    if not find_checkpoints(path):
        raise RunDirectoryError(
            f"{path} holds no checkpoint to resume from: the run ended before it saved one. Delete it, or "
            "choose another name (run_dir=NAME), and leave --resume out. (LS701)"
        )
    return path


def link_best_checkpoint(run_dir: Path, path: Path) -> None:
    link = run_dir / BEST_NAME
    if link.is_symlink() and link.readlink() == Path(path.name):
        return
    beside = run_dir / f".{BEST_NAME}.new"
    beside.unlink(missing_ok=True)
    beside.symlink_to(path.name)
    beside.replace(link)


def read_starts(path: Path) -> list[Mapping[str, Any]]:
    """Return how a run was started each time, the latest first; empty if that is not readable (local)."""
    try:
        starts: list[Mapping[str, Any]] = json.loads((path / ENVIRONMENT_NAME).read_text("utf-8"))
    except (OSError, ValueError):
        return []
    return [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []


def find_own_run(config: Config, name: str, job: str | None) -> Path | None:
    """Return the directory of the run of this job; None if it has not begun (local).

    For `resume: auto`, where the workers of a job are started again, by torchrun, Slurm or Kubernetes. The run is that
    of `run_dir`, without it the one of runs/NAME, runs/NAME-2, ... that belongs to this job: a new directory holds the
    job's name. So another run is never continued, and never written over.
    """
    if config.run_dir is not None:
        path = Path(config.run_dir)
        return path if path.is_dir() else None
    if job is None:
        raise ConfigError(
            "resume is auto, but nothing says which run is to be continued: this process does not belong to a Slurm "
            "job, and torchrun has no run id. Set run_dir, or give torchrun --standalone or --rdzv-id. (LS812)"
        )
    found = [path for _, path in sorted(find_numbered(name).items()) if _read_job(path) == job]
    return found[-1] if found else None


def note_job(run_dir: Path, job: str | None) -> None:
    if job is None:
        return
    with errors_of_writing(run_dir / JOB_NAME):
        (run_dir / JOB_NAME).write_text(job, encoding="utf-8")


def check_may_begin_again(run_dir: Path, config: Config) -> None:
    """Check that a directory without a checkpoint is that of this run, which was killed before it saved one (local)."""
    if not (run_dir / CONFIG_NAME).is_file():
        if any(not path.name.startswith(".") for path in run_dir.iterdir()):
            raise RunDirectoryError(
                f"{run_dir} exists already, and is not the directory of a run. Choose another name: "
                "run_dir=NAME. (LS810)"
            )
        return
    before = json.loads(read_config(run_dir / CONFIG_NAME).model_dump_json())
    changes = find_changes(before, json.loads(config.model_dump_json()), is_mid_epoch=False)
    others = [change for change in changes if change.needs_allow or change.reason_impossible]
    if others:
        raise RunDirectoryError(
            f"{run_dir} is of a run with another config, which has no checkpoint: {'; '.join(map(str, others))}. "
            "Delete it, or choose another name: run_dir=NAME. (LS810)"
        )


def _read_job(path: Path) -> str | None:
    try:
        return (path / JOB_NAME).read_text(encoding="utf-8")
    except OSError:
        return None


@contextmanager
def lock_run(run_dir: Path, patience_seconds: float = 0.0) -> Iterator[None]:
    """Lock a run directory, so that no other training uses it; one that uses it has `patience_seconds` to end.

    The lock is one of the kernel (flock), which is released when the process ends, even if it is killed. The existence
    of the lock file means nothing. On NFS the server keeps the lock, so it works between hosts, unless the file system
    was mounted with `nolock` or `local_lock`. On a file system without locks, such as those of some object stores,
    there is a warning, and nothing prevents two trainings in one directory.
    """
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
            stacklevel=stacklevel_of_user(),
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

    call_in_children(close)
