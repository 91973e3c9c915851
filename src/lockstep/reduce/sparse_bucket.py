"""A bucket of one sparse gradient, as of an embedding with `sparse=True`.

It has no buffer: its length differs from rank to rank and step to step. The group adds sparse tensors, if it can.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from lockstep.errors import ReductionError
from lockstep.reduce.partials import Partials
from lockstep.reduce.streams import BackwardStreams


@final
class SparseSlot:
    """The one gradient of a sparse bucket."""

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name = name
        self.parameter = parameter
        self.is_small = True
        self.is_scaled = False
        self.fits = True
        self.has_arrived = False
        self.is_unsynced = False

    def take(self, scale: float) -> None:
        """Do nothing: a sparse gradient is taken when its bucket is sent."""

    def adopt(self) -> None:
        """Do nothing, likewise."""

    def take_second(self) -> None:
        """Do nothing, likewise."""

    @property
    def has_gradient_in_place(self) -> bool:
        """Whether `.grad` is a place: never, there is none."""
        return False

    def detach_gradient(self) -> Tensor | None:
        gradient, self.parameter.grad = self.parameter.grad, None
        return gradient


@final
class SparseBucket:
    def __init__(
        self, name: str, parameter: nn.Parameter, used_counts: Tensor, streams: BackwardStreams | None = None
    ) -> None:
        self.slots = [SparseSlot(name, parameter)]
        self.used_counts = used_counts
        self.num_pending = 1
        self.streams = streams
        self.absent: list[int] = []
        self.unused: list[int] = []
        self._message = _nothing(parameter)

    def begin(self) -> None:
        """Do nothing: a sparse gradient lies in memory of its own."""

    @property
    def message(self) -> Tensor:
        return self._message

    @property
    def gradients(self) -> Tensor:
        """What a communication hook is given: all of it."""
        return self._message

    def prepare(self, scale: float) -> None:
        """Make the message ready, times `scale`."""
        if self.streams is not None:
            self.streams.join()
        (slot,) = self.slots
        gradient = slot.parameter.grad if slot.fits else None
        if gradient is not None and not gradient.is_sparse:
            raise ReductionError(
                f"Parameter {slot.name} has a dense gradient, and its embedding says sparse=True. Build the embedding "
                "with sparse=False, or use its weight in nothing else. (LS308)"
            )
        self._message = _nothing(slot.parameter) if gradient is None else gradient.detach().coalesce() * scale
        self.count_used()

    def prepare_nothing(self) -> None:
        """Make an empty message ready, for a backward that has failed here."""
        self._message = _nothing(self.slots[0].parameter)
        self.count_nothing()

    def count_used(self) -> None:
        """Write down whether the parameter has a gradient here."""
        (slot,) = self.slots
        slot.is_unsynced = slot.is_unsynced and slot.fits and slot.parameter.grad is not None
        self.absent = [] if slot.has_arrived else [0]
        self.unused = [] if slot.has_arrived or slot.is_unsynced else [0]
        self.used_counts.fill_(1 - len(self.unused))

    def count_nothing(self) -> None:
        self.absent, self.unused = [0], [0]
        self.used_counts.zero_()

    def add(self, _partials: Partials) -> list[Tensor]:
        """Add nothing: where ranks run several shards each, gradients are dense."""
        return []

    def take(self, result: Tensor) -> None:
        """Let `result`, which a hook made, be the reduced gradient."""
        self._message = result

    def write_back(self, counts: Sequence[float]) -> None:
        """Give the parameter its reduced gradient, if any rank had one."""
        (slot,) = self.slots
        if slot.fits and (not self.absent or counts[0] > 0):
            slot.parameter.grad = self._message.coalesce()
        slot.is_unsynced = False

    def reset(self) -> None:
        self.num_pending = 1
        self.slots[0].has_arrived = False


def _nothing(parameter: nn.Parameter) -> Tensor:
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, is_coalesced=True, check_invariants=False)
