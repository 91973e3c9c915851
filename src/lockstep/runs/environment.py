"""Recording how and where a run was started, so that it can be repeated: environment.json in its directory.

run_dir/
  environment.json         one object per start of the run, the latest first
  uncommitted-<n>.patch    output of `git diff --binary HEAD` at start n for the folder of the user's code, if it was
                           changed, and `save_code` is true. Untracked files are listed in environment.json, not saved
"""

import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm import World
from lockstep.devices import count_cores, take_inventory
from lockstep.runs.directory import ENVIRONMENT_NAME, errors_of_writing, read_starts
from lockstep.secrets import hide_secrets
from lockstep.settings import read_settings

_GIT_SECONDS = 20.0
_MAX_UNTRACKED_NAMES = 1000
_MAX_PATCH_BYTES = 16 << 20
"""A larger diff is not saved: it may contain a data set."""


def gather_facts(world: World, device: torch.device, device_name: str) -> list[dict[str, Any]]:
    """Return where every worker runs, in rank order (collective)."""
    properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return world.gather_objects(
        {
            "rank": world.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": str(device),  # with the index that torch uses in the worker
            "device_name": device_name,
            "device_uuid": str(getattr(properties, "uuid", "")),
            "num_threads": torch.get_num_threads(),
        }
    )


def write_environment(
    run_dir: Path,
    workers: Sequence[Mapping[str, Any]],
    fingerprint: dict[str, Any],
    code: Path,
    *,
    saves_code: bool = True,
) -> str | None:
    """Add this start to the environment.json of a run (local; call it on one rank); return the name of the patch."""
    path = run_dir / ENVIRONMENT_NAME
    earlier = read_starts(run_dir)
    if not earlier and path.exists():
        path.replace(path.with_suffix(".damaged.json"))  # somebody may still read what it says of earlier starts
    state = _git_state(run_dir, code, len(earlier) + 1, saves_code=saves_code)
    start = {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(hide_secrets(sys.argv)),
        "directory": str(Path.cwd()),
        "modules": str(code.resolve()),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "system": {"platform": platform.platform(), "cores": count_cores()},
        "driver": take_inventory().driver,
        "torch": _torch_versions(),
        "packages": _packages(),
        "code": state,
        "settings": read_settings().recorded(),
        "fingerprint": fingerprint,
        "workers": list(workers),
    }
    _write(path, (json.dumps([start, *earlier], indent=2) + "\n").encode())
    return None if state is None else state["patch"]


def _torch_versions() -> dict[str, Any]:
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


def _git_state(run_dir: Path, folder: Path, start: int, *, saves_code: bool) -> dict[str, Any] | None:
    """Return the git state of the user's code, and save its uncommitted changes; None outside a repository.

    Only of its own folder: around it may be a repository with the files of others.
    """
    top, commit = _git(folder, "rev-parse", "--show-toplevel"), _git(folder, "rev-parse", "HEAD")
    if top is None or commit is None:
        return None
    changes = _git(folder, "diff", "--binary", "--no-ext-diff", "--no-color", "--no-relative", "HEAD", "--", ".") or b""
    patch = f"uncommitted-{start}.patch"
    is_kept = saves_code and 0 < len(changes) <= _MAX_PATCH_BYTES
    if is_kept:
        _write(run_dir / patch, changes)
    untracked = _git(folder, "ls-files", "-z", "--others", "--exclude-standard", "--full-name") or b""
    names = [os.fsdecode(name) for name in untracked.split(b"\0") if name]
    return {
        "repository": _text(top),
        "commit": _text(commit),
        "branch": _text(_git(folder, "rev-parse", "--abbrev-ref", "HEAD") or b""),
        "is_changed": bool(changes),
        "patch": patch if is_kept else None,
        "untracked": names[:_MAX_UNTRACKED_NAMES],
        "num_untracked": len(names),
    }


def _text(said: bytes) -> str:
    return said.decode(errors="replace").strip()


def _git(folder: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(  # noqa: S603 - fixed arguments
            ["git", "-c", "core.quotepath=off", *arguments],  # noqa: S607 - the user's own git
            capture_output=True,
            cwd=folder,
            check=False,
            timeout=_GIT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _write(path: Path, content: bytes) -> None:
    with errors_of_writing(path):
        path.write_bytes(content)
