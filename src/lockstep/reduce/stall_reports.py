"""Connects the watch for stalls to a reducer: which wait it measures, and what it reports of this rank."""

import hashlib
import threading
import weakref
from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from lockstep.comm import World, group_store
from lockstep.reduce.backward_reducer import BackwardReducer
from lockstep.reduce.model import TrainedModel
from lockstep.reduce.stall import StallWatch, where
from lockstep.settings import read_stall_seconds

_LONG_SECONDS = 1.0


def watch_for_stalls(reducer: BackwardReducer, model: TrainedModel, world: World) -> Callable[[], object]:
    """Begin to watch the waits of a reducer; return what ends the watch (local)."""
    seconds = read_stall_seconds()
    store = None if world.group is None else group_store(world.group)
    if world.world_size == 1 or seconds == 0 or store is None:
        return _do_nothing
    names = "".join(str(each.spec) for each in model.trained)
    own_store = dist.PrefixStore(f"stall/{hashlib.sha256(names.encode()).hexdigest()}", store)
    watched = weakref.ref(reducer)
    describe = partial(_describe_progress, watched, threading.get_ident())
    watch = StallWatch(own_store, world.rank, world.world_size, seconds, partial(_seconds_waited, watched), describe)
    # At exit too: a thread that is in the store while the interpreter ends aborts the process.
    return weakref.finalize(reducer, watch.close)


def _seconds_waited(reducer: "weakref.ref[BackwardReducer]") -> float | None:
    alive = reducer()
    if alive is None:
        return None
    seconds = alive.schedule.waits.seconds()
    if seconds > _LONG_SECONDS:
        alive.schedule.waits.on_long()
    return seconds


def _describe_progress(reducer: "weakref.ref[BackwardReducer]", thread_id: int) -> str:
    alive = reducer()
    return "has ended its training" if alive is None else alive.describe_progress() + where(thread_id)


def _do_nothing() -> None:
    """Do nothing: waits are not watched."""
