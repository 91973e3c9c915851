"""Time of an all-reduce and of a training step over several hosts: network namespaces with a slow network between them.

    python benchmarks/hosts.py [--places 0,0,1,1 0,0,1,1,2,2] [--sizes 4KB,1MB,26MB,102MB] [--rate 1gbit]
                               [--repetitions 7] [--model mlp]

Needs root, and `unshare`, `ip` and `tc`. Each process is started on its host with the variables that torchrun sets. Its
default group is torch's own Gloo; the other side is a group of Lockstep's over the same ranks. All sides of a size are
measured in turn, and checked; a figure is the median over the repetitions of the slowest rank's time. Each host sends
and receives at most `--rate`; there is no further delay.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from interleaved import run_round
from tables import load_average, log, mark, print_row
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from training_models import MODELS

import lockstep as ls

ROOT = Path(__file__).resolve().parent.parent
UNITS = {"MB": 10**6, "KB": 10**3}
SIDES = {"gloo": "torch's Gloo", "hosts": "Lockstep", "ordered": "Lockstep, in the order of the tree"}
STEPS = 3


def read_size(text: str) -> int:
    return int(text[:-2]) * UNITS[text[-2:]]


def time_of(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def report(title: str, seconds: dict[str, list[float]], errors: dict[str, str]) -> None:
    if dist.get_rank() == 0:
        base = statistics.median(seconds["gloo"])
        cells = [
            f"{statistics.median(each) * 1e3:.2f}{mark(each)} ({statistics.median(each) / base:.2f})"
            for each in seconds.values()
        ]
        print_row(title, *cells, *errors.values(), load_average().split()[0])


def time_all_reduce(size: str, group: dist.ProcessGroup, repetitions: int) -> None:
    world_size = dist.get_world_size()
    tensor = torch.empty(read_size(size) // 4)
    actions: dict[str, Callable[[], object]] = {
        "gloo": lambda: dist.all_reduce(tensor),
        "hosts": lambda: dist.all_reduce(tensor, group=group),
        "ordered": lambda: ls.ordered_all_reduce(tensor, group),
    }

    def measure(side: str) -> float:
        tensor.fill_(1.0)
        spent = time_of(actions[side])
        if not bool((tensor == world_size).all()):
            raise AssertionError(f"{side}: the sum is {tensor[0]}, not {world_size}")
        return spent

    seconds: dict[str, list[float]] = {side: [] for side in actions}
    errors: dict[str, str] = {}
    for _ in range(repetitions + 1):
        run_round(list(actions), measure, seconds, errors)
    report(size, {side: each[1:] for side, each in seconds.items()}, errors)  # the first one connects


def train_step(module: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> None:
    optimizer.zero_grad()
    outputs: Tensor = module(inputs)
    nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten()).backward()
    optimizer.step()


def time_step(name: str, group: dist.ProcessGroup, repetitions: int) -> None:
    wrappers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "gloo": TorchDDP,
        "hosts": lambda module: ls.DistributedDataParallel(module, process_group=group),
    }
    model = MODELS[name]
    steps: dict[str, Callable[[], None]] = {}
    for side, wrap in wrappers.items():
        torch.manual_seed(0)
        module = wrap(model.build())
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-5)
        steps[side] = partial(train_step, module, optimizer, *model.make_batch())
    seconds: dict[str, list[float]] = {side: [] for side in steps}
    errors: dict[str, str] = {}
    for _ in range(repetitions + 2):
        run_round(
            list(steps), lambda side: time_of(lambda: [steps[side]() for _ in range(STEPS)]) / STEPS, seconds, errors
        )
    report(f"step, {name}", {side: each[2:] for side, each in seconds.items()}, errors)


def run_rank(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.new_group(backend="shm")
    assert group is not None
    for size in arguments.sizes.split(","):
        time_all_reduce(size, group, arguments.repetitions)
    if arguments.model:
        time_step(arguments.model, group, arguments.repetitions)
    dist.barrier()
    dist.destroy_process_group()


def run_hosts(places: list[int], rate: str) -> None:
    sys.path.insert(0, str(ROOT))
    from tests.process.hosts import Hosts

    print(f"\n{len(places)} workers, on hosts {places}, {rate}: milliseconds, and the ratio to torch's Gloo\n")
    print_row("", *SIDES.values(), "load")
    print_row(*["---"] * (len(SIDES) + 2))
    with tempfile.TemporaryDirectory() as folder, Hosts(Path(folder), max(places) + 1) as hosts:
        hosts.limit(rate)
        processes: list[subprocess.Popen[str]] = []
        for rank, host in enumerate(places):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "LOCAL_RANK": str(places[:rank].count(host)),
                "MASTER_ADDR": hosts.address(places[0]),
                "MASTER_PORT": "29511",
                "IS_RANK_OF_BENCHMARK": "1",
            }
            processes.append(hosts.start(host, __file__, *sys.argv[1:], variables=variables))
        for process in processes:
            said, _ = process.communicate(timeout=600)
            print("\n".join(line for line in said.splitlines() if line.startswith("|") or process.returncode))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", nargs="+", default=["0,0,1,1", "0,0,1,1,2,2"], help="the host of each rank")
    parser.add_argument("--sizes", default="4KB,1MB,26MB,102MB")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--model", default="mlp", help="one of benchmarks/training_models.py; nothing for none")
    arguments = parser.parse_args()
    if os.environ.get("IS_RANK_OF_BENCHMARK"):
        run_rank(arguments)
        return
    for places in arguments.places:
        run_hosts([int(place) for place in places.split(",")], arguments.rate)
    log(f"load {load_average()}")


if __name__ == "__main__":
    main()
