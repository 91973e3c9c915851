"""What the ranks tell each other in each reduction besides gradients, and how it travels.

    | rank 0: flags, batch size in 3 digits, ... | rank 1: ... | ... |

All are added up over the ranks, as a rule in the dtype of a bucket. Sums of many ranks are not exact in all of them:
bfloat16 holds integers up to 256 only, so that 300 ranks' ones add up to 256. Therefore each number is written by one
rank alone, the others add zeros to it, and none is larger than 127: digits to the base of 128.

[Note: one number to compare] What must be the same on all ranks is one number per rank, a hash of it all. Only where
these differ, which all ranks see, do the ranks exchange what they were made of, and find what it is.

[Note: two planes] To read what a device holds is to wait for the device. So where gradients lie on an asynchronous
one, what only hosts know (a failed backward, a changed model, batch sizes, used parameters) is sent over the group's
CPU backend when the backward and the messages were launched. Reading it waits for hosts and never for the device.
Where the gradients lie on the CPU it costs no message: it is a trailer of the last bucket. Either way a failure in a
backward is an error of that same backward on every rank, before any rank can step an optimizer.
"""

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.comm import calls_for
from lockstep.reduce.slot import make_streams
from lockstep.torch_private.groups import device_types

_BASE = 128
_FAILED = 1
_CHANGED = 2
_EMPTY = 4
_NUM_DIGITS = {"batch_size": 3, "num_backwards": 1, "comparison": 4, "inputs": 2, "gradients": 2, "nonfinite": 3}
"""Of each number of a status, in the order in which they travel, after the flags."""
_OF_ALL_RANKS = ("batch_sizes", "nums_backwards", "comparisons", "inputs", "gradients", "nonfinite")
_NUM_PER_RANK = 1 + sum(_NUM_DIGITS.values())
_NUM_KEPT = 16
"""So many statuses are kept with their numbers: as a rule it is the same one in step after step."""

COMPARISON_LIMIT = _BASE ** _NUM_DIGITS["comparison"]
"""What `RankStatus.comparison` must be below."""
FINGERPRINT_LIMIT = _BASE ** _NUM_DIGITS["inputs"]
"""What `RankStatus.inputs` and `gradients` must be below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """How one rank's backward went. Numbers that are too large are sent as the largest that can be."""

    has_failed: bool = False
    """It ended in an exception, so its gradients are not whole."""
    has_changed: bool = False
    """Its model has other parameters than the plan."""
    is_empty: bool = False
    """It had no backward, and takes part with zeros that do not count in the mean."""
    batch_size: int = 0
    """How many samples its gradients come from; 0 if that is not known."""
    num_backwards: int = 1
    """From how many backwards its gradients come: the one that is reduced, and those before it that were not."""
    comparison: int = 0
    """A number that must be the same on all ranks. [Note: one number to compare]"""
    inputs: int = 0
    """A number for the inputs of its last forward; 0 if that is not known."""
    gradients: int = 0
    """A number for its gradients before they are reduced; 0 if that is not known."""
    nonfinite: int = 0
    """The number of the first parameter found to have a gradient that is not finite, from 1 on; 0 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus:
    """How the backwards of all ranks went: the ranks with each flag of `RankStatus`, and its numbers in rank order."""

    failed: tuple[int, ...]
    changed: tuple[int, ...]
    empty: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    nums_backwards: tuple[int, ...] = ()
    comparisons: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    nonfinite: tuple[int, ...] = ()

    @property
    def agrees(self) -> bool:
        return len(set(self.comparisons)) <= 1

    @property
    def uneven_batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes if two ranks that know theirs differ; else nothing."""
        known = {size for size in self.batch_sizes if size > 0}
        return self.batch_sizes if len(known) > 1 else ()


def status_length(world_size: int) -> int:
    return _NUM_PER_RANK * world_size


@lru_cache(maxsize=_NUM_KEPT)
def write_status(status: RankStatus, rank: int, world_size: int) -> Sequence[float]:
    flags = _FAILED * status.has_failed + _CHANGED * status.has_changed + _EMPTY * status.is_empty
    own: list[float] = [float(flags)]
    for name, num_digits in _NUM_DIGITS.items():
        own += _digits(getattr(status, name), num_digits)
    return [*[0.0] * (_NUM_PER_RANK * rank), *own, *[0.0] * (_NUM_PER_RANK * (world_size - rank - 1))]


@lru_cache(maxsize=_NUM_KEPT)
def read_status(numbers: tuple[float, ...]) -> GroupStatus:
    whole = list(map(round, numbers))
    flags, *columns = (whole[column::_NUM_PER_RANK] for column in range(_NUM_PER_RANK))
    values: dict[str, tuple[int, ...]] = {}
    for name, num_digits in zip(_OF_ALL_RANKS, _NUM_DIGITS.values(), strict=True):
        values[name] = _join(columns[:num_digits])
        columns = columns[num_digits:]
    return GroupStatus(
        failed=_ranks_with(flags, _FAILED),
        changed=_ranks_with(flags, _CHANGED),
        empty=_ranks_with(flags, _EMPTY),
        **values,
    )


def _digits(number: int, num_digits: int) -> list[float]:
    rest = min(number, _BASE**num_digits - 1)
    digits = []
    for _ in range(num_digits):
        digits.append(float(rest % _BASE))
        rest //= _BASE
    return digits


def _join(digits: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return one number per rank, from the columns of its digits."""
    first, *others = digits
    if not any(map(any, others)):
        return tuple(first)
    return tuple(
        sum(digit * _BASE**place for place, digit in enumerate(row)) for row in zip(first, *others, strict=True)
    )


def _ranks_with(flags: Sequence[int], flag: int) -> tuple[int, ...]:
    return tuple(rank for rank, value in enumerate(flags) if value & flag) if any(flags) else ()


@final
class StatusTrailer:
    """The end of the last message. On an asynchronous device reading waits: only with a group without a CPU backend."""

    is_message = False

    def __init__(self, place: Tensor) -> None:
        self._place = place
        # Pinned, so that the copy does not wait for the device. Made once: pinned memory is slow to allocate. It may be
        # written again when the message was read, which is after the copy.
        is_pinned = place.device.type != "cpu" and make_streams(place.device) is not None
        self._numbers = torch.zeros(place.numel(), pin_memory=True) if is_pinned else torch.empty(0)

    def post(self, numbers: Sequence[float], further: Sequence[float]) -> None:  # noqa: ARG002 - no message of its own
        place = self._place
        if place.dtype is torch.float32 and place.is_cpu and place.numel() == len(numbers):
            # Not by torch: its two operations take as long as the rest of this.
            ctypes.memmove(place.data_ptr(), struct.pack(f"{len(numbers)}f", *numbers), place.nbytes)
            return
        values = torch.tensor(numbers, dtype=torch.float32)
        if self._numbers.numel() == values.numel():
            values = self._numbers.copy_(values)
        self._place.copy_(values, non_blocking=True)

    def receive(self) -> tuple[list[float], list[float]]:
        return read_numbers(self._place), []


@final
class StatusOverHosts:
    """A message of its own over the group's CPU backend. [Note: two planes]."""

    is_message = True

    def __init__(self, group: ProcessGroup, purpose: str) -> None:
        self._group = group
        self._purpose = purpose
        self._length = 0
        self._numbers = torch.empty(0)
        self._work: dist.Work | None = None

    def post(self, numbers: Sequence[float], further: Sequence[float]) -> None:
        self._length = len(numbers)
        self._numbers = torch.tensor([*numbers, *further], dtype=torch.float32)
        with calls_for(f"the status of {self._purpose}"):
            self._work = dist.all_reduce(self._numbers, group=self._group, async_op=True)

    def receive(self) -> tuple[list[float], list[float]]:
        if self._work is not None:
            self._work.wait()
        found = read_numbers(self._numbers)
        return found[: self._length], found[self._length :]


StatusChannel = StatusTrailer | StatusOverHosts
"""Carries the numbers of one status per reduction; those of all ranks are added up.

- `is_message`: whether it sends a message of its own; else the numbers are a part of the last message.
- `post` sends this rank's numbers, or puts them where they are sent from; an own message has `further` (collective).
- `receive` returns the sums over the ranks of both; the second is empty where there is no message of its own. Where the
  status is a part of the last message, that must have been waited for.
"""


def has_cpu_backend(group: ProcessGroup) -> bool:
    return any(device.type == "cpu" for device in device_types(group))


def read_numbers(numbers: Tensor) -> list[float]:
    """Return the numbers of a tensor of any dtype; on an asynchronous device this waits for it."""
    real = torch.view_as_real(numbers)[:, 0] if numbers.is_complex() else numbers
    values: list[float] = real.tolist()
    return values
