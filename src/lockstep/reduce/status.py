"""What the ranks tell each other with the last message of a reduction, besides gradients. Pure: numbers in and out.

    | failed | changed | batch size of rank 0: 3 digits | ... | of the last rank: 3 digits |

All are added up over the ranks, in the dtype of a bucket. So a number that only one rank writes comes through whole if
it is small enough for any dtype: bfloat16 holds integers up to 256, hence digits to the base of 128.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_BASE = 128
_NUM_DIGITS = 3
_NUM_FLAGS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What one rank says."""

    has_failed: bool = False
    """Its backward ended in an exception, so its gradients are not whole."""
    has_changed: bool = False
    """Its model has other parameters than the plan."""
    batch_size: int = 0
    """How many samples its gradients come from; 0 if it does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """What all ranks said."""

    num_failed: int
    """How many ranks' backwards ended in an exception."""
    num_changed: int
    """How many ranks' models have changed."""
    batch_sizes: tuple[int, ...]
    """Samples of each rank; 0 where it is not known."""

    @property
    def uneven_batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes if two ranks that know theirs differ; else nothing."""
        known = {size for size in self.batch_sizes if size > 0}
        return self.batch_sizes if len(known) > 1 else ()


def num_notes(world_size: int) -> int:
    """Return how many numbers the notes of so many ranks take."""
    return _NUM_FLAGS + _NUM_DIGITS * world_size


def write_note(note: Note, rank: int, world_size: int) -> list[float]:
    """Return the numbers that `rank` adds."""
    numbers = [float(note.has_failed), float(note.has_changed)]
    numbers += [0.0] * (_NUM_DIGITS * world_size)
    rest = min(note.batch_size, _BASE**_NUM_DIGITS - 1)
    for digit in range(_NUM_DIGITS):
        numbers[_NUM_FLAGS + _NUM_DIGITS * rank + digit] = float(rest % _BASE)
        rest //= _BASE
    return numbers


def read_notes(numbers: Sequence[float]) -> Notes:
    """Return what the ranks said, from the sums of their numbers."""
    digits = [round(number) for number in numbers[_NUM_FLAGS:]]
    sizes = [
        sum(digit * _BASE**place for place, digit in enumerate(digits[start : start + _NUM_DIGITS]))
        for start in range(0, len(digits), _NUM_DIGITS)
    ]
    return Notes(num_failed=round(numbers[0]), num_changed=round(numbers[1]), batch_sizes=tuple(sizes))
