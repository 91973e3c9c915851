"""Loading slices one after the other, in this process or in loading processes ahead of it."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, final

import torch
from torch.utils.data import DataLoader

from lockstep.data.keyed import KeyedDataset, SliceKeys
from lockstep.data.samples import Keys, SlicePlan
from lockstep.launch.exits import OomKills, describe_exit, name_killer, read_oom_kills
from lockstep.processes.ending import die_with_parent, terminate_only_for
from lockstep.torch_private.loaders import without_interruption

_PREFETCH_FACTOR = 2
"""How many slices each loading process is ahead; torch's default."""
_END_SECONDS = 1.0
"""The kernel closes the connections of a process before it reports its end."""
_POLL_SECONDS = 0.01


@final
class SliceLoading:
    def __init__(
        self, dataset: KeyedDataset, *, num_workers: int = 0, keeps_processes: bool = False, pin_memory: bool = False
    ) -> None:
        self._dataset = dataset
        self._num_workers = num_workers
        self._keeps_processes = keeps_processes and num_workers > 0
        self._pin_memory = pin_memory
        self._plan = SlicePlan(lambda: iter(()))
        self._processes: DataLoader[Any] | None = None
        self.is_under_way = False

    def in_this_process(self) -> "SliceLoading":
        return SliceLoading(self._dataset, pin_memory=self._pin_memory)

    def load(self, keys: SliceKeys) -> Any:
        """Load one slice in this process."""
        return self._dataset.__getitems__(keys)

    @contextmanager
    def loaded(self, keys: Keys) -> Iterator[Iterator[Any]]:
        """Load the slices with these keys, in loading processes if any; an epoch within another gets its own ones."""
        is_inner, self.is_under_way = self.is_under_way, True
        try:
            if not self._num_workers and not self._pin_memory:
                yield map(self.load, keys())
            elif is_inner or not self._keeps_processes:
                yield without_interruption(iter(self._make_loader(SlicePlan(keys), persistent=False)))
            else:
                if self._processes is None:
                    self._processes = self._make_loader(self._plan, persistent=True)
                self._plan.keys = keys
                yield without_interruption(iter(self._processes))
        finally:
            self.is_under_way = is_inner

    def _make_loader(self, plan: SlicePlan, *, persistent: bool) -> DataLoader[Any]:
        # The parent-death signal is bound to the *thread* that starts a process, so only the main thread sets it:
        # another thread may end before the epoch does.
        in_main_thread = threading.current_thread() is threading.main_thread()
        return DataLoader(
            self._dataset,
            batch_sampler=plan,  # type: ignore[arg-type] # what it yields is handed on as it is
            num_workers=self._num_workers,
            prefetch_factor=_PREFETCH_FACTOR if self._num_workers else None,
            collate_fn=_as_it_is,
            pin_memory=self._pin_memory,
            persistent_workers=persistent,
            worker_init_fn=partial(_start_loading_process, os.getpid(), _starter_pid()) if in_main_thread else None,
            # Its own generator: the default would draw from the global one, once per epoch.
            generator=torch.Generator(),
        )


def _as_it_is(collated: Any) -> Any:
    return collated


def _starter_pid() -> int | None:
    """Return which process starts loading processes; None for a fork server, which ends when this process does."""
    return None if multiprocessing.get_start_method() == "forkserver" else os.getpid()


def _start_loading_process(worker_pid: int, starter_pid: int | None, _number: int) -> None:
    die_with_parent(os.getppid() if starter_pid is None else starter_pid)
    terminate_only_for(worker_pid)


@contextmanager
def loading_processes_explained(read_kills: Callable[[], OomKills] = read_oom_kills) -> Iterator[None]:
    """Name the loading process that was killed, if that is why something within fails; enter when they have started."""
    processes = multiprocessing.active_children()
    before = read_kills()
    try:
        yield
    except (RuntimeError, EOFError, OSError) as error:
        # torch reports a lost connection, or the signal alone.
        if not isinstance(error, EOFError | ConnectionError) and "DataLoader worker" not in str(error):
            raise
        killed = _find_killed(processes)
        if killed is None:
            raise
        how = describe_exit(killed.exitcode or 0, killer=name_killer(before, read_kills()))
        explained = RuntimeError(
            f"The loading process {killed.pid} was {how}, while it loaded samples. If memory is short, use fewer "
            "loading processes, or load less in each; num_workers=0 loads in this process, and shows errors of the "
            "data set itself. (LS406)"
        )
        for note in getattr(error, "__notes__", ()):  # which samples it loaded
            explained.add_note(note)
        raise explained from error


def _find_killed(processes: list[BaseProcess]) -> BaseProcess | None:
    deadline = time.monotonic() + _END_SECONDS
    while True:
        killed = [each for each in processes if each.exitcode is not None and each.exitcode < 0]
        if killed or time.monotonic() > deadline:
            return killed[0] if killed else None
        time.sleep(_POLL_SECONDS)
