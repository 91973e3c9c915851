"""The samples of streams: which worker sees which, in which order, wherever an epoch begins."""

import copy
import json
import random
import tarfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

import lockstep as ls
from lockstep.comm import World
from lockstep.data import Stream
from lockstep.data.stream import BUFFER_SIZE

Contents = dict[tuple[int, int], list[int]]
FILES = [f"folder/{name}" for name in "abcde"]
LENGTHS = [23, 5, 0, 41, 31]


class Numbers(IterableDataset[int]):
    """Counts; each epoch in another order of halves."""

    def __init__(self, length: int = 100) -> None:
        self.length = length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from [*range(self.length)][:: -1 if self.epoch % 2 else 1]


class Stateful(Numbers):
    """Tells its place, and counts what is read."""

    num_read = 0

    def __init__(self, length: int = 100) -> None:
        super().__init__(length)
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        numbers = list(super().__iter__())
        while self.place < self.length:
            Stateful.num_read += 1
            self.place += 1
            yield numbers[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.place = state["place"]


class Counting:
    """Reads parts: their names with numbers; notes which parts were opened."""

    def __init__(self) -> None:
        self.opened: list[str] = []

    def __call__(self, name: str) -> Iterator[int]:
        self.opened.append(name)
        part = FILES.index(name)
        yield from range(1000 * part, 1000 * part + LENGTHS[part])


def sources() -> dict[str, Any]:
    return {
        "whole": Numbers(),
        "stateful": Stateful(),
        "parts": Stream(FILES, read=Counting(), buffer_size=17),
        "lengths": Stream(FILES, read=Counting(), lengths=LENGTHS, buffer_size=17),
        "endless": Stream(Numbers(30), steps_per_epoch=12, buffer_size=7),
    }


def loader(data: Any, rank: int = 0, world_size: int = 1, **options: Any) -> ls.ShardedLoader:
    settings = {"batch_size": 8, "num_shards": 3, "seed": 5} | options
    return ls.ShardedLoader(data, world=World(rank=rank, world_size=world_size, group=None), **settings)


def contents(batches: Any) -> Contents:
    return {
        (batch.cursor.step, part.shard): part.data.tolist() if hasattr(part.data, "tolist") else part.data
        for batch in batches
        for part in batch.slices
    }


def resumed(make: Callable[[], Any], stop: int, epoch: int = 0, **options: Any) -> ls.ShardedLoader:
    """Return a loader of data that are made anew, with the state of another one after so many batches of an epoch."""
    before, after = loader(make(), **options), loader(make(), **options)
    batches = before.epoch(epoch)
    for _ in range(stop):
        next(batches)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    return after


def from_step(whole: Contents, step: int) -> Contents:
    return {key: value for key, value in whole.items() if key[0] >= step}


def flat(found: Contents) -> list[int]:
    return [number for key in sorted(found) for number in found[key]]


@pytest.mark.parametrize("kind", sources())
@pytest.mark.parametrize("shuffle", [True, False])
def test_slices_do_not_depend_on_the_number_of_workers(kind: str, shuffle: bool) -> None:
    whole = contents(loader(sources()[kind], shuffle=shuffle).epoch(1))
    for world_size in (2, 3):
        found: Contents = {}
        for rank in range(world_size):
            found |= contents(loader(sources()[kind], rank, world_size, shuffle=shuffle).epoch(1))
        assert found == whole


@pytest.mark.parametrize("kind", ["whole", "stateful", "parts", "lengths"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_sample_comes_once_per_epoch(kind: str, shuffle: bool) -> None:
    data = loader(sources()[kind], shuffle=shuffle)
    first, second = (flat(contents(data.epoch(epoch))) for epoch in range(2))
    assert sorted(first) == sorted(second)
    assert len(set(first)) == len(first) == 100
    assert (first == sorted(first)) is not shuffle
    assert not shuffle or first != second


def test_only_neighbours_are_shuffled() -> None:
    found = flat(contents(loader(Stream(Numbers(), buffer_size=10)).epoch(0)))
    assert max(abs(place - number) for place, number in enumerate(found)) < 10
    assert BUFFER_SIZE == 1000


@pytest.mark.parametrize("kind", sources())
@pytest.mark.parametrize("stop", [1, 5, 11])
def test_a_resumed_epoch_goes_on_with_the_same_samples(kind: str, stop: int) -> None:
    whole = contents(loader(sources()[kind]).epoch(1))
    rest = from_step(whole, stop)
    assert contents(resumed(lambda: sources()[kind], stop, epoch=1).epoch(1, stop)) == rest
    assert contents(loader(sources()[kind]).epoch(1, stop)) == rest  # also without the state


def test_a_state_saves_reading() -> None:
    after = resumed(lambda: Stream(Stateful(), buffer_size=8), 10)
    Stateful.num_read = 0
    next(after.epoch(0, 10))
    assert Stateful.num_read <= 8 * 4


def test_parts_before_the_place_are_not_opened() -> None:
    read = Counting()
    after = resumed(lambda: Stream(FILES, read=read, buffer_size=8), 11, shuffle=False)
    read.opened.clear()
    next(after.epoch(0, 11))
    assert set(read.opened) <= {"folder/d", "folder/e"}


def test_with_lengths_each_worker_reads_its_share_alone() -> None:
    names = [str(number) for number in range(20)]
    opened: list[str] = []

    def read_part(name: str) -> Iterator[int]:
        opened.append(name)
        yield from range(10 * int(name), 10 * int(name) + 10)

    def read_all(rank: int, step: int) -> int:
        stream = Stream(names, read=read_part, lengths=[10] * 20, buffer_size=30)
        data = loader(stream, rank, 3)
        opened.clear()
        list(data.epoch(0, step))
        return len(opened)

    assert [read_all(rank, 0) for rank in range(3)] == [8, 8, 5]  # for 75, 75 and 50 records
    assert max(read_all(rank, 20) for rank in range(3)) <= 3


def test_a_state_that_loses_records_is_not_used() -> None:
    class Buffered(Stateful):
        def load_state_dict(self, state: Mapping[str, int]) -> None:
            self.place = state["place"] + 1  # what was in a buffer is lost

    whole = contents(loader(Stream(Buffered(), buffer_size=8)).epoch(0))
    after = resumed(lambda: Stream(Buffered(), buffer_size=8), 6)
    with pytest.warns(UserWarning, match="leads to other records than before"):
        assert contents(after.epoch(0, 6)) == from_step(whole, 6)


def test_a_stream_that_is_another_one_when_it_is_resumed_is_refused() -> None:
    def changed(name: str) -> Iterator[int]:
        yield from (number + 1 for number in Counting()(name))

    reads = iter([Counting(), changed])
    after = resumed(lambda: Stream(FILES, read=next(reads), buffer_size=8), 6)
    with (
        pytest.warns(UserWarning, match="leads to other records"),
        pytest.raises(ValueError, match="The stream has other records now"),
    ):
        next(after.epoch(0, 6))


def test_the_end_is_known_in_the_last_step() -> None:
    batches = list(loader(Numbers(20)).epoch(0))
    assert [batch.num_steps for batch in batches] == [None, None, 3]
    assert [batch.num_samples for batch in batches] == [8, 8, 4]
    assert [batch.num_steps for batch in loader(Numbers(20), drop_last=True).epoch(0)] == [None, 2]
    assert [batch.num_steps for batch in loader(Numbers(16)).epoch(0)] == [None, 2]
    dropped = loader(Numbers(20), drop_last=True)
    assert sum(batch.num_samples for batch in dropped.fixed_assignment_epoch()) == 20


def test_lengths_and_steps_per_epoch_tell_how_many_steps_there_are() -> None:
    found = sources()
    assert len(loader(found["lengths"])) == 13
    assert loader(found["lengths"]).num_samples == 100
    assert len(loader(found["endless"])) == 12
    assert loader(Numbers()).num_steps is None
    with pytest.raises(TypeError, match="whose length is known only at its end"):
        len(loader(Numbers()))


@pytest.mark.parametrize("lengths", [np.array(LENGTHS), list(np.array(LENGTHS)), torch.tensor(LENGTHS)])
def test_numbers_of_numpy_and_torch_are_whole_numbers_as_pythons(lengths: Any) -> None:
    # They come of what counts the records of files. The message said that whole numbers were expected.
    stream = Stream(FILES, read=Counting(), lengths=lengths, buffer_size=np.int64(17))
    assert str(stream) == str(sources()["lengths"])
    assert contents(loader(stream).epoch(0)) == contents(loader(sources()["lengths"]).epoch(0))
    assert len(loader(Stream(Numbers(), steps_per_epoch=np.int64(12)))) == 12


def test_a_stream_without_an_end_is_read_on_by_the_next_epoch() -> None:
    def numbers(_part: object) -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    def stream() -> Stream:
        return Stream([0], read=numbers, steps_per_epoch=4, buffer_size=5)

    data = loader(stream())
    found = [flat(contents(data.epoch(epoch))) for epoch in range(3)]
    assert len({number for each in found for number in each}) == 3 * 4 * 8
    assert flat(contents(loader(stream()).epoch(2))) == found[2]


def test_a_short_stream_with_steps_per_epoch_begins_again() -> None:
    data = loader(Stream(Numbers(30), steps_per_epoch=15, buffer_size=6))  # 120 samples are four passes
    found = flat(contents(data.epoch(0)))
    assert all(found.count(number) == 4 for number in range(30))
    assert len(set(map(tuple, (found[start : start + 30] for start in range(0, 120, 30))))) == 4


@pytest.mark.parametrize("kind", sources())
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_batches_that_were_fetched_ahead_are_whole_for_other_workers(kind: str, ahead: int) -> None:
    # The loader had forgotten their samples when the generator went on: none were left in a batch that was cut anew.
    whole = contents(loader(sources()[kind]).epoch(1))
    worlds = [World(rank=rank, world_size=3, group=None) for rank in range(3)]
    loaders = [
        ls.ShardedLoader(sources()[kind], batch_size=8, num_shards=3, seed=5, world=lambda rank=rank: worlds[rank])  # type: ignore[misc]
        for rank in range(3)
    ]
    epochs = [each.epoch(1) for each in loaders]
    found = contents([next(epoch) for epoch in epochs])
    fetched = [[next(epoch) for _ in range(1 + ahead * (rank != 2))] for rank, epoch in enumerate(epochs)]
    worlds[0], worlds[2] = (World(rank=rank, world_size=2, group=None) for rank in (0, 1))  # rank 1 is lost
    for rank in (0, 2):
        again = [batch.for_present_workers() for batch in fetched[rank]]
        assert all(batch.slices for batch in again)
        found |= contents([*again, *epochs[rank]])
    assert found == whole


def test_transform_runs_for_the_samples_of_the_worker_alone_with_its_own_random_numbers() -> None:
    calls: list[int] = []

    def transform(record: int) -> float:
        calls.append(record)
        return record + torch.rand(()).item() + random.random()

    whole = contents(loader(Stream(Numbers(), transform=transform)).epoch(0))
    calls.clear()
    mine = contents(loader(Stream(Numbers(), transform=transform), 1, 3).epoch(0))
    assert mine == {key: value for key, value in whole.items() if key in mine}
    assert len(calls) == len(flat(mine)) < 40
    loaded = contents(loader(Stream(Numbers(), transform=transform), 1, 3, num_workers=2).epoch(0))
    assert loaded == mine


def test_a_transform_may_change_its_record() -> None:
    def take(record: dict[str, list[int]]) -> int:
        return record["numbers"].pop()

    class Records(IterableDataset[dict[str, list[int]]]):
        def __iter__(self) -> Iterator[dict[str, list[int]]]:
            yield from ({"numbers": [number]} for number in range(20))

    batch = next(loader(Stream(Records(), transform=take)).epoch(0))
    assert contents([batch.recut(copy.copy(batch))]) == contents([batch])
    moved = batch.recut(ls.ShardedBatch(**{name: getattr(batch, name) for name in batch.__slots__} | {"slices": ()}))
    assert contents([moved]) == contents([batch])


def test_random_numbers_of_the_stream_itself_depend_on_the_epoch_alone() -> None:
    class Kept(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield from (number for number in range(400) if random.random() < 0.5)

    def stream() -> Stream:
        return Stream(Kept(), buffer_size=10)

    whole = contents(loader(stream()).epoch(3))
    random.seed(77)
    assert contents(loader(stream()).epoch(3)) == whole
    assert contents(loader(stream()).epoch(3, 12)) == from_step(whole, 12)


def read_shuffled(part: int, rng: Any = random) -> Iterator[int]:
    numbers = list(range(10 * part, 10 * part + 10))
    rng.shuffle(numbers)
    yield from numbers


@pytest.mark.parametrize("lengths", [None, [10] * 10])
@pytest.mark.parametrize("read", [read_shuffled, partial(read_shuffled, rng=random.Random(0))])
def test_a_part_that_shuffles_itself_is_the_same_wherever_its_reading_begins(read: Any, lengths: Any) -> None:
    # Two shares begin in the middle of a part: read in other random states its records came twice, or never.
    def data() -> Stream:
        return Stream(range(10), read=read, lengths=lengths, buffer_size=7)

    whole = contents(loader(data()).epoch(1))
    assert sorted(flat(whole)) == list(range(100))
    rest = from_step(whole, 5)
    assert contents(resumed(data, 5, epoch=1).epoch(1, 5)) == rest  # without a warning: the state was used
    assert contents(loader(data()).epoch(1, 5)) == rest


def test_a_state_that_is_late_is_not_used_where_neighbours_are_equal() -> None:
    class Late(Stateful):
        def __iter__(self) -> Iterator[int]:
            while self.place < self.length:
                yield self.place // 3
                self.place += 1  # too late: while the record is used, the state leads to the record itself
            self.place = 0

    def data() -> Stream:
        return Stream(Late(), buffer_size=8)

    whole = contents(loader(data()).epoch(0))
    for stop in range(2, 12):
        after = resumed(data, stop)
        with pytest.warns(UserWarning, match="leads to other records than before"):
            assert contents(after.epoch(0, stop)) == from_step(whole, stop)


def test_workers_whose_records_are_swapped_within_a_block_have_other_numbers() -> None:
    class Swapped(IterableDataset[int]):
        def __init__(self, swapped: range) -> None:
            self.swapped = swapped

        def __iter__(self) -> Iterator[int]:
            yield from (*range(20), *self.swapped, *range(60, 100))

    def numbers(rank: int, swapped: range) -> list[int]:
        return [batch.number for batch in loader(Swapped(swapped), rank, world_size=2).epoch(0)]

    assert numbers(0, range(20, 60)) == numbers(1, range(20, 60)) != numbers(1, range(59, 19, -1))


def test_nothing_is_read_after_a_last_batch_that_is_smaller() -> None:
    # of a stream that is read again
    assert sum(batch.num_samples for batch in loader(Numbers(10_004), batch_size=1000).epoch(0)) == 10_004


def test_a_slice_tells_where_its_records_are_as_a_sequence() -> None:
    places = next(loader(Numbers(), shuffle=False, batch_size=64, num_shards=2).epoch(0)).slices[1].indices
    assert list(places) == [*places[:]] == [places[n] for n in range(32)] == list(range(32, 64))


def test_workers_of_which_one_has_another_part_have_other_numbers() -> None:
    def content(files: list[str]) -> int:
        stream = Stream(FILES, read=lambda name: [f"{files[FILES.index(name)]} {n}" for n in range(5)], lengths=[5] * 5)
        return next(loader(stream, num_shards=4).epoch(0)).content

    assert content(FILES) == content(list(FILES)) != content([*FILES[:4], "another"])


def test_a_stream_without_an_end_goes_on_after_an_error_of_its_source() -> None:
    class Failing(Numbers):
        fails = True

        def __iter__(self) -> Iterator[int]:
            for number in super().__iter__():
                if number == 60 and self.fails:
                    self.fails = False
                    raise OSError("no route to host")
                yield number

    whole = contents(loader(Stream(Numbers(), steps_per_epoch=12, buffer_size=8)).epoch(0))
    data = loader(Stream(Failing(), steps_per_epoch=12, buffer_size=8))
    found: Contents = {}
    batches = data.epoch(0)
    with pytest.raises(OSError, match="no route to host"):
        found.update(each for batch in batches for each in contents([batch]).items())
    assert found | contents(data.epoch(0, len(found) // 3)) == whole


def test_samples_that_are_there_are_not_seeded_for_but_their_collating_is() -> None:
    # Seeding for each took three quarters of the time of a stream without `transform`.
    seeds: list[int] = []

    def collate(samples: list[int]) -> list[tuple[int, float]]:
        seeds.append(torch.initial_seed())
        return [(sample, random.random()) for sample in samples]

    whole = contents(loader(Stream(Numbers(), buffer_size=10), collate_fn=collate).epoch(0))
    assert len(set(seeds)) == len(seeds) == len(whole)
    mine = contents(loader(Stream(Numbers(), buffer_size=10), 1, 2, collate_fn=collate, num_workers=1).epoch(0))
    assert mine == {key: value for key, value in whole.items() if key in mine}


def test_a_stream_of_the_first_records() -> None:
    short = Stream(FILES, read=Counting(), lengths=LENGTHS).first(30)
    assert len(loader(short)) == 4
    assert len(flat(contents(loader(short).epoch(0)))) == 30
    assert list(short) == list(Stream(FILES, read=Counting()))[:30]


def test_a_skip_of_many_records_is_told() -> None:
    data = loader(Numbers(30_000), batch_size=3000)
    with pytest.warns(UserWarning, match="over 12,000 records that were seen already"):
        next(data.epoch(0, 4))
    next(data.epoch(0, 2))


class Other(IterableDataset[int]):
    """Gives other numbers whenever it is read."""

    num_passes = 0

    def __iter__(self) -> Iterator[int]:
        Other.num_passes += 1
        yield from range(self.num_passes, 50)


class Split(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self._distributed = "rank 0 of 2"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: loader(iter(Numbers())), TypeError, "can be read only once"),
        (lambda: Stream(7), TypeError, "expected an object with __iter__"),
        (lambda: Stream("a.txt", read=iter), TypeError, "expected a list: with `read`, give a list of file names"),
        (lambda: Stream([], read=iter), ValueError, "has no parts: the list is empty"),
        (
            lambda: Stream(FILES, read=iter, lengths=[1]),
            ValueError,
            "lengths has 1 numbers, and the stream has 5 parts",
        ),
        (lambda: Stream(FILES, read=iter, lengths=[1, 1, 1, 1, -1]), ValueError, "lengths holds -1"),
        (lambda: Stream(FILES, read=iter, lengths=np.ones(5)), ValueError, "lengths holds 1.0"),
        (lambda: Stream(FILES, read=iter, lengths=np.ones(5, bool)), ValueError, "lengths holds True"),
        (lambda: Stream(FILES, read=iter, lengths=[0] * 5), ValueError, "lengths are all zero"),
        (lambda: Stream(Numbers(), buffer_size=0), ValueError, "buffer_size of the stream is 0"),
        (lambda: Stream(Numbers(), lengths=[9], steps_per_epoch=2), ValueError, "lengths or steps_per_epoch, not both"),
        (lambda: Stream(Split()), ValueError, "gives each rank a part of its own"),
        (lambda: loader(Numbers(0)), ValueError, "The stream has no records"),
        (lambda: loader(Other()), ValueError, "The stream is not repeatable"),
        (lambda: loader(Numbers(), weights=[1.0]), ValueError, "weights need samples that can be asked for"),
        (lambda: loader(Numbers(), lengths=[1.0]), ValueError, "lengths need samples that can be asked for"),
        (lambda: list(loader(Numbers(5), drop_last=True).epoch(0)), ValueError, "has 5 samples: fewer than a batch"),
        (
            lambda: list(loader(Stream(FILES, read=Counting(), lengths=[23, 5, 1, 41, 31])).epoch(0)),
            ValueError,
            "part 'folder/c' of the stream has 1 records, and it has only 0",
        ),
        (
            lambda: list(loader(Stream(FILES, read=Counting(), lengths=[23, 4, 0, 41, 31])).epoch(0)),
            ValueError,
            "part 'folder/b' of the stream has 4 records, and it has more",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_an_error_of_the_stream_says_where() -> None:
    def broken(name: str) -> Iterator[int]:
        yield from range(20)
        raise OSError(f"{name} is damaged")

    with pytest.raises(OSError, match="is damaged") as caught:
        list(loader(Stream(FILES, read=broken, buffer_size=10), shuffle=False).epoch(0))
    assert "part 'folder/a' of the stream" in str(caught.value.__notes__)


# -- Streams of libraries: each record once, also where a run is resumed -----------------------------------------------


NUMBERS = list(range(400))


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    return pytest.importorskip("datasets")


def library_loader(data: Any, rank: int = 0, world_size: int = 1) -> ls.ShardedLoader:
    world = World(rank=rank, world_size=world_size, group=None)
    return ls.ShardedLoader(ls.Stream(data, buffer_size=40), batch_size=20, num_shards=2, world=world)


def records_of(batches: Any) -> dict[tuple[int, int], list[int]]:
    return {(batch.cursor.step, part.shard): part.data["x"].tolist() for batch in batches for part in batch.slices}


def numbers(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        for number in range(100):
            yield {"x": 100 * shard + number}


def make(datasets: Any, kind: str) -> Any:
    if kind == "generator":
        return datasets.IterableDataset.from_generator(numbers, gen_kwargs={"shards": list(range(4))})
    rows = datasets.Dataset.from_dict({"x": NUMBERS}).to_iterable_dataset(num_shards=4)
    return {
        "arrow": lambda: rows,
        "batched": lambda: rows.map(lambda batch: {"x": batch["x"]}, batched=True, batch_size=50),
        "shuffled": lambda: rows.shuffle(seed=1, buffer_size=50),
    }[kind]()


@pytest.mark.parametrize("kind", ["generator", "arrow", "batched", "shuffled"])
def test_streams_of_hugging_face_give_each_record_once(datasets: Any, kind: str, recwarn: Any) -> None:
    whole = records_of(library_loader(make(datasets, kind)).epoch(1))
    assert sorted(chain.from_iterable(whole.values())) == NUMBERS
    assert (
        records_of(library_loader(make(datasets, kind), 0, 2).epoch(1))
        | records_of(library_loader(make(datasets, kind), 1, 2).epoch(1))
        == whole
    )
    recwarn.clear()
    for stop in (1, 11, 17):
        before = library_loader(make(datasets, kind))
        batches = before.epoch(1)
        for _ in range(stop):
            next(batches)
        state = json.loads(json.dumps(before.state_dict()))
        after = library_loader(make(datasets, kind))
        after.load_state_dict(state)
        assert records_of(after.epoch(1, stop)) == {key: value for key, value in whole.items() if key[0] >= stop}
    # The buffer of a shuffle is not in its state: what it leads to is found to differ, and not used.
    found = [str(warning.message) for warning in recwarn if "LS411" in str(warning.message)]
    assert len(found) == (2 if kind == "shuffled" else 0)


def test_a_share_of_hugging_faces_is_refused(datasets: Any) -> None:
    share = pytest.importorskip("datasets.distributed").split_dataset_by_node(make(datasets, "arrow"), 0, 2)
    with pytest.raises(ValueError, match="gives each rank a part of its own"):
        library_loader(share)


# WebDataset leaves files to the garbage collector, which Python warns of.
@pytest.mark.filterwarnings("ignore:.*unclosed file:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_tar_files_of_webdataset_are_parts(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    (tmp_path / "text").write_text("x", encoding="utf-8")
    for part in range(2):
        with tarfile.open(tmp_path / f"{part}.tar", "w") as file:
            for number in range(10):
                file.add(tmp_path / "text", f"{part}-{number}.txt")

    def read_tar(file: Path) -> Any:
        return webdataset.WebDataset(str(file), shardshuffle=False, empty_check=False)

    files = sorted(tmp_path.glob("*.tar"))
    stream = ls.Stream(files, read=read_tar, transform=lambda record: record["__key__"], lengths=[10, 10])
    found = [
        key
        for rank in range(2)
        for batch in ls.ShardedLoader(
            stream, batch_size=4, num_shards=2, world=World(rank=rank, world_size=2, group=None)
        ).epoch(0)
        for part in batch.slices
        for key in part.data
    ]
    assert sorted(found) == sorted(f"{part}-{number}" for part in range(2) for number in range(10))
