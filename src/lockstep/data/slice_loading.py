"""Loading slices one after the other, in this process or in loading processes ahead of it.

A loading process that is killed ends nothing. A slice is loaded by its keys, so it has the same bits when it is loaded
once more: all loading processes of the epoch are started anew, and load what has not come from them yet. All of them,
because the others may wait for a lock that the killed one held. It counts as a lost worker in the limits of the launch
(`Elastic.respawn`). Where the kernel has killed it because memory ran out, there is one process fewer from then on.
"""

import logging
import multiprocessing
import os
import re
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Final, final

import torch
from torch.utils.data import DataLoader

from lockstep.comm.generations import current_generations
from lockstep.data.contents import state_number
from lockstep.data.keyed import KeyedDataset, SliceKeys
from lockstep.launch.exits import OomKills, describe_exit, has_run_out_of_memory, name_killer, read_oom_kills
from lockstep.launch.restarts import Elastic
from lockstep.processes.ending import die_with_parent, terminate_only_for
from lockstep.processes.host import exit_code_of_child
from lockstep.settings import read_settings
from lockstep.torch_private.loaders import (
    LoaderIterator,
    abandon,
    end_processes,
    end_stream,
    is_over,
    loading_processes,
    without_interruption,
)
from lockstep.torch_private.portable import replace_operators

_LOGGER = logging.getLogger("lockstep")
_PREFETCH_FACTOR = 2
"""How many slices each loading process is ahead; torch's default."""
_END_SECONDS = 1.0
"""The kernel closes the connections of a process before it reports its end."""
_POLL_SECONDS = 0.01
_KILLED_AT_START: Final = re.compile(r"DataLoader worker \(pid (\d+)\) is killed by signal: ([^.]*)\.")
_ALONE: Final = Elastic().loading_limit
"""How often processes are started anew where no launch says it."""


@final
class _SlicePlan:
    """What is to be loaded; generated lazily, because an epoch may have millions of samples.

    It begins again with what was asked for and has not been loaded: loading processes may be started anew.
    """

    def __init__(self) -> None:
        self.rest: Iterator[SliceKeys] = iter(())
        self.asked: deque[SliceKeys] = deque()

    def __iter__(self) -> Iterator[SliceKeys]:
        yield from list(self.asked)
        for keys in self.rest:
            self.asked.append(keys)
            yield keys


@final
class SliceLoading:
    def __init__(
        self,
        dataset: KeyedDataset,
        *,
        num_workers: int = 0,
        keeps_processes: bool = False,
        pin_memory: bool = False,
    ) -> None:
        self._dataset = dataset
        self.load: Final[Callable[[SliceKeys], Any]] = dataset.__getitems__
        """Loads one slice in this process."""
        self._num_workers = num_workers
        self._keeps_processes = keeps_processes
        self._pin_memory = pin_memory
        self._plan = _SlicePlan()
        self._kept: _LoadingProcesses | None = None
        self._kept_state = 0
        self._lost_at: list[float] = []
        self.is_under_way = False

    def in_this_process(self) -> "SliceLoading":
        return SliceLoading(self._dataset, pin_memory=self._pin_memory)

    @contextmanager
    def loaded(self, keys: Iterator[SliceKeys]) -> Iterator[Iterator[Any]]:
        """Load the slices with these keys, in loading processes if any; an epoch within another gets its own ones."""
        is_inner, self.is_under_way = self.is_under_way, True
        keeps = self._keeps_processes and not is_inner
        plan = self._plan if keeps else _SlicePlan()
        plan.rest, plan.asked = keys, deque()
        loading = self._load_all(plan, keeps=keeps)
        try:
            yield loading
        finally:
            loading.close()
            self.is_under_way = is_inner

    def _load_all(self, plan: _SlicePlan, *, keeps: bool) -> Generator[Any, None, None]:
        while self._num_workers:
            try:
                for data in self._processes(plan, keeps=keeps).loaded():
                    plan.asked.popleft()
                    yield data
            except Exception as error:
                if keeps:
                    self._kept = None  # these processes have ended
                if not isinstance(error, _LostError):
                    raise
                self._go_on_after(error)
            else:
                return
        rest = chain(plan.asked, plan.rest)
        yield from self._make_loader(rest) if self._pin_memory else map(self.load, rest)

    def _processes(self, plan: _SlicePlan, *, keeps: bool) -> "_LoadingProcesses":
        """Start the loading processes of an epoch, or take those of the one before if they have the present state."""
        if not keeps:
            return _LoadingProcesses(self._make_loader(plan))
        state = state_number(self._dataset)
        if self._kept is None or state != self._kept_state:
            self._kept = None  # the old ones end first: together they may need too much memory
            self._kept, self._kept_state = _LoadingProcesses(self._make_loader(plan)), state
        return self._kept

    def _make_loader(self, plan: Iterable[SliceKeys]) -> DataLoader[Any]:
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
            persistent_workers=plan is self._plan and self._num_workers > 0,
            worker_init_fn=partial(_start_loading_process, os.getpid(), _starter_pid()) if in_main_thread else None,
            # Its own generator: the default would draw from the global one, once per epoch.
            generator=torch.Generator(),
        )

    def _go_on_after(self, lost: "_LostError") -> None:
        """Return if the processes are to be started anew; else raise the error for one that has ended."""
        what = f"The loading process {lost.pid} {'was ' * lost.is_killed}{lost.reason}, while it loaded samples."
        if not (lost.is_killed and self._may_go_on(lost)):
            raise RuntimeError(
                f"{what} If memory is short, use fewer loading processes, or load less in each; num_workers=0 loads in "
                "this process, and shows errors of the data set itself. (LS406)"
            ) from lost.__cause__
        self._num_workers -= lost.has_run_out
        number = self._num_workers
        left = f"in {number} loading process{'es' * (number != 1)}" if number else "in this process"
        _LOGGER.warning(
            "%s What had not come from the loading processes yet is loaded again, %s. No bit of the result changes. "
            "(LS406)",
            what,
            left,
        )

    def _may_go_on(self, lost: "_LostError") -> bool:
        generations = current_generations()
        if generations is not None:
            return generations.may_load_again(lost.pid, lost.reason)
        return _ALONE.take(self._lost_at, time.monotonic())


def _as_it_is(collated: Any) -> Any:
    return collated


def _starter_pid() -> int | None:
    """Return which process starts loading processes; None for a fork server, which ends when this process does."""
    return None if multiprocessing.get_start_method() == "forkserver" else os.getpid()


def _start_loading_process(worker_pid: int, starter_pid: int | None, _number: int) -> None:
    die_with_parent(os.getppid() if starter_pid is None else starter_pid)
    terminate_only_for(worker_pid)
    if read_settings().is_portable():  # one that is not forked
        replace_operators()


class _LostError(Exception):
    """A loading process has ended; the cause is the error by which that was noticed, if any."""

    def __init__(self, pid: int, exit_code: int, before: OomKills, after: OomKills) -> None:
        super().__init__()
        self.pid = pid
        self.is_killed = exit_code < 0
        self.reason = describe_exit(exit_code, killer=name_killer(before, after))
        self.has_run_out = self.is_killed and has_run_out_of_memory(before, after)


@dataclass(slots=True)
class _FirstEnd:
    """The loading process that has ended first, when all others were ended too."""

    pid: int = 0
    exit_code: int = 0
    is_known: threading.Event = field(default_factory=threading.Event)


@final
class _LoadingProcesses:
    """The processes of one DataLoader; a thread ends all when one has ended."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._kills_before = read_oom_kills()
        self._iterator: LoaderIterator | None = None
        self._end = _FirstEnd()

    def loaded(self) -> Iterator[Any]:
        """Yield what they load, to the end of the plan; `_LostError` when one of them has ended."""
        try:
            if not self._end.is_known.is_set():  # a process that stays may have ended between two epochs
                yield from self._until_end(self._begin())
        except Exception as error:
            if self._is_lost(error):
                raise self._lost() from error
            if self._iterator is not None and not self._end.is_known.is_set():
                end_processes(self._iterator)
            raise
        finally:
            if self._iterator is not None and self._end.is_known.is_set():
                abandon(self._iterator)
        if self._end.is_known.is_set():
            raise self._lost()
        self._kills_before = read_oom_kills()

    def _until_end(self, iterator: LoaderIterator) -> Iterator[Any]:
        while not self._end.is_known.is_set():
            try:
                data = next(iterator)
            except StopIteration:
                return
            yield data

    def _begin(self) -> LoaderIterator:
        iterator = iter(self._loader)
        without_interruption(iterator)
        if self._iterator is None:
            watched = self._end, weakref.ref(iterator), loading_processes(iterator)
            threading.Thread(target=_end_together, args=watched, name="loading processes", daemon=True).start()
        self._iterator = iterator
        return iterator

    def _is_lost(self, error: Exception) -> bool:
        """Return whether an error comes from the end of a process, and not from the data set."""
        text = str(error)
        if "in DataLoader worker process" in text:  # raised there
            return False
        if self._iterator is None:  # torch's handler of SIGCHLD has raised while the processes were started
            found = _KILLED_AT_START.search(text)
            if found is not None:
                names = {signal.strsignal(number): number for number in signal.valid_signals()}
                self._end.pid, self._end.exit_code = int(found[1]), -names.get(found[2], signal.SIGKILL)
            return found is not None
        is_of_connection = isinstance(error, EOFError | OSError) or "DataLoader worker (pid" in text
        return self._end.is_known.wait(_END_SECONDS if is_of_connection or "Pin memory thread" in text else 0)

    def _lost(self) -> _LostError:
        return _LostError(self._end.pid, self._end.exit_code, self._kills_before, read_oom_kills())


def _end_together(end: _FirstEnd, of_iterator: "weakref.ref[LoaderIterator]", processes: Sequence[BaseProcess]) -> None:
    """Wait until one of the processes has ended, and end all of them if their iterator has not ended it itself."""
    wait([process.sentinel for process in processes])
    iterator = of_iterator()
    if iterator is None or is_over(iterator):
        return
    deadline = time.monotonic() + _END_SECONDS
    while not (ended := {each.pid: code for each in processes if (code := _exit_code(each)) is not None}):
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    first = min(ended, key=lambda pid: ended[pid] >= 0, default=None)
    end.pid, end.exit_code = first or 0, ended.get(first, -signal.SIGKILL)
    for process in processes:
        process.kill()
    end_stream(iterator)
    end.is_known.set()


def _exit_code(process: BaseProcess) -> int | None:
    assert process.pid is not None
    return exit_code_of_child(process.pid, lambda: process.exitcode)
