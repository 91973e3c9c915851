"""How a Python process starts with Lockstep's classes in place of torch's: a folder in PYTHONPATH.

Python imports `sitecustomize` when it starts. The folder contains one, which waits for the import of torch and then
imports `lockstep.drop_in`. So every Python process that inherits the variable has the same classes: data-loading
processes, those of `mp.spawn`, and scripts that a script starts. This module is here, and not in `lockstep.drop_in`,
because `lockstep run` starts its workers without importing torch.
"""

import os
from collections.abc import Sequence
from pathlib import Path

_MODULE = "lockstep.drop_in"
STARTUP_FOLDER = str(Path(__file__).parents[1] / "drop_in" / "startup")
"""The folder that contains `sitecustomize.py`."""
NOTICE = (
    "lockstep: drop-in: torch's DistributedDataParallel, DataParallel, DistributedSampler, SyncBatchNorm and "
    "init_process_group are Lockstep's in this run. Everything else is torch's, FSDP for example. To restore torch's: "
    "lockstep.drop_in.undo()."
)
"""The line that is printed once, at the start."""


def has_drop_in(python_path: str | None) -> bool:
    """Return whether a process with this PYTHONPATH starts with the drop-in."""
    return STARTUP_FOLDER in (python_path or "").split(os.pathsep)


def with_drop_in(python_path: str | None) -> str:
    return python_path or "" if has_drop_in(python_path) else with_folder(python_path, STARTUP_FOLDER)


def with_folder(python_path: str | None, folder: str) -> str:
    """Return the PYTHONPATH with this folder before all others."""
    return os.pathsep.join([folder, *([python_path] if python_path else [])])


def without_drop_in(python_path: str | None) -> str | None:
    """Return the PYTHONPATH without the drop-in; None if nothing is left of it."""
    return os.pathsep.join(part for part in (python_path or "").split(os.pathsep) if part != STARTUP_FOLDER) or None


def command_of_script(command: Sequence[str]) -> list[str] | None:
    """Return a process' command without `-m lockstep.drop_in`, wherever that stands; None if it does not.

    Python's own options, and programs that run the script such as coverage or pdb, keep their places.
    """
    for place, word in enumerate(command):
        is_option = word.startswith("-") and not word.startswith("--")
        if is_option and word.endswith("m") and list(command[place + 1 : place + 2]) == [_MODULE]:
            return [*command[:place], *_flags(word.removesuffix("m")), *command[place + 2 :]]
        if is_option and word.endswith(f"m{_MODULE}"):
            return [*command[:place], *_flags(word.removesuffix(f"m{_MODULE}")), *command[place + 1 :]]
    return None


def _flags(word: str) -> list[str]:
    return [] if word == "-" else [word]
