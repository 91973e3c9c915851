"""Scenarios that share ranks: each is run alone, and one that fails or dies is wrong alone."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.process.ranks import RankPool, RanksFailedError, join_default_group
from tests.process.scenarios import Answers, Claims, ScenarioAnswers, ShmScenarios, answers_of


def sums(rank: int, answers: Answers) -> None:
    tensor = torch.tensor(float(rank))
    dist.all_reduce(tensor)
    answers["the sum"] = tensor.item()
    answers["process of the sum"] = os.getpid()


def maxima(rank: int, answers: Answers) -> None:
    tensor = torch.tensor(float(rank))
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    answers["the maximum"] = tensor.item()
    answers["process of the maximum"] = os.getpid()


def dies(rank: int, answers: Answers) -> None:
    answers["before the death"] = True
    if rank == 1:
        os._exit(3)
    dist.barrier()


def raises(rank: int, answers: Answers) -> None:
    if rank == 1:
        raise ValueError("rank 1 cannot")
    dist.barrier()


def destroys(rank: int, answers: Answers) -> None:
    dist.destroy_process_group()
    answers["has a group"] = dist.is_initialized()


@pytest.fixture
def answers() -> Iterator[list[ScenarioAnswers]]:
    with RankPool(2, join_default_group) as pool:
        yield answers_of(pool, (dies, raises, destroys, sums, maxima))


def test_scenarios_share_processes(answers: list[ScenarioAnswers]) -> None:
    assert [found["the sum"] for found in answers] == [1.0, 1.0]
    assert [found["the maximum"] for found in answers] == [1.0, 1.0]
    for found in answers:
        assert found["process of the sum"] == found["process of the maximum"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("before the death", r"The scenario dies failed: (.*\n)*rank 1 ended with 3"),
        ("raises", r"The scenario raises failed: (.*\n)*.*ValueError: rank 1 cannot"),
    ],
)
def test_a_scenario_that_fails_is_wrong_alone(answers: list[ScenarioAnswers], name: str, said: str) -> None:
    assert answers[0]["the sum"] == 1.0
    with pytest.raises(AssertionError, match=said):
        answers[0][name]
    assert answers[1]["the maximum"] == 1.0


def test_the_next_scenario_has_a_group_again(answers: list[ScenarioAnswers]) -> None:
    assert answers[0]["has a group"] is False
    assert answers[0]["the sum"] == 1.0


def equal_sums(rank: int, world_size: int, group: Any) -> Claims:
    tensor = torch.tensor(1.0)
    dist.all_reduce(tensor, group=group)
    yield "the sum", tensor.item(), float(world_size)
    yield "something else", rank, 0


def one_dies(rank: int, world_size: int, group: Any) -> Claims:
    if rank == 1:
        os._exit(3)
    dist.barrier(group)
    yield "the barrier", True, True


def test_a_scenario_over_shared_memory_dies_alone(shm_scenarios: ShmScenarios) -> None:
    with pytest.raises(RanksFailedError, match="rank 1 ended with 3"):
        shm_scenarios.wrong_in(one_dies, 2)
    assert shm_scenarios.wrong_in(equal_sums, 2) == ["rank 1, something else: 1 is not 0"]
