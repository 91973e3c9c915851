"""What a DataLoader that draws indices from a sampler has done so far."""

import sys
from types import FrameType

from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

__all__ = ["LoaderIterator", "is_before_first_batch", "num_yielded"]
# LoaderIterator is the class of what `iter(loader)` returns, with and without workers.


def num_yielded(iterator: LoaderIterator) -> int:
    """Return how many batches the iterator of a DataLoader has returned."""
    return iterator._num_yielded


def is_before_first_batch() -> bool:
    """Return whether a DataLoader that has returned no batch yet is in this thread's stack (local)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        loading = frame.f_locals.get("self") if frame.f_code.co_varnames[:1] == ("self",) else None
        if isinstance(loading, LoaderIterator):
            return loading._num_yielded == 0
        frame = frame.f_back
    return False
