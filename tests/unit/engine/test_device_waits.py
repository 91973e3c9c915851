"""How often a step waits for an asynchronous device, and what becomes of an error on one worker of such a device."""

import pytest
import torch
from tests.support.asynchronous_device import asynchronous_device
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.comm import World

NUM_STEPS = 6


def make_data() -> TensorDataset:
    inputs = torch.randn(8 * NUM_STEPS, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def train(world: World | None, device: str, failing_rank: int = -1, failing_step: int = -1) -> tuple[list[str], str]:
    """Train, with an error in one step on one rank, which is taken again; return the errors and the digest."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)).to(device)
    fails = False

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        if fails:
            raise RuntimeError("the loss has failed")
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    trainer = ls.Trainer(
        model, torch.optim.SGD(model.parameters(), 0.1), loss=loss, num_shards=4, world=world, deterministic=False
    )
    loader = ls.ShardedLoader(make_data(), batch_size=8, num_shards=4, world=lambda: trainer.world)
    said = []
    for number, batch in enumerate(loader.epoch(0)):
        fails = number == failing_step and world is not None and world.rank == failing_rank
        if number == failing_step:
            with pytest.raises((RuntimeError, ls.ReductionError)) as caught:
                trainer.step(batch)
            said.append(str(caught.value))
            fails = False
        trainer.step(batch)
    digest = trainer.digest()
    trainer.close()
    return said, digest


def test_a_step_waits_once_for_the_device_and_once_more_while_contents_are_compared() -> None:
    def program(world: World) -> list[str]:
        with asynchronous_device() as device:
            train(world, device.name)
            return [wait for wait in device.waits if "engine/" in wait]

    for waits in run_ranks(2, program):
        in_table = [wait for wait in waits if "step_table" in wait]
        of_contents = [wait for wait in waits if "side_effects" in wait]
        assert len(in_table) == NUM_STEPS, waits
        assert len(of_contents) == 3, waits
        assert not [wait for wait in waits if "balance" in wait]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_worker_is_an_error_of_the_same_step_on_all(rank: int) -> None:
    def program(world: World, failing_step: int) -> tuple[list[str], str]:
        with asynchronous_device() as device:
            return train(world, device.name, rank, failing_step)

    undisturbed = [digest for _, digest in run_ranks(2, lambda world: program(world, -1))]
    for said, digest in run_ranks(2, lambda world: program(world, 2)):
        assert len(said) == 1
        assert "the loss has failed" in said[0]
        assert digest == undisturbed[0]
