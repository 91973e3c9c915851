"""Training the same few steps on several numbers of workers, and saying where they differ.

The first run keeps its state after every step, in files; each later one compares its own with them, step by step, so
that the first tensor that differs can be named, and by how much.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.checkpoint import state_digest
from lockstep.train.build import RunParts, build_parts
from lockstep.train.config import Config
from lockstep.train.fingerprint import Fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where a run first differs from the first one."""

    step: int
    """After so many steps."""
    name: str
    """The first parameter or buffer, in the model's order, that differs."""
    num_others: int
    """How many more differ."""
    largest: float
    """The largest difference of two of its elements; NaN if one of them is not a number."""
    scale: float
    """The largest absolute value in it."""

    def __str__(self) -> str:
        """Show it in one sentence."""
        others = f" (and {self.num_others} more)" if self.num_others else ""
        return (
            f"the first difference is after step {self.step}, in {self.name}{others}: by up to {self.largest:.3g}, "
            f"where values are up to {self.scale:.3g}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortRun:
    """A few steps on some number of workers, as one worker saw them."""

    digests: tuple[str, ...]
    """Digest after each step."""
    fingerprint: Fingerprint
    """What they depend on."""
    difference: Difference | None
    """Where it first differs from the reference; None for the reference, on other ranks than 0, and if it does not."""


def run_steps(config: Config, device: torch.device, num_steps: int, reference: Path, *, is_first: bool) -> ShortRun:
    """Train `num_steps` steps of a config (collective: every worker calls).

    Args:
        config: The run.
        device: Where this worker trains.
        num_steps: How many steps; several epochs if there are more than one has.
        reference: Directory for the states of the first run; 0 to `num_steps` files of the model's size.
        is_first: Whether this is the first run, which writes them.
    """
    parts = build_parts(config, device)
    digests: list[str] = []
    difference = None
    for step in islice(_train(config, parts), num_steps):
        state = parts.trainer.model.state_dict()
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        digests.append(state_digest(tensors))
        path = reference / f"step-{step:08d}.safetensors"
        if parts.trainer.world.rank != 0:
            continue
        if is_first:
            save_file({name: _plain(tensor) for name, tensor in tensors.items()}, path)
        elif difference is None:
            difference = _compare(load_file(path), tensors, step)
    return ShortRun(digests=tuple(digests), fingerprint=parts.trainer.fingerprint(), difference=difference)


def find_odd_rank(runs: Sequence[ShortRun]) -> tuple[int, int] | None:
    """Return the first rank whose digests are not rank 0's, and after how many steps; None if all are alike."""
    for rank, run in enumerate(runs):
        for step, (mine, first) in enumerate(zip(run.digests, runs[0].digests, strict=True), start=1):
            if mine != first:
                return rank, step
    return None


def _train(config: Config, parts: RunParts) -> Iterator[int]:
    step = 0
    epoch = 0
    while True:
        for batch in parts.train.epoch(epoch):
            parts.trainer.step(batch)
            step += 1
            yield step
        if parts.scheduler is not None and config.scheduler_interval == "epoch":
            parts.scheduler.step()
        epoch += 1


def _compare(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], step: int) -> Difference | None:
    differing = [name for name in found if _bits(_plain(found[name])) != _bits(expected[name])]
    if not differing:
        return None
    first = differing[0]
    wide = torch.complex128 if found[first].is_complex() else torch.float64
    left, right = expected[first].to(wide), _plain(found[first]).to(wide)
    return Difference(
        step=step,
        name=first,
        num_others=len(differing) - 1,
        largest=float((left - right).abs().max()),
        scale=float(left.abs().max()),
    )


def _bits(tensor: Tensor) -> bytes:
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).digest()


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
