"""What a DataLoader that draws indices from a sampler has done so far, and when it reports a killed process."""

import sys
from types import FrameType
from typing import TypeVar

from torch.utils.data import _utils
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

__all__ = ["LoaderIterator", "is_before_first_batch", "num_yielded", "without_interruption"]
# LoaderIterator is the class of what `iter(loader)` returns, with and without workers.


Loading = TypeVar("Loading", bound=LoaderIterator)


def without_interruption(iterator: Loading) -> Loading:
    """Let an iterator report a loading process that was killed when the next batch is asked for (local).

    Torch's handler of SIGCHLD raises wherever the main thread is: in the update of an optimizer, too. Without it the
    end of a process is found within 5 s of waiting for a batch.
    """
    if getattr(iterator, "_worker_pids_set", False):
        _utils.signal_handling._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False  # type: ignore[attr-defined]
    return iterator


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
