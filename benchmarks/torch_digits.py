"""The training of examples/digits.yaml as its users would write it with torch alone; started by benchmarks/trainer.py.

    torchrun --nproc-per-node 2 benchmarks/torch_digits.py EPOCHS

Rank 0 prints the samples per second of each epoch, of the training alone as `lockstep train` counts it, as JSON.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from lockstep.recipes.digits import Net, datasets

BATCH_SIZE = 128


def evaluate(model: nn.Module, loader: DataLoader[Any]) -> float:
    """Return the accuracy over the parts of all ranks (collective)."""
    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for images, digits in loader:
            counts += torch.tensor([(model(images).argmax(1) == digits).sum().item(), len(digits)])
    dist.all_reduce(counts)
    model.train()
    return float(counts[0] / counts[1])


def main() -> None:
    """Train for some epochs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set = datasets()
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.1)
    sampler: DistributedSampler[Any] = DistributedSampler(train_set)
    train = DataLoader(train_set, batch_size=BATCH_SIZE // world_size, sampler=sampler)
    test = DataLoader(
        test_set, batch_size=BATCH_SIZE // world_size, sampler=DistributedSampler(test_set, shuffle=False)
    )
    rates = []
    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(int(sys.argv[1])):
            sampler.set_epoch(epoch)
            began, total = time.perf_counter(), 0.0
            for images, digits in train:
                optimizer.zero_grad()
                loss = loss_of(model(images), digits)
                loss.backward()
                optimizer.step()
                total += loss.item()
            rates.append(len(train_set) / (time.perf_counter() - began))
            evaluate(model, test)
            if rank == 0:
                torch.save([model.module.state_dict(), optimizer.state_dict()], Path(folder) / "last.pt")
    if rank == 0:
        print(json.dumps(rates), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
