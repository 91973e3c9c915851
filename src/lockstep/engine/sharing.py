"""The optimizers of a run whose state is shared among its workers, through the life of the run.

[Note: an update in parts] Each worker updates its pieces in commit, then all gather the parameters. If a worker is lost
in between, the step is complete all the same: the others have updated what they hold, and what the lost one has updated
is held by its neighbour. What is missing is parameters of other workers, and these can only come from the next set of
workers. So the step is committed, and before anything else is done, workers meet, and *settle*: they complete the
parameters, and share the pieces anew, until each is held twice again (`Member.complete`). In any other call that fails
for the loss of a worker, all have the parameters, and settle before they call again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import final

from torch.optim import Optimizer

from lockstep.comm import World
from lockstep.errors import GroupError, LockstepError
from lockstep.sharding.parts import OptimizerParts


@final
class OptimizerSharing:
    """Without `begin`, optimizers are whole, and all of this does nothing."""

    def __init__(self) -> None:
        self._parts: dict[Optimizer, OptimizerParts] = {}
        self.lost: GroupError | None = None
        """What has ended the last gathering: parameters are incomplete here until workers settle."""
        self.has_written = False
        """Whether the update under way may have written to pieces."""

    def __bool__(self) -> bool:
        return bool(self._parts)

    def begin(self, optimizers: Sequence[Optimizer], world: World, neighbours: int) -> None:
        """Share the state among these workers (local)."""
        self._parts = {each: OptimizerParts(each, world, neighbours) for each in optimizers}

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self._parts.values())

    def describe(self) -> dict[str, str]:
        """Return what must be the same on all workers."""
        return {f"what workers share of optimizer {n}": each.describe() for n, each in enumerate(self._parts.values())}

    @contextmanager
    def update(self, chosen: Sequence[Optimizer], world: World) -> Iterator[None]:
        """Let some optimizers update the pieces that this worker holds, then gather the parameters (collective).

        Raises:
            UnusableStateError: The update of another worker has failed.
        """
        parts = [self._parts[each] for each in chosen if each in self._parts]
        self.has_written = False
        try:
            with ExitStack() as entered:
                for each in parts:
                    entered.enter_context(each.entered())
                self.has_written = bool(parts)
                yield
        except BaseException:
            for each in parts:
                with suppress(LockstepError):  # the error here is the cause
                    each.gather(world, has_failed=True)
            raise
        try:
            for each in parts:
                each.gather(world)
        except GroupError as error:
            self.lost = error

    def take_loss(self) -> GroupError | None:
        lost, self.lost = self.lost, None
        return lost

    def follow_groups(self, world: World) -> None:
        """Share anew what has other parameters than before, alike on all workers (then collective)."""
        for each in self._parts.values():
            if each.has_other_parameters:
                each.settle(world)

    def settle(self, world: World, staying: Sequence[int] | None = None) -> None:
        """[Note: an update in parts] (collective)."""
        for each in self._parts.values():
            each.settle(world, staying)

    @contextmanager
    def collected(self, world: World, targets: Sequence[int]) -> Iterator[None]:
        """Let some workers have the whole state, to save it (collective)."""
        for each in self._parts.values():
            each.collect(world, targets)
        try:
            yield
        finally:
            for each in self._parts.values():
                each.drop()

    def forget(self) -> None:
        for each in self._parts.values():
            each.forget()

    def forget_group(self) -> None:
        for each in self._parts.values():
            each.forget_group()

    @contextmanager
    def without_states(self) -> Iterator[None]:
        """Let the state of optimizers be their options alone (local)."""
        with ExitStack() as stack:
            for each in self._parts.values():
                stack.enter_context(each.without_states())
            yield

    def keep(self, *, is_stepped: bool) -> Callable[[], None]:
        kept = [each.keep(is_stepped=is_stepped) for each in self._parts.values()]

        def put_back() -> None:
            for each in kept:
                each()

        return put_back
