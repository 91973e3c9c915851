"""Differences between a config and the one that a run was started with, and what each does to the run. Pure.

harmless       changes only where and how long the run computes, or what it shows: listed
needs --allow  changes the results from here on: listed, and an error without `--allow NAME`
impossible     the saved state would not fit, or would override the changed value: an error
"""

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.errors import CheckpointError, ConfigError

ALL = "all"

_HARMLESS = frozenset(
    {
        *("async_save", "audit", "balance", "device_ids", "dry_run", "epochs", "finish", "finish_args", "keep"),
        *("early_stopping", "evict_after", "loader_workers", "max_steps", "max_time", "metric", "metrics"),
        *("exact_mean", "first_steps_verified", "keep_best", "min_workers", "report", "save_code"),
        *("on_save_error", "on_worker_loss", "respawn", "respawn_minutes", "resume", "run_dir", "save_every"),
        *("neighbours", "shard_optimizer", "spares", "track_grad_norm", "trackers", "workers"),
    }
)
"""Config keys that do not change what is computed, only where, how long, and what is saved."""
_CUTS_BATCHES = frozenset({"batch_size", "drop_last", "lengths", "weights"})
MAKES_BATCHES = _CUTS_BATCHES | {"data", "data_args"}
"""Config keys that decide which samples are in which batch."""
_SCHEDULER_REASON = "the scheduler's state in the checkpoint contains its old arguments"
_IMPOSSIBLE: Mapping[str, str] = {
    "num_shards": "the order in which gradients are added depends on it, during the whole run",
    "accumulate": "the order in which gradients are added depends on it, during the whole run",
    "seed": "all random numbers depend on it, during the whole run",
    "optimizer": "one optimizer cannot use the state of another",
    "scheduler": _SCHEDULER_REASON,
    "scheduler_args": _SCHEDULER_REASON,
    "scheduler_interval": _SCHEDULER_REASON,
    "warmup": _SCHEDULER_REASON,
    "param_groups": "the optimizer's state in the checkpoint has its groups",
    "no_decay": "the optimizer's state in the checkpoint has its groups",
}
_UNSET = object()
_REMOVES = ", so the next save removes older checkpoints from their directory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    name: str
    """Its key; dots lead into arguments: `optimizer_args.lr`."""
    before: str
    after: str
    needs_allow: bool
    reason_impossible: str
    """Why it cannot be changed; empty if it can."""

    @property
    def key(self) -> str:
        return self.name.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.name} was {self.before} and is now {self.after}"

    def is_allowed(self, allowed: Collection[str]) -> bool:
        """Return whether `allowed` contains the name, a prefix of it (`optimizer_args`), or `all`."""
        parts = self.name.split(".")
        return not {ALL, *(".".join(parts[:length]) for length in range(1, len(parts) + 1))}.isdisjoint(allowed)


def find_changes(saved: Mapping[str, Any], now: Mapping[str, Any], *, is_mid_epoch: bool) -> list[Change]:
    """Return the differences between two configs, given as plain values; keys that only one config has are left out."""
    found = []
    for key in now:
        if key not in saved or saved[key] == now[key] or key == "run_dir":  # the run directory is always shown
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
    impossible = [change for change in changes if change.reason_impossible]
    if impossible:
        listed = "; ".join(f"{change}, but {change.reason_impossible}" for change in impossible)
        raise CheckpointError(
            f"The run was started with another config and cannot continue with this one: {listed}. To continue, "
            "restore the old value; to change it, start a new run. (LS709)"
        )
    refused = [change for change in changes if change.needs_allow and not change.is_allowed(allowed)]
    if refused:
        options = " ".join(f"--allow {change.name}" for change in refused)
        raise CheckpointError(
            f"The run was started with another config: {'; '.join(map(str, refused))}. This changes the results of the "
            f"run. To continue, restore the old value; to change it from here on, give {options}; or "
            "start a new run. (LS709)"
        )


def check_names(allowed: Collection[str], known: Collection[str]) -> None:
    for name in allowed:
        key = name.partition(".")[0]
        if name != ALL and key not in known:
            near = difflib.get_close_matches(key, [*known], n=1)
            raise ConfigError(
                f"--allow {name} does not name a config key."
                + (f" Did you mean {near[0]!r}?" if near else " Expected one such as max_grad_norm, or all.")
                + " (LS813)"
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
    from lockstep.engine.saving import SCHEDULED  # imports torch, which the names of keys do not need

    key, _, option = name.partition(".")
    if key in _IMPOSSIBLE:
        return _IMPOSSIBLE[key]
    if key in {"epochs", "max_steps", "batch_size", "drop_last"} and now.get("scheduler") in {"linear", "cosine"}:
        return f"the learning rate of a {now['scheduler']} schedule depends on the steps of the whole run"
    if key == "precision" and "float16" in {saved[key], now[key]}:
        return "float16 uses a gradient scaler, and only one of the two configs has its state"
    if key in _CUTS_BATCHES and is_mid_epoch:
        return (
            "the checkpoint was written in the middle of an epoch. With other batches some samples of it would be "
            "used twice or not at all; resume from a checkpoint written at the end of an epoch"
        )
    if key == "optimizer_args" and option in SCHEDULED and (now.get("scheduler") or now.get("warmup")):
        return f"it is set by the scheduler, and {_SCHEDULER_REASON}"
    return ""
