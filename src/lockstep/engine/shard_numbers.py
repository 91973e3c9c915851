"""Hashes of what single shards compute, by which a step is checked that no bit depends on who runs which shard."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.data import ShardedBatch, Slice
from lockstep.engine.buffers import ShardZeroBuffers
from lockstep.engine.run_state import RunState
from lockstep.engine.shard_runs import ShardRuns


def number_shards(
    state: RunState, runs: ShardRuns, buffers: ShardZeroBuffers, batch: ShardedBatch, order: Sequence[int]
) -> dict[int, dict[str, str]]:
    """Compute shards in an order, each from the buffers of the step's begin (local); gradients are left on the model.

    Returns for each shard a hash of each loss and gradient, by name. `batch` has the slices of all these shards.
    """
    slices = {part.shard: part for part in batch.slices}
    found: dict[int, dict[str, str]] = {}
    for shard in order:
        with buffers.of_step_begin():
            found[shard] = _number_shard(state, runs, batch, slices[shard])
    return found


def _number_shard(state: RunState, runs: ShardRuns, batch: ShardedBatch, part: Slice) -> dict[str, str]:
    numbers: dict[str, str] = {}
    for update in state.plan.updates(state.global_step):
        prefix = f"{update.name}: " if update.name else ""
        state.model.zero_grad(set_to_none=True)
        runs.begin(update)
        loss = runs.compute(batch, part)
        numbers[f"{prefix}the loss"] = _hash_bits(loss)
        for name, each in state.model.named_parameters():
            if each.grad is not None:
                numbers[f"{prefix}the gradient of {name}"] = _hash_bits(each.grad)
    return numbers


def _hash_bits(tensor: Tensor) -> str:
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return hashlib.sha256(dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()
