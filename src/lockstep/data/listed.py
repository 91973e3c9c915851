"""The samples of a data set with an index, in an order that is known beforehand."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, final

from torch.utils.data import Dataset

from lockstep.data.contents import content_number
from lockstep.data.keyed import DrawKeys, SliceKeys
from lockstep.data.order import step_slices
from lockstep.data.samples import Draws, EpochBegin, EpochSamples, Samples
from lockstep.data.sampling import Sampling


@final
class ListedSamples(Samples):
    """The samples of a data set with an index."""

    def __init__(self, dataset: Dataset[Any], sampling: Sampling, num_shards: int, *, drop_last: bool) -> None:
        self._length = partial(length_of, dataset)
        self._content = content_number(dataset)
        self._sampling = sampling
        self._num_shards = num_shards
        self._drop_last = drop_last

    @property
    def num_samples(self) -> int:
        return self._sampling.num_samples

    def __str__(self) -> str:
        return str(self._sampling)

    def content(self) -> int:
        return self._content

    def epoch(self, begin: EpochBegin) -> EpochSamples:
        return ListedEpoch(
            self._sampling,
            begin.epoch,
            self._num_shards,
            each_once=begin.each_once,
            drops_last=self._drop_last and not begin.keeps_last,
        )

    def alone(self) -> Samples:
        return self

    def check_unchanged(self) -> None:
        """Check that the data set has as many samples as at first."""
        length = self._length()
        if length != self.num_samples:
            raise ValueError(
                f"The data set had {self.num_samples} samples when its ShardedLoader was made, and has {length} now. "
                "The order of the samples depends on their number: make a new loader, between two epochs, when a data "
                "set has grown or shrunk. (LS405)"
            )


@final
class ListedEpoch(EpochSamples):
    def __init__(
        self, sampling: Sampling, epoch: int, num_shards: int, *, each_once: bool = False, drops_last: bool = False
    ) -> None:
        self._sampling = sampling
        self._epoch = epoch
        self._num_shards = num_shards
        self._order = sampling.order(epoch, each_once=each_once)
        batches = len(self._order) / sampling.batch_size
        self._num_steps = math.floor(batches) if drops_last else math.ceil(batches)

    def cut(self, step: int) -> list[Draws]:
        order = self._order if step < self._num_steps else []
        return list(step_slices(order, step, batch_size=self._sampling.batch_size, num_shards=self._num_shards))

    def num_steps(self, step: int) -> int:  # noqa: ARG002 - as for streams
        return self._num_steps

    def number(self, step: int) -> int:  # noqa: ARG002 - as for streams
        """Return 0: the order is known, and so are the data."""
        return 0

    def keys(self, draws: Draws) -> SliceKeys:
        sampling = self._sampling
        return DrawKeys(draws, num_samples=sampling.num_samples, seed=sampling.seed, epoch=self._epoch)

    def indices(self, draws: Draws) -> Sequence[int]:
        return self._sampling.samples(draws)

    def forget(self, step: int) -> None:
        """Do nothing: the order is kept as a whole."""

    def bookmark(self, step: int) -> Mapping[str, Any]:  # noqa: ARG002 - as for streams
        """Return nothing: an epoch begins anywhere."""
        return {}


def length_of(dataset: Dataset[Any]) -> int:
    return int(type(dataset).__len__(dataset))  # type: ignore[attr-defined]


def check_listed(dataset: Dataset[Any]) -> int:
    """Return the length of a data set with an index; raise an error if it has none, or no sample."""
    length = getattr(type(dataset), "__len__", None)
    if length is None or getattr(dataset, "__getitem__", None) is None:
        raise TypeError(
            f"A ShardedLoader needs a data set with __len__ and __getitem__, or a stream (ls.Stream, an "
            f"IterableDataset), but {type(dataset).__name__} is not one. (LS402)"
        )
    num_samples = length_of(dataset)
    if num_samples < 1:
        raise ValueError("The data set is empty; expected at least one sample. (LS402)")
    return num_samples
