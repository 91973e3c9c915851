"""Load each slice in a random state that depends on its samples only.

Augmentation draws from torch's, NumPy's and Python's global generators. If they were not reseeded, a sample would
depend on which process loads it and on what that process loaded before. So every sample is loaded in a state derived
from (seed, epoch, sample), a slice is collated in one derived from its first sample, and the states of the calling
process are restored afterwards.

Generators that user code holds, such as `self.rng = random.Random(0)`, are treated in the same way: those of a data
set for each sample, those of a model and a loss function for each shard. `lockstep.held_objects` says where they are
searched for. What was searched is looked at again each time: a generator that was made since, by the code that draws
from it, has drawn from a seed of its own.

[Note: paths of generators] Each is seeded by its path, so that two draw other numbers. Another path means other
numbers, and other bits of a trained model: names and their order stay as they are.

Seeding takes longer than indexing a tensor. Nothing is seeded for data that draw nothing, see `read_columns`, nor for
records of a stream that are samples already.
"""

import inspect
import random
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from lockstep.errors import LockstepError
from lockstep.held_objects import Walk
from lockstep.processes.reproducibility import keep_host_states, seed_host_generators, state_of_generator
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.shards import derive_seed

_NUM_SHOWN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnGenerator:
    """A random generator that is held: torch's, NumPy's (of either kind) or Python's."""

    path: str
    generator: Any

    def seed(self, seed: int) -> None:
        own = derive_seed(f"generator {self.path}", seed)
        if isinstance(self.generator, torch.Generator):
            self.generator.manual_seed(own)
        elif isinstance(self.generator, random.Random):
            self.generator.seed(own)
        elif hasattr(self.generator, "bit_generator"):
            bits = self.generator.bit_generator
            bits.state = type(bits)(own).state
        else:
            self.generator.seed(own % 2**32)

    def keep_state(self) -> Callable[[], object]:
        if isinstance(self.generator, random.Random):
            return partial(self.generator.setstate, self.generator.getstate())
        if hasattr(self.generator, "bit_generator"):
            bits = self.generator.bit_generator
            return partial(setattr, bits, "state", bits.state)
        if isinstance(self.generator, torch.Generator):
            return partial(self.generator.set_state, state_of_generator(self.generator))
        return partial(self.generator.set_state, self.generator.get_state())


@final
class OwnGenerators:
    """The generators that are held by some roots, each with the path that theirs begin with."""

    def __init__(self, roots: Iterable[tuple[str, Any]]) -> None:
        self._roots = list(roots)
        self._found: list[OwnGenerator] = []
        self._walk: Walk | None = None
        self._restore_calls: list[Callable[[], object]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnGenerators, (self._roots,)

    def find(self) -> Sequence[OwnGenerator]:
        """Return them, the nearest ones first, as far as they are there now (local)."""
        if self._walk is None:
            self._walk = Walk(self._roots, stops_at=generator_kinds())
        elif not self._walk.has_new_objects():
            return self._found
        kinds, found = generator_kinds(), dict[int, OwnGenerator]()
        for held in self._walk:
            if issubclass(type(held.value), kinds) and held.value is not torch.default_generator:
                found.setdefault(id(held.value), OwnGenerator(path=held.path, generator=held.value))
        self._found = [each for each in found.values() if _can_be_seeded(each)]
        return self._found

    def has_made(self) -> bool:
        """Whether there are generators that were in no place before: they have not been seeded (local)."""
        before = self._found
        found = self.find()
        return found is not before and not {each.path for each in found} <= {each.path for each in before}

    def save(self) -> None:
        self._restore_calls = [each.keep_state() for each in self.find()]

    def restore(self) -> None:
        for restore in self._restore_calls:
            restore()
        self._restore_calls = []

    def seed_as_global(self) -> None:
        """Seed them by the seed that torch's global generator was given last (local)."""
        for each in self.find():
            each.seed(torch.initial_seed())


def generators_of_training(model: nn.Module, function: Any) -> OwnGenerators:
    """Return those that a function, or several, and the modules of a model hold. [Note: paths of generators]."""
    roots: list[tuple[str, Any]] = [("", function)]
    for path, module in model.named_modules():
        # The forward first: what it mentions is not to be found as a part of the module's class.
        # As it stands in the class: that of scripted modules answers only to objects.
        roots += [(f"{path}.1", inspect.getattr_static(type(module), "forward")), (f"{path}.0", module)]
    return OwnGenerators(roots)


def generator_kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    of_numpy = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return (torch.Generator, random.Random, *of_numpy)


def _can_be_seeded(own: OwnGenerator) -> bool:
    try:
        own.keep_state()
    except NotImplementedError:  # of the operating system's random numbers
        warnings.warn(
            f"The random generator {own.path.lstrip('.')}, a {type(own.generator).__name__}, has no state that can be "
            "set, so what it draws is something else in each run, and on each number of workers. If the weights depend "
            "on it, draw from the global generators of Python, NumPy or torch, which are seeded. (LS518)",
            stacklevel=stacklevel_of_user(),
        )
        return False
    return True


class SliceKeys(ABC):
    """Which samples a slice has, and their random states."""

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self) -> object:
        """Read now what can be read in this thread alone: another one sends the keys to a loading process."""

    @abstractmethod
    def first(self, number: int) -> "SliceKeys":
        """Return the keys of the first samples, so many."""

    @abstractmethod
    def later(self, epochs: int) -> "SliceKeys":
        """Return the keys of the same samples in random states of their own, for so many epochs later."""

    @abstractmethod
    def items(self) -> Sequence[Any]:
        """Return what the data set is indexed with for each sample: numbers; of a stream the records, in a new list."""

    @abstractmethod
    def indices(self) -> Sequence[int]:
        """Return the numbers of the samples in the data, for messages."""

    @abstractmethod
    def seeds(self, number: int) -> list[int]:
        """Return the seeds of the random states of the first samples, so many."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DrawKeys(SliceKeys):
    """Those of a slice of a data set with an index."""

    draws: Sequence[int] = field(kw_only=False)
    """Indices of the samples, plus `num_samples` for each time that a sample was drawn before in the epoch."""
    num_samples: int
    seed: int
    epoch: int

    def __len__(self) -> int:
        return len(self.draws)

    def read(self) -> None:
        """Do nothing: the data set is asked where the slice is loaded."""

    def first(self, number: int) -> "DrawKeys":
        return replace(self, draws=self.draws[:number])

    def later(self, epochs: int) -> "DrawKeys":
        return replace(self, epoch=self.epoch + epochs)

    def items(self) -> Sequence[int]:
        if max(self.draws, default=0) < self.num_samples:
            return self.draws
        return [draw % self.num_samples for draw in self.draws]

    def indices(self) -> Sequence[int]:
        return self.items()

    def seeds(self, number: int) -> list[int]:
        return list(map(self._seed_of, self.draws[:number]))

    def _seed_of(self, draw: int) -> int:
        times, index = divmod(draw, self.num_samples)
        place = (self.seed, self.epoch, index, times) if times else (self.seed, self.epoch, index)
        return derive_seed("sample", *place)


@dataclass(frozen=True, slots=True)
class FailedSlice:
    """The error of a slice that could not be loaded, in place of the slice.

    A `DataLoader` would wrap an exception of a loading process into one whose message is a traceback; this way ours
    reaches the user as it was raised.
    """

    error: LockstepError


@final
class KeyedDataset(Dataset[Any]):
    """A data set of whole slices; with `are_samples` the items of keys are samples, and need no random state."""

    def __init__(
        self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any], *, are_samples: bool = False
    ) -> None:
        self._dataset = dataset
        self._collate = collate
        self._are_samples = are_samples
        self._own = OwnGenerators([("", (dataset, collate))])

    def __getitems__(self, keys: SliceKeys) -> Any:
        """Make one collated slice; the name is that of DataLoader's protocol for whole batches."""
        if self._collate is default_collate:
            if self._are_samples:
                return self._collate_samples(keys.items(), keys)
            columns = read_columns(self._dataset, keys.items())
            if columns is not None:
                return columns
        return self._make_keyed(keys)

    def _make_keyed(self, keys: SliceKeys) -> Any:
        own = self._own.find()
        with _generators_restored(own):
            try:
                samples = keys.items() if self._are_samples else self._make_all(keys, own)
                if not self._are_samples and self._own.has_made():  # by the first sample, as a rule
                    own = self._own.find()
                    samples = self._make_all(keys, own)
            except LockstepError as error:
                return FailedSlice(error)
            _seed(derive_seed("collate", *keys.seeds(1)), own)
            return self._collate_samples(samples, keys)

    def _make_all(self, keys: SliceKeys, own: Sequence[OwnGenerator]) -> list[Any]:
        items = keys.items()
        made = zip(keys.seeds(len(items)), items, keys.indices(), strict=True)
        return [self._make(seed, item, index, own) for seed, item, index in made]

    def _collate_samples(self, samples: Any, keys: SliceKeys) -> Any:
        try:
            return self._collate(samples)
        except Exception as error:
            error.add_note(f"These samples of the data set do not make a batch: {list_samples(keys.indices())}.")
            raise

    def _make(self, seed: int, item: Any, index: int, own: Sequence[OwnGenerator]) -> Any:
        _seed(seed, own)
        try:
            return self._dataset[item]
        except LockstepError:
            raise
        except Exception as error:
            error.add_note(f"This was sample {index} of the data set.")
            raise


def list_samples(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices[:_NUM_SHOWN])) + (", ..." if len(indices) > _NUM_SHOWN else "")


def _seed(seed: int, own: Sequence[OwnGenerator]) -> None:
    for each in own:
        each.seed(seed)
    seed_host_generators(seed)


def _keep_states(own: Sequence[OwnGenerator]) -> list[Callable[[], object]]:
    return [*keep_host_states(), *(each.keep_state() for each in own)]


@contextmanager
def _generators_restored(own: Sequence[OwnGenerator]) -> Iterator[None]:
    states = _keep_states(own)
    try:
        yield
    finally:
        for restore in states:
            restore()


@final
class RandomState:
    """States of the global generators, and of others, for one piece of work that is interrupted."""

    def __init__(self, seed: int, own: OwnGenerators) -> None:
        self._seed = seed
        self._own = own
        self._states: list[Callable[[], object]] | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Set the generators to the states in which they were left; put back at the end what they were before."""
        own = self._own.find()
        with _generators_restored(own):
            if self._states is None:
                _seed(self._seed, own)
            else:
                for restore in self._states:
                    restore()
            yield
            self._states = _keep_states(own)


def read_columns(dataset: Dataset[object], indices: Sequence[int]) -> list[Tensor] | None:
    """Return what `default_collate` makes of these samples, or None where they must be asked for one by one.

    torch's `TensorDataset`, itself or in a `Subset`, draws nothing, nor does `default_collate`. So seeding changes
    nothing, and a slice is what indexing each tensor with all indices gives, bit for bit. Anything else, subclasses
    included, is asked sample by sample.
    """
    while type(dataset) is Subset:
        if not _are_within(indices, len(dataset.indices)):
            return None
        chosen = [dataset.indices[index] for index in indices]
        if not all(type(index) is int for index in chosen):
            return None
        dataset, indices = dataset.dataset, chosen
    if type(dataset) is not TensorDataset or not all(map(_is_plain, dataset.tensors)):
        return None
    if not _are_within(indices, min(map(len, dataset.tensors))):
        return None  # the data set's own error, or what a negative index means to it
    rows = torch.tensor(indices, dtype=torch.int64, device="cpu")
    return [tensor.index_select(0, rows) for tensor in dataset.tensors]


def _are_within(indices: Sequence[int], length: int) -> bool:
    return bool(indices) and min(indices) >= 0 and max(indices) < length


def _is_plain(tensor: Tensor) -> bool:
    """Whether indexing all rows at once gives what stacking single rows gives: the same strides and no graph."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.dim() > 0
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
