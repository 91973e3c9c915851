"""Models that compute on several streams: whether their gradients are those of a plain loop.

Every part of a model waits for a while before it computes, forward and backward, so that whoever does not wait for the
right stream reads what is not there yet. The plain loop does the same on one stream and waits for the device after
every step. Each rank of a group computes what the mean over all ranks should be by itself.

    --world 1     a group of one, over NCCL
    --world 2     two workers on the one card, over Gloo

torch's DistributedDataParallel runs too, as a control: what is wrong there is told, and is no failure.

    --sanitizer   without delays, under torch's CUDA sanitizer, which raises an error where two streams touch a tensor
                  without an order between them. It is TORCH_CUDA_SANITIZER=1, from after the imports on.
"""

import argparse
import contextlib
import copy
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import gpu_device
import torch
import torch.distributed as dist
from gpu_device import DEVICE, IS_CUDA, current_stream, keep_for, name, new_stream, on_stream, order, synchronize
from gpu_sides import DDP, TORCH, TRAINER
from gpu_workers import describe, hand_in, is_worker, join, join_alone, run_workers
from tables import print_row
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import TensorDataset

import lockstep as ls

SIDES = (TORCH, DDP, TRAINER)
WIDTH = 256
BATCH = 32
NUM_STEPS = 3
LEARNING_RATE = 0.1
TOLERANCE = 1e-5
LIMIT_SECONDS = 50.0

MODES = {
    "two branches": "one branch on a side stream",
    "shared weight": "one weight used on two streams",
    "side last": "the side stream's gradients come last and late",
    "whole step": "forward, backward and update on a side stream",
    "backward": "forward on the main stream, backward called on a side stream",
    "accumulated": "two backwards on two streams, the first without reduction",
}
NOT_FOR_TRAINER = ("backward", "accumulated")
"""There the trainer itself calls backward."""

Pair = tuple[Tensor, Tensor]


class Late(torch.autograd.Function):
    """Hands a tensor on after a while, forward and backward, on the stream on which it is called."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, milliseconds: float) -> Tensor:
        ctx.milliseconds = milliseconds
        gpu_device.delay(milliseconds)
        return values * 1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gpu_device.delay(ctx.milliseconds)
        return gradient * 1, None


def late(values: Tensor, milliseconds: float) -> Tensor:
    handed_on: Tensor = Late.apply(values, milliseconds)  # type: ignore[no-untyped-call]
    return handed_on


class Branches(nn.Module):
    """Two branches that meet again.

    Args:
        mode: One of `MODES`.
        milliseconds: How long each part waits.
    """

    def __init__(self, mode: str, milliseconds: float) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = self.left if mode == "shared weight" else nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)
        self.has_side = mode in {"two branches", "shared weight", "side last"}
        self._late = (milliseconds, 3 * milliseconds if mode == "side last" else milliseconds)
        self._side = new_stream()

    def forward(self, inputs: Tensor) -> Tensor:
        main, side = current_stream(), self._side if self.has_side else current_stream()
        is_first_last = self._late[1] > self._late[0]
        hidden = inputs if is_first_last else self.first(inputs)
        order(main, side)
        with on_stream(side):
            keep_for(hidden, side)
            right = late(self.right(late(hidden, self._late[1])).tanh(), self._late[1])
        left = late(self.left(late(hidden, self._late[0])).tanh(), self._late[0])
        order(side, main)
        keep_for(right, main)
        both = left + right
        if is_first_last:  # the layer that all else waits for stands at the end
            both = self.first(both).tanh()
        scores: Tensor = self.last(both)
        return scores


def on_one_stream(model: Branches) -> Branches:
    """Return a copy that computes the same and knows of no other stream."""
    plain = copy.deepcopy(model)
    plain.has_side = False
    return plain


def batch_of(rank: int, step: int) -> Pair:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(BATCH, WIDTH, generator=generator)
    return inputs, inputs[:, :1].sin()


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    error: Tensor = model(batch[0]) - batch[1]
    return error.square().mean()


@contextlib.contextmanager
def on_new_stream() -> Iterator[None]:
    """Compute on a stream of its own, in order with what comes before and after."""
    main, side = current_stream(), new_stream()
    order(main, side)
    with on_stream(side):
        yield
    order(side, main)


def backward(mode: str, model: Any, batch: Pair) -> None:
    """Do a backward in the way of a mode."""
    device_batch = [column.to(DEVICE) for column in batch]
    if mode == "accumulated":
        halves = list(zip(*(column.chunk(2) for column in device_batch), strict=True))
        with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext():
            (mean_loss(model, halves[0]) / 2).backward()
        with on_new_stream():
            (mean_loss(model, halves[1]) / 2).backward()
    elif mode == "backward":
        loss = mean_loss(model, device_batch)
        with on_new_stream():
            loss.backward()
    else:
        mean_loss(model, device_batch).backward()


def train_plain(model: Branches, mode: str, world_size: int) -> list[list[Tensor]]:
    """Return parameters after every step, and the gradients before it, of a loop over the batches of all ranks."""
    plain = on_one_stream(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE)
    found = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for rank in range(world_size):
            backward("", plain, batch_of(rank, step))
            synchronize()
        for parameter in plain.parameters():
            assert parameter.grad is not None, mode
            parameter.grad /= world_size
        gradients = [parameter.grad.clone() for parameter in plain.parameters() if parameter.grad is not None]
        optimizer.step()
        synchronize()
        found.append([*gradients, *(parameter.detach().clone() for parameter in plain.parameters())])
    return found


def train_wrapped(model: Branches, side: str, mode: str) -> list[list[Tensor]]:
    """Return the same of a wrapped model, which nothing waits for before the end of a step."""
    ids = [DEVICE] if IS_CUDA else None
    wrapped: Any = (TorchDDP if side == TORCH else ls.DistributedDataParallel)(model, device_ids=ids)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE)
    found = []
    for step in range(NUM_STEPS):
        with on_new_stream() if mode == "whole step" else contextlib.nullcontext():
            optimizer.zero_grad()
            backward(mode, wrapped, batch_of(dist.get_rank(), step))
            gradients = [parameter.grad.clone() for parameter in wrapped.parameters()]
            optimizer.step()
        found.append([*gradients, *(parameter.detach().clone() for parameter in wrapped.parameters())])
    synchronize()
    return found


def train_trainer(model: Branches, mode: str) -> list[list[Tensor]]:
    """Return the same of a trainer, one shard per rank, without the gradients."""
    world_size = dist.get_world_size()
    batches = [batch_of(rank, step) for step in range(NUM_STEPS) for rank in range(world_size)]
    data = TensorDataset(*(torch.cat(column) for column in zip(*batches, strict=True)))
    loader = ls.ShardedLoader(data, batch_size=BATCH * world_size, num_shards=world_size, shuffle=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    trainer = ls.Trainer(model, optimizer, loss=mean_loss, num_shards=world_size)
    found = []
    for batch in loader.epoch(0):
        with on_new_stream() if mode == "whole step" else contextlib.nullcontext():
            trainer.step(batch)
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    synchronize()
    return found


def difference(found: list[list[Tensor]], expected: list[list[Tensor]]) -> float:
    """Return how far two trainings are apart, in units of the largest number of a tensor."""
    pairs = [
        (one, other)
        for mine, right in zip(found, expected, strict=True)
        for one, other in zip(mine, right[-len(mine) :], strict=True)
    ]
    return max(float((one - other).abs().max() / other.abs().max().clamp(min=1e-30)) for one, other in pairs)


def try_all(sides: list[str], modes: list[str], milliseconds: float) -> dict[str, dict[str, str]]:
    """Return by mode and side what came of it: "equal", how far off it was, or an error (collective)."""
    results: dict[str, dict[str, str]] = {}
    for mode in modes:
        torch.manual_seed(0)
        model = Branches(mode, milliseconds).to(DEVICE)
        expected = train_plain(model, mode, dist.get_world_size())
        for side in sides:
            if side == TRAINER and mode in NOT_FOR_TRAINER:
                continue
            mine = copy.deepcopy(model)
            try:
                found = train_trainer(mine, mode) if side == TRAINER else train_wrapped(mine, side, mode)
                off = difference(found, expected)
                told = "equal" if off <= TOLERANCE else f"WRONG, off by {off:.1e}"
            except Exception as error:  # noqa: BLE001 - the sanitizer's errors among them; the others are tried too
                traceback.print_exc()
                told = f"{type(error).__name__}: {error}".partition("\n")[0]
            results.setdefault(mode, {})[side] = told
    return results


def show(results: dict[str, dict[str, str]], sides: list[str]) -> list[str]:
    """Print a table; return what of ours is not as it should be."""
    print_row("model", *sides)
    print_row(*["---"] * (1 + len(sides)))
    for mode, by_side in results.items():
        print_row(MODES[mode], *(by_side.get(side, "-") for side in sides))
    return [
        f"{mode}, {side}: {told}"
        for mode, by_side in results.items()
        for side, told in by_side.items()
        if side != TORCH and told != "equal"
    ]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=1, help="number of workers on the card")
    parser.add_argument("--sides", type=lambda text: text.split(","), default=list(SIDES))
    parser.add_argument("--modes", type=lambda text: text.split(","), default=list(MODES))
    parser.add_argument("--sanitizer", action="store_true", help="turn torch's CUDA sanitizer on")
    parser.add_argument("--small", action="store_true", help="a dry run on the CPU")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    milliseconds = 0.0 if options.sanitizer else 10.0
    if options.sanitizer:
        gpu_device.enable_sanitizer()
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\..*")
    if is_worker():
        join("gloo")
        hand_in(try_all(options.sides, options.modes, milliseconds))
        dist.barrier()
        return
    print(f"\n{name()}, {options.world} worker(s){', CUDA sanitizer' * options.sanitizer}\n")
    if options.world == 1:
        join_alone()
        sys.exit("\n".join(show(try_all(options.sides, options.modes, milliseconds), options.sides)) or 0)
    problems = []
    for outcome in run_workers(__file__, sys.argv[1:], world_size=options.world, limit=LIMIT_SECONDS):
        print(f"\n{describe(outcome)}")
        if outcome.result is None:
            print(outcome.output)
            problems.append(describe(outcome))
        else:
            problems += show(outcome.result, options.sides)
            if any("Error" in told for by_side in outcome.result.values() for told in by_side.values()):
                print(outcome.output)
    sys.exit("\n".join(problems) or 0)


if __name__ == "__main__":
    main()
