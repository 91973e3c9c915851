"""What a worker finds in its environment: torchrun's variables, its GPUs, the drop-in, IPython's functions.

The drop-in puts Lockstep's classes in place of torch's by a folder in PYTHONPATH. Python imports `sitecustomize` when
it starts. The folder contains one, which waits for the import of torch and then imports `lockstep.drop_in`. So every
Python process that inherits the variable has the same classes: data-loading processes, those of `mp.spawn`, and scripts
that a script starts. This is here, and not in `lockstep.drop_in`, because `lockstep run` starts its workers without
importing torch.
"""

import builtins
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.settings import LAUNCHED, read_settings

if TYPE_CHECKING:  # `lockstep run` needs no pickles
    from lockstep.launch.messages import WorkerTask

STARTUP_FOLDER = str(Path(__file__).parents[1] / "drop_in" / "startup")
NOTICE = (
    "lockstep: drop-in: torch's DistributedDataParallel, DataParallel, DistributedSampler, SyncBatchNorm and "
    "init_process_group are Lockstep's in this run. Everything else is torch's, FSDP for example. To restore torch's: "
    "lockstep.drop_in.undo()."
)
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
_MODULE = "lockstep.drop_in"


def place_variables(*, rank: int, local_rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def function_variables(task: "WorkerTask") -> dict[str, str]:
    """Return the variables of a worker of `launch`: torch's, for code that reads them, and Gloo on loopback alone."""
    threads, port = str(task.threads), task.master_port
    return {
        **place_variables(rank=task.rank, local_rank=task.worker, world_size=task.world_size, port=port),
        LAUNCHED: str(port),
        "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        **(read_settings().portable_variables() if task.is_portable else {}),
    }


def has_drop_in(python_path: str | None) -> bool:
    return STARTUP_FOLDER in (python_path or "").split(os.pathsep)


def with_drop_in(python_path: str | None) -> str:
    return python_path or "" if has_drop_in(python_path) else with_folder(python_path, STARTUP_FOLDER)


def with_folder(python_path: str | None, folder: str) -> str:
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


def is_in_ipython() -> bool:
    return hasattr(builtins, "__IPYTHON__")


def add_ipython_functions() -> None:
    """Give functions of notebook cells what IPython has built in; `display` prints, as its own does without a shell."""
    vars(builtins).update(display=_display, get_ipython=lambda: None)  # there is no shell


def _display(*objects: Any, **_options: Any) -> None:
    print(*objects)  # noqa: T201 - what it is for
