"""The order of an epoch and the cut of a step: pure functions of (seed, epoch, step)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.shards import derive_seed, split_evenly

_POOL_BATCHES = 50
"""Of how many batches the samples are sorted by length together: more give less padding, fewer a more random order."""


def epoch_order(num_samples: int, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """Return the indices of a data set in the order of one epoch, each exactly once."""
    if not shuffle:
        return list(range(num_samples))
    generator = torch.Generator()
    generator.manual_seed(derive_seed("order", seed, epoch))
    return torch.randperm(num_samples, generator=generator).tolist()


def weighted_order(weights: Tensor, *, seed: int, epoch: int) -> list[int]:
    """Return the draws of one epoch, as many as there are samples, with replacement in proportion to their weights.

    A draw is the index of a sample, plus the number of samples for each time that it was drawn before.
    """
    generator = torch.Generator()
    generator.manual_seed(derive_seed("draws", seed, epoch))
    num_samples = len(weights)
    # Not torch.multinomial, which takes at most 2**24 weights.
    sums = weights.cumsum(0)
    places = torch.rand(num_samples, dtype=torch.float64, generator=generator) * sums[-1]
    # A product that is rounded up to the last sum lies behind all samples.
    samples = torch.searchsorted(sums, places, right=True).clamp_(max=int(weights.nonzero()[-1]))
    ordered, origins = samples.sort(stable=True)
    times = torch.empty_like(samples)
    times[origins] = torch.arange(num_samples) - torch.searchsorted(ordered, ordered)
    return (samples + times * num_samples).tolist()


def bucketed_order(draws: Sequence[int], lengths: Tensor, *, batch_size: int, seed: int, epoch: int) -> list[int]:
    """Return the draws of an epoch in another order, in which the samples of each batch have similar lengths.

    They are taken in pools of 50 batches. Each pool is sorted by length and cut into batches, and all batches come in a
    random order. The smaller last batch, if there is one, is taken from a random place of the last pool: at the end of
    it the longest samples would be the ones that `drop_last` leaves out.
    """
    generator = torch.Generator()
    generator.manual_seed(derive_seed("buckets", seed, epoch))
    sorted_pools = []
    for pool in torch.tensor(draws).split(_POOL_BATCHES * batch_size):
        by_length = lengths[pool % len(lengths)].argsort(stable=True)
        sorted_pools.append(pool[by_length])
    pool, rest = sorted_pools[-1], len(draws) % batch_size
    start = int(torch.randint(len(pool) - rest + 1, (), generator=generator))
    sorted_pools[-1] = torch.cat([pool[:start], pool[start + rest :]])
    batches = torch.cat(sorted_pools).reshape(-1, batch_size)
    shuffled = batches[torch.randperm(len(batches), generator=generator)]
    return [*shuffled.flatten().tolist(), *pool[start : start + rest].tolist()]


def step_slices(order: Sequence[int], step: int, *, batch_size: int, num_shards: int) -> list[Sequence[int]]:
    """Cut the global batch of `step` into one slice per shard; the last batch's slices are shorter, or empty."""
    batch = order[step * batch_size : (step + 1) * batch_size]
    return [batch[start:stop] for start, stop in split_evenly(len(batch), num_shards)]
