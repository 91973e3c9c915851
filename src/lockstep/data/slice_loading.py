"""Loading slices one after the other, in this process or in loading processes ahead of it."""

import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch.utils.data import DataLoader

from lockstep.data.keyed import KeyedDataset, SliceKeys
from lockstep.data.slice_keys import Keys, SlicePlan
from lockstep.processes.ending import die_with_parent, terminate_only_for
from lockstep.torch_private.loaders import without_interruption

_PREFETCH_FACTOR = 2
"""How many slices each loading process is ahead; torch's default."""


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
        """Return what loads the same slices without loading processes."""
        return SliceLoading(self._dataset, pin_memory=self._pin_memory)

    def load(self, keys: SliceKeys) -> Any:
        """Load one slice in this process."""
        return self._dataset.__getitems__(keys)

    @contextmanager
    def loaded(self, keys: Keys) -> Iterator[Iterator[Any]]:
        """Load the slices with these keys, in loading processes if there are any.

        An epoch that begins while another is under way gets processes of its own.
        """
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
