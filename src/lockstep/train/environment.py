"""What a run was started with and on: enough to repeat it. Written to environment.json in its directory.

run_dir/
  environment.json         one object for each start of the run, the newest first
  uncommitted-<n>.patch    what `git diff HEAD` said at start n, where the user's code had changes
"""

import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm import World
from lockstep.devices import count_cores, take_inventory
from lockstep.errors import RunDirectoryError
from lockstep.settings import read_settings

ENVIRONMENT_NAME = "environment.json"
_GIT_SECONDS = 20.0
_LONGEST_PATCH = 4 << 20
"""In characters: somebody may have added a data set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """Where one worker runs."""

    rank: int
    """Number of the worker."""
    host: str
    """Name of its host."""
    pid: int
    """Number of its process there."""
    device: str
    """`"cpu"` or `"cuda:0"`, as torch numbers what the worker sees."""
    device_name: str
    """The processor's or the GPU's name."""
    device_uuid: str
    """The GPU's UUID, by which nvidia-smi knows it; empty for a CPU."""
    num_threads: int
    """Threads of torch's operators on the CPU."""


def gather_facts(world: World, device: torch.device, device_name: str) -> list[WorkerFacts]:
    """Return where every worker runs, in rank order (collective)."""
    properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return world.gather_objects(
        WorkerFacts(
            rank=world.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            device=str(device),
            device_name=device_name,
            device_uuid=str(getattr(properties, "uuid", "")),
            num_threads=torch.get_num_threads(),
        )
    )


def write_environment(run_dir: Path, workers: Sequence[WorkerFacts], fingerprint: dict[str, Any]) -> None:
    """Add this start to the environment.json of a run (local; call it on one rank).

    Raises:
        RunDirectoryError: It cannot be written.
    """
    path = run_dir / ENVIRONMENT_NAME
    earlier = _read(path)
    start = {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "directory": str(Path.cwd()),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "system": {"platform": platform.platform(), "cores": count_cores()},
        "driver": take_inventory().driver,
        "torch": _torch_facts(),
        "packages": _packages(),
        "code": _code(run_dir, len(earlier) + 1),
        "settings": read_settings(),
        "fingerprint": fingerprint,
        "workers": [asdict(worker) for worker in workers],
    }
    try:
        path.write_text(json.dumps([start, *earlier], indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be written: {error}. Make room, or choose another run_dir.") from error


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the starts that are noted already; a file that was cut off is begun anew."""
    try:
        starts: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return []
    return starts


def _torch_facts() -> dict[str, Any]:
    """Return the versions of what torch was built with."""
    has_cuda = torch.cuda.is_available()
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if has_cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_cuda and dist.is_nccl_available() else None,
    }


def _packages() -> dict[str, str]:
    found = ((each.metadata["Name"], each.version) for each in metadata.distributions())
    return dict(sorted((name, version) for name, version in found if name))


def _code(run_dir: Path, start: int) -> dict[str, Any] | None:
    """Return the commit of the repository that the run was started in, if it was in one; keep what is not committed."""
    top, commit = _git("rev-parse", "--show-toplevel"), _git("rev-parse", "HEAD")
    if top is None or commit is None:
        return None
    changes = _git("diff", "HEAD") or ""
    patch = f"uncommitted-{start}.patch"
    is_kept = 0 < len(changes) <= _LONGEST_PATCH
    if is_kept:
        (run_dir / patch).write_text(changes + "\n", encoding="utf-8")
    untracked = (_git("ls-files", "--others", "--exclude-standard") or "").splitlines()
    return {
        "repository": top,
        "commit": commit,
        "branch": _git("rev-parse", "--abbrev-ref", "HEAD"),
        "is_changed": bool(changes),
        "patch": patch if is_kept else None,
        "untracked": untracked,
    }


def _git(*arguments: str) -> str | None:
    """Return what git says of the working directory; None if it is in no repository, or there is no git."""
    try:
        done = subprocess.run(  # noqa: S603 - arguments of ours
            ["git", *arguments],  # noqa: S607 - the user's own git
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=_GIT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip("\n") if done.returncode == 0 else None
