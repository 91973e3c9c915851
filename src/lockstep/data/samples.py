"""What a loader asks of its data: which samples each shard has in each step of an epoch.

There are two kinds: data sets with an index (`ListedSamples`) and streams (`streamed.py`).
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch.utils.data import Dataset

from lockstep.data.batch import Cursor, ShardAssignment
from lockstep.data.contents import content_number
from lockstep.data.keyed import DrawKeys, SliceKeys
from lockstep.data.order import Sampling, read_lengths, read_weights, step_slices


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    batch_size: int
    num_shards: int
    drop_last: bool
    seed: int
    shuffle: bool

    def count_steps(self, num_samples: int, *, keeps_last: bool = False) -> int:
        whole, rest = divmod(num_samples, self.batch_size)
        return whole + (rest > 0 and (keeps_last or not self.drop_last))


class EpochSamples(ABC):
    """The samples of one epoch; its steps are asked for in order, some ahead of the one that is trained on."""

    @abstractmethod
    def cut(self, step: int) -> Sequence[SliceKeys]:
        """Return the slices of a step, of the first shards where it has too few samples for all; none after the end."""

    @abstractmethod
    def num_steps(self, step: int) -> int | None:
        """Return the steps of the epoch; None if they are not known in `step`, which is not the last one then."""

    @abstractmethod
    def number(self, slices: Sequence[SliceKeys]) -> int:
        """Return a number for what was read for a step: the same on workers that have read the same."""

    @abstractmethod
    def drop(self, step: int) -> None:
        """Drop what is kept for a step that is over."""

    @abstractmethod
    def bookmark(self, slices: Sequence[SliceKeys]) -> Mapping[str, Any]:
        """Return a state from which an epoch begins with a step without reading what comes before; empty for none."""


class Samples(ABC):
    @property
    @abstractmethod
    def num_samples(self) -> int | None:
        """How many samples an epoch has; None if that is not known before it ends."""

    @abstractmethod
    def __str__(self) -> str:
        """Return the samples and their order in words: equal for equal ones."""

    @abstractmethod
    def content(self) -> int:
        """Return a number for the data that is the same on every worker; 0 if it is known only from whole slices."""

    @abstractmethod
    def epoch(
        self, epoch: int, first_step: int = 0, *, each_once: bool = False, bookmark: Mapping[str, Any]
    ) -> EpochSamples:
        """Begin with an epoch; with `each_once` each sample comes once, those of a smaller last batch too.

        `bookmark` is what `EpochSamples.bookmark` has returned for some step, or empty.
        """

    @abstractmethod
    def alone(self) -> "Samples":
        """Return these samples for another loader, whose epochs have nothing to do with those of this one."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Check that there are as many samples as at first."""


@final
class ListedSamples(Samples):
    """The samples of a data set with an index, in an order that is known beforehand."""

    def __init__(self, dataset: Dataset[Any], cut: Cut, weights: Any, lengths: Any) -> None:
        self._dataset = dataset
        self._cut = cut
        self._sampling = Sampling(
            num_samples=_check_listed(dataset),
            batch_size=cut.batch_size,
            seed=cut.seed,
            shuffle=cut.shuffle,
            weights=None if weights is None else read_weights(weights, dataset, shuffle=cut.shuffle),
            lengths=None if lengths is None else read_lengths(lengths, dataset, shuffle=cut.shuffle),
        )
        self._content = content_number(dataset)

    @property
    def num_samples(self) -> int:
        return self._sampling.num_samples

    def __str__(self) -> str:
        return str(self._sampling)

    def content(self) -> int:
        return self._content

    def epoch(
        self,
        epoch: int,
        first_step: int = 0,  # noqa: ARG002 - as for streams
        *,
        each_once: bool = False,
        bookmark: Mapping[str, Any],  # noqa: ARG002 - as for streams
    ) -> EpochSamples:
        order = self._sampling.order(epoch, each_once=each_once)
        return _ListedEpoch(order, epoch, self._cut, self.num_samples, keeps_last=each_once)

    def alone(self) -> Samples:
        return self

    def check_unchanged(self) -> None:
        length = _length_of(self._dataset)
        if length != self.num_samples:
            raise ValueError(
                f"The data set had {self.num_samples} samples when its ShardedLoader was made, and has {length} now. "
                "The order of the samples depends on their number: make a new loader, between two epochs, when a data "
                "set has grown or shrunk. (LS405)"
            )


@final
class _ListedEpoch(EpochSamples):
    def __init__(self, order: list[int], epoch: int, cut: Cut, num_samples: int, *, keeps_last: bool) -> None:
        self._order = order
        self._epoch = epoch
        self._cut = cut
        self._num_samples = num_samples
        self._num_steps = cut.count_steps(len(order), keeps_last=keeps_last)

    def cut(self, step: int) -> Sequence[SliceKeys]:
        cut = self._cut
        order = self._order if step < self._num_steps else []
        return [
            DrawKeys(draws, num_samples=self._num_samples, seed=cut.seed, epoch=self._epoch)
            for draws in step_slices(order, step, batch_size=cut.batch_size, num_shards=cut.num_shards)
            if draws
        ]

    def num_steps(self, step: int) -> int:  # noqa: ARG002 - as for streams
        return self._num_steps

    def number(self, slices: Sequence[SliceKeys]) -> int:  # noqa: ARG002 - as for streams
        """Return 0: the order is known, and so are the data."""
        return 0

    def drop(self, step: int) -> None:
        """Do nothing: the order is kept as a whole."""

    def bookmark(self, slices: Sequence[SliceKeys]) -> Mapping[str, Any]:  # noqa: ARG002 - as for streams
        """Return nothing: an epoch begins anywhere."""
        return {}


def _length_of(dataset: Dataset[Any]) -> int:
    return int(type(dataset).__len__(dataset))  # type: ignore[attr-defined]


def _check_listed(dataset: Dataset[Any]) -> int:
    """Return the length of a data set with an index; raise an error if it has none, or no sample."""
    length = getattr(type(dataset), "__len__", None)
    if length is None or getattr(dataset, "__getitem__", None) is None:
        raise TypeError(
            f"A ShardedLoader needs a data set with __len__ and __getitem__, or a stream (ls.Stream, an "
            f"IterableDataset), but {type(dataset).__name__} is not one. (LS402)"
        )
    num_samples = _length_of(dataset)
    if num_samples < 1:
        raise ValueError("The data set is empty; expected at least one sample. (LS402)")
    return num_samples


def keys_to_load(first: Cursor, samples: EpochSamples, assignment: ShardAssignment) -> Iterator[SliceKeys]:
    """Yield the keys of each slice of this worker, to the end of the epoch.

    Not a method of the loader: the DataLoader refers to this. In a reference cycle torch cannot signal the loading
    processes to exit, and waits 5 s for them.
    """
    rank = assignment.world.rank
    for step in itertools.count(first.step):
        slices = samples.cut(step)
        if not slices:
            return
        for _, keys in own_slices(slices, assignment.ranges(Cursor(first.epoch, step))[rank]):
            keys.read()
            yield keys


def own_slices(slices: Sequence[SliceKeys], shards: range) -> list[tuple[int, SliceKeys]]:
    """Return those of a worker's `shards` that have samples."""
    return list(zip(shards, slices[shards.start : shards.stop], strict=False))
