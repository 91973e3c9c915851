"""The place of one worker in its group."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup

from lockstep.comm.objects import gather_objects, to_plain_error
from lockstep.torch_private.groups import default_group, store_of

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    rank: int
    world_size: int
    group: ProcessGroup | None
    """Their group; None for a worker that is alone."""
    is_torchs: bool = True
    """Whether torch made the group, so that it is seen when torch destroys it."""

    @property
    def has_group(self) -> bool:
        """Whether the group is there, and was not destroyed since."""
        return self.group is not None and not (self.is_torchs and store_of(self.group) is None)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every worker's `value`, in rank order (collective; small values: see `objects`)."""
        return [value] if self.group is None else gather_objects(value, self.group)

    def from_first(self, call: Callable[[], Result]) -> Result:
        """Return what `call` returns on rank 0, where alone it is called, or raise what it raises (collective)."""
        result: Result | None = None
        failure: Exception | None = None
        if self.rank == 0:
            try:
                result = call()
            except Exception as error:  # noqa: BLE001 - it is raised on every rank
                failure = error
        sent = None if failure is None else to_plain_error(failure, self.rank)
        result, received = self.gather_objects((result, sent))[0]
        failure = received if failure is None else failure
        try:
            if failure is not None:
                raise failure
        finally:
            failure = received = sent = (
                None  # its traceback has this frame: a cycle, which would keep what the frames hold
            )
        return cast("Result", result)


def current_world(group: ProcessGroup | None = None) -> World:
    """Return this worker's place in `group`, or in the default group, or alone if there is none (local)."""
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return World(rank=0, world_size=1, group=None)
        group = default_group()
    return World(rank=group.rank(), world_size=group.size(), group=group, is_torchs=store_of(group) is not None)
