"""What PyTorch's imagenet example does: a convolutional net, meters, validation with a remainder. Writes FILE.

usage: imagenet.py FILE
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Subset, TensorDataset


class Meter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, count: int) -> None:
        self.sum += value * count
        self.count += count

    def all_reduce(self) -> None:
        total = torch.tensor([self.sum, self.count], dtype=torch.float32)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total[0].item(), int(total[1].item())

    @property
    def mean(self) -> float:
        return self.sum / self.count


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


def make_images(count: int) -> TensorDataset:
    labels = torch.arange(count) % 5
    return TensorDataset(torch.randn(count, 3, 8, 8) + labels.view(-1, 1, 1, 1) * 0.3, labels)


def train(loader: DataLoader[list[Tensor]], model: nn.Module, criterion: nn.Module, optimizer: torch.optim.Optimizer):
    losses = []
    model.train()
    for images, target in loader:
        loss = criterion(model(images), target)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def validate(data: TensorDataset, sampler, model: nn.Module, criterion: nn.Module) -> list[float]:
    losses, top1 = Meter(), Meter()

    def run(loader: DataLoader[list[Tensor]]) -> None:
        with torch.no_grad():
            for images, target in loader:
                output = model(images)
                losses.update(criterion(output, target).item(), len(images))
                top1.update((output.argmax(1) == target).float().mean().item() * 100, len(images))

    model.eval()
    run(DataLoader(data, batch_size=10, sampler=sampler))
    losses.all_reduce()
    top1.all_reduce()
    counted = len(sampler) * dist.get_world_size()
    if counted < len(data):
        run(DataLoader(Subset(data, range(counted, len(data))), batch_size=10))
    return [losses.mean, top1.mean, top1.count]


def main(path: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(make_model())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
    train_data, test_data = make_images(100), make_images(31)
    train_sampler = torch.utils.data.distributed.DistributedSampler(train_data)
    test_sampler = torch.utils.data.distributed.DistributedSampler(test_data, shuffle=False, drop_last=True)
    loader = DataLoader(train_data, batch_size=10, shuffle=False, sampler=train_sampler)
    losses, best = [], 0.0
    for epoch in range(2):
        train_sampler.set_epoch(epoch)
        losses += train(loader, model, criterion, optimizer)
        found = validate(test_data, test_sampler, model, criterion)
        assert found[2] == 31
        losses += found
        scheduler.step()
        best = max(best, found[1])
    if int(os.environ["RANK"]) == 0:
        state = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
        wrapper = f"{type(model).__module__}.{type(model).__name__}"
        torch.save({"losses": [*losses, best], "state": state, "wrapper": wrapper}, path)


if __name__ == "__main__":
    dist.init_process_group(backend="gloo", init_method="env://")
    main(sys.argv[1])  # torch's wrapper has to be gone before its group, or it may wait for ever for a thread of Gloo
    dist.destroy_process_group()
