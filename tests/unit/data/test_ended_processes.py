"""A loading process that is killed: named with its signal, and with the killer where the kernel counts its kills."""

import multiprocessing
import os
import signal
import time

import pytest
import torch
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.data.slice_loading import loading_processes_explained
from lockstep.launch.exits import OomKills


def fail_with_a_killed_process(number: int, counts: list[OomKills], error: Exception) -> None:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    process.start()
    with loading_processes_explained(lambda: counts.pop(0)):
        assert process.pid is not None
        os.kill(process.pid, number)
        raise error


def test_the_kernels_killer_is_named() -> None:
    # It was "ConnectionResetError: [Errno 104] Connection reset by peer".
    counts = [OomKills(group=1, host=4), OomKills(group=2, host=5)]
    with pytest.raises(RuntimeError, match=r"loading process \d+ was killed by SIGKILL, by the kernel's out-of-memory"):
        fail_with_a_killed_process(signal.SIGKILL, counts, ConnectionResetError(104, "Connection reset by peer"))


def test_the_signal_is_named_and_notes_are_kept() -> None:
    error = RuntimeError("DataLoader worker (pid(s) 12) exited unexpectedly")
    error.add_note("At epoch 0")
    counts = [OomKills(group=None, host=None)] * 2
    with pytest.raises(RuntimeError, match="killed by SIGSEGV, while it loaded") as raised:
        fail_with_a_killed_process(signal.SIGSEGV, counts, error)
    assert raised.value.__notes__ == ["At epoch 0"]


def test_a_killed_process_is_told_where_the_next_samples_are_asked_for() -> None:
    # Torch raised it wherever the main thread was: in the middle of an update, which made the state unusable.
    data = TensorDataset(torch.zeros(64, 1))
    loader = ls.ShardedLoader(data, batch_size=2, num_shards=1, num_workers=1, collate_fn=list)
    others = set(multiprocessing.active_children())  # a test before this one may have left a process that is ending
    batches = loader.epoch(0)
    next(batches)
    (process,) = set(multiprocessing.active_children()) - others
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(
        os.P_PID, process.pid, os.WEXITED | os.WNOWAIT
    )  # as an update that goes on meanwhile: nothing is raised here
    with pytest.raises(RuntimeError, match=rf"The loading process {process.pid} was killed by SIGKILL"):
        list(batches)


def test_errors_of_the_data_set_pass() -> None:
    with pytest.raises(RuntimeError, match="mine"), loading_processes_explained():
        raise RuntimeError("mine")
