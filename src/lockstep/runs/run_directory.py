"""The run directory: a run's own folder, made once and never written over.

runs/digits/
  config.yaml            the resolved config
  environment.json       what it was started with and on, each time; see environment.py
  metrics.jsonl          one JSON object per line: steps and epochs
  step-00000132.ckpt     the newest checkpoints, and the best, named by the updates behind them
  best.ckpt              a link to the best one, where the config names a metric; see keep.py
  curves.png             loss and accuracy
  .lock                  locked while a training is in here; see run_lock.py
"""

import contextlib
import glob
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path

from lockstep.checkpoint import Checkpoint
from lockstep.checkpoint.atomic_write import atomic_write_text
from lockstep.checkpoint.step_files import find_checkpoints
from lockstep.engine.state_file import Scheduler, pack_state
from lockstep.engine.trainer import Trainer
from lockstep.errors import RunDirectoryError
from lockstep.runs.config import Config
from lockstep.runs.environment import ENVIRONMENT_NAME
from lockstep.runs.run_lock import LOCK_NAME

CONFIG_NAME = "config.yaml"
METRICS_NAME = "metrics.jsonl"
CURVES_NAME = "curves.png"
BEST_NAME = "best.ckpt"

_RUNS = Path("runs")


def make_run_directory(run_dir: str | None, name: str) -> Path:
    """Make the directory of a new run.

    Args:
        run_dir: Where; None for the first free one of runs/NAME, runs/NAME-2, ...
        name: What a numbered one is called.

    Raises:
        RunDirectoryError: It exists already, or cannot be made.
    """
    if run_dir is None:
        return _make_numbered(name)
    try:
        Path(run_dir).mkdir(parents=True)
    except FileExistsError as error:
        raise RunDirectoryError(_explain_existing(Path(run_dir))) from error
    except OSError as error:
        raise RunDirectoryError(f"The run directory {run_dir} cannot be made: {error}.") from error
    return Path(run_dir)


def _explain_existing(path: Path) -> str:
    start = f"The run directory {path} exists already, and a run is never written over."
    if path.is_dir() and find_checkpoints(path):
        return f"{start} Go on with it with --resume, or choose another name: run_dir=NAME."
    return f"{start} It holds no checkpoint to go on from: delete it, or choose another name: run_dir=NAME."


def write_config(run_dir: Path, config: Config) -> None:
    """Write the resolved config into a run's directory.

    Raises:
        RunDirectoryError: It cannot be written; an empty directory is removed again.
    """
    path = run_dir / CONFIG_NAME
    try:
        atomic_write_text(
            path,
            "# Every value of this run. Import paths are looked for beside the config file: to train from this one,\n"
            f"# copy it to where its modules are. The run was begun in {Path.cwd()}.\n{config.to_yaml()}",
        )
    except OSError as error:
        if not find_checkpoints(run_dir):
            discard_unused(run_dir)
        raise RunDirectoryError(f"{path} cannot be written: {error}. Make room, or choose another run_dir.") from error


def discard_unused(run_dir: Path) -> None:
    """Remove the directory of a run that ended before it began, so that its name is free for the next try."""
    paths = list(run_dir.iterdir())
    if all(path.name in {CONFIG_NAME, ENVIRONMENT_NAME, LOCK_NAME} or path.suffix == ".patch" for path in paths):
        for path in paths:
            path.unlink()
        run_dir.rmdir()


def find_run_directory(run_dir: str | None, name: str) -> Path:
    """Return the directory of a run to resume: `run_dir`, or the newest of runs/NAME, runs/NAME-2, ... that has any.

    Raises:
        RunDirectoryError: There is none.
    """
    numbered = re.compile(rf"{re.escape(name)}(?:-(\d+))?")
    found = {
        int(match[1] or 1): path
        for path in _RUNS.glob(f"{glob.escape(name)}*")
        if (match := numbered.fullmatch(path.name)) and find_checkpoints(path)
    }
    path = Path(run_dir) if run_dir is not None else found[max(found)] if found else _RUNS / name
    if not path.is_dir():
        raise RunDirectoryError(f"There is no run directory {path} to resume. Leave --resume out to begin a run.")
    if not find_checkpoints(path):
        raise RunDirectoryError(
            f"{path} holds no checkpoint to resume from: the run ended before its first epoch did. Delete it, or "
            "choose another name (run_dir=NAME), and leave --resume out."
        )
    return path


def link_best_checkpoint(run_dir: Path, path: Path) -> None:
    """Let best.ckpt be a link to a checkpoint of the run; at no moment is it missing, or a link to nothing.

    Raises:
        OSError: The directory cannot be written.
    """
    link = run_dir / BEST_NAME
    if link.is_symlink() and link.readlink() == Path(path.name):
        return
    beside = run_dir / f".{BEST_NAME}.new"
    beside.unlink(missing_ok=True)
    beside.symlink_to(path.name)
    beside.replace(link)


def make_checkpoint(
    trainer: Trainer, scheduler: Scheduler | None, config: Config | None, metrics: Mapping[str, float | None]
) -> Checkpoint:
    """Return where a run stands; its tensors are the live ones, and its digest is for the saver to compute (local).

    Args:
        trainer: What is trained.
        scheduler: The scheduler, whoever steps it.
        config: The run's, if it has one.
        metrics: Means over the test set, by name; finite or None.

    Raises:
        CheckpointError: The state holds something that a checkpoint cannot store.
    """
    return pack_state(
        trainer.state_dict(), scheduler, None if config is None else json.loads(config.model_dump_json()), metrics
    )


def _make_numbered(name: str) -> Path:
    try:
        _RUNS.mkdir(exist_ok=True)
        for number in itertools.count(1):
            path = _RUNS / (name if number == 1 else f"{name}-{number}")
            with contextlib.suppress(FileExistsError):  # the file system decides between two runs that begin at once
                path.mkdir()
                return path
    except OSError as error:
        raise RunDirectoryError(f"A run directory under {_RUNS} cannot be made: {error}.") from error
    raise AssertionError("counting never ends")
