"""Code that asks which process it is, within `as_another_process`."""

import os
import socket
import threading
import time
from os import getpid

import torch.distributed as dist
from torch.utils.data import get_worker_info

from lockstep.processes.other_process import as_another_process


def test_each_question_has_another_answer_and_then_its_own_again(monkeypatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def ask() -> tuple[object, ...]:
        hours = int(time.time()) // 3600, time.time_ns() // 3_600_000_000_000
        place = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID")]
        return os.getpid(), getpid(), socket.gethostname(), get_worker_info(), dist.is_initialized(), *hours, *place

    before = ask()
    with as_another_process():
        within = ask()
        assert (dist.get_rank(), dist.get_world_size()) == (1, 2)
    assert not any(one == other for one, other in zip(before, within, strict=True))
    assert ask()[:5] == before[:5]
    assert "WORLD_SIZE" not in os.environ
    assert os.environ["SLURM_PROCID"] == "3"


def test_one_question_can_be_answered_alone() -> None:
    pid, host = os.getpid(), socket.gethostname()
    with as_another_process({"host"}):
        assert os.getpid() == pid
        assert socket.gethostname() != host


def test_other_threads_get_their_own_answers() -> None:
    pid, found = os.getpid(), list[int]()
    with as_another_process():
        thread = threading.Thread(target=lambda: found.append(os.getpid()))
        thread.start()
        thread.join()
    assert found == [pid]
