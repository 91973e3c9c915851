"""`resume: auto`: finding the run of a job whose workers are started again, by torchrun, Slurm or Kubernetes.

The run is that of `run_dir`. Without `run_dir` it is the one of runs/NAME, runs/NAME-2, ... that belongs to this job:
a new directory holds the job's name. So another run is never continued, and never written over.
"""

import json
from pathlib import Path

from lockstep.errors import ConfigError, RunDirectoryError
from lockstep.runs.changes import find_changes
from lockstep.runs.config import Config, read_config
from lockstep.runs.directory import CONFIG_NAME, JOB_NAME, find_numbered


def find_own_run(config: Config, name: str, job: str | None) -> Path | None:
    """Return the directory of the run of this job; None if it has not begun (local)."""
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
    """Write into a new directory to which job it belongs (local)."""
    if job is None:
        return
    try:
        (run_dir / JOB_NAME).write_text(job, encoding="utf-8")
    except OSError as error:
        raise RunDirectoryError(f"{run_dir / JOB_NAME} cannot be written: {error}. Free disk space. (LS810)") from error


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
