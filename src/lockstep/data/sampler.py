"""`DistributedSampler`: each rank its share of a data set, in torch's order."""

import math
from collections.abc import Iterator, Sized
from typing import final

import torch
from torch.utils.data import Dataset, Sampler

from lockstep.comm import current_world


@final
class DistributedSampler(Sampler[int]):
    """Give each rank its own indices of a data set.

    Signature and order of `torch.utils.data.distributed.DistributedSampler`: a permutation seeded with
    `seed + epoch`, made a multiple of `num_replicas` long, of which rank r takes every `num_replicas`-th.

    torch makes it longer by repeating samples, which counts some of them twice: harmless in training, wrong in
    evaluation. `pad=False` gives each index to exactly one rank; ranks may then differ in length by one.

    Args:
        dataset: Anything with a length.
        num_replicas: Number of ranks; None for the world of the default group.
        rank: This rank; None for the rank in the default group.
        shuffle: Permute anew for every epoch set with `set_epoch`; else the order of the data set.
        seed: The same on every rank.
        drop_last: Leave out the tail that does not divide, instead of padding.
        pad: False to neither repeat nor leave out; excludes `drop_last`.

    Raises:
        ValueError: A rank outside the world, or `drop_last` together with `pad=False`.
    """

    def __init__(
        self,
        dataset: Dataset[object] | Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool = True,
    ) -> None:
        world = current_world()
        self.dataset = dataset
        self.num_replicas = world.world_size if num_replicas is None else num_replicas
        self.rank = world.rank if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"Invalid rank {self.rank}, rank should be in the interval [0, {self.num_replicas - 1}]")
        if drop_last and not pad:
            raise ValueError("drop_last leaves samples out and pad=False promises not to: choose one.")
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.pad = pad
        self.epoch = 0

    @property
    def total_size(self) -> int:
        """Indices of all ranks together."""
        length = len(self.dataset)  # type: ignore[arg-type]
        if not self.pad:
            return length
        rounded = length // self.num_replicas if self.drop_last else math.ceil(length / self.num_replicas)
        return rounded * self.num_replicas

    @property
    def num_samples(self) -> int:
        """Indices of this rank."""
        return len(range(self.rank, self.total_size, self.num_replicas))

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation; call before each epoch, on every rank, or every epoch has the same order."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        indices = self._order()
        if self.pad and not self.drop_last and indices:
            missing = self.total_size - len(indices)
            indices += (indices * math.ceil(missing / len(indices)))[:missing]
        return iter(indices[self.rank : self.total_size : self.num_replicas])

    def _order(self) -> list[int]:
        length = len(self.dataset)  # type: ignore[arg-type]
        if not self.shuffle:
            return list(range(length))
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        return torch.randperm(length, generator=generator).tolist()
