"""One of two workers on the card fails in the middle of a step: does each end in time, with an error naming the cause?

    exception     it raises an error in a layer of its own
    oom           it allocates more memory than its limit
    assert        a kernel asserts on the device; the host gets the error from a later CUDA call
    kill          it kills itself with SIGKILL; after that the card's memory must be free again

Each in forward and in backward, under our DistributedDataParallel and our Trainer, over Gloo (--backend nccl where NCCL
takes several ranks on one card). No launcher ends the other worker here. With --launch, the same under `ls.launch`,
which must name the worker that failed first. Several runs are under way at the same time.

Exit code 3: all ended in time, but not all errors name the cause. 1: a worker hangs, or continues to train.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from gpu_device import DEVICE, IS_CUDA, MIB, card_bytes, limit_memory, name
from gpu_sides import DDP, TRAINER
from gpu_workers import Outcome, describe, hand_in, is_worker, join, one_card, run_workers
from tables import print_row
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls

FAILING_RANK = 1
FAILING_STEP = 2
NUM_STEPS = 5
WIDTH = 512
BATCH = 64
BOUND_SECONDS = 30.0
"""Within which both workers must have ended after one has failed."""
LIMIT_SECONDS = 55.0
"""From the start of a run."""
MEMORY_SHARE = 0.04
"""Of the card, that a worker may have which is to run out of it."""
SMALLEST_BYTES = 512
"""What the allocator gives at the least."""
RELEASE_SECONDS = 10.0
SLACK_BYTES = 300 * MIB
MISSED = 3
"""Exit code where everything ended and a goal was missed."""
KINDS = ("exception", "oom", "assert", "kill")
CAUSES = {
    "exception": ("planted",),
    "oom": ("OutOfMemoryError", "out of memory"),
    "assert": ("device-side assert",),
    "kill": ("rank 1",),
}
"""What each worker's output must name: one of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Which worker fails, how and where."""

    kind: str
    side: str
    place: str
    """"forward" or "backward"."""
    backend: str

    def arguments(self) -> list[str]:
        return ["--kind", self.kind, "--side", self.side, "--place", self.place, "--backend", self.backend]

    def title(self) -> str:
        return f"{self.kind} in {self.place}, {self.side}, {self.backend}"


# -- In the workers ----------------------------------------------------------------------------------------------------


def fail(kind: str, values: Tensor) -> Tensor:
    """Fail, at once or when the device comes to it."""
    print(f"FAILED_AT {time.monotonic()}", flush=True)
    match kind:
        case "exception":
            raise RuntimeError("planted")
        case "oom":
            return values + exhaust_memory()
        case "assert" if IS_CUDA:
            table = torch.ones(4, values.shape[-1], device=DEVICE)
            return values + table[torch.full((1,), 1000, device=DEVICE)]
        case "assert":
            raise RuntimeError("CUDA error: device-side assert triggered (pretended)")
        case _:
            os.kill(os.getpid(), signal.SIGKILL)
    return values


def exhaust_memory() -> Tensor:
    """Allocate until it is refused, blocks of all sizes, and keep them all."""
    if not IS_CUDA:
        raise torch.OutOfMemoryError("CUDA out of memory (pretended)")
    held: list[Tensor] = []
    size = 512 * MIB
    while True:
        try:
            held.append(torch.ones(size, dtype=torch.uint8, device=DEVICE))
        except torch.OutOfMemoryError:
            if size <= SMALLEST_BYTES:
                raise
            size //= 2


class Fault(torch.autograd.Function):
    """Hands values on; fails in its forward or in its backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, kind: str, place: str) -> Tensor:
        ctx.kind, ctx.place = kind, place
        return fail(kind, values) if place == "forward" else values * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return (fail(ctx.kind, gradient) if ctx.place == "backward" else gradient), None, None


class Net(nn.Module):
    """Some layers, in the middle of which one worker fails in one step."""

    def __init__(self, kind: str, place: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.front = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
        self.back = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        self.kind, self.place = kind, place
        self.is_due = False

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.front(values)
        if self.is_due:
            hidden = Fault.apply(hidden, self.kind, self.place)  # type: ignore[no-untyped-call]
        scores: Tensor = self.back(hidden)
        return scores


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    scores: Tensor = model(batch[0])
    return scores.square().mean()


def train(side: str, kind: str, place: str) -> None:
    """Train until the planted failure; both workers must raise an error before the last step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if kind == "oom" and rank == FAILING_RANK:
        limit_memory(MEMORY_SHARE)
    net = Net(kind, place).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    data = torch.randn(NUM_STEPS * BATCH * world_size, WIDTH, generator=torch.Generator().manual_seed(1))
    if side == TRAINER:
        trainer = ls.Trainer(net, optimizer, loss=mean_loss, num_shards=2 * world_size)
        loader = ls.ShardedLoader(TensorDataset(data), batch_size=BATCH * world_size, num_shards=2 * world_size)
        for step, batch in enumerate(loader.epoch(0)):
            net.is_due = step == FAILING_STEP and rank == FAILING_RANK
            trainer.step(batch)
    else:
        wrapped = ls.DistributedDataParallel(net, device_ids=[DEVICE] if IS_CUDA else None)
        for step, batch in enumerate(data.split(BATCH * world_size)):
            net.is_due = step == FAILING_STEP and rank == FAILING_RANK
            optimizer.zero_grad()
            loss = mean_loss(wrapped, [batch.chunk(world_size)[rank].to(DEVICE)])
            loss.backward()
            optimizer.step()
            float(loss.detach())


# -- In the process that starts them -----------------------------------------------------------------------------------


def judge(scenario: Scenario, outcomes: list[Outcome]) -> tuple[str, str]:
    """Return what is wrong, empty for nothing, and how long the workers took to end.

    That a cause is not named is in lower case, what is worse in capitals.
    """
    failed_at = [
        float(line.split()[1])
        for outcome in outcomes
        for line in outcome.output.splitlines()
        if line.startswith("FAILED_AT")
    ]
    if not failed_at:
        return "NOT REACHED: no worker came to the planted failure", "-"
    seconds = [outcome.ended_at - min(failed_at) for outcome in outcomes]
    problems = []
    for outcome, spent in zip(outcomes, seconds, strict=True):
        is_killed = scenario.kind == "kill" and outcome.rank == FAILING_RANK
        if outcome.code is None:
            problems.append(f"rank {outcome.rank} HANGS")
        elif outcome.code == 0:
            problems.append(f"rank {outcome.rank} GOES ON")
        elif is_killed:
            continue
        elif spent > BOUND_SECONDS:
            problems.append(f"rank {outcome.rank} is LATE")
        elif not any(cause.lower() in outcome.errors().lower() for cause in CAUSES[scenario.kind]):
            problems.append(f"rank {outcome.rank} does not name the cause")
    return "; ".join(problems), ", ".join(f"{spent:.1f} s" for spent in seconds)


def is_bad(problem: str) -> bool:
    return any(word in problem for word in ("HANGS", "GOES ON", "LATE", "NOT", "NOTHING"))


def play(scenario: Scenario) -> tuple[Scenario, list[Outcome]]:
    return scenario, run_workers(__file__, scenario.arguments(), world_size=2, limit=LIMIT_SECONDS)


def play_launched(kind: str, side: str) -> tuple[str, str]:
    """Fail under `ls.launch`; return what is wrong, and what it said."""
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            ls.launch(train_launched, kind, side, f"file://{folder}/meeting", devices=one_card(2))
    except ls.WorkerFailedError as error:
        first, spent = error.failures[0], time.monotonic() - began
        said = f"{spent:.1f} s: worker {first.rank} {first.reason}".partition("\n")[0]
        return "" if first.rank == FAILING_RANK else "another worker is named first", said
    return "NOTHING was raised", "-"


def train_launched(run: ls.Run, kind: str, side: str, meeting: str) -> None:
    """Train on the card in a worker of `ls.launch`, over Gloo."""
    ls.destroy_process_group()
    ls.init_process_group("gloo", init_method=meeting, rank=run.rank, world_size=run.world_size)
    train(side, kind, "backward")


def check_release(before: int) -> str:
    """Wait until the card has as much free memory as before; return what is wrong."""
    began = time.monotonic()
    while (extra := card_bytes() - before) > SLACK_BYTES:
        if time.monotonic() > began + RELEASE_SECONDS:
            return f"{extra / MIB:.0f} MiB of the card are still in use after {RELEASE_SECONDS:.0f} s"
        time.sleep(0.2)
    return ""


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--places", type=lambda text: text.split(","), default=["forward", "backward"])
    parser.add_argument("--backend", default="gloo", choices=["gloo", "nccl"])
    parser.add_argument("--launch", action="store_true", help="under ls.launch")
    parser.add_argument("--jobs", type=int, default=12, help="how many runs at the same time; default 12")
    parser.add_argument("--small", action="store_true", help="a dry run on the CPU")
    for option in ("--kind", "--side", "--place"):
        parser.add_argument(option, help=argparse.SUPPRESS)  # of a worker
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if is_worker():
        join(options.backend)
        train(options.side, options.kind, options.place)
        hand_in("trained to the end")
        return
    print(f"{name()}; the failing worker is rank {FAILING_RANK}, the bound {BOUND_SECONDS:.0f} s\n")
    before = card_bytes()
    problems: list[str] = []
    outputs: list[str] = []
    print_row("failure", "ended after it: rank 0, rank 1", "result")
    print_row(*["---"] * 3)
    with ThreadPoolExecutor(options.jobs) as pool:
        if options.launch:
            kinds = [(kind, side) for kind in options.kinds for side in (DDP, TRAINER)]
            for (kind, side), (problem, said) in zip(
                kinds, pool.map(lambda each: play_launched(*each), kinds), strict=True
            ):
                print_row(f"{kind}, {side}, ls.launch", said, problem or "good")
                problems += [f"{kind}, {side}, ls.launch: {problem}"] * bool(problem)
        else:
            scenarios = [
                Scenario(kind=kind, side=side, place=place, backend=options.backend)
                for kind in options.kinds
                for side in (DDP, TRAINER)
                for place in options.places
            ]
            for scenario, outcomes in pool.map(play, scenarios):
                problem, seconds = judge(scenario, outcomes)
                print_row(scenario.title(), seconds, problem or "good")
                problems += [f"{scenario.title()}: {problem}"] * bool(problem)
                for outcome in outcomes:
                    shown = outcome.output if is_bad(problem) else outcome.errors()
                    outputs.append(f"--- {scenario.title()}: {describe(outcome)}\n{shown.strip()}")
    released = check_release(before)
    print(f"\nthe card's memory after all have ended: {released or 'free as before'}\n")
    print("\n".join(outputs))
    problems += [f"memory is NOT FREE: {released}"] * bool(released)
    print("\n".join(problems), flush=True)
    sys.exit(1 if any(map(is_bad, problems)) else MISSED if problems else 0)


if __name__ == "__main__":
    main()
