"""The order of an epoch and the cut of a step: pure functions of (seed, epoch, step)."""

from collections.abc import Sequence

import torch

from lockstep.shards import derive_seed, split_evenly


def epoch_order(num_samples: int, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """Return the indices of a data set in the order of one epoch, each exactly once."""
    if not shuffle:
        return list(range(num_samples))
    generator = torch.Generator()
    generator.manual_seed(derive_seed("order", seed, epoch))
    return torch.randperm(num_samples, generator=generator).tolist()


def step_slices(order: Sequence[int], step: int, *, batch_size: int, num_shards: int) -> list[Sequence[int]]:
    """Cut the global batch of `step` into one slice per shard; the last batch's slices are shorter, or empty."""
    batch = order[step * batch_size : (step + 1) * batch_size]
    return [batch[start:stop] for start, stop in split_evenly(len(batch), num_shards)]
