"""All-reduces over every pair and over all ranks, whose sums are known."""

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.process.ranks import CPU, call_on_ranks

import lockstep as ls
from lockstep.comm import current_world, link_check
from lockstep.comm.link_check import LinkReport, check_links

ALL_SETS = [(0, 1), (0, 2), (1, 2), (0, 1, 2)]


def check(run: ls.Run) -> Sequence[list[LinkReport]]:
    """Check links that are right; then the link between ranks 0 and 2 is wrong, and then a call does not end."""
    right = check_links(current_world(), CPU)
    plain: Any = dist.all_reduce

    def wrong(tensor: torch.Tensor, group: Any, async_op: bool) -> Any:
        work = plain(tensor, group=group, async_op=async_op)
        if dist.get_process_group_ranks(group) == [0, 2] and run.rank == 2 and tensor.numel() > 2000:
            work.wait()
            tensor[1000] += 1
        return work

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", wrong)
        broken = check_links(current_world(), CPU)

    over = False

    def stuck(tensor: torch.Tensor, group: Any, async_op: bool) -> Any:
        nonlocal over
        if dist.get_process_group_ranks(group) == [0, 2]:
            over = True
            if run.rank == 2:
                tensor = tensor.clone()
                return dist.irecv(tensor, 0, group)
        return plain(tensor, group=group, async_op=async_op)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600 * over, sleep=time.sleep)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", stuck)
        patch.setattr(link_check, "time", clock)  # nobody waits for the limit, and no slow machine reaches it
        hanging = check_links(current_world(), CPU)
    return right, broken, hanging


def test_every_pair_and_all_are_checked() -> None:
    answers = call_on_ranks(3, check)
    right, broken, hanging = answers[0]
    assert [answer == answers[0] for answer in answers] == [True] * 3
    assert [report.ranks for report in right] == ALL_SETS
    assert [report.problem for report in right] == [""] * 4
    assert all(report.seconds > 0 for report in right)

    assert [bool(report.problem) for report in broken] == [False, True, False, False]
    assert broken[1].problem == "Rank 2: 1 of 262139 sums of torch.float32 are wrong."

    assert [report.ranks for report in hanging] == ALL_SETS[:2]
    assert "Rank 0: an all-reduce of 1 torch.float32 did not end in 30 s." in hanging[1].problem
