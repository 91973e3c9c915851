"""Mean and variance of a batch that lies on several ranks, by one all-gather.

Each rank sends mean, summed squared deviation and count of its own part, and not sums of x and of x squared: where the
mean is large beside the deviation, the difference of those sums is nothing but rounding. Every rank then combines the
same rows in the same way, so that running statistics stay equal on all of them, bit for bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm import World
from lockstep.parallel.batch_norm_kernels import local_moments

_BEGINNING = "This was the"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStatistics:
    """What the parts of all ranks are together; the same on every rank."""

    mean: Tensor
    """Mean, per channel; float32, or float64 for such inputs."""
    var: Tensor
    """Mean squared deviation, per channel: divided by the count, not by one less."""
    count: Tensor
    """How many values each channel has; a scalar of the mean's dtype and device."""
    records: Tensor
    """One number per rank: 1 where autograd records the forward, else 0."""


@contextmanager
def naming_the_layer(called: str, phase: str, world: World) -> Iterator[None]:
    """Add to an error of a collective call whose it was: a wait that ends by timeout, or with a rank that is gone."""
    try:
        yield
    except RuntimeError as error:
        # A group that has failed raises the same error in every call: what was said of another call is no longer true.
        error.__notes__ = [note for note in getattr(error, "__notes__", []) if not note.startswith(_BEGINNING)]
        error.add_note(
            f"{_BEGINNING} {phase} of {called} on rank {world.rank}. It is collective while training: all "
            f"{world.world_size} ranks of its group must run the layer's forward, and the backward that follows, "
            "equally often and in the same order. Look for a branch or a loop that differs between ranks."
        )
        raise


@torch.no_grad()
def gather_statistics(inputs: Tensor, eps: float, world: World, *, is_recorded: bool, called: str) -> BatchStatistics:
    """Return the statistics of every rank's `inputs`, in kernel layout and maybe empty, together (collective)."""
    count = inputs.numel() // inputs.size(1)
    mean, deviation = local_moments(inputs, eps)
    row = torch.cat([mean, deviation, mean.new_full((1,), count), mean.new_full((1,), is_recorded)])
    # A list of rows: the call for one tensor has one name up to torch 2.12 and another from 2.13 on.
    rows = row.new_empty(world.world_size, row.numel())
    with naming_the_layer(called, "forward", world):
        dist.all_gather(list(rows.unbind()), row, group=world.group)
    statistics = combine(rows)
    # Where there is at most one value on all ranks there is at most one here. So whoever has more need not look at the
    # sum, for which it would have to wait for its GPU.
    if count <= 1 and (total := int(statistics.count)) <= 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got {total} on all {world.world_size} ranks "
            f"together (input size {list(inputs.shape)} on rank {world.rank}). Feed larger batches, drop the last "
            "incomplete one, or switch the layer to eval(). (LS330)"
        )
    return statistics


def combine(rows: Tensor) -> BatchStatistics:
    """Combine the parts of all ranks (pure); a row is mean and deviation per channel, count, whether it is recorded."""
    num_channels = rows.size(1) // 2 - 1
    means, deviations, counts, records = rows.split([num_channels, num_channels, 1, 1], dim=1)
    count = counts.sum()
    divisor = count.clamp(min=1)
    weights = counts / divisor
    rough = (weights * means).sum(0)
    # The rounding of the first sum is relative to the mean; the second one takes it away.
    mean = rough + (weights * (means - rough)).sum(0)
    var = (deviations / divisor + weights * (means - mean).square()).sum(0)
    return BatchStatistics(mean=mean, var=var, count=count, records=records.squeeze(1))
