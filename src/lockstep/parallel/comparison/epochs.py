"""Whether samplers are told their epochs: torch's, ours, those of the user's own classes.

A sampler that nobody tells holds the same when the next epoch begins. After a resume `set_epoch` is left out for the
first epoch, as where it is called at the end of each: then the samples come in the order of epoch 0, some of which the
interrupted epoch had already. An epoch is an iterator of a DataLoader, and one whose batches are trained on.
"""

import weakref
import zlib
from collections.abc import Iterator
from types import FunctionType
from typing import Any, Final, final

import torch

from lockstep.held_objects import names_in_code
from lockstep.parallel.comparison.check import Check, Reduced, warn_once
from lockstep.parallel.comparison.data import LoaderPositions
from lockstep.parallel.comparison.optimizers import OptimizerSteps
from lockstep.torch_private.loaders import LoaderIterator, samplers_of

_FEWEST_STEPS: Final = 2
"""An iterator with fewer reductions may only have inspected a batch."""
_OURS: Final = ("num_epochs_set", "is_order_told")
"""Attributes of lockstep.DistributedSampler that its order does not depend on."""
_FIRST_LATER: Final = 3
"""Second numbers from here on tell of a resume; a loop from 1 on that ends with `set_epoch(epoch + 1)` has 2."""


@final
class ToldEpochs(Check):
    def __init__(self, positions: LoaderPositions, optimizers: OptimizerSteps) -> None:
        self._positions = positions
        self._optimizers = optimizers
        self._iterator: weakref.ref[LoaderIterator] | None = None
        self._sampler: weakref.ref[Any] | None = None
        self._num_steps = 0
        self._before: tuple[object, ...] = ()
        self._numbers: list[int] = []
        self._num_told = self._num_alike = 0
        self._has_warned = False

    def reset(self, reduction: Reduced | None) -> None:
        iterators = self._positions.alive() if reduction is not None and not self._has_warned else []
        if not iterators or not self.is_compared:
            return
        if self._iterator is not None and self._iterator() is iterators[0]:
            self._num_steps += 1
            return
        before, self._iterator = self._num_steps, weakref.ref(iterators[0])
        self._num_steps = 1
        sampler: Any = next(
            (each for each in samplers_of(iterators[0]) if callable(getattr(each, "set_epoch", None))), None
        )
        if sampler is None or not (getattr(sampler, "shuffle", True) and getattr(sampler, "pad", True)):
            return
        if self._sampler is None or self._sampler() is not sampler:
            self._sampler, self._before, self._numbers = weakref.ref(sampler), (), []
        self._note_number(sampler)
        held = tuple(_state_of(sampler))
        self._num_alike = self._num_alike + 1 if self._before == held else 0
        # Told the same number once: another phase of the training, whose epochs are counted anew.
        num_told, self._num_told = self._num_told, getattr(sampler, "num_epochs_set", 0)
        is_forgotten = self._num_alike > (self._num_told > num_told)
        if is_forgotten and before >= _FEWEST_STEPS and _depends_on_epoch(sampler):
            self._has_warned = True
            if not getattr(sampler, "is_order_told", False):  # by lockstep.DistributedSampler itself
                sampler.is_order_told = True
                warn_once(
                    f"A second epoch of a {type(sampler).__name__} has begun, and its epoch is still "
                    f"{getattr(sampler, 'epoch', 'the same')}: it shuffles by seed and epoch, so every epoch has the "
                    "same order. Call set_epoch(epoch) of this sampler before each epoch, with another number each "
                    "time. (LS316)",
                    f"A second epoch of a {type(sampler).__name__}",
                )
        self._before = held

    def _note_number(self, sampler: Any) -> None:
        """Look for a first epoch of number 0, and later ones (local)."""
        epoch = getattr(sampler, "epoch", None)
        if not isinstance(epoch, int):
            return
        self._numbers.append(epoch)
        if len(self._numbers) < 2 or self._numbers[0] != 0:  # noqa: PLR2004 - the first and a later one
            return
        second, was_first_told = self._numbers[1], getattr(sampler, "num_epochs_set", 2) > 1
        goes_on = len(self._numbers) == 3 and self._numbers[2] == second + 1  # noqa: PLR2004 - no numbers of another kind
        if second >= _FIRST_LATER - bool(self._optimizers.had_state) and (not was_first_told or goes_on):
            self._has_warned = True
            warn_once(
                f"The first epoch of this process had the order of epoch 0, and the next one is epoch {second}: after "
                "a resume set_epoch was not called before the first batch, so some samples are seen twice in an epoch "
                "and others not at all. Call sampler.set_epoch(epoch) at the beginning of each epoch, of the resumed "
                "one too. (LS316)",
                "The first epoch of this process",
            )


def _depends_on_epoch(sampler: Any) -> bool:
    """Return whether what `set_epoch` writes is named elsewhere in a sampler's class."""
    told, used = set[str](), set[str]()
    for member in (each for kind in type(sampler).__mro__[:-1] for each in vars(kind).values()):
        if isinstance(member, FunctionType) and member.__name__ != "__init__":
            (told if member.__name__ == "set_epoch" else used).update(names_in_code(member.__code__))
    return bool(told & used - {"super", *_OURS})


def _state_of(sampler: Any) -> Iterator[object]:
    """Yield what may change a sampler's order: numbers and texts, and states of generators, that it holds."""
    for name, value in vars(sampler).items():
        if isinstance(value, int | float | str) and name not in _OURS:
            yield name, value
        elif isinstance(value, torch.Generator):
            yield name, zlib.crc32(value.get_state().numpy().tobytes())
        elif hasattr(value, "bit_generator") or hasattr(value, "getstate"):
            yield name, repr(value.getstate() if hasattr(value, "getstate") else value.bit_generator.state)
        elif callable(getattr(value, "set_epoch", None)):
            yield from _state_of(value)
