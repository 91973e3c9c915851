"""A loading process that is killed: its samples are loaded again, until the limit is used up, and then it is named."""

import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

import lockstep as ls
from lockstep.data import slice_loading
from lockstep.data.keyed import DrawKeys, KeyedDataset, SliceKeys
from lockstep.data.slice_loading import SliceLoading
from lockstep.launch.exits import OomKills

WORKER = os.getpid()
LATE = 4
"""A sample of a late step."""
BIG = bytes(1 << 22)


class Noisy(Dataset[Any]):
    """Samples with noise, of which one ends the process that loads it the first `times`."""

    def __init__(self, folder: Path, times: int = 0, end: Callable[[], object] = lambda: None) -> None:
        self.folder = folder
        self.times = times
        self.end = end

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == LATE and os.getpid() != WORKER and len(list(self.folder.iterdir())) < self.times:
            (self.folder / str(os.getpid())).touch()
            self.end()
        return torch.rand(2), index


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def loaded(data: Dataset[Any], **options: Any) -> list[Any]:
    loader = ls.ShardedLoader(data, batch_size=4, num_shards=2, seed=3, **options)
    return [
        [(noise.tolist(), int(index)) for noise, index in zip(*part.data, strict=True)]
        for epoch in range(2)
        for batch in loader.epoch(epoch)
        for part in batch.slices
    ]


def children_of(before: set[BaseProcess]) -> set[BaseProcess]:
    return set(multiprocessing.active_children()) - before


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("times", [1, 3])
def test_samples_of_a_killed_process_are_loaded_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, times: int, *, stays: bool
) -> None:
    # It ended the run: each of 18 random kills.
    again = loaded(Noisy(tmp_path, times, kill), num_workers=2, persistent_workers=stays)
    assert again == loaded(Noisy(tmp_path))
    said = [record.getMessage() for record in caplog.records if "(LS406)" in record.getMessage()]
    assert len(said) == times
    assert all("was killed by SIGKILL" in text and "in 2 loading processes. No bit" in text for text in said)


def test_the_limit_ends_it_and_then_the_process_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"The loading process \d+ was killed by SIGKILL.*use fewer") as raised:
        loaded(Noisy(tmp_path, 4, kill), num_workers=1)
    assert any("epoch" in note for note in raised.value.__notes__)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="SIGSEGV of a process that catches it")
def test_an_exit_of_the_data_set_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"The loading process \d+ ended with exit code 7, while it loaded"):
        loaded(Noisy(tmp_path, 1, lambda: os._exit(7)), num_workers=1)


def keys_of(count: int) -> Iterator[SliceKeys]:
    return (DrawKeys([number], num_samples=count, seed=0, epoch=0) for number in range(count))


def test_with_too_little_memory_there_is_one_process_fewer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(Noisy):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            if index in {5, 11} and os.getpid() != WORKER:
                kill()
            return torch.rand(2), index

    counts = itertools.count()
    monkeypatch.setattr(slice_loading, "read_oom_kills", lambda: OomKills(group=next(counts), host=None))
    loading = SliceLoading(KeyedDataset(Killed(tmp_path), list), num_workers=2)
    before = set(multiprocessing.active_children())
    with loading.loaded(keys_of(24)) as slices:
        found = [(int(index), len(children_of(before))) for ((_, index),) in slices]
    assert [index for index, _ in found] == list(range(24))
    assert (found[0][1], found[-1][1]) == (2, 0)
    said = [record.getMessage() for record in caplog.records]
    assert all("by the kernel's out-of-memory killer" in text for text in said)
    assert [text.split("again, ")[1][:30] for text in said] == [
        "in 1 loading process. No bit o",
        "in this process. No bit of the",
    ]


def test_a_process_killed_between_two_steps_interrupts_nothing() -> None:
    # Torch raised it wherever the main thread was: in the middle of an update, which made the state unusable.
    data = TensorDataset(torch.arange(64.0))
    loader = ls.ShardedLoader(data, batch_size=2, num_shards=1, num_workers=1, collate_fn=list)
    before = set(multiprocessing.active_children())  # a test before this one may have left a process that is ending
    batches = loader.epoch(0)
    next(batches)
    (process,) = children_of(before)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # as an update that goes on: nothing is raised here
    assert len(list(batches)) == 31


def test_a_process_that_stays_and_is_killed_between_two_epochs(tmp_path: Path) -> None:
    # "DataLoader worker (pid(s) 4711) exited unexpectedly", without a word about who, how and why.
    before = set(multiprocessing.active_children())
    loader = ls.ShardedLoader(Noisy(tmp_path), batch_size=4, num_shards=2, num_workers=2, persistent_workers=True)
    assert len(list(loader.epoch(0))) == 6
    for process in children_of(before):
        process.kill()
        process.join()
    assert len(list(loader.epoch(1))) == 6


def test_a_process_killed_in_the_middle_of_a_large_message(tmp_path: Path) -> None:
    # Who read the rest waited for ever: this process could have written it, too.
    before = set(multiprocessing.active_children())
    loader = ls.ShardedLoader(Noisy(tmp_path), batch_size=4, num_shards=1, num_workers=1, collate_fn=lambda _: BIG)
    batches = loader.epoch(0)
    next(batches)
    (process,) = children_of(before)
    assert process.pid is not None
    wait_for_state(process.pid, "S")  # the pipe is full with the first part of a message, of which nobody reads more
    os.kill(process.pid, signal.SIGSTOP)
    wait_for_state(process.pid, "T")
    thread = threading.Timer(0.2, process.kill)  # this one reads the first part meanwhile, and waits
    thread.start()
    assert [len(batch.slices[0].data) for batch in batches] == [len(BIG)] * 5
    thread.join()


def wait_for_state(pid: int, wanted: str) -> None:
    """Wait until each thread of a process sleeps ("S"), or is stopped ("T")."""
    deadline = time.monotonic() + 30
    while any(
        path.read_text().rpartition(")")[2].split()[0] != wanted for path in Path(f"/proc/{pid}/task").glob("*/stat")
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("kind", [RuntimeError, EOFError, ConnectionResetError])
def test_errors_of_the_data_set_pass(kind: type[Exception]) -> None:
    class Raising(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            raise kind("mine")

    loader = ls.ShardedLoader(Raising(torch.zeros(4)), batch_size=2, num_shards=1, num_workers=1, collate_fn=list)
    with pytest.raises(kind, match="mine"):
        list(loader.epoch(0))


def test_samples_of_a_stream_are_loaded_again(tmp_path: Path) -> None:
    def read(times: int) -> ls.Stream:
        samples = Noisy(tmp_path, times, kill)
        return ls.Stream(range(24), transform=samples.__getitem__, buffer_size=8)

    assert loaded(read(2), num_workers=2, persistent_workers=True) == loaded(read(0))
