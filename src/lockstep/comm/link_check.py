"""Whether the devices of a group add up correctly: all-reduces whose result is known, over every pair and over all.

Broken links, PCIe switches with access control and defects of the communication library show as sums that are wrong, or
as calls that never end. So every all-reduce has a limit, each element is compared, and results travel over the store,
which works when the devices do not.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, Store

from lockstep.comm.stored_values import read_record, to_stored
from lockstep.comm.world import World
from lockstep.errors import GroupError
from lockstep.torch_private.groups import store_of

_LENGTHS: Final = (1, 1021, 262_139, 4_194_301)
"""Elements of the messages: libraries have another protocol for each of short, medium and long ones."""
_DTYPES: Final = (torch.float32, torch.bfloat16)
_LARGEST_SUM: Final = 256
"""bfloat16 has every whole number up to here, so that sums are exact in any order."""
_PERIOD: Final = 61
"""The values of a rank repeat after so many elements: a part that is in the wrong place is noticed."""
_LIMIT_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    ranks: tuple[int, ...]
    seconds: float
    """How long the all-reduce of the longest message took on the slowest rank; 0 if there was a problem."""
    problem: str
    """What went wrong, in a sentence; empty if every sum was right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankReport:
    seconds: float = 0.0
    problem: str = ""
    is_stuck: bool = False
    """Whether a call has not ended: the device can do no more."""


def check_links(world: World, device: torch.device) -> list[LinkReport]:
    """All-reduce tensors whose sums are known over every pair of ranks, then over all (collective over all ranks).

    The reports are the same on every rank. They end with the first set of ranks of which a call does not end within
    `_LIMIT_SECONDS`, their group's making included: then the devices are unusable, and the process should exit.
    """
    store = None if world.group is None else store_of(world.group)
    if world.group is None or store is None:
        raise GroupError("There is no process group whose links could be checked. (LS127)")
    number = store.add(f"link_check/calls/{world.rank}", 1)  # the same on every rank
    reports: list[LinkReport] = []
    for ranks in _sets_of_ranks(world.world_size):
        place = PrefixStore(f"link_check/{number}/{ranks}", store)
        place.set(str(world.rank), to_stored(_check_set(ranks, world, device)))
        found = [_read(place, rank) for rank in range(world.world_size)]
        problems = [report.problem for report in found if report.problem]
        seconds = 0.0 if problems else max(report.seconds for report in found)
        reports.append(LinkReport(ranks=ranks, seconds=seconds, problem=" ".join(problems)))
        if any(report.is_stuck for report in found):
            break
    return reports


def _sets_of_ranks(world_size: int) -> Iterator[tuple[int, ...]]:
    if world_size > 2:  # noqa: PLR2004 - of two ranks the only pair is all
        yield from itertools.combinations(range(world_size), 2)
    yield tuple(range(world_size))


def _check_set(ranks: tuple[int, ...], world: World, device: torch.device) -> _RankReport:
    end = time.monotonic() + _LIMIT_SECONDS
    seconds, problem = 0.0, ""
    try:
        # Longer than the limit: at its own timeout NCCL ends the process.
        group: Any = dist.new_group(list(ranks), timeout=timedelta(seconds=2 * _LIMIT_SECONDS))
        if world.rank not in ranks:
            return _RankReport()
        for length, dtype in itertools.product(_LENGTHS, _DTYPES):
            started = time.monotonic()
            wrong = _count_wrong(length, dtype, ranks, ranks.index(world.rank), device, group, end)
            seconds = time.monotonic() - started
            if wrong is None:
                problem = f"Rank {world.rank}: an all-reduce of {length} {dtype} did not end in {_LIMIT_SECONDS:g} s."
                return _RankReport(problem=problem, is_stuck=True)
            if wrong and not problem:  # and go on: the other ranks do
                problem = f"Rank {world.rank}: {wrong} of {length} sums of {dtype} are wrong."
        dist.destroy_process_group(group)
    except (RuntimeError, ValueError) as error:
        problem = f"Rank {world.rank}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return _RankReport(seconds=seconds, problem=problem)


def _count_wrong(
    length: int,
    dtype: torch.dtype,
    ranks: Sequence[int],
    place: int,
    device: torch.device,
    group: ProcessGroup,
    end: float,
) -> int | None:
    """Return how many sums are wrong on this rank; None if the call has not ended by `end`."""
    values = [_values(length, number, len(ranks)) for number in range(len(ranks))]
    # One element more, so that the tensor does not begin where its memory does.
    tensor = torch.empty(length + 1, dtype=dtype, device=device)[1:]
    tensor.copy_(values[place])
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    while not work.is_completed():
        if time.monotonic() > end:
            return None
        time.sleep(_POLL_SECONDS)
    work.wait()
    return int((tensor.to("cpu", torch.float32) != torch.stack(values).sum(0)).sum())


def _values(length: int, number: int, num_ranks: int) -> Tensor:
    """Return what one rank adds: whole numbers, small enough for their sum over all ranks to be exact."""
    num_values = max(_LARGEST_SUM // num_ranks, 1) + 1
    pattern = (torch.arange(_PERIOD, device="cpu") * 31 + number * 17) % _PERIOD % num_values
    return pattern.repeat(-(-length // _PERIOD))[:length].float()


def _read(place: Store, rank: int) -> _RankReport:
    try:
        place.wait([str(rank)], timedelta(seconds=3 * _LIMIT_SECONDS))
    except dist.DistError:
        problem = (
            f"Rank {rank} did not report within {3 * _LIMIT_SECONDS:g} s: it has ended, or a call does not return."
        )
        return _RankReport(problem=problem, is_stuck=True)
    return read_record(str(rank), place.get(str(rank)), _RankReport)
