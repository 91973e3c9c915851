"""A worker that is lost at a given exchange, which some of the others complete and some do not, without processes.

The rank that is lost ends its thread with `Lost` when it has given its part of the exchange.
"""

import threading
from collections.abc import Callable, Collection
from typing import Any

from tests.support.threaded_ranks import make_subgroup

from lockstep.comm import World
from lockstep.comm.generations import LostWorker, NextGeneration
from lockstep.errors import PeerLostError


class Lost(BaseException):
    """Ends the thread of the rank that is lost."""


class ScriptedGenerations:
    """What `Generations` is to a worker, for one rank that is a thread.

    Args:
        world: The first workers.
        shared: One for all ranks: whether the rank was lost.
        lost: The rank that will be.
    """

    is_joiner = False
    planned_number = 0

    def __init__(self, world: World, shared: threading.Event, lost: int) -> None:
        self.number = 0
        self.member: object = None
        self.help_others: Callable[[], None] | None = None
        self.num_calls = 0
        self.reports: list[str] = []
        self._world = world
        self._shared = shared
        self._lost = lost

    @property
    def has_next(self) -> bool:
        return self._shared.is_set() and self.number == 0

    def report(self, what: str, **_: Any) -> None:
        self.reports.append(what)

    def report_ready(self, **_: Any) -> None:
        """Do nothing."""

    def take_losses(self) -> tuple[LostWorker, ...]:
        return (LostWorker(rank=self._lost, pid=1, reason="killed by SIGKILL"),)

    def wait_for_next(self, error: BaseException) -> None:
        """Return, if a rank was lost."""
        if not self.has_next:
            raise error

    def join_next(self) -> tuple[World, NextGeneration]:
        """Return the world of those that are left."""
        self.number = 1
        ranks = [rank for rank in range(self._world.world_size) if rank != self._lost]
        world = make_subgroup(self._world, ranks)
        return world, NextGeneration(number=1, rank=world.rank, world_size=world.world_size)


class ScriptedLosses:
    """Loses a rank at an exchange of a given number, once for all ranks of a test.

    Args:
        lost: The rank.
        completes: The ranks on which the exchange returns; on the others that are left it raises.
    """

    def __init__(self, lost: int, completes: Collection[int]) -> None:
        self._lost = lost
        self._completes = completes
        self._happened = threading.Event()
        self._of_thread = threading.local()

    def generations(self, world: World) -> ScriptedGenerations:
        self._of_thread.world, self._of_thread.left = world, {}
        return ScriptedGenerations(world, self._happened, self._lost)

    def lose_at(self, exchange: str, number: int) -> None:
        """Let the exchange of this name, the number-th from now on, be the one (each rank calls)."""
        self._of_thread.left[exchange] = number

    def note_loss(self) -> None:
        """Let the rank be lost between two calls, for the rank that calls this."""
        self._happened.set()

    def scripted(self, name: str, exchange: Callable[..., Any]) -> Callable[..., Any]:
        """Return an exchange that looks at the script."""

        def call(*args: Any, **options: Any) -> Any:
            left = getattr(self._of_thread, "left", {})
            left[name] = left.get(name, 0) - 1
            if left[name] != 0:
                return exchange(*args, **options)
            return self._lose(lambda: exchange(*args, **options))

        return call

    def _lose(self, exchange: Callable[[], Any]) -> Any:
        world: World = self._of_thread.world
        group: Any = world.group
        completes = world.rank in self._completes
        try:
            result = exchange()
        except PeerLostError:
            if world.rank == self._lost:
                raise Lost from None
            raise
        self._happened.set()
        if completes or not self._completes:
            group.state.broken = PeerLostError(f"Rank {self._lost} was lost.", self._lost)
            group.state.turns.notify()
        if completes:
            return result
        raise Lost if world.rank == self._lost else PeerLostError(f"Rank {self._lost} was lost.", self._lost)
