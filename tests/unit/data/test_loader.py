import gc
import multiprocessing
import random
import traceback
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.comm import World
from lockstep.data import ShardedBatch, ShardedLoader
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


def test_the_last_batch_is_smaller_and_says_so() -> None:
    sizes = [batch.num_samples for batch in loader().epoch(0)]
    assert sizes == [8, 8, 7]
    assert len(loader()) == 3


@pytest.mark.parametrize("sizes", [{"num_shards": "4"}, {"batch_size": 20.5}, {"batch_size": True}, {"seed": 1.0}])
def test_a_size_that_is_no_whole_number_is_told_when_the_loader_is_made(sizes: dict[str, Any]) -> None:
    options = {"batch_size": 8, "num_shards": 1} | sizes
    name, value = next(iter(sizes.items()))
    with pytest.raises(TypeError, match=f"{name} is {value!r}, expected a whole number"):
        ShardedLoader(range(20), **options)


def test_drop_last_leaves_out_the_smaller_last_batch_of_an_epoch_and_not_of_an_evaluation() -> None:
    dropping = loader(drop_last=True)
    batches = list(dropping.epoch(0))
    assert [batch.num_samples for batch in batches] == [8, 8]
    assert {batch.num_steps for batch in batches} == {len(dropping)} == {2}
    assert contents(batches).items() <= contents(list(loader().epoch(0))).items()
    assert sum(batch.num_samples for batch in dropping.fixed_assignment_epoch()) == 23
    assert dropping.source != loader().source
    assert len(loader(drop_last=True, length=24)) == 3
    with pytest.raises(ValueError, match="drop_last=True leaves out all of them"):
        loader(drop_last=True, length=7)


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
def test_a_loader_that_is_dropped_ends_its_processes(is_abandoned: bool) -> None:
    before = set(multiprocessing.active_children())
    whole: ShardedLoader | None = loader(num_workers=1, persistent_workers=not is_abandoned)
    epoch = whole.epoch(0)
    next(epoch)
    if not is_abandoned:
        list(epoch)
    (process,) = set(multiprocessing.active_children()) - before
    # At once, and not when the garbage collector comes by: by then torch can no longer tell them to end.
    gc.disable()
    try:
        whole = epoch = None
        process.join(30)
        assert process.exitcode == 0
    finally:
        gc.enable()


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

    alone = draw(1)
    assert len({tuple(values) for values in alone.values()}) == 23
    assert alone == draw(3) == draw(1, num_workers=2)


def test_a_data_sets_own_generator_is_left_as_it_was() -> None:
    data = OwnNoise()
    before = data.generator.get_state()
    list(ShardedLoader(data, batch_size=8, num_shards=4, collate_fn=list).epoch(0))
    assert torch.equal(data.generator.get_state(), before)


def test_a_batch_smaller_than_the_shards_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size is 3 and num_shards is 4"):
        loader(batch_size=3)


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        loader(length=0)


def test_a_step_outside_the_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match="have 3 steps"):
        loader().epoch(0, start_step=4)


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
