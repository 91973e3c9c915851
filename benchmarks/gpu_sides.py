"""A training step as each side does it: a plain loop, torch's DistributedDataParallel, ours, and our trainer.

Every side copies its batch from pinned memory to the device in each step, as a real loop does.
"""

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_device import DEVICE, IS_CUDA
from gpu_models import Case, pinned
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import TensorDataset

import lockstep as ls

PLAIN, TORCH, DDP, TRAINER = "plain loop", "torch DDP", "ls DDP", "ls Trainer"
SIDES = (PLAIN, TORCH, DDP, TRAINER)
Step = Callable[[], object]
"""Does one step of training."""


def make_step(
    side: str,
    case: Case,
    *,
    num_shards: int = 1,
    compile_mode: str | None = None,
    deterministic: bool = False,
    max_grad_norm: float | None = None,
    has_scaler: bool = False,
) -> Step:
    """Make a model and return what does a step of one side (collective where the side is).

    Args:
        num_shards: Of the trainer; of the others micro-batches, whose gradients are accumulated.
        compile_mode: Of torch.compile; None for none.
        deterministic: Of the trainer; for the others the process is set beforehand.
    """
    torch.manual_seed(0)
    model = case.build().to(DEVICE)
    if isinstance(model[0] if isinstance(model, nn.Sequential) else None, nn.Conv2d):
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # as convolutions want it
    torch.manual_seed(1)
    inputs, targets = case.make_batch()
    optimizer = case.make_optimizer(model.parameters())
    scaler = torch.amp.GradScaler(DEVICE.type) if has_scaler else None
    if side == TRAINER:
        data = TensorDataset(inputs, targets)
        loader = ls.ShardedLoader(data, batch_size=len(data), num_shards=num_shards, shuffle=False, pin_memory=IS_CUDA)
        batch = next(loader.epoch(0))
        warnings.filterwarnings("ignore", message="The batch is that of")  # it is the same one in every step
        trainer = ls.Trainer(
            compiled(model, compile_mode),
            optimizer,
            loss=case.loss,
            num_shards=num_shards,
            deterministic=deterministic,
            max_grad_norm=max_grad_norm,
            scaler=scaler,
        )
        return partial(trainer.step, batch)
    wrapped: Any = model
    if side == TORCH:
        wrapped = TorchDDP(model, device_ids=[DEVICE] if IS_CUDA else None, gradient_as_bucket_view=True)
    elif side == DDP:
        wrapped = ls.DistributedDataParallel(model, device_ids=[DEVICE] if IS_CUDA else None)
    micro_batches = [
        pinned((one.contiguous(), other.contiguous()))
        for one, other in zip(inputs.tensor_split(num_shards), targets.tensor_split(num_shards), strict=True)
    ]
    return partial(
        loop_step, compiled(wrapped, compile_mode), wrapped, optimizer, case, micro_batches, max_grad_norm, scaler
    )


def compiled(model: nn.Module, mode: str | None) -> Any:
    if mode is None:
        return model
    if not IS_CUDA:  # in a dry run, without building C++
        return torch.compile(model, backend="aot_eager")
    return torch.compile(model, mode=mode)


def loop_step(
    model: nn.Module,
    wrapped: Any,
    optimizer: torch.optim.Optimizer,
    case: Case,
    micro_batches: list[Any],
    max_grad_norm: float | None,
    scaler: torch.amp.GradScaler | None,
) -> None:
    """Do a step as people write it."""
    optimizer.zero_grad(set_to_none=True)
    for number, micro_batch in enumerate(micro_batches, start=1):
        is_last = number == len(micro_batches)
        with contextlib.nullcontext() if is_last or not hasattr(wrapped, "no_sync") else wrapped.no_sync():
            batch = [column.to(DEVICE, non_blocking=True) for column in micro_batch]
            loss = case.loss(model, batch) / len(micro_batches)
            (loss if scaler is None else scaler.scale(loss)).backward()
    if max_grad_norm is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(list(model.parameters()), max_grad_norm)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
