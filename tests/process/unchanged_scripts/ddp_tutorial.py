"""What PyTorch's DDP tutorial shows: a basic step, a checkpoint, a model in parts; by mp.spawn. Writes FILE.

usage: ddp_tutorial.py FILE PORT
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 - as the tutorial has it


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(inputs)))


class ToyModelInParts(nn.Module):
    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.devices = first, second
        self.first, self.second = nn.Linear(10, 10).to(first), nn.Linear(10, 5).to(second)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.first(inputs.to(self.devices[0])))
        return self.second(hidden.to(self.devices[1]))


def setup(rank: int, world_size: int, port: str) -> None:
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(rank)  # so that the wrapper has to make the models equal


def take_steps(model: nn.Module, count: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(torch.randn(20, 10)), torch.randn(20, 5))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def demo(rank: int, world_size: int, path: str, port: str) -> None:
    setup(rank, world_size, port)
    train(rank, path)  # torch's wrapper has to be gone before its group, or it may wait for ever for a thread of Gloo
    dist.destroy_process_group()


def train(rank: int, path: str) -> None:
    model = DDP(ToyModel())
    losses = take_steps(model, 2)
    if rank == 0:
        torch.save(model.state_dict(), f"{path}.checkpoint")
    dist.barrier()
    loaded = DDP(ToyModel())
    loaded.load_state_dict(torch.load(f"{path}.checkpoint", map_location="cpu", weights_only=True))
    losses += take_steps(loaded, 2)
    in_parts = DDP(ToyModelInParts("cpu", "cpu:0"))
    losses += take_steps(in_parts, 2)
    if rank == 0:
        state = {
            f"{name}/{key}": value
            for name, each in (("loaded", loaded), ("parts", in_parts))
            for key, value in each.module.state_dict().items()
        }
        wrapper = f"{type(model).__module__}.{type(model).__name__}"
        torch.save({"losses": losses, "state": state, "wrapper": wrapper}, path)


if __name__ == "__main__":
    mp.spawn(demo, args=(2, sys.argv[1], sys.argv[2]), nprocs=2, join=True)
