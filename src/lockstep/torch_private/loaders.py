"""What a DataLoader that draws indices from a sampler has done so far, and its loading processes."""

import functools
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any, Final, final

from torch.utils.data import Dataset, _utils
from torch.utils.data.dataloader import _BaseDataLoaderIter

_MOST_SAMPLERS = 8
LoaderIterator = _BaseDataLoaderIter
"""The class of what `iter(loader)` returns, with and without workers."""


@final
class _Noted:
    """Objects in the order in which they were noted, as long as somebody else holds them (any thread)."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[Any]] = {}

    def add(self, value: object) -> None:
        key, references = id(value), self._references
        if key not in references:
            with suppress(TypeError):  # a sampler may be a list
                references[key] = weakref.ref(value, lambda _: references.pop(key, None))

    def alive(self) -> list[Any]:
        return [each for each in (reference() for reference in list(self._references.values())) if each is not None]


_ITERATORS: Final = _Noted()
_SAMPLERS: Final = _Noted()
iterators = _ITERATORS.alive
"""Return the iterators of DataLoaders that were made since this module was imported, oldest first (local)."""
used_samplers = _SAMPLERS.alive
"""Return the samplers of these iterators, and those that were noted, in the order in which they were used (local)."""
note_sampler = _SAMPLERS.add
"""Take note of a sampler that is iterated by itself."""


def _note_iterators() -> None:
    # To look for them among all objects of the process would take 0.1 s.
    kind: Any = LoaderIterator
    make = kind.__init__

    @functools.wraps(make)
    def make_and_note(iterator: LoaderIterator, loader: Any) -> None:
        make(iterator, loader)
        _ITERATORS.add(iterator)
        for each in samplers_of(iterator):
            _SAMPLERS.add(each)

    kind.__init__ = make_and_note


def without_interruption(iterator: LoaderIterator) -> None:
    """Let an iterator report a loading process that was killed when the next batch is asked for (local).

    Torch's handler of SIGCHLD raises wherever the main thread is: in the update of an optimizer, too. Without it the
    end of a process is found within 5 s of waiting for a batch.
    """
    if getattr(iterator, "_worker_pids_set", False):
        _utils.signal_handling._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False  # type: ignore[attr-defined]


def loading_processes(iterator: LoaderIterator) -> list[BaseProcess]:
    """Return the processes of an iterator: the one list of them that it has."""
    lists = (each for each in vars(iterator).values() if isinstance(each, list))
    return next((found for found in lists if found and isinstance(found[0], BaseProcess)), [])


def is_over(iterator: LoaderIterator) -> bool:
    return bool(getattr(iterator, "_shutdown", True))


def end_stream(iterator: LoaderIterator) -> None:
    """Let who reads what the processes have written, all of which have ended, come to an end (any thread).

    This process can write into the pipe too, so its end never comes by itself: not where a process was killed in the
    middle of a message.
    """
    if hasattr(iterator, "_pin_memory_thread_done_event"):
        iterator._pin_memory_thread_done_event.set()
    iterator._worker_result_queue._writer.close()  # type: ignore[attr-defined]


def end_processes(iterator: LoaderIterator) -> None:
    """End the processes of an iterator that is given up: later, in a reference cycle, torch could not tell them to."""
    iterator._shutdown_workers()  # type: ignore[attr-defined]


def abandon(iterator: LoaderIterator) -> None:
    """Let go of an iterator whose processes were killed (local).

    Torch would signal them that it ends, and wait for ever for a lock that one of them held.
    """
    iterator._shutdown = True  # type: ignore[attr-defined]
    for process in loading_processes(iterator):
        process.join()
    for queue in (*iterator._index_queues, iterator._worker_result_queue):  # type: ignore[attr-defined]
        queue.cancel_join_thread()
        queue.close()


def kept_dataset(iterator: LoaderIterator) -> object:
    """Return the data set of which loading processes that stay for all epochs have a copy; None where none stay."""
    keeps = iterator._persistent_workers and iterator._num_workers > 0
    return iterator._dataset if keeps else None


def loading_seed(iterator: LoaderIterator) -> int:
    """Return the number from which loading processes seed their generators; 0 without such processes."""
    return int(iterator._base_seed) if iterator._num_workers > 0 else 0


def beginning_of_processes(iterator: LoaderIterator) -> object:
    """Return the worker_init_fn of an iterator with loading processes."""
    return getattr(iterator, "_worker_init_fn", None)


def loaded_from(iterator: LoaderIterator) -> tuple[object, object]:
    """Return data set and collate function of an iterator."""
    return iterator._dataset, iterator._collate_fn


def samplers_of(iterator: LoaderIterator) -> list[object]:
    """Return the batch sampler of an iterator, and the samplers within one another in it, outermost first."""
    found: list[object] = [iterator._index_sampler]
    for each in found:
        if len(found) < _MOST_SAMPLERS:
            for name in ("batch_sampler", "sampler"):
                with suppress(Exception):  # a sampler of the user's may compute it
                    found.append(getattr(each, name))
    return [each for each in found if each is not None]


def worker_info_of(*, number: int, of: int) -> object:
    """Return what `get_worker_info` returns in a loading process."""
    return _utils.worker.WorkerInfo(id=number, num_workers=of, seed=number, dataset=Dataset[Any]())


def num_yielded(iterator: LoaderIterator) -> int:
    return iterator._num_yielded


def watch_loading(
    begin: Callable[[], int],
    given: Callable[[LoaderIterator, Any, Any], bool],
    ended: Callable[[LoaderIterator], None],
    fetch: Callable[[Callable[..., Any], Any, Any], Any],
) -> None:
    """Call these for all iterators of DataLoaders, from now on; `begin` before their processes start.

    `given` gets each batch, with what its sampler has drawn for it; if it returns true, the iterator is at its end.
    `fetch` is called in place of what loads a batch, in the process that does, with it.
    """
    kind: Any = LoaderIterator
    make, give, draw, reset = kind.__init__, kind.__next__, kind._next_index, kind._reset

    def make_watched(iterator: Any, loader: Any) -> None:
        begin()
        make(iterator, loader)

    def reset_watched(iterator: Any, *args: Any) -> None:
        vars(iterator).update(_lockstep_drawn=deque(), _lockstep_is_over=False)
        reset(iterator, *args)

    def draw_watched(iterator: Any) -> Any:
        drawn = draw(iterator)
        vars(iterator).setdefault("_lockstep_drawn", deque()).append(drawn)  # loading processes load ahead
        return drawn

    def give_watched(iterator: Any) -> Any:
        if vars(iterator).get("_lockstep_is_over"):
            raise StopIteration
        try:
            batch = give(iterator)
        except StopIteration:
            ended(iterator)
            raise
        drawn = vars(iterator).get("_lockstep_drawn")
        iterator._lockstep_is_over = given(iterator, batch, drawn.popleft() if drawn else None)
        return batch

    kind.__init__, kind.__next__, kind._next_index = make_watched, give_watched, draw_watched
    kind._reset = reset_watched
    for fetcher in (_utils.fetch._MapDatasetFetcher, _utils.fetch._IterableDatasetFetcher):
        fetcher.fetch = _watched_fetch(fetcher.fetch, fetch)  # type: ignore[method-assign]


def _watched_fetch(load: Callable[..., Any], fetch: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(load)(lambda fetcher, wanted: fetch(load, fetcher, wanted))


_note_iterators()
