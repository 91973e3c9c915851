"""What becomes of a model's buffers in a step of several shards.

[Note: buffers of shard 0] BatchNorm's running statistics come from the samples of one shard, as torch's come from those
of one rank. Which one must not depend on the number of workers, so it is shard 0: every shard starts from the buffers
that the step began with, what shard 0 makes of them is kept, and rank 0, which always runs shard 0, shares it.

[Note: buffers that are replaced] A forward may write a buffer, put another tensor in its place, of another shape even,
or make one where there was none. So both are noted: which tensors there were, and what was in them. The other workers
are told by rank 0 when its buffers have other shapes than at the beginning of the step.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import final

import torch
from torch import Tensor, nn

from lockstep.comm import World, broadcast_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffer:
    """A buffer as rank 0 describes it."""

    number: int
    """Equal for two names of one tensor."""
    shape: tuple[int, ...]
    """Its shape."""
    dtype: torch.dtype
    """Its dtype."""
    is_on_cpu: bool
    """Whether it is on the CPU, wherever the model is."""


_Layout = list[dict[str, _Buffer | None]]
"""The buffers of every module, in the order of the modules."""


@final
class BuffersOfShard0:
    """Lets every shard of a worker start from the step's buffers, and keeps those of shard 0.

    Args:
        model: Whose buffers; its modules stay the same.
        world: The workers.
        device: Where buffers are that are not on the CPU.
    """

    def __init__(self, model: nn.Module, world: World, device: torch.device) -> None:
        self._parts = [module._buffers for module in model.modules()]  # noqa: SLF001 - torch's names hide None
        self._world = world
        self._device = device
        self._has_several = False
        self._before = _Snapshot(self._parts, with_values=False)
        self._kept: _Snapshot | None = None

    def begin(self, *, num_slices: int, may_go_back: bool) -> None:
        """Begin with a step.

        Args:
            num_slices: How many slices this worker runs; with one, values need not be put back after it.
            may_go_back: Whether `go_back` may be asked for.
        """
        self._has_several = num_slices > 1
        self._before = _Snapshot(self._parts, with_values=self._has_several or may_go_back)
        self._kept = None

    def after(self, shard: int, *, is_last: bool) -> None:
        """Put back what the shard's forward changed; call it after each backward, which may still read it."""
        if shard == 0:
            if not self._has_several:
                return
            self._kept = _Snapshot(self._parts, with_values=True)
        wanted = self._kept if is_last and self._kept is not None else self._before
        wanted.put_back()

    @property
    def has_new_layout(self) -> bool:
        """Whether there are other buffers than when the step began, or of other shapes."""
        return self._before.is_other_layout()

    def share(self, *, is_new_layout: bool) -> None:
        """Give every worker shard 0's buffers, which rank 0 has (collective).

        Args:
            is_new_layout: Whether rank 0 `has_new_layout`.
        """
        if self._world.group is None:
            return
        if is_new_layout:
            mine = _describe(self._parts) if self._world.rank == 0 else None
            self._take_layout(self._world.gather_objects(mine)[0])
        tensors = {id(buffer): buffer for buffer in _tensors(self._parts)}
        if tensors:
            broadcast_tensors(list(map(without_repeats, tensors.values())), self._world.group)

    def go_back(self) -> None:
        """Let buffers be what they were when the step began."""
        self._before.put_back()

    def _take_layout(self, layout: _Layout) -> None:
        """Have such buffers as rank 0 has; those that fit stay, with their values."""
        if self._world.rank == 0:
            return
        made: dict[int, Tensor] = {}
        for part, described in zip(self._parts, layout, strict=True):
            found = {name: self._fitting(part.get(name), wanted, made) for name, wanted in described.items()}
            part.clear()
            part.update(found)

    def _fitting(self, present: Tensor | None, wanted: _Buffer | None, made: dict[int, Tensor]) -> Tensor | None:
        if wanted is None:
            return None
        if wanted.number not in made:
            fits = present is not None and present.shape == wanted.shape and present.dtype == wanted.dtype
            device = torch.device("cpu") if wanted.is_on_cpu else self._device
            made[wanted.number] = (
                present
                if fits and present is not None
                else torch.empty(wanted.shape, dtype=wanted.dtype, device=device)
            )
        return made[wanted.number]


@final
class _Snapshot:
    """The buffers of a model at a moment. [Note: buffers that are replaced].

    Args:
        parts: The dictionaries in which modules keep their buffers.
        with_values: Whether to note what is in them, not only which they are.
    """

    def __init__(self, parts: Sequence[dict[str, Tensor | None]], *, with_values: bool) -> None:
        self._parts = parts
        self._names = [dict(part) for part in parts]
        self._shapes = [buffer.shape for buffer in _tensors(self._names)]
        unique = {id(buffer): buffer for buffer in _tensors(self._names)} if with_values else {}
        self._values = [(buffer, without_repeats(buffer).detach().clone()) for buffer in unique.values()]

    def put_back(self) -> None:
        """Let the model's buffers be these again."""
        for part, names in zip(self._parts, self._names, strict=True):
            if part or names:
                part.clear()
                part.update(names)
        for buffer, value in self._values:
            place = without_repeats(buffer.data)
            if place.shape == value.shape:
                place.copy_(value)
            else:  # it was resized
                buffer.data = value.clone()

    def is_other_layout(self) -> bool:
        """Whether the model has other buffers now, or of other shapes."""
        now = list(_tensors(self._parts))
        if list(map(id, now)) == list(map(id, _tensors(self._names))):
            return [buffer.shape for buffer in now] != self._shapes
        return _describe(self._parts) != _describe(self._names)


def without_repeats(tensor: Tensor) -> Tensor:
    """Return the part of an expanded tensor that has memory, which can be written; another tensor as it is."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _describe(parts: Iterable[dict[str, Tensor | None]]) -> _Layout:
    numbers: dict[int, int] = {}
    return [
        {
            name: None
            if buffer is None
            else _Buffer(
                number=numbers.setdefault(id(buffer), len(numbers)),
                shape=tuple(buffer.shape),
                dtype=buffer.dtype,
                is_on_cpu=buffer.device.type == "cpu",
            )
            for name, buffer in part.items()
        }
        for part in parts
    ]


def _tensors(parts: Iterable[dict[str, Tensor | None]]) -> Iterator[Tensor]:
    """Return the buffers that are there, in the order of their names."""
    return (buffer for buffer in chain.from_iterable(part.values() for part in parts) if buffer is not None)
