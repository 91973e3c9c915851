"""Which workers a run has now, as the launcher decides it: a worker's side.

A *generation* is one set of workers. When a worker has ended, the launcher sends those that are left the next
generation: their ranks, and who was lost. They leave the group of the last generation, and make one for the next.

    launcher                                    worker
    --------                                    ------
                                           <-   ready      it can continue without others
    a worker ends
    who is left, in `launch/membership.py` ->   generation
                                                leave the old group, make the new one
                                           <-   lost       a call has failed because a rank was lost
    nobody was lost                        ->   unchanged  the error stands
"""

import dataclasses
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

from torch.distributed import PrefixStore

from lockstep.channel.client import Channel
from lockstep.channel.lines import Message
from lockstep.comm.bootstrap.channel_store import ChannelStore
from lockstep.comm.bootstrap.process_group import destroy_process_group, init_process_group
from lockstep.comm.world import World, current_world
from lockstep.errors import GroupError

_DECISION_SECONDS = 60.0
"""How long the launcher may take to decide: until it has seen that a worker has ended, and killed one if need be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostWorker:
    """A worker that has ended."""

    rank: int
    """Its rank in the generation before."""
    pid: int
    """Its process."""
    reason: str
    """How it ended: "was killed by SIGKILL"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextGeneration:
    """What the launcher has decided."""

    number: int
    """Number of the generation."""
    rank: int
    """The rank of this worker."""
    world_size: int
    """How many workers there are."""
    lost: tuple[LostWorker, ...]
    """Who has ended since the generation before."""


@final
class Generations:
    """The generations of a run, as one of its workers follows them.

    Args:
        descriptor: This worker's end of its channel to the launcher.
        backend: With which a group is made.

    Attributes:
        number: The present generation.
        help_others: Called when there is a new generation, but this worker makes no calls any more; None where
            nothing can be done for the others.
        on_joined: Called when this worker has joined a generation.
    """

    def __init__(self, descriptor: int, backend: str) -> None:
        self.number = 0
        self.help_others: Callable[[], None] | None = None
        self.on_joined: Callable[[NextGeneration], None] = _ignore
        self._backend = backend
        self._changed = threading.Condition()
        self._next: NextGeneration | None = None
        self._unchanged = False
        self._stop_reason = ""
        self._store: ChannelStore | None = None
        self._channel = Channel(descriptor, self.handle)

    def make_first(self, rank: int, world_size: int) -> None:
        """Make the group of the first generation (collective).

        Raises:
            GroupError: It cannot be made.
        """
        init_process_group(self._backend, store=ChannelStore(self._channel), rank=rank, world_size=world_size)

    def handle(self, message: Message) -> None:
        """Take in an event of the launcher; called in the thread that reads the channel."""
        with self._changed:
            if message["event"] == "generation":
                lost = tuple(LostWorker(**each) for each in message["lost"])
                earlier = self._next.lost if self._next is not None else ()
                fields = {name: message[name] for name in ("number", "rank", "world_size")}
                self._next = NextGeneration(lost=(*earlier, *lost), **fields)
                if self._store is not None:
                    self._store.abandon()
            elif message["event"] == "unchanged":
                self._unchanged = True
            elif message["event"] == "stop":
                self._stop_reason = message["reason"]
            self._changed.notify_all()

    def report_ready(self, *, max_workers: int, min_workers: int = 1) -> None:
        """Report to the launcher that this worker can continue without others, or with more (local)."""
        self._channel.report("ready", max_workers=max_workers, min_workers=min_workers)

    @property
    def has_next(self) -> bool:
        """Whether there is a generation that this worker has not joined."""
        return self._next is not None

    def wait_for_next(self, error: BaseException) -> None:
        """Wait for the generation after one in which a call has failed.

        Args:
            error: How it has failed. It is raised again where the launcher sees no loss.

        Raises:
            GroupError: The run cannot continue.
        """
        deadline = time.monotonic() + _DECISION_SECONDS
        with self._changed:
            self._unchanged = False
            if self._next is None:
                self._channel.report("lost", generation=self.number)
            while self._next is None:
                if self._stop_reason:
                    raise GroupError(f"{error} {self._stop_reason}") from error
                if self._unchanged or not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise error

    def join_next(self) -> tuple[World, NextGeneration]:
        """Leave the group of the present generation and make that of the next one (collective for its workers).

        Raises:
            GroupError: The group cannot be made: another worker was lost meanwhile, as a rule.
        """
        joined, store = self._take_next()
        self.number = joined.number
        try:
            destroy_process_group()
            init_process_group(
                self._backend,
                store=PrefixStore(f"generation/{joined.number}", store),
                rank=joined.rank,
                world_size=joined.world_size,
            )
        except RuntimeError as error:
            if not self._keep_losses(joined) or isinstance(error, GroupError):
                raise
            raise GroupError(f"The group of generation {joined.number} was given up: {error}") from error
        finally:
            with self._changed:
                self._store = None
        self.on_joined(joined)
        return current_world(), joined

    def _take_next(self) -> tuple[NextGeneration, ChannelStore]:
        """Return the next generation, which is the present one from now on, and its store."""
        with self._changed:
            taken, self._next = self._next, None
            assert taken is not None
            store = self._store = ChannelStore(self._channel)
            return taken, store

    def _keep_losses(self, given_up: NextGeneration) -> bool:
        """Keep who was lost before a generation that was given up, for the report on the one after it, if any."""
        with self._changed:
            if self._next is not None:
                self._next = dataclasses.replace(self._next, lost=(*given_up.lost, *self._next.lost))
            return self._next is not None


def _ignore(_joined: NextGeneration) -> None:
    """Do nothing: nobody needs to know."""


class _Present:
    generations: Generations | None = None


_PRESENT: Final = _Present()


def follow_generations(generations: Generations) -> None:
    """Let this process follow the generations of a run (local)."""
    _PRESENT.generations = generations


def current_generations() -> Generations | None:
    """Return the generations that this process follows; None if its launcher does not replace groups (local)."""
    return _PRESENT.generations
