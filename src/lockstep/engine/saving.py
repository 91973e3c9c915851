"""A trainer's state as one file: what `Trainer.save` and `Trainer.load`, and the command, write, read and warn of.

`trainer.state_dict()` is values and tensors; a file is a manifest and tensors (`lockstep.checkpoint`). This module
converts between them. An error on one worker raises on all.
"""

import hashlib
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from lockstep.checkpoint.file import find_newest_intact, load_checkpoint, save_checkpoint, with_digest
from lockstep.checkpoint.manifest import Checkpoint, Manifest, decode_state, encode_state
from lockstep.checkpoint.step_files import checkpoint_name
from lockstep.comm import World
from lockstep.data import Cursor
from lockstep.engine.arguments import warn_of_other_conditions
from lockstep.engine.batches import gather_results
from lockstep.engine.optimizers import SchedulerSet, class_name
from lockstep.engine.run_state import RunState
from lockstep.engine.schedules import Schedule
from lockstep.engine.state_parts import ObjectPart, Scheduler, Stateful, StatePart
from lockstep.errors import CheckpointError, PeerFailedError, without_code
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.recording import EventKind, own_recorder
from lockstep.reduce.model import Description, describe_options
from lockstep.version import VERSION

Result = TypeVar("Result")
SCHEDULED = frozenset({"lr", "momentum", "betas"})
"""Options of an optimizer that schedulers set."""
_CLASSES = ("optimizer", "scheduler", "other_scheduler")
_PLAIN = ("epoch", "step", "global_step", "num_shards", "seed", "loader", "fingerprint")
_ENCODED = ("optimizer", "scaler")
_OF_MANIFEST = {*_PLAIN, *_ENCODED, "model", "callbacks", "optimizer_class", "scheduler", "scheduler_class"}
"""The entries of a state that have places of their own in a manifest; all others are its `parts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedState:
    path: Path
    cursor: Cursor
    """The next step of the run."""
    global_step: int
    """Steps taken so far, skipped ones included."""
    metrics: Mapping[str, float | None]
    """What was measured when it was saved; None for a value that was not finite; empty if none were given."""


def pack_state(
    state: Mapping[str, Any],
    scheduler: Scheduler | None,
    config: Mapping[str, Any] | None,
    metrics: Mapping[str, float | None],
    extra: Mapping[str, Stateful] = MappingProxyType({}),
) -> Checkpoint:
    """Return a checkpoint with the live tensors; its digest is left open. The trainer or the user steps `scheduler`."""
    model = {name: value for name, value in state["model"].items() if isinstance(value, Tensor)}
    of_modules = {name: value for name, value in state["model"].items() if name not in model}
    others = {name: each.state_dict() for name, each in extra.items()}
    tensors: dict[str, Tensor] = {}

    def encode(name: str, value: Any) -> Any:
        if value is None or (value == {} and name not in {"optimizer", "scheduler"}):
            return None
        return encode_state(value, "optimizer" if name == "optimizer" else f"optimizer/{name}", tensors)

    parts = {name: encode(name, value) for name, value in state.items() if name not in _OF_MANIFEST}
    manifest = Manifest(
        **{name: state[name] for name in _PLAIN},
        **{name: encode(name, state.get(name)) for name in _ENCODED},
        digest="",
        scheduler=None if scheduler is None else encode("scheduler", scheduler.state_dict()),
        classes={
            "optimizer": state["optimizer_class"],
            "scheduler": state["scheduler_class"],
            "other_scheduler": None if state["scheduler_class"] else class_name(scheduler),
        },
        model_extra=encode("model", of_modules),
        callbacks=encode("callbacks", state.get("callbacks")),
        extra=encode("extra", others),
        parts={name: value for name, value in parts.items() if value is not None} or None,
        config=config,
        metrics={
            name: float(value) if value is not None and math.isfinite(value) else None
            for name, value in metrics.items()
        },
        versions={"lockstep": VERSION} | {name: version(name) for name in ("torch", "safetensors")},
    )
    return Checkpoint(model=model, optimizer=tensors, manifest=manifest)


def unpack_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what `Trainer.load_state_dict` takes, with the state of the scheduler, even of one that the user steps."""
    manifest, tensors = checkpoint.manifest, checkpoint.optimizer
    return {
        **decode_state(manifest.parts or {}, tensors),
        **{name: getattr(manifest, name) for name in _PLAIN},
        **{name: decode_state(getattr(manifest, name), tensors) for name in (*_ENCODED, "scheduler")},
        "callbacks": decode_state(manifest.callbacks or {}, tensors),
        **{f"{name}_class": manifest.classes[name] for name in _CLASSES if name in manifest.classes},
        "model": {**checkpoint.model, **decode_state(manifest.model_extra or {}, tensors)},
    }


def split_scheduler_state(
    state: dict[str, Any], *, has_scheduler: bool, own: Any
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the trainer's part of an unpacked state, and that of a scheduler that it does not step itself (`own`)."""
    known = {name: value for name, value in state.items() if name != "other_scheduler_class"}
    other = state.get("other_scheduler_class")
    if has_scheduler:
        if other is not None:
            raise CheckpointError(
                f"The checkpoint has a {other} that was not stepped by the trainer, which steps its own once per step: "
                "the result would differ. Make the trainer without it, step it as before, and give it to load: "
                "trainer.load(path, scheduler=...). (LS708)"
            )
        return known, None
    made = state["scheduler"]
    if (made is None) != (own is None):
        has, lacks = ("The checkpoint", "this run") if own is None else ("This run", "the checkpoint")
        raise CheckpointError(
            f"{has} has a scheduler, and {lacks} has none: the result would differ. Make the same scheduler as "
            "before; one that the trainer does not step is given to save and load: "
            "trainer.load(path, scheduler=...). (LS708)"
        )
    if state.get("scheduler_class") is not None:
        raise CheckpointError(
            f"The checkpoint has a {state['scheduler_class']} that the trainer has stepped, once per step, and that "
            "this trainer does not step: the result would differ. Give it to the trainer: "
            "Trainer(..., scheduler=...). (LS708)"
        )
    if "other_scheduler_class" in state and other != class_name(own):
        raise CheckpointError(
            f"The checkpoint has a {other}, and this run a {class_name(own)}: the result would differ. Make the "
            "same scheduler as before. (LS708)"
        )
    return {**known, "scheduler": None}, made


def read_on_all_ranks(world: World, path: Path) -> tuple[Path, Checkpoint]:
    """Read one checkpoint on every rank, checking each byte; of a directory the newest of rank 0 (collective)."""

    def find() -> str:
        return find_newest_intact(path, _warn_of_broken)[0].name if path.is_dir() else ""

    name = world.from_first(find)
    file = path / name if name else path
    checkpoint = raise_on_all_ranks(world, lambda: load_checkpoint(file), "reading a checkpoint")
    manifest = checkpoint.manifest
    seen = world.gather_objects((_describe(file, manifest), hashlib.sha256(manifest.to_json().encode()).hexdigest()))
    for rank, (described, number) in enumerate(seen):
        if number != seen[0][1]:
            raise CheckpointError(
                f"The ranks have read different checkpoints: rank 0 {seen[0][0]}, and rank {rank} {described}. Give "
                "all of them the same file, or copies of it. (LS712)"
            )
    return file, checkpoint


def raise_on_all_ranks(world: World, compute: Callable[[], Result], purpose: str) -> Result:
    """Return what `compute` returns here; if it raises on one rank, the others raise `CheckpointError` (collective)."""
    results: list[Result] = []

    def keep() -> None:  # the result stays on this rank
        results.append(compute())

    try:
        gather_results(world, keep, purpose)
    except PeerFailedError as error:
        raise CheckpointError(str(error)) from error
    return results[0]


def _describe(path: Path, manifest: Manifest) -> str:
    return f"{path} (epoch {manifest.epoch}, step {manifest.step}, digest {manifest.digest[:16]})"


def _warn_of_broken(error: CheckpointError) -> None:
    warnings.warn(f"{without_code(error)} The one before is loaded. (LS713)", stacklevel=stacklevel_of_user())


def save_state(
    state: RunState,
    world: World,
    path: Path,
    scheduler: Scheduler | LRScheduler | None,
    metrics: Mapping[str, float],
    extra: Mapping[str, Stateful],
) -> Path:
    """Write a state into one file and return its path (collective); `Trainer.save` says what it raises."""
    _check_extra(extra)
    _check_scheduler(state, scheduler)
    gather_results(world, state.check_usable, "Trainer.save")
    if world.rank == 0:
        warn_of_late_scheduler(scheduler, state.cursor)

    def write() -> Path:
        stepped = state.scheduler if scheduler is None else scheduler
        checkpoint = pack_state(state.to_dict(), stepped, None, metrics, extra)
        file = path / checkpoint_name(checkpoint.manifest.global_step) if path.is_dir() else path
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"The directory of the checkpoint {file} cannot be created: {error}. (LS703)"
            ) from error
        with own_recorder().during(EventKind.SAVING, text="save"):
            save_checkpoint(file, with_digest(checkpoint))
        return file

    with state.sharing.collected(world, [0]):
        return world.from_first(write)


def load_state(
    state: RunState,
    world: World,
    path: Path,
    scheduler: Scheduler | LRScheduler | None,
    extra: Mapping[str, Stateful],
) -> LoadedState:
    """Resume from a file (collective); `Trainer.load` says what it raises."""
    _check_scheduler(state, scheduler)
    _check_extra(extra)
    file, checkpoint = read_on_all_ranks(world, path)
    options = describe_options(state.optimizer)
    stepped = state.scheduler if scheduler is None else scheduler
    schedule = describe_schedule(stepped)
    with ExitStack() as restored_on_error:

        def restore() -> None:
            own, of_scheduler = split_scheduler_state(
                unpack_state(checkpoint), has_scheduler=state.scheduler is not None, own=scheduler
            )
            states = decode_state(checkpoint.manifest.extra or {}, checkpoint.optimizer)
            _check_same_extra(states, extra)
            others: list[StatePart] = [ObjectPart(f"extra {name}", each) for name, each in extra.items()]
            own |= {f"extra {name}": each for name, each in states.items()}
            if scheduler is not None:
                others.append(ObjectPart("the loop's scheduler", scheduler))
                own["the loop's scheduler"] = of_scheduler
            restored_on_error.enter_context(state.restored_from(own, others))

        raise_on_all_ranks(world, restore, "loading a checkpoint")
    if world.rank == 0:  # one warning is enough
        warn_of_other_conditions(checkpoint.manifest.fingerprint, state.fingerprint())
        warn_of_other_options(options, describe_options(state.optimizer))
        warn_of_other_schedule(schedule, describe_schedule(stepped))
    metrics = checkpoint.manifest.metrics
    return LoadedState(path=file, cursor=state.cursor, global_step=state.global_step, metrics=metrics)


def _check_extra(extra: Mapping[str, Stateful]) -> None:
    for name, each in extra.items():
        if not all(callable(getattr(each, method, None)) for method in ("state_dict", "load_state_dict")):
            raise TypeError(
                f"extra[{name!r}] is a {type(each).__name__}, expected an object with state_dict and "
                "load_state_dict. (LS708)"
            )


def _check_same_extra(saved: Mapping[str, Any], extra: Mapping[str, Stateful]) -> None:
    if saved.keys() != extra.keys():
        raise CheckpointError(
            f"The checkpoint holds extra state of {', '.join(saved) or 'nothing'}, and load was given "
            f"{', '.join(extra) or 'none'}. Give load the objects that save was given: "
            "trainer.load(path, extra={name: object}). (LS708)"
        )


def _check_scheduler(state: RunState, scheduler: Scheduler | LRScheduler | None) -> None:
    if scheduler is not None and state.scheduler is not None:
        raise ValueError(
            "The trainer steps a scheduler, whose state is a part of its own. Leave scheduler= out; it is for one "
            "that you step yourself. (LS708)"
        )


def warn_of_late_scheduler(scheduler: Any, cursor: Cursor) -> None:
    is_between = cursor.step == 0 and cursor.epoch > 0
    if is_between and getattr(scheduler, "last_epoch", None) == cursor.epoch - 1:
        warnings.warn(
            f"The run is saved at the end of epoch {cursor.epoch - 1}, for which the scheduler was not stepped yet: a "
            "run that resumes from here would leave that out. Step it first, then save. (LS711)",
            stacklevel=stacklevel_of_user(),
        )


def describe_schedule(scheduler: Any) -> Description:
    """Return the options with which a scheduler was made, as far as its state holds them: loading replaces them."""
    if isinstance(scheduler, SchedulerSet):
        found = {name: describe_schedule(part) for name, part in scheduler.parts.items()}
        return {f"{option} of {name}": value for name, part in found.items() for option, value in part.items()}
    if scheduler is None:
        return {}
    values = {
        name: value
        for name, value in getattr(scheduler, "__dict__", {}).items()
        if name in _parameters(type(scheduler))
    }
    for each in values.pop("lr_lambdas", []):  # of functions nothing is saved
        values |= each.options() if isinstance(each, Schedule) else getattr(each, "__dict__", {})
    return {name: str(value) for name, value in values.items()}


def _parameters(kind: type) -> set[str]:
    try:
        return {*inspect.signature(kind).parameters, "lr_lambdas"} - {"optimizer", "last_epoch"}
    except (TypeError, ValueError):
        return set()


def warn_of_other_schedule(made: Description, loaded: Description) -> None:
    changed = [name for name in made if made[name] != loaded.get(name, made[name])]
    if changed:
        listed = "; ".join(f"{name} was to be {made[name]} and is {loaded[name]}" for name in changed)
        warnings.warn(
            f"The scheduler continues with the options of the checkpoint: {listed}. The learning rates are those of "
            "the run as it was begun. For others begin a new run. (LS711)",
            stacklevel=stacklevel_of_user(),
        )


def warn_of_other_options(made: Description, loaded: Description) -> None:
    has_schedule = any(name.startswith("initial_lr") for name in loaded)
    changed = [name for name in made if name in loaded and made[name] != loaded[name]]
    odd = [name for name in changed if not (has_schedule and name.partition(" ")[0] in SCHEDULED)]
    if odd:
        listed = "; ".join(f"{name} was to be {made[name]} and is {loaded[name]}" for name in odd)
        warnings.warn(
            f"The optimizer continues with the options of the checkpoint: {listed}. To change one, set it in "
            "optimizer.param_groups after loading. (LS711)",
            stacklevel=stacklevel_of_user(),
        )
