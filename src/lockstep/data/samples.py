"""What a loader asks of its data: which samples each shard has in each step of an epoch.

There are two kinds: data sets with an index (`ListedSamples`) and streams (`streamed.py`).
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

from torch.utils.data import Dataset

from lockstep.data.batch import Cursor, ShardAssignment
from lockstep.data.contents import content_number
from lockstep.data.keyed import DrawKeys, SliceKeys
from lockstep.data.order import Sampling, step_slices

Draws = Sequence[Any]
"""The samples of a slice, before they are loaded."""
Keys = Callable[[], Iterator[SliceKeys]]
"""Makes the keys of each slice to load, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochBegin:
    epoch: int
    first_step: int = 0
    keeps_last: bool = False
    """Whether a last batch that is smaller than the others belongs to it in any case."""
    each_once: bool = False
    """Whether each sample comes once, whatever its weight."""
    bookmark: Mapping[str, Any] = field(default_factory=dict)
    """What `EpochSamples.bookmark` has returned for some step, or empty."""


class EpochSamples(ABC):
    """The samples of one epoch; its steps are asked for in order, some ahead of the one that is trained on."""

    @abstractmethod
    def cut(self, step: int) -> Sequence[Draws]:
        """Return the draws of each shard in a step; there are none in any shard when the epoch is over."""

    @abstractmethod
    def num_steps(self, step: int) -> int | None:
        """Return the steps of the epoch; None if they are not known in `step`, which is not the last one then."""

    @abstractmethod
    def number(self, slices: Sequence[Draws]) -> int:
        """Return a number for what was read for a step: the same on workers that have read the same."""

    @abstractmethod
    def keys(self, draws: Draws) -> SliceKeys:
        """Return what a loading process needs to load a slice."""

    @abstractmethod
    def indices(self, draws: Draws) -> Sequence[int]:
        """Return where the samples are in the data, for messages."""

    @abstractmethod
    def forget(self, step: int) -> None:
        """Drop what is kept for a step that is over."""

    @abstractmethod
    def bookmark(self, slices: Sequence[Draws]) -> Mapping[str, Any]:
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
    def epoch(self, begin: EpochBegin) -> EpochSamples:
        """Begin with an epoch."""

    @abstractmethod
    def alone(self) -> "Samples":
        """Return these samples for another loader, whose epochs have nothing to do with those of this one."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Check that there are as many samples as at first."""


@final
class ListedSamples(Samples):
    """The samples of a data set with an index, in an order that is known beforehand."""

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

    def cut(self, step: int) -> Sequence[Draws]:
        order = self._order if step < self._num_steps else []
        return step_slices(order, step, batch_size=self._sampling.batch_size, num_shards=self._num_shards)

    def num_steps(self, step: int) -> int:  # noqa: ARG002 - as for streams
        return self._num_steps

    def number(self, slices: Sequence[Draws]) -> int:  # noqa: ARG002 - as for streams
        """Return 0: the order is known, and so are the data."""
        return 0

    def keys(self, draws: Draws) -> SliceKeys:
        sampling = self._sampling
        return DrawKeys(draws, num_samples=sampling.num_samples, seed=sampling.seed, epoch=self._epoch)

    def indices(self, draws: Draws) -> Sequence[int]:
        return self._sampling.samples(draws)

    def forget(self, step: int) -> None:
        """Do nothing: the order is kept as a whole."""

    def bookmark(self, slices: Sequence[Draws]) -> Mapping[str, Any]:  # noqa: ARG002 - as for streams
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


@final
class SlicePlan:
    """What is to be loaded; generated lazily, because an epoch may have millions of samples.

    It begins again with what was asked for and has not been loaded: loading processes may be started anew.
    """

    def __init__(self) -> None:
        self._rest: Iterator[SliceKeys] = iter(())
        self._asked: deque[SliceKeys] = deque()

    def begin(self, keys: Iterator[SliceKeys]) -> None:
        self._rest, self._asked = keys, deque()

    def __iter__(self) -> Iterator[SliceKeys]:
        yield from list(self._asked)
        for keys in self._rest:
            self._asked.append(keys)
            yield keys

    def note_loaded(self) -> None:
        """Take note that the first of what was asked for has been loaded."""
        self._asked.popleft()


def keys_of_slices(first: Cursor, samples: EpochSamples, assignment: ShardAssignment) -> Iterator[SliceKeys]:
    """Yield the keys of each slice of this worker, to the end of the epoch.

    Not a method of the loader: the DataLoader refers to this. In a reference cycle torch cannot signal the loading
    processes to exit, and waits 5 s for them.
    """
    for step in itertools.count(first.step):
        slices = samples.cut(step)
        if not any(slices):
            return
        for _, draws in own_slices(slices, assignment.ranges(Cursor(first.epoch, step))[assignment.world.rank]):
            yield samples.keys(draws)


def keys_after(first: Sequence[SliceKeys], keys: Keys) -> Iterator[SliceKeys]:
    yield from first
    yield from keys()


def own_slices(slices: Sequence[Draws], shards: range) -> list[tuple[int, Draws]]:
    """Return those of a worker's `shards` that have samples, with their draws."""
    return [(shard, slices[shard]) for shard in shards if len(slices[shard]) > 0]
