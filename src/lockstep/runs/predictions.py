"""Files of predictions: .csv, .npz or .parquet, made of parts without holding all of them in memory. Needs no torch.

OUTPUT.parts/
  job.json                              what is predicted; another prediction does not continue it
  rows-000000000000-000000012800.npz    the columns of these samples
"""

import csv
import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.checkpoint.atomic_write import atomic_replace, atomic_write_text, remove_stale_temp_files
from lockstep.errors import UsageError
from lockstep.runs.opening import SavedRun

SUFFIXES = (".csv", ".npz", ".parquet")
_MAX_CSV_COLUMNS = 4096
_JOB_NAME = "job.json"
_CONFIG_KEYS = {
    *("model", "model_args", "data", "data_args", "collate", "batch_size", "num_shards", "accumulate"),
    *("precision", "seed", "deterministic", "threads_per_worker", "portable"),
}
"""Keys of a config from which predictions follow; the command line may replace their values."""
_PART = re.compile(r"rows-(\d{12})-(\d{12})\.npz")

Array = np.ndarray[Any, Any]
Columns = dict[str, Array]
"""Columns by name; a column has its rows along dimension 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictRequest:
    saved: SavedRun
    data: str | None
    """A set of the run, or the import path of a function that returns one; None for the test set, or else another."""
    weights: str | None
    """"ema" or "swa" for averaged weights; None for the model's own."""
    output_function: str | None
    """Import path of a function of the model's output that returns what is written; None to write the output."""
    has_targets: bool
    """Whether samples that are pairs are (input, target)."""
    parts: Path
    start: int = 0
    """How many samples are in the parts already: whole batches."""


def check_table_path(path: Path) -> None:
    """Check that a table of this name can be written, before hours are spent on its contents."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"The output is {path}, expected a name that ends with {', '.join(SUFFIXES)}. (LS814)")
    if path.exists():
        raise UsageError(f"{path} exists already, and is not overwritten. Delete it, or choose another name. (LS814)")
    if not path.parent.is_dir():
        raise UsageError(f"There is no folder {path.parent} to write {path.name} into. (LS814)")
    if path.suffix == ".parquet":
        _import_pyarrow()


def write_table(path: Path, parts: Sequence[Path]) -> None:
    """Write one table with the rows of all parts (numpy.savez), in order, and a column `index` (local)."""
    write = {".csv": _write_csv, ".npz": _write_npz, ".parquet": _write_parquet}[path.suffix]
    try:
        with atomic_replace(path) as temp:
            write(temp, parts)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error}. The predictions are kept in {parts[0].parent}. (LS814)"
        ) from error


def _read(parts: Sequence[Path]) -> Iterator[Columns]:
    start = 0
    first: dict[str, tuple[int, ...]] = {}
    for path in parts:
        with np.load(path, allow_pickle=False) as file:
            columns: Columns = {name: file[name] for name in file.files}
        number = len(next(iter(columns.values())))
        shapes = {name: values.shape[1:] for name, values in columns.items()}
        first = first or shapes
        if shapes != first:
            raise UsageError(
                f"{path} has rows of other shapes than {parts[0]}, and a file needs the same for all. Let "
                "--output-function return such, and delete the folder to begin again. (LS814)"
            )
        yield {"index": np.arange(start, start + number), **columns}
        start += number


def _write_csv(path: Path, parts: Sequence[Path]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        for number, columns in enumerate(_read(parts)):
            flat = {name: values.reshape(len(values), -1) for name, values in columns.items()}
            if sum(values.shape[1] for values in flat.values()) > _MAX_CSV_COLUMNS:
                raise UsageError(
                    f"The outputs have more than {_MAX_CSV_COLUMNS} numbers per sample, too many columns for a .csv. "
                    "Write .npz or .parquet. (LS814)"
                )
            if number == 0:
                names = [
                    name if columns[name].ndim == 1 else f"{name}_{place}"
                    for name, values in flat.items()
                    for place in range(values.shape[1])
                ]
                writer.writerow(names)
            lists = [values.tolist() for values in flat.values()]
            writer.writerows([cell for row in rows for cell in row] for rows in zip(*lists, strict=True))


def _write_npz(path: Path, parts: Sequence[Path]) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, Any] = {}
    for columns in _read(parts):
        for name, values in columns.items():
            before = shapes.get(name, (0, *values.shape[1:]))
            shapes[name], dtypes[name] = (before[0] + len(values), *values.shape[1:]), values.dtype
    with zipfile.ZipFile(path, "w") as archive:
        for name, shape in shapes.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                header = {"descr": np.lib.format.dtype_to_descr(dtypes[name]), "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
                for columns in _read(parts):
                    file.write(np.ascontiguousarray(columns[name]).tobytes())


def _write_parquet(path: Path, parts: Sequence[Path]) -> None:
    pyarrow, parquet = _import_pyarrow()
    writer = None
    try:
        for columns in _read(parts):
            table = pyarrow.table({name: _as_arrow(pyarrow, values) for name, values in columns.items()})
            if writer is None:
                writer = parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


def _as_arrow(pyarrow: Any, values: Array) -> Any:
    found = pyarrow.array(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        found = pyarrow.FixedSizeListArray.from_arrays(found, size)
    return found


def _import_pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError(
            "A .parquet file needs pyarrow, which is not installed: pip install 'lockstep-ddp[parquet]', or write .csv "
            "or .npz. (LS814)"
        ) from error
    return pyarrow, parquet


def part_name(start: int, stop: int) -> str:
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


def describe_job(request: PredictRequest) -> dict[str, Any]:
    """Return all that predictions follow from, as JSON values: the options of `lockstep predict`, and of the config."""
    return {
        "checkpoint": request.saved.digest,
        "--data": request.data or "test",
        "--weights": request.weights,
        "--output-function": request.output_function,
        "--no-targets": not request.has_targets,
        **request.saved.config.model_dump(mode="json", include=_CONFIG_KEYS),
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
    remove_stale_temp_files(folder)
    for path in folder.iterdir():
        if path.name == _JOB_NAME or _PART.fullmatch(path.name):
            path.unlink()
    with suppress(OSError):  # the table is written, and another's files are not ours to remove
        folder.rmdir()
