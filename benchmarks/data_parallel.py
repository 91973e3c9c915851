"""Time of a training step under Lockstep's DataParallel and torch's on GPUs; without GPUs, under the plain module.

    python benchmarks/data_parallel.py [--steps 20] [--rounds 9] [--replicas 2]

All sides train the same model on the same batch. Each round measures a few steps of every side, so that noise affects
all sides equally. A figure is the median over the rounds of the time per step. "no kept memory" is ours
without reuse of memory between steps, as in torch's. On one GPU the replicas share it and torch's is left out;
there, and on the CPU, where the plain module uses all cores anyway, figures show the cost of replicas, not the
speed-up.
"""

import argparse
import copy
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lockstep.parallel.replicas.copies import Copies
from lockstep.parallel.replicas.data_parallel import DataParallel

Batch = tuple[torch.Tensor, torch.Tensor]


def mlp() -> tuple[nn.Module, Batch]:
    """6 M parameters, little computation: copies dominate."""
    layers = [nn.Linear(512, 1536), nn.ReLU(), nn.Linear(1536, 1536), nn.ReLU(), nn.Linear(1536, 1536)]
    return nn.Sequential(*layers, nn.Linear(1536, 10)), (torch.randn(64, 512), torch.randint(0, 10, (64,)))


def conv_net() -> tuple[nn.Module, Batch]:
    """A small net with BatchNorm: computation dominates."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(128 * 16, 10)]
    return nn.Sequential(*layers), (torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,)))


def many_tiny() -> tuple[nn.Module, Batch]:
    """400 parameters of 16 to 256 numbers: bound by Python."""
    layers = [layer for _ in range(200) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(*layers), (torch.randn(8, 16), torch.randint(0, 10, (8,)))


MODELS = {"MLP, 6 M": mlp, "conv net, 0.1 M": conv_net, "400 tiny": many_tiny}


class Forgetful(DataParallel):
    """Ours without kept memory."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._copies = Copies()
        return super().forward(*inputs, **kwargs)


def sides(devices: list[Any]) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """Return how each side wraps a module; torch's runs on GPUs only, on each once."""
    wrappers: dict[str, Callable[[nn.Module], nn.Module]] = {"plain module": lambda module: module}
    if torch.cuda.is_available() and len(set(devices)) == len(devices):
        wrappers["torch"] = lambda module: nn.DataParallel(module, devices)
    wrappers["Lockstep"] = lambda module: DataParallel(module, devices)
    wrappers["no kept memory"] = lambda module: Forgetful(module, devices)
    return wrappers


def time_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, steps: int) -> float:
    """Return seconds per step."""
    inputs, targets = batch
    began = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def main() -> None:
    """Run the benchmark and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps per turn")
    parser.add_argument("--rounds", type=int, default=9, help="rounds")
    parser.add_argument("--replicas", type=int, default=2, help="number of replicas")
    options = parser.parse_args()
    num_gpus = torch.cuda.device_count()
    devices: list[Any] = [number % num_gpus for number in range(options.replicas)] if num_gpus else []
    devices = devices or ["cpu"] * options.replicas
    home = torch.device("cuda:0" if num_gpus else "cpu")
    wrappers = sides(devices)
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, load {load}, {home}")
    print(f"replicas on {devices}, {options.rounds} rounds of {options.steps} steps, medians\n")
    others = [side for side in wrappers if side != "Lockstep"]
    ratios = " | ".join(f"Lockstep / {side}" for side in others)
    print(f"| model | {', ms | '.join(wrappers)}, ms | {ratios} |")
    print("| --- " * (1 + len(wrappers) + len(others)) + "|")
    for name, build in MODELS.items():
        torch.manual_seed(0)
        model, (inputs, targets) = build()
        batch = inputs.to(home), targets.to(home)
        trained = {}
        for side, wrap in wrappers.items():
            wrapped = wrap(copy.deepcopy(model).to(home))
            trained[side] = (wrapped, torch.optim.SGD(wrapped.parameters(), lr=1e-3))
        seconds: dict[str, list[float]] = {side: [] for side in wrappers}
        for number in range(options.rounds + 1):
            for side, (wrapped, optimizer) in trained.items():
                spent = time_step(wrapped, optimizer, batch, options.steps)
                if number > 0:  # the first round warms up
                    seconds[side].append(spent)
        medians = {side: statistics.median(spent) for side, spent in seconds.items()}
        figures = " | ".join(f"{1000 * medians[side]:.2f}" for side in wrappers)
        compared = " | ".join(f"{medians['Lockstep'] / medians[side]:.2f}" for side in others)
        print(f"| {name} | {figures} | {compared} |", flush=True)


if __name__ == "__main__":
    main()
