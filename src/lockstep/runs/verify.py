"""Training the same few steps with different numbers of workers, and reporting where the results differ.

The first run saves its state after every step. Each later run compares its own state with these files, step by step, so
that the first tensor that differs can be reported, and by how much.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.checkpoint.file import state_digest
from lockstep.engine.fingerprint import Fingerprint
from lockstep.runs.build import WITHOUT_CALLBACKS, RunParts, build_parts
from lockstep.runs.config import Config
from lockstep.torch_private.modules import byte_view


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortRun:
    digests: tuple[str, ...]
    fingerprint: Fingerprint
    difference: str | None


def run_steps(config: Config, device: torch.device, num_steps: int, reference: Path, *, is_first: bool) -> ShortRun:
    """Train some steps (collective); the first run writes its state after each step as a file in `reference`."""
    # Without a lost worker it would be another number of workers.
    parts = build_parts(config.model_copy(update={"on_worker_loss": "stop", **WITHOUT_CALLBACKS}), device)
    digests: list[str] = []
    difference = None
    for step in islice(_train(config, parts), num_steps):
        state = parts.trainer.model.state_dict()
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        digests.append(state_digest(tensors))
        path = reference / f"step-{step:08d}.safetensors"
        if is_first:
            if parts.trainer.world.rank == 0:
                save_file({name: _plain(tensor) for name, tensor in tensors.items()}, path)
            parts.trainer.world.gather_objects(None)  # a barrier: the other ranks read the file
        if difference is None:
            difference = find_difference(load_file(path), tensors, step)
    return ShortRun(digests=tuple(digests), fingerprint=parts.trainer.fingerprint(), difference=difference)


def find_deviating_rank(runs: Sequence[ShortRun]) -> int | None:
    """Return the rank whose digests first differ from those of rank 0; None if all are equal."""
    first = runs[0].digests
    steps = {
        rank: next(
            step for step, (mine, expected) in enumerate(zip(run.digests, first, strict=True)) if mine != expected
        )
        for rank, run in enumerate(runs)
        if run.digests != first
    }
    return min(steps, key=steps.__getitem__, default=None)


def find_difference(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], step: int) -> str | None:
    """Return how tensors differ first, after a step, from those of the first run; None if they are equal."""
    names = list(dict.fromkeys([*found, *expected]))
    differing = [name for name in names if not _have_equal_bits(expected.get(name), found.get(name))]
    if not differing:
        return None
    name, *others = differing  # in the model's order
    how = _describe_difference(expected.get(name), found.get(name))
    more = f" (and {len(others)} more)" if others else ""
    return f"the first difference is after step {step}, in {name}{more}: {how}"


def _train(config: Config, parts: RunParts) -> Iterator[int]:
    step = 0
    epoch = 0
    while True:
        for batch in parts.train.epoch(epoch):
            parts.trainer.step(batch)
            step += 1
            yield step
        if parts.scheduler is not None and config.steps_scheduler_per_epoch:
            parts.scheduler.step()
        epoch += 1


def _have_equal_bits(expected: Tensor | None, found: Tensor | None) -> bool:
    if expected is None or found is None or expected.dtype != found.dtype or expected.shape != found.shape:
        return False
    return torch.equal(byte_view(_plain(found)), byte_view(expected))


def _describe_difference(expected: Tensor | None, found: Tensor | None) -> str:
    if expected is None:
        return "it exists in this run only"
    if found is None:
        return "it exists in the first run only"
    kinds = [f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in (found, expected)]
    if kinds[0] != kinds[1]:
        return f"it is {kinds[0]}, and {kinds[1]} in the first run"
    wide = torch.complex128 if found.is_complex() else torch.float64
    left, right = expected.to(wide), _plain(found).to(wide)
    return f"by up to {float((left - right).abs().max()):.3g}, where values are up to {float(left.abs().max()):.3g}"


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
