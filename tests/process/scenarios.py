"""Scenarios on ranks that stay from one to the next: each is run when a test asks for it, and no other.

A rank that raises or dies in one is started anew for the next, so the others do not notice.

A *scenario* of `ShmScenarios` is given its rank, the number of ranks and a group of its own, and yields what it looked
at, what it found and what it expected. It does not stop at the first difference, so that the ranks go on together.

One of `ScenarioAnswers` is given the rank, and a dictionary in which it notes what it found, by names that are its own.
"""

import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from tests.process.ranks import PATIENCE, Rank, RankPool, RanksFailedError
from torch import Tensor

import lockstep as ls

Claims = Iterator[tuple[str, Any, Any]]
ShmScenario = Callable[[int, int, Any], Claims]
Answers = dict[str, Any]

_LONGEST_CALL = timedelta(seconds=60)


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
        """Stop the ranks."""
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


@final
class ScenarioAnswers:
    """What scenarios found on one rank, by name; a scenario is run when somebody looks for what only it can have.

    Args:
        runs: Runs scenarios, and keeps what they found, for all ranks.
        rank: Whose answers these are.
    """

    def __init__(self, runs: "_ScenarioRuns", rank: int) -> None:
        self._runs = runs
        self._rank = rank

    def __getitem__(self, name: str) -> Any:
        return self._runs.find(name)[self._rank][name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the answer of that name, or `default` if another rank has it, and this one has not."""
        return self._runs.find(name)[self._rank].get(name, default)

    def starting_with(self, prefix: str) -> Answers:
        """Return the answers whose names begin so, of all scenarios."""
        return self._runs.find_all(prefix, self._rank)


def answers_of(
    pool: RankPool, scenarios: Sequence[Callable[..., None]], call: Callable[..., None] | None = None
) -> list[ScenarioAnswers]:
    """Return what the scenarios find on every rank, in rank order, when it is looked for.

    Args:
        pool: The ranks.
        scenarios: The scenarios, in the order in which they are tried; names of answers are of one each.
        call: Calls a scenario, with `(run, scenario, answers)`; None for `scenario(run.rank, answers)`.
    """
    runs = _ScenarioRuns(pool, scenarios, _call_with_rank if call is None else call)
    return [ScenarioAnswers(runs, rank) for rank in range(pool.size)]


def _call_with_rank(run: ls.Run, scenario: Callable[[int, Answers], None], answers: Answers) -> None:
    scenario(run.rank, answers)


def _answer(run: ls.Run, call: Callable[..., None], scenario: Callable[..., None]) -> Answers:
    answers: Answers = {}
    call(run, scenario, answers)
    return answers


@final
class _ScenarioRuns:
    def __init__(self, pool: RankPool, scenarios: Sequence[Callable[..., None]], call: Callable[..., None]) -> None:
        self._pool = pool
        self._scenarios = scenarios
        self._call = call
        self._found: dict[Callable[..., None], list[Answers]] = {}
        self._failures: dict[Callable[..., None], str] = {}

    def find(self, name: str) -> list[Answers]:
        """Return what all ranks found in the scenario that has an answer of that name, on some rank.

        Scenarios that have its words in their code are tried first.
        """
        for scenario in sorted(self._scenarios, key=lambda scenario: -_likelihood(scenario, name)):
            found = self._run(scenario)
            if any(name in answers for answers in found):
                return found
        raise AssertionError(f"No scenario found {name!r}.{self._explain_failures()}")

    def find_all(self, prefix: str, rank: int) -> Answers:
        """Return what a rank found by names that begin so; a scenario that failed matters if its code has them."""
        chosen: Answers = {}
        for scenario in self._scenarios:
            found = self._run(scenario)
            assert found or _likelihood(scenario, prefix) < 1.0, self._explain_failures()
            answers = found[rank] if found else {}
            chosen.update({name: value for name, value in answers.items() if name.startswith(prefix)})
        return chosen

    def _run(self, scenario: Callable[..., None]) -> list[Answers]:
        if scenario not in self._found:
            try:
                self._found[scenario] = self._pool.run(_answer, self._call, scenario)
            except RanksFailedError as error:
                self._found[scenario] = []
                self._failures[scenario] = str(error)
        return self._found[scenario]

    def _explain_failures(self) -> str:
        return "".join(
            f"\nThe scenario {scenario.__name__} failed: {said}" for scenario, said in self._failures.items()
        )


def _likelihood(scenario: Callable[..., None], name: str) -> float:
    source = inspect.getsource(scenario)
    if f'"{name}"' in source:
        return 2.0
    words = name.split()
    return sum(word in source for word in words) / len(words)
