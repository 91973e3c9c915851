"""What the ranks train on: batches, DataLoaders and samplers.

[Note: what is a batch] The first dimension of the inputs need not be the batch: packed sequences have their tokens
there, heads of a detector their regions, and such sizes vary on each rank from step to step. A batch size does not,
except for the last batch of an epoch. So sizes that differ between the ranks are warned of where they were the same on
all ranks in all steps before, or differ in the same ratio as in one of the two steps before; and not any more after
they have differed in two ways. The ratio, because steps may alternate between one forward and two: 3 samples and 2 are
6 and 4 then.

A rank that skips a batch before its forward is out of step:

    for batch in loader:                 rank 0   batch 3  backward 3      batch 4  backward 4
        try:                             rank 1   batch 3  an error        batch 4  backward 3     batch 5  backward 4
            inputs = decode(batch)
        except ValueError:
            continue

All calls of the ranks agree. But the iterators of DataLoaders count what they have yielded, and from then on rank 1 is
ahead by one. So these counts are compared in each backward; where one rank is ahead by the same number in several
backwards in a row, it is warned of.

A wrapper is not given the samplers of a script. But iterators of DataLoaders are noted when they are made, and their
samplers (`torch_private.loaders`): so those that are trained on are compared from the first backward on.

[Note: what a data set holds] A DistributedSampler gives each rank indices, so index 7 must be the same sample on every
rank. It is not where files were listed in another order (`os.listdir`, a set), or where each rank has split the data
with a seed of its own. So data sets are compared, as far as can be seen without reading a sample: that may be slow, or
change something. Left out is what may differ between ranks that do as they should: the folder of files, which may be
one of each rank or host; options, among them a rank; tensors that were written to, as the last loss of each sample;
what a sampler that is made into a data set has drawn.
"""

import os
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from itertools import chain
from math import gcd
from numbers import Number
from pathlib import PurePath
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, Sampler, Subset, TensorDataset

from lockstep.comm import World
from lockstep.errors import LockstepError, ReductionError
from lockstep.means import IS_OVER_RANKS
from lockstep.parallel.comparison.check import (
    SWITCH,
    Check,
    Lines,
    Reduced,
    Scope,
    others_than_first,
    warn_once,
)
from lockstep.reduce import GroupStatus, RankStatus
from lockstep.reduce.buckets import Bucket
from lockstep.reduce.model import Description, describe_differences
from lockstep.reduce.status import FINGERPRINT_LIMIT
from lockstep.reduce.tensor_bits import glance, glance_at_bits
from lockstep.torch_private.autograd import is_inside_transform
from lockstep.torch_private.loaders import LoaderIterator, iterators, kept_dataset, num_yielded, used_samplers
from lockstep.torch_private.modules import tree_leaves, version_of

_NUM_ALIKE: Final = 3
"""So many reductions in a row show that ranks train on the same data, or that one stays ahead."""
_NUM_WITH_DATA: Final = 4
_NUM_BETWEEN_DATA: Final = 64
"""In the first so many of every `_NUM_BETWEEN_DATA` reductions is seen whether ranks have the same data."""
_NUM_FRUITLESS: Final = 8
"""After so many exchanges without a finding the counts are compared no more."""
_NAMES: Final = ("num_replicas", "shuffle", "seed", "epoch", "drop_last", "total_size")
"""What of a sampler must be the same on all ranks; `num_samples` is that of the rank where nothing is padded."""
_MOST_SEEN: Final = 256
_MOST_NUMBERS: Final = 1 << 14
_LONGEST_TEXT: Final = 200
_DEPTH: Final = 3
"""So many data sets within one another are looked at: a part of a part of the data."""
_PLAIN: Final = (str, int, float, PurePath)
_MOST_SENT: Final = 32
"""So many first items of a list are sent to the other ranks, to find the first that differs."""
_MOST_SHOWN: Final = 3
Items = Mapping[str, tuple[tuple[str, ...], int]]
"""By where a data set holds them: the first items in words, and a number for all of them."""


@final
class UnevenBatchWarning(Check):
    def __init__(self) -> None:
        self._is_done = False
        self._sizes: tuple[int, ...] = ()
        self._recent: tuple[tuple[int, ...], ...] = ()
        self._uneven: set[tuple[int, ...]] = set()
        self._last_backwards: tuple[int, ...] = ()
        self._is_even = True

    def reset(self, reduction: Reduced | None) -> None:
        if reduction is not None and self.is_compared and not self._is_done:
            if not IS_OVER_RANKS.get():
                self.compare(reduction.status)
            IS_OVER_RANKS.set(False)

    def compare(self, status: GroupStatus) -> None:
        if self._is_done or status.empty:
            return
        backwards = status.nums_backwards
        if len(set(backwards)) > 1 and _are_as_large_each(status):
            is_first, self._last_backwards = self._last_backwards != backwards, backwards
            if not is_first:  # a second time, so that a last, shorter accumulation is not warned of alone
                self._warn(status)
            return
        divisor = gcd(*status.batch_sizes) or 1
        ratio = tuple(size // divisor for size in status.batch_sizes)
        is_first, was_even = not self._recent, self._is_even
        is_next = ratio in self._recent or (not is_first and was_even)
        before, self._sizes = self._sizes, status.batch_sizes
        self._recent = (*self._recent[-1:], ratio)
        self._is_even = was_even and len(set(ratio)) == 1 and ratio[0] > 0 and _is_multiple(before, self._sizes)
        if status.uneven_batch_sizes:
            self._uneven.add(ratio)
            if is_next:
                self._warn(status)
            self._is_done = self._is_done or len(self._uneven) > 1  # they vary. [Note: what is a batch]

    def _warn(self, status: GroupStatus) -> None:
        self._is_done = True
        if status.uneven_batch_sizes:
            _warn_of_sizes(status)
        else:
            _warn_of_accumulation(status.nums_backwards)


@final
class SameDataWarning(Check):
    """Warns once, on each rank, that all ranks train on the same data.

    They have the same gradients before the reduction, or the same inputs, which are others in each step: a grid of
    coordinates is the same in all steps and on all ranks, and their targets are not.
    """

    def __init__(self, *, may_read: bool) -> None:
        self._may_read = may_read
        self._is_looking = may_read
        self._num_alike = 0
        self._last_inputs = 0
        self.has_warned = False
        self._inputs = 0
        self._gradients = 0

    def end_forward(self, inputs: Any) -> None:
        if self._is_looking and not is_inside_transform():
            tensors = [
                value
                for value in tree_leaves(inputs)
                if type(value) is Tensor and value.device.type == "cpu" and value.numel() > 0
            ]
            self._inputs = _shorten(glance_at_bits(*tensors)) if tensors else 0

    def look_at(self, bucket: Bucket) -> None:
        if self._is_looking and not bucket.message.is_sparse:
            seen = glance(bucket.gradients)
            if bool(seen.any()):  # those of all ranks may be zero
                self._gradients = _shorten(glance_at_bits(seen))

    def fill_in(self, status: RankStatus) -> RankStatus:
        inputs, gradients = self._inputs, self._gradients
        self._inputs = self._gradients = 0
        return replace(status, inputs=inputs, gradients=gradients) if inputs or gradients else status

    def reset(self, reduction: Reduced | None) -> None:
        if reduction is not None:
            was_looking, number = self._is_looking, reduction.number
            self._is_looking = self._may_read and number % _NUM_BETWEEN_DATA < _NUM_WITH_DATA
            if was_looking:
                self.compare(reduction.status)

    def compare(self, status: GroupStatus) -> None:
        if self.has_warned or status.empty or not any(status.gradients):
            return
        inputs = status.inputs[0]
        has_same_inputs = inputs not in {0, self._last_inputs} and len(set(status.inputs)) == 1
        # Gradients of unlike inputs are the same where another wrapper has averaged them, or where all are zero.
        is_like = len(set(status.inputs)) == 1
        has_same_gradients = is_like and status.gradients[0] != 0 and len(set(status.gradients)) == 1
        self._last_inputs = inputs
        self._num_alike = self._num_alike + 1 if has_same_inputs or has_same_gradients else 0
        if self._num_alike < _NUM_ALIKE:
            return
        self.has_warned = True
        what = "computed the same gradients" if has_same_gradients else "trained on the same inputs"
        warn_once(
            f"In {_NUM_ALIKE} steps in a row all {len(status.inputs)} ranks {what}, so they do the work of one. Give "
            "each rank its own part of the data: DataLoader(dataset, sampler=ls.DistributedSampler(dataset)), or "
            "another seed for random data. (LS315)",
            f"In {_NUM_ALIKE} steps in a row all",
        )


def _is_multiple(before: tuple[int, ...], now: tuple[int, ...]) -> bool:
    """Return whether even sizes differ by a number of forwards, as far as can be seen."""
    return not before or max(before[0], now[0]) % min(before[0], now[0]) == 0


def _are_as_large_each(status: GroupStatus) -> bool:
    """Return whether the batch of each backward has the same size on all ranks, as far as it is known."""
    pairs = zip(status.batch_sizes, status.nums_backwards, strict=True)
    return len({size / number for size, number in pairs if size > 0}) <= 1


def _shorten(number: int) -> int:
    """Return a number from 1 on that is small enough for the status; 0 for 0."""
    return 1 + number % (FINGERPRINT_LIMIT - 1) if number else 0


def _warn_of_sizes(status: GroupStatus) -> None:
    sizes = status.batch_sizes
    most, least = max(sizes), min(size for size in sizes if size > 0)
    warn_once(
        f"In one step rank {sizes.index(most)} trained on {most} samples{_backwards(status, sizes.index(most))} and "
        f"rank {sizes.index(least)} on {least}{_backwards(status, sizes.index(least))}, by the first dimension of the "
        "inputs. DistributedDataParallel averages the ranks' gradients, so a sample of the smaller batch counts for "
        "more. Give every rank the same number (DistributedSampler with drop_last, a DataLoader with drop_last=True, "
        "as many micro-batches), take the loss from ls.mean_over_ranks(total, count), or train with ls.Trainer, which "
        "weights by samples. (LS314)",
        "In one step rank",
        if_meant="If that dimension is not the batch, or the loss is weighted already",
    )


def _backwards(status: GroupStatus, rank: int) -> str:
    number = status.nums_backwards[rank]
    return "" if len(set(status.nums_backwards)) == 1 else f" in {number} backward{'' if number == 1 else 's'}"


def _warn_of_accumulation(backwards: Sequence[int]) -> None:
    most, least = max(backwards), min(backwards)
    warn_once(
        f"In one step rank {backwards.index(most)} accumulated the gradients of {most} backwards and rank "
        f"{backwards.index(least)} those of {least}. DistributedDataParallel averages the ranks' gradients, whatever "
        "they are sums of. Accumulate over as many micro-batches on every rank, or weight the loss. (LS314)",
        "In one step rank",
    )


@final
class LoaderPositions(Check):
    """How far this rank is in its DataLoaders, and whether their processes still have the loop's data set."""

    def __init__(self) -> None:
        self._iterators: list[weakref.ref[Any]] = []
        self._kept: weakref.WeakKeyDictionary[Any, tuple[int, dict[str, str]]] = weakref.WeakKeyDictionary()
        self._has_warned = False
        self._is_over = False
        self._offsets: tuple[int, ...] = ()
        self._num_alike = self._num_fruitless = self._last = self._num_reductions = 0

    def judge(self, found: Sequence[tuple[int, ...]], lines: Sequence[Lines]) -> None:  # noqa: ARG002
        if self._is_over or len(set(found)) == 1:
            return
        self._num_fruitless += 1
        if len(set(map(len, found))) == 1:
            first, *others = map(sum, found)
            offsets = tuple(other - first for other in others)
            is_next = offsets == self._offsets and self._num_reductions == self._last + 1
            self._num_alike = self._num_alike + 1 if is_next else 1
            self._offsets, self._last = offsets, self._num_reductions
            if self._num_alike >= _NUM_ALIKE:
                self._warn(offsets)
        self._is_over = self._is_over or self._num_fruitless >= _NUM_FRUITLESS

    def reset(self, reduction: Reduced | None) -> None:
        if reduction is not None:
            self._num_reductions = reduction.number
            if not self.alive():
                self._iterators = [weakref.ref(each) for each in iterators()]
            self._compare_data_sets()

    def alive(self) -> list[LoaderIterator]:
        return [each for each in (reference() for reference in self._iterators) if each is not None]

    def record(self) -> tuple[int, ...]:
        """Return how many batches each of them has yielded; nothing where that is not compared (local)."""
        if self._is_over:
            return ()
        counts = map(num_yielded, self.alive())
        return tuple(sorted(count for count in counts if count > 0))

    def number(self) -> int:
        return hash(self.record())

    def _warn(self, offsets: Sequence[int]) -> None:
        self._is_over = True
        rank = next(rank for rank, offset in enumerate(offsets, start=1) if offset)
        offset = offsets[rank - 1]
        ahead, behind = (rank, 0) if offset > 0 else (0, rank)
        batches = "1 batch" if abs(offset) == 1 else f"{abs(offset)} batches"
        warn_once(
            f"In {_NUM_ALIKE} backwards in a row rank {ahead} had drawn {batches} more from its DataLoader than rank "
            f"{behind}. It has skipped a batch before its forward (an error of the data, `continue`), or has had a "
            "longer or shorter epoch; it will be done before the others, which then wait for it. Call "
            "model.skip_backward() in place of backward() where a batch is left out, or leave it out on every rank. "
            "(LS318)",
            f"In {_NUM_ALIKE} backwards in a row rank",
            if_meant="If a thread of yours draws batches ahead of the training",
        )

    def _compare_data_sets(self) -> None:
        for iterator in [reference() for reference in self._iterators if not self._has_warned]:
            if iterator is None or (dataset := kept_dataset(iterator)) is None:
                continue
            num_batches, now = num_yielded(iterator), _plain_attributes(dataset)
            last, before = self._kept.setdefault(iterator, (num_batches, now))
            odd = next((place for place, value in now.items() if before.get(place) != value), "")
            if num_batches <= last and odd:  # in a new epoch
                self._has_warned = True
                warn_once(
                    f"Attribute {odd} was {before.get(odd, 'not there')} and is {now[odd]} now, but the processes of "
                    "the DataLoader, which persistent_workers=True keeps, have the data set as it was when they began. "
                    "They load by the old value. Leave persistent_workers out, or make a new DataLoader after the "
                    "change. (LS322)",
                    f"Attribute {odd} was",
                    if_meant="If the value has nothing to do with the samples",
                )
            self._kept[iterator] = num_batches, before


@final
class DataSamplers(Check):
    """Looks at the samplers of one rank, for what must be the same on all."""

    scope = Scope.RUN

    def __init__(self, world: World) -> None:
        self._world = world
        self._found: list[weakref.ref[DistributedSampler[Any]]] = []
        self._items: dict[int, Items] = {}
        self._has_warned = False
        self._is_asked = True

    def begin(self) -> None:
        known = self._alive()
        for sampler in used_samplers():
            # Not isinstance, which would run the code of proxies.
            if not (issubclass(type(sampler), DistributedSampler) and _is_complete(sampler)) or any(
                sampler is each for each in known
            ):
                continue
            self._found = [weakref.ref(each) for each in (*self._alive(), sampler)]
            # One replica: each rank may have data of its own.
            self._items[id(sampler)] = describe_items(sampler.dataset) if sampler.num_replicas != 1 else {}
            if sampler.shuffle and sampler.num_replicas != self._world.world_size and not self._has_warned:
                self._has_warned = True
                warn_once(
                    f"A DistributedSampler was made for {sampler.num_replicas} replicas, and the model is trained on "
                    f"{self._world.world_size} ranks: samples are left out, or seen by several ranks. Make it with "
                    f"num_replicas={self._world.world_size}, or leave that out. (LS317)",
                    "A DistributedSampler was made for",
                )

    def number(self) -> int:
        if not self._found or not self._is_asked:
            return 0
        # Sorted: a rank may have evaluated before the others.
        numbers = (
            (*(int(getattr(each, name)) for name in self._names_of(each)), number_items(self._items.get(id(each), {})))
            for each in self._alive()
        )
        return hash(tuple(sorted(numbers)))

    def record(self) -> tuple[tuple[Description, Items], ...]:
        described = [
            ({name: repr(getattr(each, name)) for name in self._names_of(each)}, self._items[id(each)])
            for each in (self._alive() if self._is_asked else ())
        ]
        return tuple(sorted(described, key=lambda each: tuple(each[0].values())))

    def judge(
        self,
        found: Sequence[Sequence[tuple[Description, Items]]],
        lines: Sequence[Lines],  # noqa: ARG002
    ) -> LockstepError | None:
        if len(set(map(len, found))) > 1:
            self._is_asked = False  # else the ranks would exchange all that they compare, in each backward
            return None
        for rank, described in others_than_first(found):
            for (here, items), (there, first_items) in zip(described, found[0], strict=True):
                if here != there:
                    how = describe_differences(here, there).replace("total_size", "total_size, the length of the data,")
                    return ReductionError(
                        f"The DistributedSamplers of ranks {rank} and 0 differ: {how}. "
                        "So some samples would be seen by several ranks, and others by none, or a rank is ahead of the "
                        "other by batches that it has skipped or not had. Make samplers alike on every rank, and call "
                        f"set_epoch with the same number on all. {SWITCH} (LS317)",
                    )
                if items != first_items:
                    return ReductionError(f"{_describe_other_data(rank, items, first_items)} {SWITCH} (LS317)")
        return None

    @staticmethod
    def _names_of(sampler: DistributedSampler[Any]) -> Sequence[str]:
        return _NAMES if sampler.num_replicas != 1 else _NAMES[:1]

    def _alive(self) -> list[DistributedSampler[Any]]:
        return [each for each in (reference() for reference in self._found) if each is not None]


def _is_complete(sampler: object) -> bool:
    """Return whether a sampler has what torch's has: a subclass may not have called its `__init__`."""
    return hasattr(sampler, "dataset") and all(isinstance(getattr(sampler, name, None), Number) for name in _NAMES)


def _describe_other_data(rank: int, here: Items, there: Items) -> str:
    """Return how a data set of a rank differs from that of rank 0, and what to do."""
    name = next(name for name in {**there, **here} if here.get(name) != there.get(name))
    ours, first = (each.get(name, (("nothing",), 0))[0] for each in (here, there))
    place = next((index for index, pair in enumerate(zip(ours, first, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        how = f"both begin with {ours[0]}, with other values in it or after it"
    else:
        # From the first that differs on.
        texts = [", ".join(each[place : place + _MOST_SHOWN]) for each in (ours, first)]
        how = f"{texts[0]}, ... on rank {rank} and {texts[1]}, ... on rank 0"
    if name.endswith(".indices"):
        return (
            f"Ranks {rank} and 0 train on different parts of the data: {name} differ: {how}. random_split without a "
            "generator draws another split on each rank, so one rank trains on what another one evaluates. Give it one "
            "seed on all ranks: random_split(dataset, lengths, generator=torch.Generator().manual_seed(0))."
        )
    return (
        f"The data sets of the DistributedSamplers of ranks {rank} and 0 differ in {name}: {how}. A sampler "
        "gives each rank numbers of samples, so some samples would be seen by several ranks, and others by none. Make "
        "the data alike on every rank, in one order: sort what lists files, and draw with one seed."
    )


def _plain_attributes(dataset: object) -> dict[str, str]:
    """Return the numbers, texts and flags that a data set and those within it hold, as `epoch of the Images`."""
    found: dict[str, str] = {}
    for _ in range(_DEPTH):
        held = dict(getattr(dataset, "__dict__", {}))
        owner = type(dataset).__name__
        plain = {name: each for name, each in held.items() if type(each) in {int, float, str, bool}}
        found |= {f"{name} of the {owner}": _shorten_text(repr(each)) for name, each in plain.items()}
        dataset = held.get("dataset")
    return found


def describe_items(dataset: object) -> Items:
    """Return what a data set has of one item per sample, and its names of classes, by where it holds them (local)."""
    return dict(_describe(dataset, "data", _DEPTH))


def _describe(dataset: object, name: str, depth: int) -> Iterator[tuple[str, tuple[tuple[str, ...], int]]]:
    if not isinstance(dataset, Sized) or depth == 0:
        return
    try:
        num_samples = len(dataset)
    except Exception:  # noqa: BLE001 - the user's own, of a data set within another that may never be asked
        return
    attributes = dict(getattr(dataset, "__dict__", {}))
    if isinstance(dataset, Subset) and hasattr(dataset.indices, "tolist"):  # an array of NumPy, or a tensor
        attributes["indices"] = dataset.indices.tolist()
    if isinstance(dataset, TensorDataset):
        values = {f"tensors[{index}]": tensor for index, tensor in enumerate(dataset.tensors)}
    elif any(issubclass(type(value), Sampler) for value in attributes.values()):
        values = {}
    else:
        values = {key: value for key, value in attributes.items() if not _was_written(value)}
    for key, value in values.items():
        described = _describe_value(value, num_samples)
        if described is not None:
            yield f"{name}.{key}", described
    inner = attributes.get("dataset")
    if inner is not None:
        yield from _describe(inner, f"{name}.dataset", depth - 1)


def _was_written(value: object) -> bool:
    return type(value) is Tensor and not value.is_inference() and version_of(value) > 0


def _describe_value(value: Any, num_samples: int) -> tuple[tuple[str, ...], int] | None:
    if type(value) is Tensor:
        is_plain = value.layout is torch.strided and not value.is_nested and value.device.type == "cpu"
        fits = is_plain and value.dim() > 0 and len(value) == num_samples
        return ((f"a tensor of {tuple(value.shape)}",), _number_of_rows(value)) if fits else None
    if type(value) is dict and len(value) <= _MOST_SEEN:
        numbers = _numbers_classes(value)
        return ((_shorten_text(repr(value)),), _number(list(value.items()))) if numbers else None
    if type(value) not in {list, tuple} or len(value) != num_samples or not value:
        return None
    seen = value[:: max(1, num_samples // _MOST_SEEN)]
    if not all(map(_is_plain, seen)):
        return None
    seen = _without_folder(seen)
    return tuple(_shorten_text(repr(each)) for each in seen[:_MOST_SENT]), _number(seen)


def _numbers_classes(value: Mapping[Any, Any]) -> bool:
    """Return whether a dictionary gives names to the numbers from 0 on, or numbers to names."""
    plain = all(type(each) is str or type(each) is int for pair in value.items() for each in pair)
    wanted = set(range(len(value)))
    return plain and len(value) > 1 and (value.keys() == wanted or set(value.values()) == wanted)


def _without_folder(items: Sequence[Any]) -> list[Any]:
    """Return items without the folder that all paths among them have in common."""
    parts = chain.from_iterable(each if type(each) is tuple else (each,) for each in items)
    paths = [str(each) for each in parts if isinstance(each, PurePath) or (type(each) is str and os.sep in each)]
    folder, separator, _ = os.path.commonprefix(paths).rpartition(os.sep)  # noqa: RUF071 - up to its last separator
    return [_cut(each, folder + separator) for each in items] if separator else list(items)


def _cut(item: Any, folder: str) -> Any:
    if type(item) is tuple:
        return tuple(_cut(each, folder) for each in item)
    is_within = isinstance(item, str | PurePath) and str(item).startswith(folder)
    return type(item)(str(item)[len(folder) :]) if is_within else item


def _is_plain(item: Any) -> bool:
    if type(item) is tuple:
        return all(isinstance(each, _PLAIN) for each in item)
    return isinstance(item, _PLAIN)


def _number(items: Sequence[Any]) -> int:
    return zlib.crc32(repr(items).encode())


def _number_of_rows(tensor: Tensor) -> int:
    seen = tensor.detach()[:: max(1, len(tensor) // _MOST_SEEN)].reshape(-1)
    return zlib.crc32(seen[:: max(1, seen.numel() // _MOST_NUMBERS)].contiguous().view(torch.uint8).numpy().tobytes())


def _shorten_text(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


def number_items(described: Items) -> int:
    """Return a number for what `describe_items` has returned, the same in every process (pure)."""
    return zlib.crc32(repr(sorted(described.items())).encode())
