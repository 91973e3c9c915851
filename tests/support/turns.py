"""Ranks that are threads of one process take turns: one runs at a time, until it waits in a call of its group.

Ranks share memory here and nowhere else. With turns, what they do is in the same order in every run, and each has the
state of the random generators to itself, as it would in a process of its own. If no rank can go on, that is seen at
once, and not after a timeout: every rank that waits gets an error that says what each of them waits for.

    rank 0   runs ... waits                          runs again when what it waits for is there
    rank 1                 runs ... waits
    rank 2                                runs ... ends
"""

import random
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, final

import numpy as np
import torch

from lockstep.errors import CollectiveTimeoutError, GroupError, PeerLostError


class RankState(Enum):
    """What one rank is doing: RUNNABLE <-> WAITING, and from RUNNABLE to ENDED."""

    RUNNABLE = auto()
    WAITING = auto()
    ENDED = auto()


@final
@dataclass(slots=True)
class _Rank:
    state: RankState = RankState.RUNNABLE
    waits_for: str = ""
    missing: Callable[[], Collection[int]] = tuple
    error: BaseException | None = None
    """Why it ended."""
    no_way_on: GroupError | None = None
    """Why what it waits for will not come."""
    generators: Sequence[Any] = ()


@final
class Turns:
    """Who runs, and who waits for whom.

    Args:
        num_ranks: Number of ranks.
        seconds: How long one turn may take.
    """

    def __init__(self, num_ranks: int, seconds: float) -> None:
        self._seconds = seconds
        self._changed = threading.Condition()
        self._ranks = [_Rank(generators=_read_generators()) for _ in range(num_ranks)]
        self._threads: dict[int, int] = {}
        self._current = 0
        self._num_turns = 0
        self._ended: list[int] = []
        self._is_aborted = False

    def begin(self, rank: int) -> None:
        """Wait for the first turn of a rank, which this thread is."""
        with self._changed:
            self._threads[threading.get_ident()] = rank
            self._await_turn(rank)
            _write_generators(self._ranks[rank].generators)

    def end(self, rank: int, error: BaseException | None) -> None:
        """Note that a rank has returned, or failed, and give its turn to another."""
        with self._changed:
            self._ranks[rank].state, self._ranks[rank].error = RankState.ENDED, error
            self._ended.append(rank)
            self._pass_on(rank)

    def wait_for(self, rank: int, missing: Callable[[], Collection[int]], what: str) -> None:
        """Let others run until `rank` misses nobody.

        Args:
            rank: Who waits.
            missing: Returns the ranks that must do something first; depends on nothing but what ranks do.
            what: What is waited for, for messages.

        Raises:
            PeerLostError: No rank can go on, and one that is missing has ended.
            CollectiveTimeoutError: No rank can go on.
        """
        with self._changed:
            if not missing():
                return
            if self._threads.get(threading.get_ident()) != rank:
                self._wait_beside(rank, missing, what)
                return
            me = self._ranks[rank]
            me.state, me.waits_for, me.missing, me.generators = RankState.WAITING, what, missing, _read_generators()
            self._pass_on(rank)
            self._await_turn(rank)
            _write_generators(me.generators)
            me.state = RankState.RUNNABLE
            error, me.no_way_on = me.no_way_on, None
            if error is not None:
                raise error

    def notify(self) -> None:
        """Let threads look again that ranks have started themselves."""
        with self._changed:
            self._changed.notify_all()

    def wait_for_all(self) -> None:
        """Return when all ranks have ended.

        Raises:
            AssertionError: A turn took too long: the rank waits for something else than its group.
        """
        with self._changed:
            try:
                while not self._have_all_ended():
                    has_moved = partial(self._has_moved, self._num_turns)
                    if not self._changed.wait_for(has_moved, self._seconds):
                        raise AssertionError(self._explain_long_turn())
            finally:
                self._is_aborted = not self._have_all_ended()
                self._changed.notify_all()

    def failures(self) -> list[tuple[int, BaseException]]:
        """Return which ranks failed, and why; first the one that failed first."""
        found = [(rank, self._ranks[rank].error) for rank in self._ended]
        return [(rank, error) for rank, error in found if error is not None]

    def _has_moved(self, num_turns: int) -> bool:
        return self._num_turns != num_turns

    def _have_all_ended(self) -> bool:
        return len(self._ended) == len(self._ranks)

    def _wait_beside(self, rank: int, missing: Callable[[], Collection[int]], what: str) -> None:
        """Wait in a thread that a rank has started, which takes no turns."""
        if not self._changed.wait_for(lambda: not missing() or self._is_aborted, self._seconds):
            raise CollectiveTimeoutError(f"A thread of rank {rank} has waited {self._seconds:g} s for {what}.")

    def _await_turn(self, rank: int) -> None:
        self._changed.wait_for(lambda: self._current == rank or self._is_aborted)
        if self._is_aborted:
            raise GroupError("The test was ended.")

    def _pass_on(self, rank: int) -> None:
        """Give the turn to the next rank that can go on; if there is none, to one that gets an error."""
        self._num_turns += 1
        order = [(rank + distance) % len(self._ranks) for distance in range(1, len(self._ranks) + 1)]
        able = [other for other in order if self._can_go_on(self._ranks[other])]
        if able:
            self._current = able[0]
        elif not self._have_all_ended():
            self._current, error = self._choose_failure()
            self._ranks[self._current].no_way_on = error
        self._changed.notify_all()

    def _can_go_on(self, rank: _Rank) -> bool:
        return rank.state is RankState.RUNNABLE or (rank.state is RankState.WAITING and not rank.missing())

    def _choose_failure(self) -> tuple[int, GroupError]:
        """Return which rank gets an error when all wait, and the error: best one that waits for a rank that failed."""
        waiting = [number for number, rank in enumerate(self._ranks) if rank.state is RankState.WAITING]
        waits = "; ".join(f"rank {number} waits for {self._ranks[number].waits_for}" for number in waiting)
        failed = [rank for rank, _ in self.failures()]
        for lost in (*failed, *self._ended):
            for number in waiting:
                if lost in self._ranks[number].missing():
                    error = self._ranks[lost].error
                    how = "has returned and makes no more calls" if error is None else f"failed: {_describe(error)}"
                    return number, PeerLostError(f"Rank {lost} {how} ({waits}).", rank=lost)
        return waiting[0], CollectiveTimeoutError(f"No rank can go on: {waits}.")

    def _explain_long_turn(self) -> str:
        idents = {rank: ident for ident, rank in self._threads.items()}
        frame = sys._current_frames().get(idents.get(self._current, -1))
        where = "".join(traceback.format_stack(frame)) if frame is not None else "(its thread is gone)"
        return (
            f"A turn of rank {self._current} takes longer than {self._seconds:g} s. While a rank waits for something "
            f"else than a call of its group, no other rank runs. It is here:\n{where}"
        )


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@contextmanager
def restored_generators() -> Iterator[None]:
    before = _read_generators()
    try:
        yield
    finally:
        _write_generators(before)


def _read_generators() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 - the state of what users call


def _write_generators(state: Sequence[Any]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])  # noqa: NPY002 - likewise
