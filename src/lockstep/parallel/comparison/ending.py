"""The end of the script: has every rank run as many backwards as the others?

A rank that has skipped a batch before its forward, or had fewer batches in an epoch, makes the same calls as the others
in the same order, with other batches, until its script ends. Then the others wait for a backward that never comes:

    rank 0                                     the group's store                rank 1
    ------                                     -----------------                ------
    1 waits in backward 8 for a moment   ->    "8, waits, line"
                                               "7, ended, line"           <-    2 its script ends (`atexit`)
                                                                          ->    3 reads that; logs both numbers; exits
    4 gets the error of a rank that is gone

A rank whose script ends waits until the others have ended too or one waits for it: for a moment that is long enough for
one more backward of theirs, by the longest time between two backwards here, and for at most `_LONGEST_WAIT_SECONDS`,
however many models it has wrapped.
"""

import functools
import logging
import sys
import time
from typing import Final, final

import torch.distributed as dist
from torch.distributed import Store

from lockstep.comm import World, group_store
from lockstep.parallel.comparison.forwards import TrainingForwards
from lockstep.parallel.comparison.optimizers import OptimizerSteps
from lockstep.processes.forking import call_at_exit_here

_LOGGER = logging.getLogger("lockstep")
_LONGEST_WAIT_SECONDS: Final = 10.0
_SHORTEST_WAIT_SECONDS: Final = 2.0
"""A rank that waits says so after half a second at most."""
_PAUSE_SECONDS: Final = 0.05


@final
class EndOfScript:
    """Compares how far the ranks have come when the script of one ends; lives until then, without the model."""

    def __init__(
        self,
        world: World,
        name: str,
        number: int,
        forwards: TrainingForwards,
        optimizers: OptimizerSteps,
    ) -> None:
        store = None if world.group is None else group_store(world.group)
        self._store: Store | None = None if store is None else dist.PrefixStore(f"lockstep/end/{number}", store)
        self._rank, self._world_size = world.rank, world.world_size
        self._name = name
        self._forwards = forwards
        self._optimizers = optimizers
        self._num_begun = 0
        self._posted = ""
        self._last_begun = self._longest_pause = 0.0
        self._post(0, "runs")
        self._keep_quiet = call_at_exit_here(self._tell)

    def note_begun(self) -> None:
        now = time.monotonic()
        if self._num_begun > 1:  # the first backwards may compile
            self._longest_pause = max(self._longest_pause, now - self._last_begun)
        self._last_begun = now
        self._num_begun += 1

    def post_wait(self, number: int) -> None:
        """Let the others know that this rank waits in the reduction of this number; another thread calls it."""
        self._post(number, "waits")

    def close(self) -> None:
        self._keep_quiet()

    def _post(self, num_begun: int, state: str) -> None:
        if self._store is not None:
            text = f"{num_begun} {self._optimizers.num_steps} {state} {self._forwards.line}"
            if text != self._posted:  # a rank that waits calls this again and again
                self._store.set(f"{self._rank}", text)
            self._posted = text

    def _tell(self) -> None:
        if (self._num_begun == 0 and self._forwards.num_unused == 0) or self._store is None:
            return
        # A script that has failed has its message already.
        has_failed = getattr(sys, "last_value", None) is not None
        try:
            self._post(self._num_begun, "failed" if has_failed else "ended")
            deadline = time.monotonic() if has_failed else _end_of_script() + self._wait_seconds
            text = self._wait_for_others(deadline, has_failed=has_failed)
            if text and self._store.add("told", 1) == 1:  # one rank says it
                _LOGGER.warning("%s", text)
        except dist.DistError:
            return  # the store has ended with the rank that holds it

    @property
    def _wait_seconds(self) -> float:
        return min(_SHORTEST_WAIT_SECONDS + 3 * self._longest_pause, _LONGEST_WAIT_SECONDS)

    def _wait_for_others(self, deadline: float, *, has_failed: bool) -> str:
        assert self._store is not None
        waited_for = set(range(self._world_size)) - {self._rank}
        is_first = self._store.add(f"exits of {self._rank}", 1) == 1
        while waited_for and is_first:
            for rank in sorted(waited_for):
                num_begun, num_steps, state, line = self._store.get(f"{rank}").decode().split(" ", 3)
                if state == "failed":  # it has shown why
                    waited_for.discard(rank)
                    continue
                if int(num_begun) > self._num_begun and state != "runs" and not has_failed:
                    return self._describe_missing((self._rank, self._num_begun), (rank, int(num_begun)), line)
                if state == "ended":
                    waited_for.discard(rank)
                    if int(num_begun) < self._num_begun:
                        return self._describe_missing((rank, int(num_begun)), (self._rank, self._num_begun), line)
                    if int(num_steps) < self._optimizers.num_steps:
                        return self._describe_steps(rank, int(num_steps))
            if waited_for and time.monotonic() > deadline:
                return ""
            time.sleep(_PAUSE_SECONDS if waited_for else 0)
        return ""

    def _describe_missing(self, behind: tuple[int, int], ahead: tuple[int, int], line: str) -> str:
        """Return what has happened, in words; `line` is where the other rank's last forward was."""
        (rank, num_begun), (other, num_expected) = behind, ahead
        here, there = (self._forwards.line, line) if rank == self._rank else (line, self._forwards.line)
        return (
            f"The script of rank {rank} has ended after {num_begun} backwards of {self._name}, and rank {other} has "
            f"begun backward {num_expected}, in which it needs rank {rank}. The last forwards were at {here} on rank "
            f"{rank} and at {there} on rank {other}. Rank {rank} has skipped a batch before its forward, or had fewer "
            "batches in an epoch, or a loss that does not depend on the parameters, or ran its last backward under "
            "no_sync(), or called sys.exit(); since then it was behind the others. Call "
            "model.skip_backward() where a batch is left out, give every rank as many batches "
            "(ls.DistributedSampler), or train within model.join(). (LS318)"
        )

    def _describe_steps(self, rank: int, num_steps: int) -> str:
        return (
            f"After the last of {self._num_begun} backwards of {self._name}, rank {self._rank} has taken "
            f"{self._optimizers.num_steps} optimizer steps and rank {rank} {num_steps}, so their parameters differ. "
            f"The last step was at {self._optimizers.line}. Step the optimizer on every rank or on none. (LS321)"
        )


@functools.cache
def _end_of_script() -> float:
    """Return when this process was at its end, the same for all models that it has wrapped."""
    return time.monotonic()
