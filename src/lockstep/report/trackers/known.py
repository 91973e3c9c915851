"""The trackers that a config names, and whether their packages are installed. Needs no torch, until one is made."""

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from lockstep.errors import ConfigError
from lockstep.report.trackers.protocol import Tracker
from lockstep.runs.importing import call_object, import_object
from lockstep.runs.training_options import NamedTracker

_KNOWN = {
    "tensorboard": ("lockstep.report.trackers.tensorboard:TensorBoard", ("tensorboard", "tensorboardX")),
    "wandb": ("lockstep.report.trackers.wandb:WandB", ("wandb",)),
    "mlflow": ("lockstep.report.trackers.mlflow:MLflow", ("mlflow",)),
}
"""By name: the class, and the packages of which it needs one."""


def check_trackers(named: Sequence[NamedTracker]) -> None:
    """Check that the packages of trackers are installed, and their options known; imports none of them."""
    missing = []
    for name, options in map(_split, named):
        if name in _KNOWN:
            path, packages = _KNOWN[name]
            if not any(importlib.util.find_spec(package) for package in packages):
                missing.append(packages[0])
            call_object(f"trackers.{name}", import_object("trackers", path), **options)
    if missing:
        listed = " and ".join(missing)
        raise ConfigError(
            f"trackers needs {listed}, which {'is' if len(missing) == 1 else 'are'} not installed. Install with: "
            f"pip install 'lockstep-ddp[trackers]' (or pip install {' '.join(missing)}), or leave it out of "
            "trackers. (LS817)"
        )


def make_trackers(named: Sequence[NamedTracker]) -> list[tuple[str, Tracker]]:
    """Make the trackers of a config (local)."""
    check_trackers(named)
    return [(name, _make(name, options)) for name, options in map(_split, named)]


def _make(name: str, options: dict[str, Any]) -> Tracker:
    path, _ = _KNOWN.get(name, (name, ()))
    found = import_object("trackers", path)
    made: Any = call_object("trackers", found, **options) if isinstance(found, type) or options else found
    absent = [method for method in ("start", "log", "end") if not callable(getattr(made, method, None))]
    if absent:
        raise ConfigError(
            f"trackers names {name!r}, a {type(made).__name__} without {' and '.join(absent)}. A tracker has the "
            "methods start(run), log(global_step, values) and end(ending): see docs/trackers.md. (LS817)"
        )
    tracker: Tracker = made
    return tracker


def _split(named: NamedTracker) -> tuple[str, dict[str, Any]]:
    return next(iter(named.items())) if isinstance(named, dict) else (named, {})
