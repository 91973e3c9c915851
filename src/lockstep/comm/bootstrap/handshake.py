"""The startup handshake: before a group is made, workers compare rank, world size and backend through the store.

torch's own set-up takes each worker's settings as they are and then waits for the rest. Two workers with one rank,
worlds of two sizes, different backends, a worker that never starts: each ends in a timeout, half an hour later, that
names no worker. Here the worker that finds such a mistake stores it, and all raise the same message.

worker r                                              the store, under the generation's prefix
--------                                              ----------------------------------------
1 pass over generations that are finished          <- decision, closed
2 compare its settings with the first worker's     <> first
3 take the place of rank r                         <> place/<r>, taken
4 the last to take a place, or to find a mistake   -> wake
5 show that it is alive, and on which host         -> alive/<r>, living
6 the last to show it, or to find a mistake        -> decision
7 read the hosts of all                            <- alive/*
8 after a mistake: raise when all have read it     <> num_read, closed

[Note: liveness check] A store may outlive workers: torchrun's agent keeps its store when it restarts workers, and the
file of a FileStore remains when they are killed. A place may be taken by a process that has exited, so no worker counts
as present before step 5. A generation with such a process in it is abandoned; the running workers use the next one.

[Note: wait before raising] The store may live in rank 0's process and end with it. So before it raises, a worker waits
for a short time until the others have read the reason.
"""

import contextlib
import itertools
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import final

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from lockstep.comm.hosts import GroupHosts, host_record, read_hosts
from lockstep.comm.stored_values import read_number, read_record, to_stored
from lockstep.errors import GroupError
from lockstep.processes.user_line import stacklevel_of_user

RESPONSE_SECONDS = 5.0
"""How long a running worker may take to answer, and how long workers that found a mistake wait for the others."""

WARNING_SECONDS = 20.0
"""After how long a wait for other workers one worker warns which ranks are missing."""
_CLAIM_SECONDS = 2.0
"""How long a worker that serves the store may take to start the handshake."""
_ABSENT = ""
"""What `compare_set` expects of a key that is not set."""
_SHORTEST_SECONDS = 0.01
"""The shortest wait: to a store, zero means for ever."""
_NAMED_RANKS = 8
_DECIDED = "lockstep/decided"
_PREFIX = "lockstep/{}/handshake"


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """Settings and process of a worker, as it writes them to the store."""

    rank: int
    world_size: int
    backend: str
    process: str
    """Where to find it, for people: `"process 12 on host a"`."""
    token: str
    """Unique to its process: distinguishes a repeated handshake of one worker from a second worker with its rank."""


class Outcome(StrEnum):
    """How a generation ended; it is decided once, and every worker reads the same.

    none -> COMPLETE: every rank has shown that it is alive.
    none -> FAILED: a worker found a mistake; all raise.
    none -> ABANDONED: one of its workers has exited; the others use the next generation.
    """

    COMPLETE = "complete"
    FAILED = "failed"
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True, kw_only=True)
class _HandshakeResult:
    outcome: Outcome
    message: str = ""
    """What to raise, after a failure."""
    num_readers: int = 0
    """How many workers should read it before the first one raises."""


def run_handshake(
    store: Store,
    me: Announcement,
    *,
    timeout: timedelta,
    hosted_at: str = "",
    problem: str = "",
) -> int | None:
    """Wait until every rank is present with the same settings (collective); return the number of the generation.

    The number is the same on all ranks, and no other group on this store has it: the group's keys in the store get a
    prefix made of it. It is None if this was the store of the previous group and rank 0 has closed it: open it again.

    `hosted_at` is the store's address if it lives in rank 0's process, else empty. A `problem` (why this worker cannot
    take part) is raised by all workers.
    """
    start = time.monotonic()
    generation = 0
    handshake: _Handshake | None = None
    try:
        generation = _latest_decided(store)
        while not (handshake := _Handshake(store, generation, me, start)).run(timeout, problem):
            generation += 1
            others = handshake.first_member_of_other_world() if hosted_at else None
            if others is not None and not _Handshake(store, generation, me, start).has_begun():
                raise GroupError(_explain_closed_world(hosted_at, me, others))
    except dist.DistNetworkError as error:
        if hosted_at and me.rank != 0 and (generation > 0 or handshake is None or not handshake.has_place):
            return None
        raise GroupError(_explain_lost(hosted_at, me)) from error
    return generation


def hosts_of_generation(store: Store, generation: int, rank: int, world_size: int) -> GroupHosts:
    """Return the hosts of the workers of a complete generation (local)."""
    shown = PrefixStore(_PREFIX.format(generation), store)
    return read_hosts(shown, [f"alive/{peer}" for peer in range(world_size)], rank)


def report_duplicate_rank(store: Store, me: Announcement) -> str:
    """Report the worker that has this worker's rank and serves `store`, if both belong to one world.

    Called by a second rank 0, which could not open a store of its own. In one world all workers raise; otherwise this
    returns the process that serves the store, as text, or an empty text if there is no handshake.
    """
    for generation in itertools.count(_latest_decided(store)):
        handshake = _Handshake(store, generation, me, time.monotonic())
        decision = handshake.decision()
        if decision is None or decision.outcome is Outcome.COMPLETE:
            break
    other = handshake.wait_for_rank_holder()
    if other is not None and decision is None and _find_mistake(other, me) is None:
        decision = handshake.report_mistake(other, _explain_duplicate_rank(other, me))
        if decision.outcome is Outcome.FAILED:
            wait_for_readers(handshake.store, decision.num_readers)
            raise GroupError(decision.message)
    return "" if other is None else other.process


@final
class _Handshake:
    def __init__(self, store: Store, generation: int, me: Announcement, start: float) -> None:
        self._root = store
        self._generation = generation
        self.store = PrefixStore(_PREFIX.format(generation), store)
        self._me = me
        self._start = start
        self.has_place = False

    def run(self, timeout: timedelta, problem: str) -> bool:
        """Take part, unless it is decided; return whether this worker took part and the world is complete with it."""
        decision = self.decision()
        takes_part = decision is None
        if decision is None:
            decision = self.join(timeout, problem)
        if decision.outcome is Outcome.FAILED and (takes_part or not self.store.check(["closed"])):
            wait_for_readers(self.store, decision.num_readers)
            raise GroupError(decision.message)
        return takes_part and decision.outcome is Outcome.COMPLETE and self._is_member()

    def decision(self) -> _HandshakeResult | None:
        return self._read_decision() if self.store.check(["decision"]) else None

    def _read_decision(self) -> _HandshakeResult:
        return read_record("decision", self.store.get("decision"), _HandshakeResult)

    def wait_for_rank_holder(self) -> Announcement | None:
        """Return the worker that has the place of this worker's rank; wait for it for a short time."""
        key = f"place/{self._me.rank}"
        return read_record(key, self.store.get(key), Announcement) if _wait(self.store, [key], _CLAIM_SECONDS) else None

    def has_begun(self) -> bool:
        return self.store.check(["first"])

    def first_member_of_other_world(self) -> Announcement | None:
        """Return the first worker of a world that is complete without this process; None if there is no such world."""
        decision = self.decision()
        is_complete = decision is not None and decision.outcome is Outcome.COMPLETE
        return self._claim("first") if is_complete and not self._is_member() else None

    def join(self, timeout: timedelta, problem: str) -> _HandshakeResult:
        first = self._claim("first")
        mistake = _find_mistake(first, self._me)
        if mistake is not None:
            return self.report_mistake(first, mistake)
        holder = self._claim(f"place/{self._me.rank}")
        if holder.token != self._me.token:
            return self.report_mistake(holder, _explain_duplicate_rank(holder, self._me))
        self.has_place = True
        if self.store.add("taken", 1) == self._me.world_size:
            self._wake_all("all are here")
        response_seconds = min(RESPONSE_SECONDS, timeout.total_seconds())
        left = self._start + timeout.total_seconds() - time.monotonic()
        # Wait this long at least: other workers may be about to switch from an abandoned generation.
        if not self._wait_for_wake(response_seconds if problem else max(left, response_seconds)):
            return self._decide_at_timeout(problem)
        return self._show_alive(problem)

    def _wait_for_wake(self, seconds: float) -> bool:
        """Wait for the wake key; after a long wait, warn once which ranks are missing."""
        if seconds <= WARNING_SECONDS:
            return _wait(self.store, ["wake"], seconds)
        if _wait(self.store, ["wake"], WARNING_SECONDS):
            return True
        present = [rank for rank in range(self._me.world_size) if self.store.check([f"place/{rank}"])]
        missing = sorted(set(range(self._me.world_size)) - set(present))
        if missing and self._me.rank == present[0]:
            warnings.warn(
                f"{_name_ranks(missing)} of {self._me.world_size} did not connect in {WARNING_SECONDS:.3g} s; "
                f"{_name_ranks(present).lower()} will wait {seconds - WARNING_SECONDS:.0f} s more. (LS109)",
                stacklevel=stacklevel_of_user(),
            )
        return _wait(self.store, ["wake"], seconds - WARNING_SECONDS)

    def report_mistake(self, other: Announcement, mistake: str) -> _HandshakeResult:
        """Publish a mistake that involves `other`, if its process still runs (see [Note: liveness check])."""
        self._wake_all("a mistake")
        if not _wait(self.store, [f"alive/{other.rank}"], RESPONSE_SECONDS):
            return self._decide(Outcome.ABANDONED)
        return self._decide(Outcome.FAILED, mistake, max(other.world_size, self._me.world_size))

    def _show_alive(self, problem: str) -> _HandshakeResult:
        self.store.set(f"alive/{self._me.rank}", host_record())
        if self.store.get("wake") == b"all are here":
            if problem:
                return self._decide(Outcome.FAILED, problem, self._me.world_size)
            if self.store.add("living", 1) == self._me.world_size:
                return self._decide(Outcome.COMPLETE)
        # The worker that set the wake key waits once for the others to show that they run, and then decides.
        if _wait(self.store, ["decision"], 2 * RESPONSE_SECONDS):
            return self._read_decision()
        return self._decide(Outcome.FAILED if problem else Outcome.ABANDONED, problem, self._me.world_size)

    def _decide_at_timeout(self, problem: str) -> _HandshakeResult:
        """Decide on a generation in which not all places were taken in time."""
        self._wake_all("time is up")
        self.store.set(f"alive/{self._me.rank}", host_record())
        ranks = range(self._me.world_size)
        _wait(self.store, [f"alive/{rank}" for rank in ranks if self.store.check([f"place/{rank}"])], RESPONSE_SECONDS)
        living = [rank for rank in ranks if self.store.check([f"alive/{rank}"])]
        missing = sorted(set(ranks) - set(living))
        if not (missing or problem):
            return self._decide(Outcome.COMPLETE)
        waited = time.monotonic() - self._start
        return self._decide(Outcome.FAILED, problem or _explain_missing(living, missing, waited), len(living))

    def _decide(self, outcome: Outcome, message: str = "", num_readers: int = 0) -> _HandshakeResult:
        """Store the decision on the generation, unless there is one; return the stored one."""
        decision = _HandshakeResult(outcome=outcome, message=message, num_readers=num_readers)
        decided = self.store.compare_set("decision", _ABSENT, to_stored(decision))
        self._root.set(_DECIDED, str(self._generation))
        return read_record("decision", decided, _HandshakeResult)

    def _is_member(self) -> bool:
        if self.has_place or not self.store.check([f"place/{self._me.rank}"]):
            return self.has_place
        return self._claim(f"place/{self._me.rank}").token == self._me.token

    def _claim(self, key: str) -> Announcement:
        """Set `key` to this worker, unless it is set; return the worker that it holds."""
        return read_record(key, self.store.compare_set(key, _ABSENT, to_stored(self._me)), Announcement)

    def _wake_all(self, why: str) -> None:
        self.store.compare_set("wake", _ABSENT, why)


def wait_for_readers(store: Store, num_readers: int) -> None:
    """Wait until so many have read a reason to raise, but not for long (see [Note: wait before raising])."""
    with contextlib.suppress(dist.DistNetworkError):  # rank 0 has exited, and its store with it
        if store.add("num_read", 1) < num_readers:
            _wait(store, ["closed"], RESPONSE_SECONDS)
        store.set("closed", "yes")


def _wait(store: Store, keys: list[str], seconds: float) -> bool:
    """Return whether all `keys` were set within `seconds`."""
    try:
        store.wait(keys, timedelta(seconds=max(seconds, _SHORTEST_SECONDS)))
    except dist.DistNetworkError:
        raise
    except RuntimeError:  # FileStore has no exception of its own for a timeout
        return store.check(keys)
    return True


def _latest_decided(store: Store) -> int:
    """Return about the last generation that has a decision; no worker needs earlier ones."""
    return read_number(_DECIDED, store.get(_DECIDED)) if store.check([_DECIDED]) else 0


def _find_mistake(first: Announcement, me: Announcement) -> str | None:
    if first.world_size != me.world_size:
        return (
            f"The workers have different world sizes: rank {first.rank} ({first.process}) has "
            f"{first.world_size} and rank {me.rank} ({me.process}) has {me.world_size}. Give all of them the same "
            "WORLD_SIZE, the number of workers on all hosts together; two trainings need a MASTER_PORT (or file, or "
            "store) each. (LS107)"
        )
    if first.backend != me.backend:
        return (
            f"The workers have different backends: rank {first.rank} ({first.process}) has "
            f"{first.backend!r} and rank {me.rank} ({me.process}) has {me.backend!r}. Pass the same backend to "
            "init_process_group on every rank. (LS108)"
        )
    return None


def _explain_duplicate_rank(other: Announcement, me: Announcement) -> str:
    return (
        f"Two workers have rank {me.rank} of {me.world_size}: {other.process} and {me.process}. Give every worker a "
        f"RANK of its own, 0 to {me.world_size - 1}; two trainings need a MASTER_PORT (or file, or store) each. (LS107)"
    )


def _explain_missing(living: Sequence[int], missing: Sequence[int], waited: float) -> str:
    return (
        f"{_name_ranks(missing)} did not connect: {_name_ranks(living).lower()} waited {waited:.3g} s for a world of "
        f"{len(living) + len(missing)} workers. Look at the log of each missing rank; if fewer "
        "workers were started, WORLD_SIZE is too large. (LS109)"
    )


def _explain_closed_world(hosted_at: str, me: Announcement, first: Announcement) -> str:
    return (
        f"The world at {hosted_at} is complete without this worker, {me.process}: its {first.world_size} workers, "
        f"{first.process} among them, have ranks 0 to {first.world_size - 1}, and this one has rank {me.rank} of "
        f"{me.world_size}. Start every rank once and give all the same WORLD_SIZE; if that is another training, set "
        "MASTER_PORT to a free port. (LS107)"
    )


def _explain_lost(hosted_at: str, me: Announcement) -> str:
    where = f"the store at {hosted_at}, which rank 0 serves," if hosted_at else "the store of the rendezvous"
    return (
        f"Rank {me.rank} lost {where} while it waited for the other workers. "
        "Look at the log of the process there. (LS112)"
    )


def _name_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    named = ", ".join(map(str, ranks[:_NAMED_RANKS]))
    more = len(ranks) - _NAMED_RANKS
    return f"Ranks {named} and {more} more" if more > 0 else f"Ranks {named}"
