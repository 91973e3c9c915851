"""What PyTorch's tutorial on multi-GPU training with torchrun teaches: a trainer with snapshots. Writes FILE.

Three epochs; then it starts again from the snapshot of the second, as after a fault, and must end alike.

usage: multi_gpu_torchrun.py FILE
"""

import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 - as the tutorial has it
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class SnapshotTrainer:
    def __init__(self, snapshot: str) -> None:
        torch.manual_seed(1)
        inputs = torch.rand(80, 20)
        self.loader = DataLoader(
            TensorDataset(inputs, inputs.sum(1, keepdim=True)),
            batch_size=8,
            pin_memory=False,
            shuffle=False,
            sampler=DistributedSampler(torch.utils.data.TensorDataset(inputs)),
        )
        model = nn.Linear(20, 1)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        self.snapshot = snapshot
        self.epochs_run = 0
        if Path(snapshot).exists():
            found = torch.load(snapshot, map_location="cpu", weights_only=True)
            model.load_state_dict(found["model"])
            self.epochs_run = found["epochs_run"]
        self.model = DDP(model)
        self.losses: list[float] = []

    def train(self, epochs: int) -> None:
        for epoch in range(self.epochs_run, epochs):
            self.loader.sampler.set_epoch(epoch)
            for inputs, targets in self.loader:
                self.losses.append(self.step(inputs, targets))
            if int(os.environ["LOCAL_RANK"]) == 0 and epoch == 1:
                torch.save({"model": self.model.module.state_dict(), "epochs_run": epoch + 1}, self.snapshot)

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()


def main(path: str) -> None:
    trainer = SnapshotTrainer(f"{path}.snapshot")
    trainer.train(3)
    torch.distributed.barrier()
    again = SnapshotTrainer(f"{path}.snapshot")
    again.train(3)
    assert again.losses == trainer.losses[-5:]
    if int(os.environ["RANK"]) == 0:
        found = {
            "losses": trainer.losses,
            "state": again.model.module.state_dict(),
            "wrapper": f"{type(again.model).__module__}.{type(again.model).__name__}",
        }
        torch.save(found, path)


if __name__ == "__main__":
    init_process_group(backend="gloo")
    main(sys.argv[1])  # torch's wrapper has to be gone before its group, or it may wait for ever for a thread of Gloo
    destroy_process_group()
