"""What is logged of the bits of a step, and what two logs of a step say where they differ. Pure.

`lockstep.engine.audit` says what each fact is of, and why the first that differs is the cause.

[Note: marks] A text begins with one number over all numbers, which alone decides whether two are equal. Behind it are
marks, which tell where they differ: one for each number, or where there are more, one for each row and each column of a
square that they are written into.
"""

import base64
import hashlib
import string
import struct
from collections.abc import Sequence
from itertools import chain
from typing import Final

FACTS: Final = ("options", "samples", "state", "loss", "gradient")
NUM_MARKS: Final = {"samples": 12, "loss": 12, "state": 18, "gradient": 18}
_WHOLE_BYTES: Final = 6
"""So many that the step table's float64 holds the number exactly."""
_WHOLE_CHARACTERS: Final = 8
_FACTOR, _SHIFT, _MASK = 0x9E3779B97F4A7C15, 52, (1 << 12) - 1
_DIGITS: Final = string.ascii_letters + string.digits + "-_"


def condense(numbers: Sequence[float], num_marks: int) -> str:
    """Return a short text for numbers. [Note: marks]."""
    whole = base64.urlsafe_b64encode(number_of(numbers).to_bytes(_WHOLE_BYTES, "big")).decode()
    marks = [int.from_bytes(struct.pack("<d", number), "little") * _FACTOR >> _SHIFT & _MASK for number in numbers]
    if len(marks) > num_marks:
        side = num_marks // 2
        rows = [sum(marks[at::side]) for at in range(side)]
        columns = [
            sum(chain.from_iterable(marks[at : at + side] for at in range(start * side, len(marks), side**2)))
            for start in range(side)
        ]
        marks = [*rows, *columns]
    return whole + "".join(_DIGITS[mark >> 6 & 63] + _DIGITS[mark & 63] for mark in marks)


def find_differing(one: str, other: str, count: int, num_marks: int) -> list[int]:
    """Return which of `count` numbers may differ between two texts; empty if the texts are equal."""
    if one == other:
        return []
    cuts = [[text[at : at + 2] for at in range(_WHOLE_CHARACTERS, len(text), 2)] for text in (one, other)]
    marks = [mine != theirs for mine, theirs in zip(*cuts, strict=False)]
    if count <= num_marks:
        found = [place for place, differs in enumerate(marks[:count]) if differs]
    else:
        side = num_marks // 2
        found = [at for at in range(count) if marks[at % side] and marks[side + at // side % side]]
    return found or list(range(count))


def number_of(values: Sequence[object]) -> int:
    digest = hashlib.blake2b(repr(values).encode(), digest_size=_WHOLE_BYTES).digest()
    return int.from_bytes(digest, "big")
