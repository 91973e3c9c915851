"""What the ranks train on: batches of different sizes, and the same batches on all ranks. Both are warned of once.

[Note: what is a batch] The first dimension of the inputs need not be the batch: packed sequences have their tokens
there, heads of a detector their regions, and such sizes vary on each rank from step to step. A batch size does not,
except for the last batch of an epoch. So sizes that differ between the ranks are warned of where they were the same on
all ranks in all steps before, or differ in the same ratio as in one of the two steps before; and not any more after
they have differed in two ways. The ratio, because steps may alternate between one forward and two: 3 samples and 2 are
6 and 4 then.
"""

import warnings
from collections.abc import Iterable, Sequence
from math import gcd
from typing import Any, final

from torch import Tensor

from lockstep.processes.user_line import stacklevel_of_user
from lockstep.reduce import GroupStatus
from lockstep.reduce.buckets import Bucket
from lockstep.reduce.status import FINGERPRINT_LIMIT
from lockstep.reduce.tensor_bits import glance_at_bits

_NUM_ALIKE = 3
"""So many reductions in a row show that ranks train on the same data."""


@final
class UnevenBatchWarning:
    """Warns once, on each rank, that ranks trained on different numbers of samples; not while `is_expected`."""

    def __init__(self) -> None:
        self.is_expected = False
        self._is_done = False
        self._sizes: tuple[int, ...] = ()
        self._recent: tuple[tuple[int, ...], ...] = ()
        self._uneven: set[tuple[int, ...]] = set()
        self._last_backwards: tuple[int, ...] = ()
        self._is_even = True

    def look_at(self, status: GroupStatus) -> None:
        if self._is_done or self.is_expected or status.empty:
            return
        backwards = status.nums_backwards
        if len(set(backwards)) > 1 and _are_as_large_each(status):
            is_first, self._last_backwards = self._last_backwards != backwards, backwards
            if not is_first:  # a second time, so that a last, shorter accumulation is not warned of alone
                self._warn(_describe_sizes(status) if status.uneven_batch_sizes else _describe_accumulation(backwards))
            return
        ratio = _reduce_ratio(status.batch_sizes)
        is_first, was_even = not self._recent, self._is_even
        is_next = ratio in self._recent or (not is_first and was_even)
        before, self._sizes = self._sizes, status.batch_sizes
        self._recent = (*self._recent[-1:], ratio)
        self._is_even = was_even and len(set(ratio)) == 1 and ratio[0] > 0 and _is_multiple(before, self._sizes)
        if status.uneven_batch_sizes:
            self._uneven.add(ratio)
            if is_next:
                self._warn(_describe_sizes(status))
            self._is_done = self._is_done or len(self._uneven) > 1  # they vary. [Note: what is a batch]

    def _warn(self, text: str) -> None:
        self._is_done = True
        warnings.warn(text, stacklevel=stacklevel_of_user())


@final
class SameDataWarning:
    """Warns once, on each rank, that all ranks train on the same data.

    They have the same gradients before the reduction, or the same inputs, which are others in each step: a grid of
    coordinates is the same in all steps and on all ranks, and their targets are not.
    """

    def __init__(self) -> None:
        self._num_alike = 0
        self._last_inputs = 0
        self._has_warned = False
        self._inputs = 0
        self._gradients = 0

    def note_inputs(self, values: Iterable[Any]) -> None:
        tensors = [
            value for value in values if type(value) is Tensor and value.device.type == "cpu" and value.numel() > 0
        ]
        self._inputs = _shorten(glance_at_bits(*tensors)) if tensors else 0

    def note_gradients(self, bucket: Bucket) -> None:
        """Note the gradients of a bucket before they are reduced (local)."""
        if not bucket.message.is_sparse and bool(bucket.gradients.any()):  # those of all ranks may be zero
            self._gradients = _shorten(glance_at_bits(bucket.gradients))

    def take_numbers(self) -> tuple[int, int]:
        """Return numbers for the inputs and the gradients that were noted since the last call; 0 for none (local)."""
        numbers = self._inputs, self._gradients
        self._inputs = self._gradients = 0
        return numbers

    def look_at(self, status: GroupStatus) -> None:
        if self._has_warned or status.empty or not any(status.gradients):
            return  # not looked at this time
        inputs = status.inputs[0]
        has_same_inputs = inputs not in {0, self._last_inputs} and len(set(status.inputs)) == 1
        # Gradients of unlike inputs are the same where another wrapper has averaged them, or where all are zero.
        is_like = len(set(status.inputs)) == 1
        has_same_gradients = is_like and status.gradients[0] != 0 and len(set(status.gradients)) == 1
        self._last_inputs = inputs
        self._num_alike = self._num_alike + 1 if has_same_inputs or has_same_gradients else 0
        if self._num_alike < _NUM_ALIKE:
            return
        self._has_warned = True
        what = "computed the same gradients" if has_same_gradients else "trained on the same inputs"
        warnings.warn(
            f"In {_NUM_ALIKE} steps in a row all {len(status.inputs)} ranks {what}, so they do the work of one. Give "
            "each rank its own part of the data: DataLoader(dataset, sampler=ls.DistributedSampler(dataset)), or "
            "another seed for random data. This warning is given once. (LS315)",
            stacklevel=stacklevel_of_user(),
        )


def _reduce_ratio(sizes: tuple[int, ...]) -> tuple[int, ...]:
    divisor = gcd(*sizes)
    return tuple(size // divisor for size in sizes) if divisor else sizes


def _is_multiple(before: tuple[int, ...], now: tuple[int, ...]) -> bool:
    """Return whether even sizes differ by a number of forwards, as far as can be seen."""
    return not before or max(before[0], now[0]) % min(before[0], now[0]) == 0


def _are_as_large_each(status: GroupStatus) -> bool:
    """Return whether the batch of each backward has the same size on all ranks, as far as it is known."""
    pairs = zip(status.batch_sizes, status.nums_backwards, strict=True)
    return len({size / number for size, number in pairs if size > 0}) <= 1


def _shorten(number: int) -> int:
    """Return a number from 1 on that is small enough for the status; 0 for 0."""
    return 1 + number % (FINGERPRINT_LIMIT - 1) if number else 0


def _describe_sizes(status: GroupStatus) -> str:
    sizes = status.batch_sizes
    most, least = max(sizes), min(size for size in sizes if size > 0)
    return (
        f"In one step rank {sizes.index(most)} trained on {most} samples{_backwards(status, sizes.index(most))} and "
        f"rank {sizes.index(least)} on {least}{_backwards(status, sizes.index(least))}, by the first dimension of the "
        "inputs. DistributedDataParallel averages the ranks' gradients, so a sample of the smaller batch counts for "
        "more. Give every rank the same number (DistributedSampler with drop_last, a DataLoader with drop_last=True, "
        "as many micro-batches), or train with ls.Trainer, which weights by samples. If that "
        "dimension is not the batch, or the loss is weighted already, ignore this warning: "
        'warnings.filterwarnings("ignore", message="In one step rank"). It is given once. (LS314)'
    )


def _backwards(status: GroupStatus, rank: int) -> str:
    number = status.nums_backwards[rank]
    return "" if len(set(status.nums_backwards)) == 1 else f" in {number} backward{'' if number == 1 else 's'}"


def _describe_accumulation(backwards: Sequence[int]) -> str:
    most, least = max(backwards), min(backwards)
    return (
        f"In one step rank {backwards.index(most)} accumulated the gradients of {most} backwards and rank "
        f"{backwards.index(least)} those of {least}. DistributedDataParallel averages the ranks' gradients, whatever "
        "they are sums of. Accumulate over as many micro-batches on every rank, or weight the loss. This warning is "
        'given once; warnings.filterwarnings("ignore", message="In one step rank") leaves it out. (LS314)'
    )
