"""Time of a training step under Lockstep's DistributedDataParallel and torch's, on Gloo and on shared memory.

    make bench            or: python benchmarks/ddp.py [--steps 30] [--rounds 7] [--worlds 2,4]

All train the same model in the same processes, in turn, a few steps each, round after round, so that whatever
else the machine does hits each alike. The figure is the median over the rounds of the slowest rank's time per step.
"""

import argparse
import os
import platform
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep as ls

Batch = tuple[torch.Tensor, torch.Tensor]


def mlp() -> tuple[nn.Module, Batch]:
    """6 M parameters, little computation: bound by communication."""
    layers = [
        nn.Linear(512, 1536),
        nn.ReLU(),
        nn.Linear(1536, 1536),
        nn.ReLU(),
        nn.Linear(1536, 1536),
        nn.Linear(1536, 10),
    ]
    return nn.Sequential(*layers), (torch.randn(32, 512), torch.randint(0, 10, (32,)))


def conv_net() -> tuple[nn.Module, Batch]:
    """A small net with BatchNorm: bound by computation."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(128 * 16, 10)]
    return nn.Sequential(*layers), (torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,)))


def many_tiny() -> tuple[nn.Module, Batch]:
    """400 parameters of 16 to 256 numbers: bound by overhead."""
    layers = [layer for _ in range(200) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(*layers), (torch.randn(8, 16), torch.randint(0, 10, (8,)))


MODELS = {"MLP, 6 M": mlp, "conv net, 0.1 M": conv_net, "400 tiny": many_tiny}


def torch_ddp(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Wrap with torch's."""
    return TorchDDP(model, process_group=group, gradient_as_bucket_view=True)


def lockstep_ddp(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Wrap with ours."""
    return ls.DistributedDataParallel(model, process_group=group)


WRAPPERS = {"torch": torch_ddp, "Lockstep": lockstep_ddp}
BACKENDS = ("gloo", "shm")
ALONE = "alone"
SIDES = [ALONE, *(f"{name} {backend}" for name in WRAPPERS for backend in BACKENDS)]


def time_steps(_place: ls.Run, steps: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return seconds per step, by model and side."""
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    medians: dict[str, dict[str, float]] = {}
    for name, build in MODELS.items():
        torch.manual_seed(0)
        sides = {}
        for side in SIDES:
            model, batch = build()
            wrapper, _, backend = side.partition(" ")
            wrapped = model if side == ALONE else WRAPPERS[wrapper](model, groups[backend])
            sides[side] = (wrapped, torch.optim.SGD(wrapped.parameters(), lr=1e-3), batch)
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        for number in range(rounds + 1):
            for side, (model, optimizer, batch) in sides.items():
                spent = _run(model, optimizer, batch, steps)
                if number > 0:  # the first round warms up
                    seconds[side].append(spent)
        medians[name] = {side: statistics.median(spent) for side, spent in seconds.items()}
    return medians


def _run(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, steps: int) -> float:
    inputs, targets = batch
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    slowest = torch.tensor((time.perf_counter() - began) / steps)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def main() -> None:
    """Run the benchmark and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps per turn")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each side")
    parser.add_argument("--worlds", default="2,4", help="numbers of workers")
    options = parser.parse_args()
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, load {load}, CPU")
    print(f"{options.rounds} rounds of {options.steps} steps, one thread per worker, median of the slowest rank\n")
    print(f"| model | workers | {', ms | '.join(SIDES)}, ms | Lockstep / torch, gloo | Lockstep shm / torch gloo |")
    print("| --- " * (len(SIDES) + 4) + "|")
    for world in map(int, options.worlds.split(",")):
        medians, *_ = ls.launch(time_steps, options.steps, options.rounds, devices=f"cpu:{world}")
        for name, sides in medians.items():
            figures = " | ".join(f"{1000 * sides[side]:.2f}" for side in SIDES)
            same = sides["Lockstep gloo"] / sides["torch gloo"]
            best = sides["Lockstep shm"] / sides["torch gloo"]
            print(f"| {name} | {world} | {figures} | {same:.2f} | {best:.2f} |", flush=True)


if __name__ == "__main__":
    main()
