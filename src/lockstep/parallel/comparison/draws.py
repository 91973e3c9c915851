"""What each rank draws by itself: random numbers that are the same on all, parts of the data that are not one split.

    torch.manual_seed(0)                                  # on every rank: the models begin alike
    for inputs, labels in loader:                         # of each rank's own samples
        loss = criterion(model(inputs + noise * torch.randn_like(inputs)), labels)

In the first reductions each rank looks how many numbers its generators have given; then it sends the state of one that
has given some for each sample. A few numbers in a step are no mistake: ranks that have one seed may agree by it on a
size or a choice. Loading processes have generators of their own, which begin with a number of the iterator's; whether a
data set draws from them is read in its code.

    order = torch.randperm(len(data))                     # on each rank another one
    part = Subset(data, order[rank::world_size])

Such parts overlap, and leave samples out. Each rank sends the numbers of some of its samples, chosen by a hash of them,
so that all ranks choose the same: where two ranks have more than a few of them in common, and not all, they overlap.
"""

import re
import types
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, islice
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler, Subset, SubsetRandomSampler, TensorDataset

from lockstep.held_objects import names_in_code
from lockstep.parallel.comparison.check import Check, Lines, Reduced, Scope, warn_once
from lockstep.parallel.comparison.data import LoaderPositions, SameDataWarning
from lockstep.processes.reproducibility import read_generator_states
from lockstep.reduce import RankStatus
from lockstep.reduce.status import FINGERPRINT_LIMIT
from lockstep.torch_private.loaders import (
    LoaderIterator,
    beginning_of_processes,
    loaded_from,
    loading_seed,
    samplers_of,
)

_FIRST_SENT: Final = 4
"""After so many reductions the states are sent, one with each: those before have numbers for the data themselves."""
_SOURCES: Final = {
    "torch": "torch's generator: torch.manual_seed(seed + rank)",
    "device": "the generator of the device: torch.manual_seed(seed + rank)",
    "loaders": "the DataLoader's processes, which are seeded from torch's generator: torch.manual_seed(seed + rank)",
    "numpy": "NumPy's generator: numpy.random.seed(seed + rank)",
    "python": "the generator of Python's random: random.seed(seed + rank)",
}
_DRAWING: Final = re.compile(
    r"(rand|randn|randint|normal|uniform|bernoulli|random)(_|_like)?|randrange|choice|gauss|beta|dropout"
)
_ITS_OWN: Final = frozenset({"Generator", "generator", "default_rng", "RandomState", "Random", "manual_seed", "seed"})
"""Names in code that has a generator or a seed of its own."""
_ENTRIES: Final = ("__getitem__", "__getitems__", "__iter__", "__call__", "forward")
_DEPTH: Final = 4
_MOST_PARTS: Final = 64
_NUM_WORDS: Final = 624
_FEWEST_DRAWN: Final = 16
"""So many numbers in each step are more than ranks agree on, as for the layers that a step leaves out."""

_SPREAD: Final = 2654435761
_LIMIT: Final = 1 << 32
"""Numbers of samples are multiplied by the one, modulo the other, so that the smallest are any of them."""
_FEWEST_COMMON: Final = 3
_LARGEST_SHARE: Final = 0.1
"""Parts may be made equally long by a few samples that are there twice."""
_MOST_NUMBERS: Final = 1 << 20

_State = tuple[int, int]
"""A number for what a generator holds, and its place in it."""


@final
class SameRandomNumbers(Check):
    scope = Scope.RUN

    def __init__(self, same_data: SameDataWarning, positions: LoaderPositions) -> None:
        self._same_data = same_data
        self._positions = positions
        self._module: Callable[[], nn.Module | None] = lambda: None  # weak: the module's hooks hold this
        self._states: dict[str, _State] = {}
        self._drawn: dict[str, int] = {}
        self._places: dict[str, int] = {}
        self._num_reductions = 0

    def know(self, named: Any, module: nn.Module | None) -> None:  # noqa: ARG002
        self._module = self._module if module is None else weakref.ref(module)

    def fill_in(self, status: RankStatus) -> RankStatus:
        place = self._num_reductions - _FIRST_SENT
        if place >= len(_SOURCES) or not self.is_compared:
            return status
        before, self._states = self._states, dict(read_states())
        for name in before.keys() & self._states.keys():
            number = _count(before[name], self._states[name])
            self._drawn[name] = min(number, self._drawn.get(name, number))
            self._places[name] = max(self._states[name][1], self._places.get(name, 0))
        if place < 0:
            return status
        name = list(_SOURCES)[place]
        number = self._number_of_loaders() if name == "loaders" else self._number_of(name, status.batch_size)
        return replace(
            status, inputs=number % FINGERPRINT_LIMIT, gradients=number // FINGERPRINT_LIMIT % FINGERPRINT_LIMIT
        )

    def reset(self, reduction: Reduced | None) -> None:
        if reduction is None:
            self._states = {}
            return
        self._num_reductions = reduction.number
        place, status = reduction.number - 1 - _FIRST_SENT, reduction.status
        if not 0 <= place < len(_SOURCES) or self._same_data.has_warned or not self.is_compared:
            return
        sent = set(zip(status.inputs, status.gradients, strict=True))
        if self._drawn.get(list(_SOURCES)[place], 0) == sum(status.batch_sizes):
            return  # the samples of the whole batch, of which each rank takes its part
        if len(sent) == 1 and sent != {(0, 0)} and len(status.inputs) > 1:
            source, _, seeding = list(_SOURCES.values())[place].partition(": ")
            warn_once(
                f"All ranks draw the same random numbers in each step, from {source}, and have other samples: the same "
                f"noise, masks or augmentation on all of them. Seed each rank with another number after the model is "
                f"made: {seeding}. (LS315)",
                "All ranks draw the same random numbers",
            )

    def _number_of(self, name: str, num_samples: int) -> int:
        """Return a number for the state of a generator that has given numbers for each sample; else 0 (local)."""
        module = self._module()
        drops = module is not None and any(
            "Drop" in type(each).__name__ and getattr(each, "p", 1) and each.training for each in module.modules()
        )
        fewest = max(_FEWEST_DRAWN, num_samples) * (1 if name == "torch" else 2)  # words of 32 bits
        fewest = 1 if name == "device" or (drops and name == "torch") else fewest
        # The place: a generator that is seeded anew in each step may have given a few numbers since.
        is_drawn = min(self._drawn.get(name, 0), self._places.get(name, 0)) >= fewest
        return 1 + hash(self._states[name]) if is_drawn else 0

    def _number_of_loaders(self) -> int:
        seeds = [loading_seed(each) for each in self._positions.alive() if _draws(each)]
        return 1 + hash(tuple(sorted(seeds))) if any(seeds) else 0


@final
class OverlappingParts(Check):
    scope = Scope.RUN

    def __init__(self, positions: LoaderPositions) -> None:
        self._positions = positions
        self._chosen: tuple[int, ...] = ()
        self._is_over = False

    def number(self) -> int:
        return hash(self._chosen)

    def record(self) -> tuple[int, ...]:
        return self._chosen

    def judge(self, found: Sequence[tuple[int, ...]], lines: Sequence[Lines]) -> None:  # noqa: ARG002
        """Warn if two ranks have some samples in common, and not all."""
        for (rank, here), (other, there) in combinations(enumerate(found), 2):
            last = min(max(here, default=0), max(there, default=0))  # beyond it one of them has sent no more
            mine, theirs = ({each for each in chosen if each <= last} for chosen in (here, there))
            share = len(mine & theirs) / (min(len(mine), len(theirs)) or 1)
            if mine != theirs and len(mine & theirs) >= _FEWEST_COMMON and share > _LARGEST_SHARE:
                warn_once(
                    f"Ranks {rank} and {other} train on parts of the data that overlap: about {share:.0%} of the "
                    "samples of one are the other's too, and others are left out. Each rank has drawn an order by "
                    "itself. Draw it with the same seed on every rank (torch.randperm(n, "
                    "generator=torch.Generator().manual_seed(0))), or use ls.DistributedSampler. (LS317)",
                    f"Ranks {rank} and {other} train on parts",
                )
                return

    def reset(self, reduction: Reduced | None) -> None:
        if self._chosen or self._is_over:
            self._chosen, self._is_over = (), True
        elif (iterators := self._positions.alive()) and reduction is not None and self.is_compared:
            self._chosen = next(filter(None, map(_choose_samples, iterators)), ())
            self._is_over = not self._chosen


def _choose_samples(iterator: LoaderIterator) -> tuple[int, ...]:
    """Return numbers for some samples of a part of the data that this rank has chosen; nothing of whole data."""
    samplers = samplers_of(iterator)
    dataset, numbers = loaded_from(iterator)[0], None
    if any(isinstance(each, DistributedSampler) for each in samplers):
        return ()  # which has parts of what all have
    chosen = next((each.indices for each in samplers if isinstance(each, SubsetRandomSampler)), None)
    if chosen is not None:
        numbers = torch.as_tensor(chosen)
    while isinstance(dataset, Subset):
        indices = torch.as_tensor(dataset.indices)
        numbers, dataset = indices if numbers is None else indices[numbers], dataset.dataset
    if numbers is None and isinstance(dataset, TensorDataset):
        rows = dataset.tensors[0].detach().flatten(1) if dataset.tensors[0].dim() > 1 else None
        if rows is not None and rows.is_cpu and rows.numel() < _MOST_NUMBERS:
            numbers = _hash_rows(rows)
    if numbers is None or numbers.unique().numel() < len(numbers):
        return ()
    return tuple(sorted((numbers.long() * _SPREAD % _LIMIT).tolist())[:_MOST_PARTS])


def _hash_rows(rows: Tensor) -> Tensor:
    words = rows.contiguous().view(torch.uint8).flatten(1).long()
    weights = torch.arange(1, words.shape[1] + 1) * _SPREAD % _LIMIT
    return (words * weights).sum(1) % _LIMIT


def read_states() -> Iterator[tuple[str, _State]]:
    """Yield number and place of each global generator, by name; of Mersenne twisters the place in their words."""
    states = read_generator_states()
    words = states["torch"].numpy().tobytes()
    yield "torch", (zlib.crc32(words[24:]), _NUM_WORDS - int.from_bytes(words[8:12], "little"))
    python = states["python"][1]
    yield "python", (hash(python[:-1]), python[-1])
    if states["numpy"] is not None:
        yield "numpy", (zlib.crc32(states["numpy"][1].tobytes()), int(states["numpy"][2]))
    for state in list(states["devices"].values())[:1]:
        held = state.numpy().tobytes()
        yield "device", (zlib.crc32(held[:8]), int.from_bytes(held[8:16], "little"))


def _count(before: _State, now: _State) -> int:
    """Return how many numbers a generator has given since, at least."""
    return now[1] - before[1] + (_NUM_WORDS if now[0] != before[0] else 0)


def _draws(iterator: Any) -> bool:
    """Return whether a DataLoader's processes draw from what torch has seeded, by the code of its data set."""
    if loading_seed(iterator) == 0 or _seeds_by_itself(beginning_of_processes(iterator)):
        return False
    return any(map(_draws_in, _parts(loaded_from(iterator), _DEPTH)))


def _seeds_by_itself(function: Any) -> bool:
    """Return whether a worker_init_fn seeds generators, by other numbers than torch's: that of the rank, say."""
    code = getattr(getattr(function, "func", function), "__code__", None)  # of a partial's too
    names = {*names_in_code(code), *getattr(code, "co_varnames", ())}
    is_torchs = names & {"initial_seed", "get_worker_info"} and not any("rank" in each for each in names)
    return any("seed" in each for each in names) and not is_torchs


def _parts(values: Iterable[Any], depth: int) -> Iterator[Any]:
    """Yield objects with what they hold: data sets within data sets, lists of transforms."""
    for value in islice(values, _MOST_PARTS):
        if isinstance(value, str | int | float | Tensor | type):
            continue
        yield value
        if depth and not isinstance(value, types.FunctionType):
            held = value if isinstance(value, list | tuple) else getattr(value, "__dict__", {}).values()
            yield from _parts(held, depth - 1)


def _draws_in(value: Any) -> bool:
    """Return whether the functions that load a sample name one that draws, and no generator of their own."""
    kind = type(value)
    members = [value] if isinstance(value, types.FunctionType) else [getattr(kind, each, None) for each in _ENTRIES]
    waiting, names = [each for each in members if isinstance(each, types.FunctionType)], set[str]()
    for function in waiting:  # with the methods and the functions of the same file that they call
        new = set(names_in_code(function.__code__)) - names
        names |= new
        called = [getattr(kind, each, None) or function.__globals__.get(each) for each in new]
        waiting += [
            each for each in called if isinstance(each, types.FunctionType) and each.__module__ == function.__module__
        ]
    drawn = {each for each in names if _DRAWING.fullmatch(each)}
    knows = names & {"torch", "functional", "F", "random"} or any(each.endswith("_") for each in drawn)
    return bool(drawn and knows) and not names & _ITS_OWN
