"""How many batches each rank has drawn from its DataLoader: a rank that skips one before its forward is out of step.

    for batch in loader:                 rank 0   batch 3  backward 3      batch 4  backward 4
        try:                             rank 1   batch 3  an error        batch 4  backward 3     batch 5  backward 4
            inputs = decode(batch)
        except ValueError:
            continue

All calls of the ranks agree. But the iterators of DataLoaders count what they have yielded, and from then on rank 1 is
ahead by one. So these counts are compared in each backward; where one rank is ahead by the same number in several
backwards in a row, it is warned of.
"""

import gc
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, Final, final

from lockstep.processes.user_line import stacklevel_of_user
from lockstep.torch_private.loaders import LoaderIterator, num_yielded

_FIRST_LOOK: Final = 2
"""In which reduction iterators are looked for first; it takes some milliseconds."""
_NUM_LOOKS: Final = 3
_NUM_BETWEEN: Final = 256
"""They are looked for when none is left: so often, and once more after every so many reductions; where none was ever
found, after twice, four times, ... as many, for it takes up to 0.1 s in a process of many objects."""
_NUM_ALIKE: Final = 3
"""So many backwards in a row show that a rank stays ahead."""
_NUM_FRUITLESS: Final = 8
"""After so many exchanges without a finding the counts are compared no more."""


@final
class LoaderPositions:
    """How far one rank is in the DataLoaders from which it draws, and whether others are as far."""

    def __init__(self) -> None:
        self._iterators: list[weakref.ref[Any]] = []
        self._num_looks = 0
        self._has_found = False
        self._is_over = False
        self._offsets: tuple[int, ...] = ()
        self._num_alike = self._num_fruitless = self._last = 0

    def look(self, num_reductions: int) -> None:
        """Look for the iterators, if there may be others; before `number` (local)."""
        if self._is_over or num_reductions < _FIRST_LOOK or any(map(_is_alive, self._iterators)):
            return
        spans = num_reductions // _NUM_BETWEEN
        if self._num_looks < _NUM_LOOKS + (spans if self._has_found else spans.bit_length()):
            self._num_looks += 1
            objects = gc.get_objects()
            kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, LoaderIterator)}
            found = [each for each in objects if type(each) in kinds] if kinds else []
            self._iterators = [weakref.ref(each) for each in found]
            self._has_found = self._has_found or bool(found)

    def describe(self) -> tuple[int, ...]:
        """Return how many batches each of them has yielded; nothing where that is not compared (local)."""
        if self._is_over:
            return ()
        counts = (num_yielded(each) for each in (reference() for reference in self._iterators) if each is not None)
        return tuple(sorted(count for count in counts if count > 0))

    def number(self) -> int:
        return hash(self.describe())

    def compare(self, positions: Sequence[tuple[int, ...]], num_reductions: int) -> None:
        """Warn if a rank stays ahead; called where the ranks have exchanged what they are to compare (local)."""
        if self._is_over or len(set(positions)) == 1:
            return
        self._num_fruitless += 1
        if len(set(map(len, positions))) == 1:
            first, *others = map(sum, positions)
            offsets = tuple(other - first for other in others)
            is_next = offsets == self._offsets and num_reductions == self._last + 1
            self._num_alike = self._num_alike + 1 if is_next else 1
            self._offsets, self._last = offsets, num_reductions
            if self._num_alike >= _NUM_ALIKE:
                self._warn(offsets)
        self._is_over = self._is_over or self._num_fruitless >= _NUM_FRUITLESS

    def _warn(self, offsets: Sequence[int]) -> None:
        self._is_over = True
        rank = next(rank for rank, offset in enumerate(offsets, start=1) if offset)
        offset = offsets[rank - 1]
        ahead, behind = (rank, 0) if offset > 0 else (0, rank)
        batches = "1 batch" if abs(offset) == 1 else f"{abs(offset)} batches"
        warnings.warn(
            f"In {_NUM_ALIKE} backwards in a row rank {ahead} had drawn {batches} more from its DataLoader than rank "
            f"{behind}. It has skipped a batch before its forward (an error of the data, `continue`), or has had a "
            "longer or shorter epoch; it will be done before the others, which then wait for it. Call "
            "model.skip_backward() in place of backward() where a batch is left out, or leave it out on every rank. "
            "If a thread of yours draws batches ahead of the training, ignore this warning: "
            'warnings.filterwarnings("ignore", message="In 3 backwards in a row rank"). It is given once. (LS318)',
            stacklevel=stacklevel_of_user(),
        )


def _is_alive(reference: "weakref.ref[Any]") -> bool:
    return reference() is not None
