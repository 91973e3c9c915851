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
    """The samples of a data set with an index.

    Args:
        dataset: The data set.
        sampling: Their order.
        num_shards: Slices of a batch.
        drop_last: Whether a last batch that is smaller than the others is left out.
    """

    def __init__(self, dataset: Dataset[Any], sampling: Sampling, num_shards: int, *, drop_last: bool) -> None:
        self._length = partial(length_of, dataset)
        self._content = content_number(dataset)
        self._sampling = sampling
        self._num_shards = num_shards
        self._drop_last = drop_last

    @property
    def num_samples(self) -> int:
        """How many samples an epoch has."""
        return self._sampling.num_samples

    def __str__(self) -> str:
        return str(self._sampling)

    def content(self) -> int:
        """Return a number for the data; 0 if it is known only from whole slices."""
        return self._content

    def epoch(self, begin: EpochBegin) -> EpochSamples:
        """Begin with an epoch."""
        return ListedEpoch(
            self._sampling,
            begin.epoch,
            self._num_shards,
            each_once=begin.each_once,
            drops_last=self._drop_last and not begin.keeps_last,
        )

    def alone(self) -> Samples:
        """Return these samples for another loader."""
        return self

    def check_unchanged(self) -> None:
        """Check that the data set has as many samples as at first.

        Raises:
            ValueError: It has not.
        """
        length = self._length()
        if length != self.num_samples:
            raise ValueError(
                f"The data set had {self.num_samples} samples when its ShardedLoader was made, and has {length} now. "
                "The order of the samples depends on their number: make a new loader, between two epochs, when a data "
                "set has grown or shrunk. (LS405)"
            )


@final
class ListedEpoch(EpochSamples):
    """An epoch of a data set with an index.

    Args:
        sampling: The order.
        epoch: Its number.
        num_shards: Slices of a batch.
        each_once: Whether each sample comes once, whatever its weight.
        drops_last: Whether a smaller last batch is left out.
    """

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
        """Return the draws of each shard in a step."""
        order = self._order if step < self._num_steps else []
        return list(step_slices(order, step, batch_size=self._sampling.batch_size, num_shards=self._num_shards))

    def num_steps(self, step: int) -> int:  # noqa: ARG002 - as for streams
        """Return the steps of the epoch."""
        return self._num_steps

    def number(self, step: int) -> int:  # noqa: ARG002 - as for streams
        """Return 0: the order is known, and so are the data."""
        return 0

    def keys(self, draws: Draws) -> SliceKeys:
        """Return what a loading process needs to load a slice."""
        sampling = self._sampling
        return DrawKeys(draws, num_samples=sampling.num_samples, seed=sampling.seed, epoch=self._epoch)

    def indices(self, draws: Draws) -> Sequence[int]:
        """Return the indices of the samples."""
        return self._sampling.samples(draws)

    def forget(self, step: int) -> None:
        """Do nothing: the order is kept as a whole."""

    def bookmark(self, step: int) -> Mapping[str, Any]:  # noqa: ARG002 - as for streams
        """Return nothing: an epoch begins anywhere."""
        return {}


def length_of(dataset: Dataset[Any]) -> int:
    """Return the present length of a data set."""
    return int(type(dataset).__len__(dataset))  # type: ignore[attr-defined]


def check_listed(dataset: Dataset[Any]) -> int:
    """Return the length of a data set with an index.

    Raises:
        TypeError: It is not one.
        ValueError: It is empty.
    """
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
