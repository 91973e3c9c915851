"""Scenarios that share ranks: each is run alone, and one that fails or dies is wrong alone."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.process.ranks import RankPool, RanksFailedError
from tests.process.scenarios import Claims, ShmScenarios, everyone, scenarios_in, wrong_in


def sums(rank: int) -> Claims:
    tensor = torch.tensor(float(rank))
    dist.all_reduce(tensor)
    yield "the sum", tensor.item(), 1.0
    yield "something else", rank, 0
    yield "what all ranks have", everyone(rank), [0, 1]


def processes(_rank: int) -> Claims:
    yield "process", os.getpid(), 0


def dies(rank: int) -> Claims:
    yield "before the death", True, True
    if rank == 1:
        os._exit(3)
    dist.barrier()


def raises(rank: int) -> Claims:
    yield "before the error", True, True
    if rank == 1:
        raise ValueError("rank 1 cannot")
    dist.barrier()


def destroys(_rank: int) -> Claims:
    dist.destroy_process_group()
    yield "has a group", dist.is_initialized(), False


def test_a_claim_that_is_wrong_is_one_and_the_scenario_goes_on(pair: RankPool) -> None:
    assert wrong_in(pair, sums) == ["rank 1, something else: 1 is not 0"]


def test_scenarios_share_processes_until_one_fails(pair: RankPool) -> None:
    found = [wrong_in(pair, processes) for _ in range(2)]
    assert found[0] == found[1]
    assert len(set(found[0])) == 2
    for fails, said in ((dies, "rank 1 ended with 3"), (raises, "ValueError: rank 1 cannot")):
        with pytest.raises(RanksFailedError, match=said):
            wrong_in(pair, fails)
        assert wrong_in(pair, sums) == ["rank 1, something else: 1 is not 0"]
    assert not set(wrong_in(pair, processes)) & set(found[0])


def test_the_next_scenario_has_a_group_again(pair: RankPool) -> None:
    assert wrong_in(pair, destroys) == []
    assert wrong_in(pair, sums) == ["rank 1, something else: 1 is not 0"]


def test_scenarios_of_a_module_are_found() -> None:
    assert scenarios_in(globals()) == [sums, processes, dies, raises, destroys, equal_sums, one_dies]


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
