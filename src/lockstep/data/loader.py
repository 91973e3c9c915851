"""`ShardedLoader`: the batches of a run, of which each worker loads the slices that it runs."""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Literal, NoReturn, TypedDict, final

from torch import Tensor
from torch.utils.data import Dataset, default_collate

from lockstep.comm import World, current_world, join_world
from lockstep.data.batch import Cursor, ErrorPlace, ShardAssignment, ShardedBatch, Slice
from lockstep.data.contents import slice_number
from lockstep.data.keyed import DrawKeys, FailedSlice, KeyedDataset, SliceKeys
from lockstep.data.samples import Cut, EpochSamples, ListedSamples, Samples, keys_to_load, own_slices
from lockstep.data.slice_loading import SliceLoading
from lockstep.data.stream import Stream, as_stream
from lockstep.data.streamed import StreamedSamples, Transformed
from lockstep.recording import EventKind, own_recorder

_NUM_COMPARED = 12
"""Samples by which the data of the workers are compared."""


class LoaderOptions(TypedDict, total=False):
    """What `Trainer.loader` passes on to a `ShardedLoader`."""

    shuffle: bool
    weights: Literal["balanced"] | Sequence[float] | Tensor | None
    lengths: Sequence[float] | Tensor | None
    num_workers: int
    persistent_workers: bool
    collate_fn: Callable[[list[Any]], Any] | None
    drop_last: bool
    pin_memory: bool


@final
class ShardedLoader:
    """Load a data set in global batches that are cut into shards.

        loader = ls.ShardedLoader(dataset, batch_size=32, num_shards=8, seed=0)    # 32 samples over all workers
        loader = trainer.loader(dataset, batch_size=32)    # the same: num_shards and seed are the trainer's
        for epoch in range(2):
            for batch in loader.epoch(epoch):
                trainer.step(batch)

    The global batch of a step depends on (seed, epoch, step) alone. The last batch of an epoch is smaller where the
    batch size does not divide the data set: nothing is padded, and nothing is dropped without `drop_last`.

    Args:
        dataset: A map-style data set (`__getitem__` and `__len__`), or a stream: an `ls.Stream`, or an
            `IterableDataset`, which becomes one.
        batch_size: Samples of a step over *all* workers.
        num_shards: Slices of a batch; the number of shards of the run.
        seed: Of the order and of the samples' random states; the same on every worker.
        shuffle: A new order for every epoch; else the order of the data set.
        weights: How often each sample is drawn, in proportion: one number for each, not negative. An epoch has as many
            draws as there are samples, with replacement, as with torch's WeightedRandomSampler: some samples come
            several times, each time in another random state, and some do not come. "balanced" draws every class
            equally often; the data set holds the classes as `targets` or `labels`, or is a TensorDataset with the
            classes as its last tensor. An evaluation counts each sample once, whatever the weights are.
        lengths: The length of each sample, say its tokens: batches then hold samples of similar lengths, so that they
            need little padding, and come in a random order. A shard's samples are neighbours by length.
        num_workers: Data-loading processes of each worker, as in `torch.utils.data.DataLoader`.
        persistent_workers: Keep these processes for the next epoch, which begins sooner then. After a change of the
            data set or of `collate_fn`, as by a `set_epoch`, they are started anew (docs/own-loop.md: what is noticed).
        collate_fn: Makes a batch of a list of samples; torch's default when None.
        drop_last: Leave out the last batch of an epoch where it is smaller than the others, as in torch's DataLoader.
            Its slices may have one sample each, of which BatchNorm in training raises an error. In the next epoch other
            samples are left out, if the loader shuffles.
        pin_memory: Put batches into pinned memory, for GPUs.
        world: The workers, or a function that returns them, which is asked when an epoch begins; None for the default
            group, which is made if torchrun or another launcher started this worker and it is not there, or alone.

    Raises:
        TypeError: A data set without a length or without indexing that is no stream, a stream that can be read only
            once, or a size or seed that is not a whole number.
        ValueError: A batch smaller than the number of shards, an empty data set, one that is smaller than a batch where
            the last batch is left out, or more workers than shards; weights or lengths that are not one for each
            sample, negative, or together with `shuffle=False`; weights that are all zero, or "balanced" where the
            classes are not known; weights or lengths for a stream, or a stream without a record, or one that gives
            other records when it is read again.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        num_shards: int,
        seed: int = 0,
        shuffle: bool = True,
        weights: Literal["balanced"] | Sequence[float] | Tensor | None = None,
        lengths: Sequence[float] | Tensor | None = None,
        num_workers: int = 0,
        persistent_workers: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        pin_memory: bool = False,
        world: World | Callable[[], World] | None = None,
    ) -> None:
        for name, value in {"batch_size": batch_size, "num_shards": num_shards, "seed": seed}.items():
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise TypeError(f"{name} is {value!r}, expected a whole number. (LS401)")
        if batch_size < num_shards:
            raise ValueError(
                f"batch_size is {batch_size} and num_shards is {num_shards}: every shard needs a sample of each "
                f"batch. Use a batch_size of at least {num_shards}, or fewer shards. (LS401)"
            )
        stream = as_stream(dataset)
        self._cut = Cut(batch_size=batch_size, num_shards=num_shards, drop_last=drop_last, seed=seed, shuffle=shuffle)
        if stream is not None:
            self._samples: Samples = _stream_samples(stream, self._cut, weights, lengths)
            dataset = Transformed(stream.transform)
        else:
            self._samples = ListedSamples(dataset, self._cut, weights, lengths)
        self.num_samples = self._samples.num_samples
        """How many samples an epoch has; None for a stream whose end is not known."""
        if drop_last and self.num_samples is not None and self.num_samples < batch_size:
            raise ValueError(
                f"The data set has {self.num_samples} samples and batch_size is {batch_size}, so drop_last=True leaves "
                "out all of them. Use a smaller batch_size, or drop_last=False. (LS401)"
            )
        if world is None:
            join_world()
            world = current_world
        self._current_world: Callable[[], World] = partial(_same_world, world) if isinstance(world, World) else world
        self.batch_size = batch_size
        self.num_shards = num_shards
        self._assignment = ShardAssignment(self._current_world(), num_shards)
        self._following = threading.Lock()
        self._content = self._known_content = self._samples.content()
        self._has_own_collate = collate_fn is not None
        self._loading = SliceLoading(
            KeyedDataset(
                dataset,
                default_collate if collate_fn is None else collate_fn,
                are_samples=stream is not None and stream.transform is None,
            ),
            num_workers=num_workers,
            keeps_processes=persistent_workers,
            pin_memory=pin_memory,
        )
        self._may_write_records = stream is not None and stream.transform is None and self._has_own_collate
        self._bookmark: Mapping[str, Any] = {}
        self._present: tuple[EpochSamples, Sequence[SliceKeys]] | None = None

    def __iter__(self) -> NoReturn:
        """Refuse to be looped over as a DataLoader is: the order of an epoch follows from its number."""
        raise TypeError(
            "A ShardedLoader cannot be iterated; iterate over one of its epochs: for batch in loader.epoch(epoch), "
            "where epoch is 0, 1, ... (LS403)"
        )

    def __len__(self) -> int:
        """Return the number of steps of an epoch.

        Raises:
            TypeError: The data are a stream whose end is not known.
        """
        num_steps = self.num_steps
        if num_steps is None:
            raise TypeError(
                "The data are a stream, whose length is known only at its end. Give ls.Stream the lengths of its "
                "parts, or steps_per_epoch, if the number of steps is needed beforehand. (LS409)"
            )
        return num_steps

    @property
    def num_steps(self) -> int | None:
        """How many steps an epoch has; None for a stream whose end is not known."""
        return None if self.num_samples is None else self._cut.count_steps(self.num_samples)

    @property
    def num_batches(self) -> int | None:
        """How many batches hold all samples, together with a last one that `drop_last` leaves out of an epoch.

        None for a stream whose end is not known.
        """
        return None if self.num_samples is None else self._cut.count_steps(self.num_samples, keeps_last=True)

    @property
    def source(self) -> str:
        """The data and their order in words: equal for loaders that make the same batches."""
        count = "samples" if self.num_samples is None else f"{self.num_samples} samples"
        return (
            f"{count} in batches of {self.batch_size}, {self.num_shards} shards, seed {self._cut.seed}, "
            f"{self._samples}{', without the last batch where it is smaller' if self._cut.drop_last else ''}"
        )

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[ShardedBatch]:
        """Yield this worker's part of each batch of an epoch, from `start_step` on.

        Raises:
            ValueError: A negative epoch, a step outside the epoch, or a data set that is longer or shorter than it was.
        """
        self._samples.check_unchanged()
        num_steps = self.num_steps
        if epoch < 0 or start_step < 0 or (num_steps is not None and start_step > num_steps):
            have = "" if num_steps is None else f" and have {num_steps} steps"
            raise ValueError(
                f"Epoch {epoch}, step {start_step} is not in this data: epochs count from 0{have}. A run that is "
                "resumed needs the data and the batch size that it was saved with. (LS404)"
            )
        return self._iterate(epoch, start_step)

    def state_dict(self) -> dict[str, Any]:
        """Return where a stream is at the present batch, so that a resumed run need not read what comes before (local).

            trainer.save(path, extra={"loader": loader})
            trainer.load(path, extra={"loader": loader})

        A state is not needed for the right samples, and empty for data sets with an index.
        """
        found = self._bookmark if self._present is None else self._present[0].bookmark(self._present[1])
        return dict(found)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned (local); `epoch` uses it if it belongs to the epoch and step."""
        self._bookmark, self._present = dict(state), None

    def for_one_worker(self) -> "ShardedLoader":
        """Return a loader of the same batches, of which this worker has all slices; it loads in this process."""
        alone = World(rank=0, world_size=1, group=None)
        other = copy.copy(self)
        vars(other).update(
            _current_world=partial(_same_world, alone),
            _assignment=ShardAssignment(alone, self.num_shards),
            _following=threading.Lock(),
            _loading=self._loading.in_this_process(),
            _samples=self._samples.alone(),
            _present=None,
        )
        return other

    def fixed_assignment_epoch(self, *, each_once: bool = True) -> Iterator[ShardedBatch]:
        """Yield this worker's part of all batches of epoch 0, in which no shard moves to another worker.

        So one worker adds up all values of a shard, in the order of the data.

        Args:
            each_once: Whether each sample comes once; False to draw samples by their weights and to leave out what
                `drop_last` does, as for training.
        """
        self._samples.check_unchanged()
        return self._iterate(0, 0, is_fixed=True, each_once=each_once)

    def _iterate(
        self, epoch: int, step: int, *, is_fixed: bool = False, each_once: bool = False
    ) -> Iterator[ShardedBatch]:
        bookmark = {} if is_fixed else self._bookmark
        samples = self._samples.epoch(epoch, step, each_once=each_once, bookmark=bookmark)
        # A nested epoch prefetches at other times than the outer one: in it no shard moves to another worker.
        moves_shards = not is_fixed and not self._loading.is_under_way
        recorder = own_recorder()
        source = self.source  # once: it reads all weights and lengths
        present = self._follow_world()
        while slices := samples.cut(step):
            world = present.world
            assignment = present if moves_shards else ShardAssignment(world, self.num_shards)
            content = self._content
            compared = [] if content else self._keys_to_compare()
            keys = keys_to_load(Cursor(epoch, step), samples, assignment)
            with self._loading.loaded(chain(compared, keys)) as loaded:
                if compared:
                    self._content = content = slice_number([_check_slice(next(loaded)) for _ in compared])
                while self._assignment is present and slices:
                    event = recorder.begin(EventKind.LOADING, step, epoch, 0)
                    cursor = Cursor(epoch, step)
                    ranges = assignment.ranges(cursor)
                    if moves_shards:
                        self._present = samples, slices
                    yield ShardedBatch(
                        cursor=cursor,
                        num_steps=samples.num_steps(step),
                        num_samples=sum(map(len, slices)),
                        num_shards=self.num_shards,
                        slices=tuple(
                            _next_slice(loaded, cursor, shard, keys)
                            for shard, keys in own_slices(slices, ranges[world.rank])
                        ),
                        lengths=tuple(map(len, slices)),
                        ranges=ranges,
                        source=source,
                        content=content,
                        number=_number_of(samples, slices, world),
                        assignment=assignment,
                        world=world,
                        # With its draws: a prefetcher of the user's is at a later step when the batch is cut anew.
                        recut=_last(partial(self._recut, samples, slices), recorder.end, event),
                        load_again=self._loading_again(slices),
                        load_shard=None if self._may_write_records else partial(self._load_shard, slices),
                    )
                    samples.drop(step)
                    step += 1
                    slices = samples.cut(step)
            present = self._assignment
        self._samples.check_unchanged()

    def _keys_to_compare(self) -> list[SliceKeys]:
        """Return the keys of slices that every worker loads, by which their data are compared: the first of epoch 0.

        Whatever collates slices can collate these. Of a large one, torch's own function gets a part.
        """
        found: list[SliceKeys] = []
        missing = _NUM_COMPARED
        for keys in self._samples.epoch(0, bookmark={}).cut(0):
            if missing > 0:
                found.append(keys if self._has_own_collate else keys.first(missing))
                missing -= len(keys)
        return found

    def _recut(self, samples: EpochSamples, cut: Sequence[SliceKeys], batch: ShardedBatch) -> ShardedBatch:
        """Cut a batch for the present workers. An epoch that is under way follows them from its next step on."""
        assignment = self._follow_world()
        ranges = assignment.ranges(batch.cursor)
        held = {part.shard: part for part in batch.slices}
        slices = tuple(
            held[shard] if shard in held else _next_slice(map(self._loading.load, [keys]), batch.cursor, shard, keys)
            for shard, keys in own_slices(cut, ranges[assignment.world.rank])
        )
        return replace(
            batch,
            slices=slices,
            ranges=ranges,
            assignment=assignment,
            world=assignment.world,
            content=self._content or self._number_data(),
            number=_number_of(samples, cut, assignment.world),
        )

    def _loading_again(self, cut: Sequence[SliceKeys]) -> Callable[[Sequence[int], int], Any] | None:
        first = cut[0]
        if not isinstance(first, DrawKeys):
            return None  # a record may be written to by what makes a sample of it

        def load(places: Sequence[int], epochs_later: int) -> Any:
            draws = [draw for keys in cut if isinstance(keys, DrawKeys) for draw in keys.draws]
            keys = replace(first, draws=[draws[place] for place in places], epoch=first.epoch + epochs_later)
            return _check_slice(self._loading.load(keys))

        return load

    def _load_shard(self, cut: Sequence[SliceKeys], shard: int, epochs_later: int) -> Any:
        return _check_slice(self._loading.load(cut[shard].later(epochs_later)))

    def _number_data(self) -> int:
        self._content = slice_number([_check_slice(self._loading.load(keys)) for keys in self._keys_to_compare()])
        return self._content

    def _follow_world(self) -> ShardAssignment:
        """Return the shards of the present workers, assigned anew if they are others than before."""
        with self._following:  # a thread of the user's may fetch batches while the trainer's cuts one anew
            world = self._current_world()
            if world != self._assignment.world:
                self._assignment = ShardAssignment(world, self.num_shards)
                self._content = self._known_content  # else loaded anew, as new workers load what it is now
            return self._assignment


def _number_of(samples: EpochSamples, slices: Sequence[SliceKeys], world: World) -> int:
    """Return the number of what was read for a step; 0 where nobody compares it."""
    return samples.number(slices) if world.world_size > 1 else 0


def _last(value: Any, end: Callable[[int], object], event: int) -> Any:
    """Return `value` when the event of which it is the last part has ended."""
    end(event)
    return value


def _same_world(world: World) -> World:
    return world


def _next_slice(loaded: Iterator[Any], cursor: Cursor, shard: int, keys: SliceKeys) -> Slice:
    try:
        data = next(loaded)
    except Exception as error:
        ErrorPlace(cursor, shard, keys.indices()).note(error)
        raise
    return Slice(shard=shard, num_samples=len(keys), data=_check_slice(data), indices=keys.indices())


def _check_slice(data: Any) -> Any:
    if isinstance(data, FailedSlice):
        raise data.error
    return data


def _stream_samples(stream: Stream, cut: Cut, weights: object, lengths: object) -> Samples:
    for name, value in (("weights", weights), ("lengths", lengths)):
        if value is not None:
            raise ValueError(
                f"{name} need samples that can be asked for by their index, and the data are a stream, which is read "
                f"in its own order. Leave {name} out, or use a data set with __getitem__ and __len__. (LS409)"
            )
    return StreamedSamples(stream, cut)
