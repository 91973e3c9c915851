"""How a config differs from the one that a run was begun with, and what that does to the run. Pure.

harmless       where the run computes, how long, what it shows: listed
needs --allow  changes the bits from here on: listed, and refused without `--allow NAME`
impossible     the state would not fit, or not have the effect that the config says: refused
"""

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.engine.restoring import SCHEDULED
from lockstep.errors import CheckpointError, ConfigError

ALL = "all"
"""The name that allows everything that can be allowed."""

_HARMLESS = frozenset(
    {
        *("async_save", "balance", "device_ids", "epochs", "finish", "finish_args", "keep", "keep_best"),
        *("loader_workers", "metric", "on_save_error", "run_dir", "save_every", "workers"),
    }
)
"""Config keys that do not change what is computed, only where, how long and what is kept of it."""
_SCHEDULER_REASON = "the scheduler's state in the checkpoint holds what it was made with"
_IMPOSSIBLE: Mapping[str, str] = {
    "num_shards": "the order in which gradients are added goes by it, in all of the run",
    "seed": "all that is random follows from it, in all of the run",
    "optimizer": "the state of one optimizer means nothing to another",
    "scheduler": _SCHEDULER_REASON,
    "scheduler_args": _SCHEDULER_REASON,
    "scheduler_interval": _SCHEDULER_REASON,
}
_UNSET = object()
_REMOVES = ", so older checkpoints are removed at the next save in their directory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A value of a config that is not what it was."""

    name: str
    """Its key, with dots into arguments: `optimizer_args.lr`."""
    before: str
    """What it was, as text."""
    after: str
    """What it is."""
    needs_allow: bool
    """Whether it changes the bits of the run."""
    reason_impossible: str
    """Why it cannot be changed; empty where it can."""

    @property
    def key(self) -> str:
        """The key of the config."""
        return self.name.partition(".")[0]

    def __str__(self) -> str:
        """Say it in words."""
        return f"{self.name} was {self.before} and is {self.after}"

    def is_allowed(self, allowed: Collection[str]) -> bool:
        """Return whether leave was given, by the name, one that it is below, or `all`."""
        parts = self.name.split(".")
        return not {ALL, *(".".join(parts[:length]) for length in range(1, len(parts) + 1))}.isdisjoint(allowed)


def find_changes(saved: Mapping[str, Any], now: Mapping[str, Any], *, is_mid_epoch: bool) -> list[Change]:
    """Return what differs between two configs as plain values; keys that only one of them knows are left out.

    Args:
        saved: The config in the checkpoint.
        now: The config to go on with.
        is_mid_epoch: Whether the checkpoint stands in the middle of an epoch.
    """
    found = []
    for key in now:
        if key not in saved or saved[key] == now[key] or key == "run_dir":  # the one that is gone on with is shown
            continue
        for name, before, after in _differences(key, saved[key], now[key]):
            found.append(
                Change(
                    name=name,
                    before=_text(before),
                    after=_text(after) + _REMOVES * (key == "keep" and _keeps_fewer(before, after)),
                    needs_allow=key not in _HARMLESS,
                    reason_impossible=_reason_impossible(name, saved, now, is_mid_epoch=is_mid_epoch),
                )
            )
    return found


def check_changes(changes: Collection[Change], allowed: Collection[str]) -> None:
    """Check that a run may go on with these changes.

    Raises:
        CheckpointError: One is impossible, or changes the bits and is not allowed; names the options to give.
    """
    impossible = [change for change in changes if change.reason_impossible]
    if impossible:
        listed = "; ".join(f"{change}, but {change.reason_impossible}" for change in impossible)
        raise CheckpointError(
            f"The run was begun with another config, with which it cannot go on: {listed}. To go on, set it back; to "
            "change it, begin a new run."
        )
    refused = [change for change in changes if change.needs_allow and not change.is_allowed(allowed)]
    if refused:
        options = " ".join(f"--allow {change.name}" for change in refused)
        raise CheckpointError(
            f"The run was begun with another config: {'; '.join(map(str, refused))}. This changes what comes out of "
            f"it. To go on, set it back; to change it from here on, say {options}; or "
            "begin a new run."
        )


def check_names(allowed: Collection[str], known: Collection[str]) -> None:
    """Check that what is to be allowed are keys of a config.

    Raises:
        ConfigError: One is not.
    """
    for name in allowed:
        key = name.partition(".")[0]
        if name != ALL and key not in known:
            near = difflib.get_close_matches(key, [*known], n=1)
            raise ConfigError(
                f"--allow {name} names no key of a config."
                + (f" Did you mean {near[0]!r}?" if near else " Expected one such as max_grad_norm, or all.")
            )


def _differences(name: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys([*before, *after]):
            if before.get(key, _UNSET) != after.get(key, _UNSET):
                yield from _differences(f"{name}.{key}", before.get(key, _UNSET), after.get(key, _UNSET))
    else:
        yield name, before, after


def _keeps_fewer(before: int | None, after: int | None) -> bool:
    return after is not None and (before is None or after < before)


def _text(value: Any) -> str:
    return "not set" if value is _UNSET else repr(value)


def _reason_impossible(name: str, saved: Mapping[str, Any], now: Mapping[str, Any], *, is_mid_epoch: bool) -> str:
    """Return why a value cannot be changed; empty where it can."""
    key, _, option = name.partition(".")
    if key in _IMPOSSIBLE:
        return _IMPOSSIBLE[key]
    if key == "precision" and "float16" in {saved[key], now[key]}:
        return "float16 comes with a gradient scaler, whose state the other side has not"
    if key == "batch_size" and is_mid_epoch:
        return (
            "the checkpoint stands in the middle of an epoch, which would be cut anew: samples would be seen twice, or "
            "never; a checkpoint of an epoch's end can go on with it"
        )
    if key == "optimizer_args" and option in SCHEDULED and now.get("scheduler") is not None:
        return f"it is set by the scheduler, and {_SCHEDULER_REASON}"
    return ""
