"""Scenarios on real groups of the backend "shm": one launch plays many of them, and each test looks at one.

A *scenario* is given its rank, the number of ranks and a group of its own, and yields what it looked at, what it found
and what it expected. It does not stop at the first difference, so that the ranks go on together; an exception ends it
on every rank, and the next scenario starts with a new group.
"""

import faulthandler
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from tests.process.ranks import PATIENCE, Rank, Ranks
from torch import Tensor

Claims = Iterator[tuple[str, Any, Any]]
Scenario = Callable[[int, int, Any], Claims]

_LONGEST_CALL = timedelta(seconds=15)


def wrong_in(scenario: Scenario, scenarios: tuple[Scenario, ...], world_size: int, backend: str = "gloo") -> list[str]:
    """Return what was not as expected in one scenario, on any rank.

    Args:
        scenario: The scenario.
        scenarios: All that are played by one launch, the first time that one of them is asked for.
        world_size: Number of ranks.
        backend: Of the default group; the scenario's own is always "shm".
    """
    return _play(scenarios, world_size, backend)[scenarios.index(scenario)]


@cache
def _play(scenarios: tuple[Scenario, ...], world_size: int, backend: str) -> list[list[str]]:
    """Return what was wrong in each scenario; one that breaks down is the end of those after it."""
    found: list[list[str]] = []
    with TemporaryDirectory() as folder, Ranks(Path(folder), world_size, _play_all, scenarios, backend) as ranks:
        try:
            found.extend([line for rank in range(world_size) for line in ranks.hear(rank)] for _ in scenarios)
        except AssertionError as error:
            culprit = scenarios[len(found)].__name__
            found += [[f"the ranks broke down in {culprit}: {error}"]] * (len(scenarios) - len(found))
    return found


def _play_all(rank: Rank, scenarios: tuple[Scenario, ...], backend: str) -> None:
    dist.init_process_group(backend, store=rank.store(), rank=rank.number, world_size=rank.size, timeout=_LONGEST_CALL)
    for scenario in scenarios:
        faulthandler.dump_traceback_later(PATIENCE - 5, exit=True)
        rank.say(_play_one(rank, scenario))
    faulthandler.cancel_dump_traceback_later()


def _play_one(rank: Rank, scenario: Scenario) -> list[str]:
    group: Any = dist.new_group(backend="shm", timeout=_LONGEST_CALL)
    wrong = []
    try:
        for what, result, expected in scenario(rank.number, rank.size, group):
            try:
                _compare(result, expected)
            except AssertionError as error:
                wrong.append(f"rank {rank.number}, {what}: {error}")
    except Exception:  # noqa: BLE001 - the test shows it
        wrong.append(f"rank {rank.number}: {traceback.format_exc()}")
        group.abort()
    dist.destroy_process_group(group)
    return wrong


def _compare(result: Any, expected: Any) -> None:
    """Compare tensors bit by bit, also within lists, and all else with `==`."""
    if isinstance(expected, Tensor):
        if str(expected.dtype).startswith("torch.float8"):
            assert result.dtype == expected.dtype, f"{result.dtype} is not {expected.dtype}"
            result, expected = result.view(torch.uint8), expected.view(torch.uint8)
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    elif isinstance(expected, list | tuple) and any(isinstance(value, Tensor) for value in expected):
        assert len(result) == len(expected), f"{len(result)} values, expected {len(expected)}"
        for one, other in zip(result, expected, strict=True):
            _compare(one, other)
    else:
        assert result == expected, f"{result!r} is not {expected!r}"
