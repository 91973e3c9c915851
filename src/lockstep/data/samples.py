"""What a loader asks of its data: which samples each shard has in each step of an epoch.

There are two kinds: data sets with an index (`lockstep.data.listed`) and streams (`lockstep.data.streamed`).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.data.keyed import SliceKeys

Draws = Sequence[Any]
"""The samples of a slice, before they are loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochBegin:
    """Which epoch is to begin, and how."""

    epoch: int
    """The epoch, counted from 0."""
    first_step: int = 0
    """The first step that will be asked for."""
    keeps_last: bool = False
    """Whether a last batch that is smaller than the others belongs to it in any case."""
    each_once: bool = False
    """Whether each sample comes once, whatever its weight."""
    bookmark: Mapping[str, Any] = field(default_factory=dict)
    """What `EpochSamples.bookmark` has returned for some step, or empty."""


class EpochSamples(ABC):
    """The samples of one epoch; its steps are asked for in order, some ahead of the one that is trained on."""

    @abstractmethod
    def cut(self, step: int) -> list[Draws]:
        """Return the draws of each shard in a step; there are none in any shard when the epoch is over."""

    @abstractmethod
    def num_steps(self, step: int) -> int | None:
        """Return the steps of the epoch; None if they are not known in `step`, which is not the last one then."""

    @abstractmethod
    def number(self, step: int) -> int:
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
    def bookmark(self, step: int) -> Mapping[str, Any]:
        """Return a state from which an epoch begins with `step` without reading what comes before; empty for none."""


class Samples(ABC):
    """The samples of a loader."""

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
