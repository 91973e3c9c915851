import multiprocessing
import random
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from lockstep.comm import World
from lockstep.data import ShardedBatch, ShardedLoader
from lockstep.data.keyed import OwnGenerators, read_columns
from lockstep.engine.networks import find_networks, networks_walk
from lockstep.errors import DataFileError


class Noisy(Dataset[Any]):
    """Samples with augmentation from all three global generators."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, torch.rand(()).item(), random.random(), float(np.random.rand())  # noqa: NPY002


class Unreadable(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise DataFileError("3.png is truncated.")
        return index


def loader(rank: int = 0, world_size: int = 1, length: int = 23, **options: Any) -> ShardedLoader:
    world = World(rank=rank, world_size=world_size, group=None)
    settings = {"batch_size": 8, "num_shards": 4, "seed": 5} | options
    return ShardedLoader(Noisy(length), world=world, **settings)


def contents(batches: list[ShardedBatch]) -> dict[tuple[int, int], list[list[float]]]:
    """Return what each shard of each step holds."""
    return {
        (batch.cursor.step, part.shard): [column.tolist() for column in part.data]
        for batch in batches
        for part in batch.slices
    }


def merged(world_size: int, epoch: int = 1, **options: Any) -> dict[tuple[int, int], list[list[float]]]:
    result: dict[tuple[int, int], list[list[float]]] = {}
    for rank in range(world_size):
        result.update(contents(list(loader(rank, world_size, **options).epoch(epoch))))
    return result


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_slices_do_not_depend_on_the_number_of_workers(world_size: int) -> None:
    assert merged(world_size) == merged(1)


def test_samples_do_not_depend_on_the_number_of_loading_processes() -> None:
    assert merged(1, num_workers=2) == merged(1)


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_sees_each_sample_once(shuffle: bool) -> None:
    seen = [index for columns in merged(3, shuffle=shuffle).values() for index in columns[0]]
    assert sorted(seen) == list(range(23))


@pytest.mark.parametrize("sizes", [{"num_shards": "4"}, {"batch_size": 20.5}, {"batch_size": True}, {"seed": 1.0}])
def test_a_size_that_is_no_whole_number_is_told_when_the_loader_is_made(sizes: dict[str, Any]) -> None:
    options = {"batch_size": 8, "num_shards": 1} | sizes
    name, value = next(iter(sizes.items()))
    with pytest.raises(TypeError, match=f"{name} is {value!r}, expected a whole number"):
        ShardedLoader(range(20), **options)


def test_drop_last_leaves_out_the_smaller_last_batch_of_an_epoch_and_not_of_an_evaluation() -> None:
    assert [batch.num_samples for batch in loader().epoch(0)] == [8, 8, 7]
    assert len(loader()) == 3
    dropping = loader(drop_last=True)
    batches = list(dropping.epoch(0))
    assert [batch.num_samples for batch in batches] == [8, 8]
    assert {batch.num_steps for batch in batches} == {len(dropping)} == {2}
    assert contents(batches).items() <= contents(list(loader().epoch(0))).items()
    assert sum(batch.num_samples for batch in dropping.fixed_assignment_epoch()) == 23
    assert dropping.source != loader().source
    assert len(loader(drop_last=True, length=24)) == 3


def test_a_last_batch_smaller_than_the_shards_leaves_slices_out() -> None:
    *_, last = loader(length=9).epoch(0)
    assert [part.shard for part in last.slices] == [0]
    *_, last = loader(rank=1, world_size=2, length=9).epoch(0)
    assert last.slices == ()


def test_epochs_have_different_orders_and_augmentation() -> None:
    whole = loader()
    first, second = (contents(list(whole.epoch(epoch))) for epoch in (0, 1))
    assert first != second
    assert contents(list(whole.epoch(0))) == first


def test_starting_in_the_middle_gives_the_rest_of_the_epoch() -> None:
    rest = [batch for batch in loader().epoch(2) if batch.cursor.step >= 1]
    assert contents(list(loader().epoch(2, start_step=1))) == contents(rest)


def test_an_abandoned_epoch_does_not_leak_into_the_next() -> None:
    whole = loader(num_workers=1)
    next(iter(whole.epoch(0)))
    assert contents(list(whole.epoch(1))) == merged(1)


@pytest.mark.parametrize("is_abandoned", [True, False])
@pytest.mark.usefixtures("no_garbage_collection")
def test_a_loader_that_is_dropped_ends_its_processes(is_abandoned: bool) -> None:
    before = set(multiprocessing.active_children())
    whole: ShardedLoader | None = loader(num_workers=1, persistent_workers=not is_abandoned)
    epoch = whole.epoch(0)
    next(epoch)
    if not is_abandoned:
        list(epoch)
    (process,) = set(multiprocessing.active_children()) - before
    # At once, and not when the garbage collector comes by: by then torch can no longer tell them to end.
    whole = epoch = None
    process.join(30)
    assert process.exitcode == 0


def test_loading_processes_may_come_from_a_fork_server() -> None:
    # The default of Python 3.14. They once ended at once, for their parent is not the worker.
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        assert merged(1, num_workers=1) == merged(1)
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_two_epochs_at_once_do_not_mix(num_workers: int) -> None:
    whole = loader(num_workers=num_workers)
    first = whole.epoch(0)
    batches = [next(first)]
    assert contents(list(whole.epoch(1))) == merged(1)
    batches.extend(first)
    assert contents(batches) == merged(1, epoch=0)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_error_comes_out_as_it_was_raised(num_workers: int) -> None:
    broken = ShardedLoader(Unreadable(), batch_size=4, num_shards=2, num_workers=num_workers)
    with pytest.raises(DataFileError, match=r"^3\.png is truncated\.$"):
        list(broken.epoch(0))


def test_collating_has_a_random_state_of_its_own() -> None:
    def collate(samples: list[Any]) -> Any:
        return [torch.tensor([sample[0] for sample in samples]), torch.rand(1)]

    alone, shared, processes = (
        merged(workers, collate_fn=collate, num_workers=loading) for workers, loading in ((1, 0), (2, 0), (1, 1))
    )
    assert alone == shared == processes
    assert len({columns[1][0] for columns in alone.values()}) == len(alone)


def test_loading_leaves_the_callers_generators_alone() -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.rand())  # noqa: NPY002

    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    expected = draw()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    list(loader().epoch(0))
    assert draw() == expected


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_is_changed_in_a_data_set_between_epochs_is_seen(num_workers: int) -> None:
    # Loading processes lived on for the next epoch, with the first one's data set: a `set_epoch` did nothing. Then only
    # those did that were told to stay.
    class Changing(Dataset[int]):
        epoch = 0

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return self.epoch

    def seen(**options: Any) -> list[int]:
        data = Changing()
        values: list[int] = []
        whole = ShardedLoader(data, batch_size=4, num_shards=1, num_workers=num_workers, **options)
        for data.epoch in range(2):
            values += [int(batch.slices[0].data[0]) for batch in whole.epoch(data.epoch)]
        return values

    assert seen() == [0, 1]
    assert seen(persistent_workers=True) == [0, 1]


GLOBAL_GENERATOR = np.random.default_rng(0)


class OwnNoise(Dataset[Any]):
    """Samples with noise from generators of its own; one is made when it is first needed."""

    def __init__(self) -> None:
        noise = random.Random(0)
        self.transforms: list[Any] = [lambda value: value + noise.random(), Shift(np.random.RandomState(0))]
        self.generator = torch.Generator()
        self.late: Any = None

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[int, list[float]]:
        if self.late is None:
            self.late = np.random.default_rng()
        value = torch.rand((), generator=self.generator).item()
        for transform in self.transforms:
            value = transform(value)
        return index, [value, self.late.random(), GLOBAL_GENERATOR.random(), self.transforms[1].generator.rand()]


class Shift:
    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, value: float) -> float:
        return value + float(self.generator.rand())


def test_generators_of_the_data_sets_own_are_seeded_for_each_sample() -> None:
    def draw(world_size: int, **options: Any) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}
        for rank in range(world_size):
            world = World(rank=rank, world_size=world_size, group=None)
            whole = ShardedLoader(OwnNoise(), batch_size=8, num_shards=4, world=world, collate_fn=list, **options)
            found.update(sample for batch in whole.epoch(0) for part in batch.slices for sample in part.data)
        return found

    data = OwnNoise()
    before = data.generator.get_state()
    list(ShardedLoader(data, batch_size=8, num_shards=4, collate_fn=list).epoch(0))
    assert torch.equal(data.generator.get_state(), before), "it is left as it was"
    alone = draw(1)
    assert len({tuple(values) for values in alone.values()}) == 23
    assert alone == draw(3) == draw(1, num_workers=2)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: loader(batch_size=3), "batch_size is 3 and num_shards is 4"),
        (lambda: loader(length=0), "empty"),
        (lambda: loader().epoch(0, start_step=4), "have 3 steps"),
        (lambda: loader(drop_last=True, length=7), "drop_last=True leaves out all of them"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_a_data_set_that_grows_or_shrinks_is_refused() -> None:
    data = Noisy(23)
    batches = ShardedLoader(data, batch_size=8, num_shards=4)
    assert len(list(batches.epoch(0))) == 3
    data.length = 25
    with pytest.raises(ValueError, match=r"had 23 samples .* and has 25 now"):
        batches.epoch(1)
    data.length = 23
    epoch = batches.epoch(1)
    assert [next(epoch).cursor.step for _ in range(3)] == [0, 1, 2]
    data.length = 22
    with pytest.raises(ValueError, match="has 22 now"):
        next(epoch)


class Failing(Dataset[Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        if index == 7:
            raise KeyError("the seventh")
        return torch.zeros(index % 2 + 1)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_data_set_names_sample_shard_and_step(workers: int) -> None:
    loader = ShardedLoader(Failing(), batch_size=2, num_shards=2, shuffle=False, num_workers=workers)
    with pytest.raises(KeyError) as caught:
        list(loader.epoch(0))
    text = "".join(traceback.format_exception(caught.value))
    assert "This was sample 7 of the data set." in text
    assert "At epoch 0, step 3 (counted from 0), shard 1, samples 7 of the data set." in text


def test_samples_of_other_shapes_are_named() -> None:
    loader = ShardedLoader(Failing(), batch_size=2, num_shards=1, shuffle=False)
    with pytest.raises(RuntimeError, match="stack") as caught:
        next(loader.epoch(2))
    assert caught.value.__notes__ == ["These samples of the data set do not make a batch: 0, 1."]


# -- An epoch that continues with other workers ------------------------------------------------------------------------


Contents = dict[tuple[int, int], list[list[float]]]


class Workers:
    """Loaders of several workers in one process; rank and number of each may change."""

    def __init__(self, worlds: list[World], **options: Any) -> None:
        self.worlds = worlds
        settings = {"batch_size": 8, "num_shards": 4, "seed": 5} | options
        self.loaders = [ShardedLoader(Noisy(30), world=self.ask(place), **settings) for place in range(len(worlds))]

    def ask(self, place: int) -> Callable[[], World]:
        return lambda: self.worlds[place]


def world(rank: int, world_size: int) -> World:
    return World(rank=rank, world_size=world_size, group=None)


def undisturbed(epoch: int = 1) -> Contents:
    return contents(list(ShardedLoader(Noisy(30), world=world(0, 1), batch_size=8, num_shards=4, seed=5).epoch(epoch)))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("lost", "left"), [(0, [1, 2]), (1, [0, 2]), (2, [0]), (0, [2])])
def test_remaining_workers_load_what_a_lost_one_had(lost: int, left: list[int], num_workers: int) -> None:
    workers = Workers([world(rank, 3) for rank in range(3)], num_workers=num_workers)
    epochs = [loader.epoch(1) for loader in workers.loaders]
    before = contents([next(epoch) for epoch in epochs])
    batches = [next(epoch) for epoch in epochs]
    for rank, place in enumerate(left):
        workers.worlds[place] = world(rank, len(left))
    repeated = contents([batches[place].for_present_workers() for place in left])
    after: Contents = {}
    for place in left:
        after |= contents(list(epochs[place]))
    assert before | repeated | after == undisturbed()
    assert lost not in left


def test_a_worker_keeps_the_slices_that_it_has() -> None:
    workers = Workers([world(rank, 2) for rank in range(2)])
    batch = next(workers.loaders[1].epoch(0))
    workers.worlds[1] = world(0, 1)
    again = batch.for_present_workers()
    assert {part.shard for part in again.slices} == {0, 1, 2, 3}
    assert all(any(part is each for each in again.slices) for part in batch.slices)


def test_a_batch_of_earlier_workers_can_be_cut_for_later_ones_more_than_once() -> None:
    workers = Workers([world(0, 1)])
    batches: list[ShardedBatch] = list(workers.loaders[0].epoch(1))  # all were loaded before the workers changed
    workers.worlds[0] = world(1, 2)
    mine = contents([batch.for_present_workers() for batch in batches])
    workers.worlds[0] = world(0, 2)
    others = contents([batch.for_present_workers() for batch in batches])
    assert mine.keys().isdisjoint(others)
    assert mine | others == undisturbed()


def test_an_epoch_continues_with_more_workers() -> None:
    workers = Workers([world(0, 1), world(1, 2)])
    first = workers.loaders[0].epoch(1)
    before = contents([next(first)])
    workers.worlds[0] = world(0, 2)
    batch = next(first)  # loaded for the workers of before: the loader does not ask in mid-epoch
    assert len(batch.ranges) == 1
    batches = [batch.for_present_workers(), *first, *workers.loaders[1].epoch(1, start_step=1)]
    assert before | contents(batches) == undisturbed()
    assert len(batches) == 2 * 3


def test_more_workers_than_shards_are_refused() -> None:
    workers = Workers([world(0, 1)])
    batch = next(workers.loaders[0].epoch(0))
    workers.worlds[0] = world(0, 5)
    with pytest.raises(ValueError, match="5 workers"):
        batch.for_present_workers()


# -- Columns of tensors are read at once -------------------------------------------------------------------------------


class Drawing(TensorDataset):
    """A data set that looks like torch's, and draws."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return (self.tensors[0][index] + torch.rand(()),)


def columns() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(9, 2, 3), torch.arange(9), torch.rand(9, 4).bfloat16(), torch.rand(9) > 0.5


@pytest.mark.parametrize(
    "data",
    [
        TensorDataset(*columns()),
        Subset(TensorDataset(*columns()), [8, 7, 6, 5, 4, 3, 2, 1, 0]),
        Subset(Subset(TensorDataset(*columns()), range(9)), [0, 2, 4, 6, 8]),
    ],
)
def test_columns_are_what_collating_samples_gives(data: Dataset[Any]) -> None:
    indices = [3, 0, 4, 4]
    expected = default_collate([data[index] for index in indices])
    found = read_columns(data, indices)
    assert found is not None
    assert type(found) is type(expected)
    for ours, collated in zip(found, expected, strict=True):
        assert (ours.dtype, ours.stride()) == (collated.dtype, collated.stride())
        assert torch.equal(ours, collated)


@pytest.mark.parametrize(
    "data",
    [
        Drawing(torch.zeros(9)),
        ConcatDataset([TensorDataset(torch.zeros(9))]),
        Subset(TensorDataset(torch.zeros(9)), [-1] * 9),
        Subset(TensorDataset(torch.zeros(2)), range(9)),
        TensorDataset(torch.zeros(9, requires_grad=True)),
        TensorDataset(torch.zeros(2, 9).t()),
        TensorDataset(torch.zeros(9, dtype=torch.complex64).conj()),
    ],
)
def test_what_may_give_something_else_is_asked_sample_by_sample(data: Dataset[Any]) -> None:
    assert read_columns(data, [3, 0, 4]) is None


def test_a_sample_outside_of_the_tensors_is_the_data_sets_own_error() -> None:
    data = Subset(TensorDataset(torch.zeros(4)), range(9))
    loader = ShardedLoader(data, batch_size=9, num_shards=1, world=World(rank=0, world_size=1, group=None))
    with pytest.raises(IndexError, match="out of bounds"):
        list(loader.epoch(0))


def test_a_subclass_that_draws_gets_a_random_state_for_each_sample() -> None:
    world = World(rank=0, world_size=1, group=None)

    def load(num_shards: int) -> list[float]:
        loader = ShardedLoader(
            Drawing(torch.zeros(8)), batch_size=8, num_shards=num_shards, seed=3, shuffle=False, world=world
        )
        return [value for batch in loader.epoch(0) for part in batch.slices for value in part.data[0].tolist()]

    assert load(1) == load(4)
    assert len(set(load(1))) == 8


# -- Random generators that an object holds are found, whatever else it holds ------------------------------------------


def test_tensors_as_keys_are_not_printed() -> None:
    # The state of an optimizer has them. Their text took 70 ms in each search; a loss that mentions its trainer leads
    # there, and the first steps of each set of workers search.
    class Key(torch.Tensor):
        def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
            raise AssertionError("printed")

    key, generator, network = torch.ones(2).as_subclass(Key), random.Random(0), torch.nn.Linear(1, 1)
    state = {key: {"generator": generator, "network": network}}
    assert [found.path for found in OwnGenerators([("", state)]).find()] == [".0.generator"]
    assert find_networks(networks_walk([state]), torch.nn.Linear(1, 1)) == {"0.network": network}


def test_generators_under_objects_are_told_apart_by_their_places_alone() -> None:
    # The text of an object has its address: the seed of a generator under it was another one on each worker.
    class Key:
        def __repr__(self) -> str:
            raise AssertionError("printed")

    held = {Key(): random.Random(1), "named": torch.Generator(), Key(): random.Random(2)}
    assert [(each.path, each.generator) for each in OwnGenerators([("", held)]).find()] == [
        (f".{name}", generator) for name, generator in zip(["0", "named", "2"], held.values(), strict=True)
    ]


@pytest.mark.parametrize("root", [torch.zeros(2), random.Random, 3, None])
def test_there_are_none_in_what_holds_nothing(root: object) -> None:
    assert OwnGenerators([("", root)]).find() == []
