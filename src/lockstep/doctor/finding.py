"""Which recording is meant: the newest one, that of a run directory, or that of a process."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lockstep.errors import UsageError
from lockstep.processes.host import start_ticks
from lockstep.recording.file_format import HEADER_BYTES, RECORDING_NAME, FileHeader, parse_header
from lockstep.recording.writing import private_folder

_RUNS: Final = Path("runs")
_ADVICE: Final = (
    "Name a run directory, or a process with --pid. Jobs of `lockstep train`, `lockstep run`, `ls.launch` and scripts "
    "with Lockstep's process group are recorded, unless LOCKSTEP_RECORDING is off."
)


def find_recording(run_dir: Path | None = None, pid: int | None = None) -> Path:
    """Return the folder of a recording: that of a worker or launcher `pid`, or of a run directory, or itself (local).

    Without either the newest: one that still runs first, and of several that run, one of runs/: the others may be of
    another terminal.
    """
    if pid is not None:
        return _find_process(pid)
    if run_dir is not None:
        for folder in (run_dir / RECORDING_NAME, run_dir):
            if any(folder.glob("*.rec")):
                return folder
        raise UsageError(f"{run_dir} holds no recording. {_ADVICE} (LS816)")
    found = []
    for folder, headers in _all():
        runs = any(map(is_running, headers))
        last_opened = max(each.opened_wall_ns for each in headers)
        found.append((runs, runs and folder.is_relative_to(_RUNS), last_opened, folder))
    if not found:
        raise UsageError(
            f"There is no recording in runs/ or in the folder of jobs without a run directory. {_ADVICE} (LS816)"
        )
    return max(found)[-1]


def is_running(header: FileHeader) -> bool:
    return header.start_ticks != 0 and start_ticks(header.pid) == header.start_ticks


def _find_process(pid: int) -> Path:
    found = [
        (is_running(header), header.opened_wall_ns, folder)
        for folder, headers in _all()
        for header in headers
        if header.pid == pid
    ]
    if not found:
        raise UsageError(f"No recording is of process {pid}. {_ADVICE} (LS816)")
    return max(found)[2]  # numbers of processes come again: the one that runs, or the last one


def _all() -> Iterator[tuple[Path, list[FileHeader]]]:
    """Yield the recordings that can be found without being told where, with the headers of their files."""
    folders = list(_RUNS.glob(f"*/{RECORDING_NAME}"))
    with contextlib.suppress(OSError):  # then no job without a run directory can have recorded there
        folders += [each for each in private_folder().iterdir() if each.is_dir()]
    for folder in folders:
        headers = read_headers(folder)
        if headers:
            yield folder, headers


def read_headers(folder: Path) -> list[FileHeader]:
    return [header for path in folder.glob("*.rec") if (header := read_header(path)) is not None]


def read_header(path: Path) -> FileHeader | None:
    """Return who wrote a file; None if it is none of a recording (local)."""
    try:
        with path.open("rb") as file:
            return parse_header(file.read(HEADER_BYTES))
    except (OSError, ValueError):
        return None
