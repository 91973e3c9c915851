"""`ShardedLoader`: the batches of a run, of which each worker loads the slices that it runs."""

import copy
import math
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, final

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from lockstep.comm import World, current_world, join_world
from lockstep.data.assignment import ShardAssignment
from lockstep.data.batch import ShardedBatch, Slice
from lockstep.data.contents import content_number, slice_number
from lockstep.data.cursor import Cursor
from lockstep.data.keyed import FailedSlice, KeyedDataset, SampleKey
from lockstep.data.order import epoch_order, step_slices
from lockstep.processes.lifetime import die_with_parent, terminate_only_for
from lockstep.shards import derive_seed

_PREFETCH_FACTOR = 2
"""How many slices each loading process is ahead; torch's default."""
_NUM_COMPARED = 12
"""Samples by which the data of the workers are compared."""
_Cuts = Callable[[int], list[Sequence[int]]]
"""Returns the samples of each shard in a step of an epoch."""
_Keys = Callable[[], Iterator[list[SampleKey]]]
"""Makes the keys of the samples of each slice to load, in order."""


@final
class _Plan:
    """What a DataLoader is to load; generated lazily, because an epoch may have millions of samples."""

    def __init__(self, keys: _Keys) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[list[SampleKey]]:
        return self.keys()


@final
class ShardedLoader:
    """Load a map-style data set in global batches that are cut into shards.

    The global batch of a step depends on (seed, epoch, step) alone. The last batch of an epoch is smaller where the
    batch size does not divide the data set: nothing is padded, and nothing is dropped without `drop_last`.

    Args:
        dataset: A map-style data set (`__getitem__` and `__len__`).
        batch_size: Samples of a step over *all* workers.
        num_shards: Slices of a batch; the number of shards of the run.
        seed: Of the order and of the samples' random states; the same on every worker.
        shuffle: A new order for every epoch; else the order of the data set.
        num_workers: Data-loading processes of each worker, as in `torch.utils.data.DataLoader`.
        persistent_workers: Keep these processes for the next epoch, which begins sooner then. They keep the data set as
            it was when they began: what is changed in it between two epochs, as by a `set_epoch`, they do not see.
        collate_fn: Makes a batch of a list of samples; torch's default when None.
        drop_last: Leave out the last batch of an epoch where it is smaller than the others, as in torch's DataLoader.
            Its slices may have one sample each, of which BatchNorm in training raises an error. In the next epoch other
            samples are left out, if the loader shuffles.
        pin_memory: Put batches into pinned memory, for GPUs.
        world: The workers, or a function that returns them, which is asked when an epoch begins; None for the default
            group, which is made if torchrun or another launcher started this worker and it is not there, or alone.

    Raises:
        TypeError: A data set without a length or without indexing.
        ValueError: A batch smaller than the number of shards, an empty data set, one that is smaller than a batch where
            the last batch is left out, or more workers than shards.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        num_shards: int,
        seed: int = 0,
        shuffle: bool = True,
        num_workers: int = 0,
        persistent_workers: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        pin_memory: bool = False,
        world: World | Callable[[], World] | None = None,
    ) -> None:
        self.num_samples = _check_dataset(dataset)
        if batch_size < num_shards:
            raise ValueError(
                f"batch_size is {batch_size} and num_shards is {num_shards}: every shard needs a sample of each "
                f"batch. Use a batch_size of at least {num_shards}, or fewer shards."
            )
        if drop_last and self.num_samples < batch_size:
            raise ValueError(
                f"The data set has {self.num_samples} samples and batch_size is {batch_size}, so drop_last=True leaves "
                "out all of them. Use a smaller batch_size, or drop_last=False."
            )
        if world is None:
            join_world()
            world = current_world
        self._current_world: Callable[[], World] = partial(_same_world, world) if isinstance(world, World) else world
        self.batch_size = batch_size
        self.num_shards = num_shards
        self._seed = seed
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._world = self._current_world()
        self._assignment = ShardAssignment(self._world.world_size, num_shards)
        self._num_workers = num_workers
        self._keeps_processes = persistent_workers and num_workers > 0
        self._pin_memory = pin_memory
        self._length = partial(_length_of, dataset)
        self._content = self._content_of_tensors = content_number(dataset)
        self._has_own_collate = collate_fn is not None
        self._dataset = KeyedDataset(dataset, default_collate if collate_fn is None else collate_fn)
        self._plan = _Plan(lambda: iter(()))
        self._processes: DataLoader[Any] | None = None
        self._is_iterating = False

    def __iter__(self) -> NoReturn:
        """Refuse to be looped over as a DataLoader is: the order of an epoch follows from its number."""
        raise TypeError(
            "A ShardedLoader cannot be iterated; iterate over one of its epochs: for batch in loader.epoch(epoch), "
            "where epoch is 0, 1, ..."
        )

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        return self.num_samples // self.batch_size if self._drop_last else self.num_batches

    @property
    def num_batches(self) -> int:
        """How many batches hold all samples, together with a last one that `drop_last` leaves out of an epoch."""
        return math.ceil(self.num_samples / self.batch_size)

    @property
    def source(self) -> str:
        """The data and their order in words: equal for loaders that make the same batches."""
        return self._describe()

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[ShardedBatch]:
        """Yield this worker's part of each batch of an epoch, from `start_step` on.

        Raises:
            ValueError: A negative epoch, a step outside the epoch, or a data set that is longer or shorter than it was.
        """
        self._check_length()
        if epoch < 0 or not 0 <= start_step <= len(self):
            raise ValueError(
                f"Epoch {epoch}, step {start_step} is not in this data: epochs count from 0 and have {len(self)} steps."
            )
        return self._iterate(epoch, range(start_step, len(self)))

    def for_one_worker(self) -> "ShardedLoader":
        """Return a loader of the same batches, of which this worker has all slices; it loads in this process."""
        alone = World(rank=0, world_size=1, group=None)
        other = copy.copy(self)
        vars(other).update(
            _current_world=partial(_same_world, alone),
            _world=alone,
            _assignment=ShardAssignment(1, self.num_shards),
            _plan=_Plan(lambda: iter(())),
            _processes=None,
            _keeps_processes=False,
            _num_workers=0,
            _is_iterating=False,
        )
        return other

    def fixed_assignment_epoch(self) -> Iterator[ShardedBatch]:
        """Yield this worker's part of all batches of epoch 0, in which no shard moves to another worker.

        So one worker adds up all values of a shard, in the order of the data. No batch is left out.
        """
        self._check_length()
        return self._iterate(0, range(self.num_batches), moves_shards=False)

    def _iterate(self, epoch: int, steps: range, *, moves_shards: bool = True) -> Iterator[ShardedBatch]:
        order = epoch_order(self.num_samples, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
        cuts = partial(step_slices, order, batch_size=self.batch_size, num_shards=self.num_shards)
        # A nested epoch prefetches at other times than the outer one: in it no shard moves to another worker.
        moves_shards &= not self._is_iterating
        step, num_steps = steps.start, steps.stop
        self._follow_world()
        while step < num_steps:
            world = self._world
            assignment = self._assignment if moves_shards else ShardAssignment(world.world_size, self.num_shards)
            epoch_ranges = _EpochRanges(assignment, epoch)
            keys = partial(_keys_of_slices, range(step, num_steps), cuts, epoch_ranges, world.rank, self._seed, epoch)
            compared = [] if self._content else self._keys_to_compare()
            with self._loaded(partial(_keys_after, compared, keys)) as loaded:
                if compared:
                    self._content = slice_number([_check_slice(next(loaded)) for _ in compared])
                while step < num_steps and self._world == world:
                    slices = cuts(step)
                    ranges = epoch_ranges.ranges(step)
                    yield ShardedBatch(
                        cursor=Cursor(epoch, step),
                        num_steps=num_steps,
                        num_samples=sum(map(len, slices)),
                        num_shards=self.num_shards,
                        slices=tuple(
                            Slice(shard=shard, num_samples=len(indices), data=_check_slice(next(loaded)))
                            for shard, indices in _own(slices, ranges[world.rank])
                        ),
                        ranges=ranges,
                        source=self._describe(),
                        content=self._content,
                        assignment=assignment,
                        world=world,
                        recut=partial(self._recut, cuts),
                    )
                    epoch_ranges.forget(step)
                    step += 1
        self._check_length()

    def _keys_to_compare(self) -> list[list[SampleKey]]:
        """Return the keys of slices that every worker loads, by which their data are compared.

        They are the first slices of epoch 0: whatever collates slices can collate these. Of a large one, torch's own
        function gets a part.
        """
        order = epoch_order(self.num_samples, seed=self._seed, epoch=0, shuffle=self._shuffle)
        found: list[list[SampleKey]] = []
        for indices in step_slices(order, 0, batch_size=self.batch_size, num_shards=self.num_shards):
            missing = _NUM_COMPARED - sum(map(len, found))
            if missing > 0 and indices:
                part = indices if self._has_own_collate else indices[:missing]
                found.append(_sample_keys(part, self._seed, 0))
        return found

    def _recut(self, cuts: _Cuts, batch: ShardedBatch) -> ShardedBatch:
        """Cut a batch for the present workers. An epoch that is under way follows them from its next step on."""
        world = self._follow_world()
        ranges = self._assignment.ranges(batch.cursor)
        held = {part.shard: part for part in batch.slices}
        slices = tuple(
            held[shard] if shard in held else self._load(batch.cursor.epoch, shard, indices)
            for shard, indices in _own(cuts(batch.cursor.step), ranges[world.rank])
        )
        return replace(batch, slices=slices, ranges=ranges, assignment=self._assignment, world=world)

    def _load(self, epoch: int, shard: int, indices: Sequence[int]) -> Slice:
        """Load one slice in this process."""
        data = self._dataset.__getitems__(_sample_keys(indices, self._seed, epoch))
        return Slice(shard=shard, num_samples=len(indices), data=_check_slice(data))

    def _follow_world(self) -> World:
        """Return the present workers; if they are others than before, assign the shards anew."""
        world = self._current_world()
        if world != self._world:
            self._assignment = ShardAssignment(world.world_size, self.num_shards)
            self._content = self._content_of_tensors  # else loaded anew, as new workers load what it is now
        self._world = world
        return world

    @contextmanager
    def _loaded(self, keys: _Keys) -> Iterator[Iterator[Any]]:
        """Load the slices with these keys, in loading processes if there are any.

        An epoch that begins while another is under way gets processes of its own.
        """
        if self._is_iterating:
            yield iter(self._make_loader(_Plan(keys), persistent=False))
            return
        self._is_iterating = True
        try:
            if not self._keeps_processes:
                yield iter(self._make_loader(_Plan(keys), persistent=False))
                return
            if self._processes is None:
                self._processes = self._make_loader(self._plan, persistent=True)
            self._plan.keys = keys
            yield iter(self._processes)
        finally:
            self._is_iterating = False

    def _make_loader(self, plan: _Plan, *, persistent: bool) -> DataLoader[Any]:
        # The parent-death signal is bound to the *thread* that starts a process, so only the main thread sets it:
        # another thread may end before the epoch does.
        in_main_thread = threading.current_thread() is threading.main_thread()
        return DataLoader(
            self._dataset,
            batch_sampler=plan,
            num_workers=self._num_workers,
            prefetch_factor=_PREFETCH_FACTOR if self._num_workers else None,
            collate_fn=_as_it_is,
            pin_memory=self._pin_memory,
            persistent_workers=persistent,
            worker_init_fn=partial(_start_loading_process, os.getpid(), _starter_pid()) if in_main_thread else None,
            # Its own generator: the default would draw from the global one, once per epoch.
            generator=torch.Generator(),
        )

    def _describe(self) -> str:
        order = "in order" if not self._shuffle else "shuffled"
        return (
            f"{self.num_samples} samples in batches of {self.batch_size}, {self.num_shards} shards, seed {self._seed}, "
            f"{order}{', without the last batch where it is smaller' if self._drop_last else ''}"
        )

    def _check_length(self) -> None:
        length = self._length()
        if length != self.num_samples:
            raise ValueError(
                f"The data set had {self.num_samples} samples when its ShardedLoader was made, and has {length} now. "
                "The order of the samples depends on their number: make a new loader, between two epochs, when a data "
                "set has grown or shrunk."
            )


@final
class _EpochRanges:
    """The shards of every worker in the steps of an epoch; those of a step do not change after the first request."""

    def __init__(self, assignment: ShardAssignment, epoch: int) -> None:
        self._assignment = assignment
        self._epoch = epoch
        self._ranges: dict[int, tuple[range, ...]] = {}

    def ranges(self, step: int) -> tuple[range, ...]:
        if step not in self._ranges:
            self._ranges[step] = self._assignment.ranges(Cursor(self._epoch, step))
        return self._ranges[step]

    def forget(self, step: int) -> None:
        self._ranges.pop(step, None)


def _keys_of_slices(
    steps: range, cuts: _Cuts, epoch_ranges: _EpochRanges, rank: int, seed: int, epoch: int
) -> Iterator[list[SampleKey]]:
    """Yield the keys of the samples of each slice of one worker.

    Not a method of the loader: the DataLoader refers to this. In a reference cycle torch cannot signal the loading
    processes to exit, and waits 5 s for them.
    """
    for step in steps:
        for _, indices in _own(cuts(step), epoch_ranges.ranges(step)[rank]):
            yield _sample_keys(indices, seed, epoch)


def _keys_after(first: Sequence[list[SampleKey]], keys: _Keys) -> Iterator[list[SampleKey]]:
    yield from first
    yield from keys()


def _sample_keys(indices: Sequence[int], seed: int, epoch: int) -> list[SampleKey]:
    return [(derive_seed("sample", seed, epoch, index), index) for index in indices]


def _same_world(world: World) -> World:
    return world


def _own(slices: list[Sequence[int]], shards: range) -> list[tuple[int, Sequence[int]]]:
    """Return those of a worker's `shards` that have samples, with their samples."""
    return [(shard, slices[shard]) for shard in shards if len(slices[shard]) > 0]


def _as_it_is(collated: Any) -> Any:
    return collated


def _check_slice(data: Any) -> Any:
    if isinstance(data, FailedSlice):
        raise data.error
    return data


def _starter_pid() -> int | None:
    """Return which process starts loading processes; None for a fork server, which ends when this process does."""
    return None if multiprocessing.get_start_method() == "forkserver" else os.getpid()


def _start_loading_process(worker_pid: int, starter_pid: int | None, _number: int) -> None:
    die_with_parent(os.getppid() if starter_pid is None else starter_pid)
    terminate_only_for(worker_pid)


def _length_of(dataset: Dataset[Any]) -> int:
    return int(type(dataset).__len__(dataset))  # type: ignore[attr-defined]


def _check_dataset(dataset: Dataset[Any]) -> int:
    length = getattr(type(dataset), "__len__", None)
    if isinstance(dataset, IterableDataset) or length is None or getattr(dataset, "__getitem__", None) is None:
        raise TypeError(
            f"A ShardedLoader needs a data set with __len__ and __getitem__, but {type(dataset).__name__} is not "
            "one: the order of the samples must be known beforehand."
        )
    num_samples = _length_of(dataset)
    if num_samples < 1:
        raise ValueError("The data set is empty; expected at least one sample.")
    return num_samples
