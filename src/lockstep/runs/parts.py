"""The parts in which predictions are written before they become one file: OUTPUT.parts. Needs no torch.

job.json                          what is predicted; another prediction does not continue it
rows-000000000000-000000012800.npz    the columns of these samples
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.checkpoint.atomic_write import atomic_write_text, remove_stale_temp_files
from lockstep.errors import UsageError
from lockstep.runs.saved_runs import SavedRun

_JOB_NAME = "job.json"
_CONFIG_KEYS = {
    *("model", "model_args", "data", "data_args", "collate", "batch_size", "num_shards"),
    *("precision", "seed", "deterministic", "threads_per_worker"),
}
"""Keys of a config from which predictions follow; the command line may replace their values."""
_PART = re.compile(r"rows-(\d{12})-(\d{12})\.npz")


def part_name(start: int, stop: int) -> str:
    """Return the file name of the samples from `start` up to `stop`."""
    return f"rows-{start:012d}-{stop:012d}.npz"


def find_parts(folder: Path) -> list[tuple[Path, int]]:
    """Return the parts that follow on each other from sample 0 on, each with the number of the sample after it."""
    by_start = {
        int(match[1]): (path, int(match[2])) for path in folder.iterdir() if (match := _PART.fullmatch(path.name))
    }
    found: list[tuple[Path, int]] = []
    while (following := by_start.get(found[-1][1] if found else 0)) is not None:
        found.append(following)
    return found


def describe_job(
    saved: SavedRun, *, data: str, weights: str | None, output_function: str | None, has_targets: bool
) -> dict[str, Any]:
    """Return all that predictions follow from, as JSON values: the options of `lockstep predict`, and of the config."""
    return {
        "checkpoint": saved.digest,
        "--data": data,
        "--weights": weights,
        "--output-function": output_function,
        "--no-targets": not has_targets,
        **saved.config.model_dump(mode="json", include=_CONFIG_KEYS),
    }


def open_parts(folder: Path, job: Mapping[str, Any]) -> int:
    """Make the folder, or continue with it; return how many samples it has (local)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_stale_temp_files(folder)
        path = folder / _JOB_NAME
        parts = find_parts(folder)
        if not parts or not path.exists():  # one that failed before its first part may have been a mistyped command
            atomic_write_text(path, json.dumps(job, indent=2, sort_keys=True) + "\n")
            return 0
        before = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder} cannot be used for predictions: {error}. Choose another output file. (LS814)"
        ) from error
    changed = [key for key in sorted({*before, *job}) if before.get(key) != job.get(key)]
    if changed:
        raise UsageError(
            f"{folder} holds a part of another prediction, with another {', '.join(changed)}. Delete the folder to "
            "begin again, or choose another output file. (LS814)"
        )
    return parts[-1][1]


def remove_parts(folder: Path) -> None:
    """Remove the folder and all that `open_parts` and the writer have made in it."""
    for path in folder.iterdir():
        if path.name == _JOB_NAME or _PART.fullmatch(path.name):
            path.unlink()
    folder.rmdir()
