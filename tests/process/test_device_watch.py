"""A rank that is lost while a device waits for it, over a backend whose `wait` returns at once, as that of NCCL."""

import logging
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, final

import pytest
import torch
import torch.distributed as dist
from tests.process.ranks import Rank, Ranks

import lockstep as ls
from lockstep.comm import raise_if_broken

DEVICE = "meta"
"""Its tensors have no values, so a test cannot use a wrong one by accident."""


@final
class QueuedCall(dist.Work):
    """A call that is only queued: the device ends it when the backend is aborted, or when it is released."""

    def __init__(self, is_over: threading.Event) -> None:
        super().__init__()
        self._is_over = is_over

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return self._is_over.is_set()


@final
class QueueingBackend(dist.ProcessGroup):
    """A backend of an asynchronous device."""

    def __init__(self, _store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this form
        self.is_over = threading.Event()
        self.num_aborts = 0

    def allreduce(self, *_arguments: Any) -> dist.Work:
        return QueuedCall(self.is_over)

    def abort(self) -> None:
        self.num_aborts += 1
        self.is_over.set()

    def shutdown(self) -> None:
        pass


def join(rank: Rank) -> Any:
    dist.Backend.register_backend("queueing", QueueingBackend, devices=[DEVICE])
    ls.init_process_group(f"cpu:shm,{DEVICE}:queueing", store=rank.store(), rank=rank.number, world_size=rank.size)
    return dist.group.WORLD


def wait_for_a_lost_rank(rank: Rank) -> list[Any]:
    """Rank 2 is killed while ranks 0 and 1 wait for the device."""
    group = join(rank)
    backend = group._get_backend(torch.device(DEVICE))
    tensor = torch.ones(3, device=DEVICE)
    dist.barrier()
    if rank.number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(tensor)  # returns at once
    is_ended = backend.is_over.wait(20.0)  # as `tensor.tolist()` would
    messages = []
    for call in (
        lambda: raise_if_broken(group),
        lambda: dist.all_reduce(tensor),
        lambda: dist.all_reduce(torch.ones(1)),
    ):
        with pytest.raises(ls.PeerLostError) as lost:
            call()
        messages.append((lost.value.rank, str(lost.value)))
    return [is_ended, backend.num_aborts, messages]


def test_a_lost_rank_ends_the_wait_for_a_device(tmp_path: Path) -> None:
    with Ranks(tmp_path, 3, wait_for_a_lost_rank) as ranks:
        pid = ranks.pid(2)
        answers = [ranks.result(number) for number in (0, 1)]
    for is_ended, num_aborts, messages in answers:
        assert is_ended
        assert num_aborts == 1
        assert {number for number, _ in messages} == {2}
        assert all(f"Rank 2 (process {pid}) is lost" in message for _, message in messages)


def leave_normally(rank: Rank) -> list[Any]:
    """Rank 1 leaves the group: a call that is over is left alone, and one that is not is ended."""
    group = join(rank)
    backend = group._get_backend(torch.device(DEVICE))
    tensor = torch.ones(3, device=DEVICE)
    dist.all_reduce(tensor)
    backend.is_over.set()
    dist.barrier()
    if rank.number == 1:
        ls.destroy_process_group()
        rank.say()
        rank.hear()
        return []
    rank.hear()
    watch = group._torch.watch
    is_over = watch.look()
    aborts = backend.num_aborts
    backend.is_over.clear()
    dist.all_reduce(tensor)
    assert backend.is_over.wait(20.0)
    with pytest.raises(ls.PeerLostError, match="Rank 1 has left the group"):
        raise_if_broken(group)
    return [is_over, aborts, backend.num_aborts]


def test_a_rank_that_leaves_ends_only_a_wait_that_needs_it(tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, leave_normally) as ranks:
        ranks.hear(1)
        ranks.say(0)
        answer = ranks.result(0)
        ranks.say(1)
    assert answer == [False, 0, 1]


def log_a_stall(rank: Rank) -> list[str]:
    os.environ["LOCKSTEP_STALL_SECONDS"] = "0.2"
    group = join(rank)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lockstep").addHandler(handler)
    dist.all_reduce(torch.ones(3, device=DEVICE))
    end = time.monotonic() + 60.0
    while not messages and time.monotonic() < end:
        time.sleep(0.01)
    group._torch.watch.look()
    return messages


def test_a_call_that_does_not_end_on_the_device_is_logged_once(tmp_path: Path) -> None:
    with Ranks(tmp_path, 1, log_a_stall) as ranks:
        (message,) = ranks.result(0)
    assert "all_reduce at " in message
    assert "test_device_watch.py:" in message
    assert "has not ended on the device after 0.2 s" in message
    assert "NCCL_P2P_DISABLE=1" in message
