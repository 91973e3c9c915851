"""What the ranks tell each other in each reduction, besides gradients. Pure: numbers in and out.

    | rank 0: flags, batch size in 3 digits | rank 1: ... | ... |

All are added up over the ranks, as a rule in the dtype of a bucket. Sums of many ranks are not exact in all of them:
bfloat16 holds integers up to 256 only, so that 300 ranks' ones add up to 256. Therefore each number is written by one
rank alone, the others add zeros to it, and none is larger than 127: digits to the base of 128.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_BASE = 128
_NUM_DIGITS = 3
_NUM_PER_RANK = 1 + _NUM_DIGITS
_FAILED = 1
_CHANGED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """How one rank's backward went."""

    has_failed: bool = False
    """It ended in an exception, so its gradients are not whole."""
    has_changed: bool = False
    """Its model has other parameters than the plan."""
    batch_size: int = 0
    """How many samples its gradients come from; 0 if that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus:
    """How the backwards of all ranks went."""

    failed: tuple[int, ...]
    """The ranks whose backward ended in an exception."""
    changed: tuple[int, ...]
    """The ranks whose model has changed."""
    batch_sizes: tuple[int, ...]
    """Samples of each rank; 0 where it is not known."""

    @property
    def uneven_batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes if two ranks that know theirs differ; else nothing."""
        known = {size for size in self.batch_sizes if size > 0}
        return self.batch_sizes if len(known) > 1 else ()


def status_length(world_size: int) -> int:
    """Return how many numbers the status of so many ranks takes."""
    return _NUM_PER_RANK * world_size


def write_status(status: RankStatus, rank: int, world_size: int) -> list[float]:
    """Return the numbers that `rank` adds."""
    numbers = [0.0] * status_length(world_size)
    start = _NUM_PER_RANK * rank
    numbers[start] = float(_FAILED * status.has_failed + _CHANGED * status.has_changed)
    rest = min(status.batch_size, _BASE**_NUM_DIGITS - 1)
    for digit in range(1, _NUM_PER_RANK):
        numbers[start + digit] = float(rest % _BASE)
        rest //= _BASE
    return numbers


def read_status(numbers: Sequence[float]) -> GroupStatus:
    """Return the status of all ranks, from the sums of their numbers."""
    whole = [round(number) for number in numbers]
    flags = whole[::_NUM_PER_RANK]
    return GroupStatus(
        failed=tuple(rank for rank, flag in enumerate(flags) if flag & _FAILED),
        changed=tuple(rank for rank, flag in enumerate(flags) if flag & _CHANGED),
        batch_sizes=tuple(
            sum(digit * _BASE**place for place, digit in enumerate(whole[start + 1 : start + _NUM_PER_RANK]))
            for start in range(0, len(whole), _NUM_PER_RANK)
        ),
    )
