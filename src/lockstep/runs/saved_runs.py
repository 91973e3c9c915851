"""Finding what a run has saved: its newest checkpoint, its config, and the folder of its modules. Needs no torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint.step_files import find_checkpoints, peek_manifest
from lockstep.errors import CheckpointError, ConfigError
from lockstep.runs.config import Config, apply_overrides, parse_config
from lockstep.runs.directory import ENVIRONMENT_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """A checkpoint, and what is needed to use it."""

    checkpoint: Path
    config: Config
    """The config of the run, with the changes that the user asked for."""
    code: Path | None
    """The folder of the modules that the config names, if the run directory tells it."""
    where: str
    """At which epoch and step it was saved, in words."""
    digest: str
    """Digest of its weights."""
    metrics: Mapping[str, float | None]
    """What was measured when it was saved."""


def find_saved_run(
    path: Path, overrides: Sequence[str] = (), *, workers: int | None = None, devices: str | None = None
) -> SavedRun:
    """Find the newest checkpoint of a run directory, or take the file itself (local); None: the config's value."""
    checkpoint = path
    if path.is_dir():
        found = find_checkpoints(path)
        if not found:
            raise CheckpointError(
                f"{path} holds no checkpoint. Name a checkpoint, or a run that has saved one. (LS701)"
            )
        checkpoint = found[0]
    elif not path.exists():
        raise CheckpointError(
            f"There is no checkpoint or run directory {path}. `lockstep runs` lists the runs of this directory. (LS701)"
        )
    manifest = peek_manifest(checkpoint)
    values: Any = manifest.get("config")
    if not isinstance(values, Mapping):
        raise CheckpointError(
            f"{checkpoint} was saved without a config, by a training loop of its own: call Trainer.load and "
            "Trainer.evaluate there. (LS715)"
        )
    changed = {**json.loads(json.dumps(values)), "on_worker_loss": "stop", "min_workers": 1}
    if devices is not None:
        changed |= {"device_ids": devices, "workers": None}
    elif workers is not None and not isinstance(changed.get("device_ids"), list):
        changed["device_ids"] = str(changed.get("device_ids", "auto")).partition(":")[0]
    if workers is not None:
        changed["workers"] = workers
    apply_overrides(changed, overrides)
    epoch, step = manifest.get("epoch", 0), manifest.get("step", 0)
    return SavedRun(
        checkpoint=checkpoint,
        config=parse_config(changed, str(checkpoint)),
        code=_find_code(checkpoint.resolve().parent),
        digest=str(manifest.get("digest")),
        metrics=manifest.get("metrics") or {},
        where=f"after epoch {epoch}" if step == 0 else f"after step {step} of epoch {epoch + 1}",
    )


def search_path(saved: SavedRun, given: Path | None) -> list[str]:
    """Return the folders in which the modules of a run are searched, before the installed packages."""
    if given is not None and not given.is_dir():
        raise ConfigError(f"--code {given} is no folder. Name the folder of the modules that the config names. (LS804)")
    folders = [given] if given is not None else [*([saved.code] if saved.code is not None else []), Path.cwd()]
    return [str(folder.resolve()) for folder in folders]


def _find_code(run_dir: Path) -> Path | None:
    """Return the folder that the run has recorded, if it is still there."""
    try:
        starts = json.loads((run_dir / ENVIRONMENT_NAME).read_text("utf-8"))
        folder = Path(starts[0]["modules"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return folder if folder.is_dir() else None
