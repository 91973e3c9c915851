"""Scenarios on ranks that stay from one to the next: each is run when a test asks for it, and no other.

A *scenario* is given its rank, and yields what it looked at, what it found and what it expected. It does not stop at
the first difference, so that the ranks go on together. A rank that raises or dies in one is started anew for the next,
so the others do not notice. One of `ShmScenarios` is given the number of ranks and a group of its own too.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from tests.process.ranks import PATIENCE, Rank, RankPool
from torch import Tensor

import lockstep as ls
from lockstep.errors import LockstepError

Claims = Iterator[tuple[str, Any, Any]]
Scenario = Callable[[int], Claims]
ShmScenario = Callable[[int, int, Any], Claims]

_LONGEST_CALL = timedelta(seconds=60)


def scenarios_in(module: dict[str, Any]) -> list[Any]:
    """Return what makes claims in a module, given its `globals()`; names with an underscore are parts of others."""
    return [
        each
        for name, each in module.items()
        if not name.startswith("_") and getattr(each, "__annotations__", {}).get("return") == Claims
    ]


def name_of(scenario: Callable[..., Claims]) -> str:
    return scenario.__name__


def wrong_in(pool: RankPool, scenario: Scenario) -> list[str]:
    """Return what was not as expected in a scenario, on any rank of a pool that has a default group.

    Raises:
        RanksFailedError: A rank raised, died or is not done in time.
    """
    return [line for lines in pool.run(_check, scenario) for line in lines]


def everyone(value: Any) -> list[Any]:
    """Return the values of all ranks (collective)."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def found_in(text: str, part: str) -> str:
    """Return the part if the text has it, else the text: a claim about a message that shows it where it is wrong."""
    return part if part in text else text


def error_of(call: Callable[[], object]) -> str:
    """Return class and message of the error that a call raises, or `"no error"`."""
    try:
        call()
    except (LockstepError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _check(run: ls.Run, scenario: Scenario) -> list[str]:
    return list(_wrong_among(run.rank, scenario(run.rank)))


def _wrong_among(rank: int, claims: Claims) -> Iterator[str]:
    for what, result, expected in claims:
        try:
            _compare(result, expected)
        except AssertionError as error:
            yield f"rank {rank}, {what}: {error}"


@final
class ShmScenarios:
    """Runs scenarios on groups of the backend "shm"; ranks are started when they are needed first."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, str], RankPool] = {}
        self._stack = ExitStack()

    def wrong_in(self, scenario: ShmScenario, world_size: int, backend: str = "gloo") -> list[str]:
        """Return what was not as expected in a scenario, on any rank.

        Args:
            scenario: The scenario.
            world_size: Number of ranks.
            backend: Of the default group; the scenario's own is always "shm".

        Raises:
            RanksFailedError: A rank died, or is not done in time.
        """
        if (world_size, backend) not in self._pools:
            pool = self._stack.enter_context(RankPool(world_size, _SetUp(backend), PATIENCE))
            self._pools[world_size, backend] = pool
        return [line for lines in self._pools[world_size, backend].run(_run_one, scenario) for line in lines]

    def close(self) -> None:
        self._stack.close()


@final
class _SetUp:
    def __init__(self, backend: str) -> None:
        self._backend = backend

    def __call__(self, rank: Rank) -> Rank:
        dist.init_process_group(
            self._backend, store=rank.store(), rank=rank.number, world_size=rank.size, timeout=_LONGEST_CALL
        )
        return rank


def _run_one(rank: Rank, scenario: ShmScenario) -> list[str]:
    group: Any = dist.new_group(backend="shm", timeout=_LONGEST_CALL)
    wrong: list[str] = []
    try:
        wrong += _wrong_among(rank.number, scenario(rank.number, rank.size, group))
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
