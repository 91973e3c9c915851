"""The run directory: the folder of one run, created once and never overwritten.

runs/digits/
  config.yaml            the resolved config
  environment.json       how and where the run was started, each time; see environment.py
  metrics.jsonl          one JSON object per line: steps and epochs
  step-00000132.ckpt     the newest checkpoints and the best one, named by the number of updates
  best.ckpt              a link to the best one, if the config names a metric; see retention.py
  curves.png             loss and accuracy
  report.html            a page about the run, for a browser
  recording/             what each worker did last; see lockstep.recording
  tensorboard/, wandb/   what trackers write; see report/trackers
  .tracked               the key of the run for trackers
  .lock                  locked while a training uses the directory; see run_lock.py
  .ended                 how the run ended, once it has; see ending.py
  .control               where `lockstep scale` asks the launcher, while it runs; see launch/control.py
  .job                   which job the run belongs to, with resume: auto; see own_run.py
"""

import contextlib
import glob
import itertools
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from lockstep.checkpoint.atomic_write import atomic_write_text, is_temp_name
from lockstep.checkpoint.step_files import find_checkpoints
from lockstep.errors import RunDirectoryError
from lockstep.launch.control import CONTROL_NAME
from lockstep.runs.config import Config
from lockstep.runs.run_lock import LOCK_NAME, explain_holder, find_holder

if TYPE_CHECKING:  # `lockstep train` makes a run directory without torch
    from lockstep.checkpoint import Checkpoint
    from lockstep.engine.restoring import Stateful
    from lockstep.engine.state_file import Scheduler
    from lockstep.engine.trainer import Trainer

CONFIG_NAME = "config.yaml"
ENVIRONMENT_NAME = "environment.json"
METRICS_NAME = "metrics.jsonl"
CURVES_NAME = "curves.png"
REPORT_NAME = "report.html"
BEST_NAME = "best.ckpt"
JOB_NAME = ".job"
ENDED_NAME = ".ended"
RECORDING_NAME = "recording"
TRACKED_NAME = ".tracked"
_TRACKER_FOLDERS = {"tensorboard", "wandb"}

_RUNS = Path("runs")


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
    try:
        atomic_write_text(
            path,
            "# All values of this run. Modules are searched in the folder of the config file: to train with this one,\n"
            f"# copy it to the folder of its modules. The run was started in {Path.cwd()}.\n{config.to_yaml()}",
        )
    except OSError as error:
        if not find_checkpoints(run_dir):
            discard_unused(run_dir)
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
    names = {CONFIG_NAME, CONTROL_NAME, ENDED_NAME, ENVIRONMENT_NAME, JOB_NAME, LOCK_NAME, RECORDING_NAME}
    names |= {TRACKED_NAME, *_TRACKER_FOLDERS}
    is_written = path.name in names or path.suffix == ".patch"
    return is_written or is_temp_name(path.name)


def _is_left_over(path: Path) -> bool:
    """Whether a run made this directory and was killed before its first step; another one may take it over."""
    paths = list(path.iterdir()) if path.is_dir() else []
    is_of_a_run = LOCK_NAME in {each.name for each in paths}  # a run writes that first
    return is_of_a_run and all(map(_is_made_before_training, paths)) and find_holder(path) is None


def find_numbered(name: str) -> dict[int, Path]:
    """Return the directories runs/NAME, runs/NAME-2, ... by their number (local)."""
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
    """Make best.ckpt a symbolic link to a checkpoint of the run, atomically."""
    link = run_dir / BEST_NAME
    if link.is_symlink() and link.readlink() == Path(path.name):
        return
    beside = run_dir / f".{BEST_NAME}.new"
    beside.unlink(missing_ok=True)
    beside.symlink_to(path.name)
    beside.replace(link)


def make_checkpoint(
    trainer: "Trainer",
    scheduler: "Scheduler | None",
    config: Config | None,
    metrics: Mapping[str, float | None],
    extra: "Mapping[str, Stateful]" = MappingProxyType({}),
) -> "Checkpoint":
    """Return a checkpoint of a run, with the live tensors; the saver computes its digest (local)."""
    from lockstep.engine.state_file import pack_state

    values = None if config is None else json.loads(config.model_dump_json())
    return pack_state(trainer.state_dict(), scheduler, values, metrics, extra)


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
