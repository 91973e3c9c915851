"""Streams of libraries: each record once, also where a run is resumed."""

import json
import tarfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import lockstep as ls
from lockstep.comm import World

NUMBERS = list(range(400))


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    return pytest.importorskip("datasets")


def loader(data: Any, rank: int = 0, world_size: int = 1) -> ls.ShardedLoader:
    world = World(rank=rank, world_size=world_size, group=None)
    return ls.ShardedLoader(ls.Stream(data, buffer_size=40), batch_size=20, num_shards=2, world=world)


def contents(batches: Any) -> dict[tuple[int, int], list[int]]:
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
    whole = contents(loader(make(datasets, kind)).epoch(1))
    assert sorted(chain.from_iterable(whole.values())) == NUMBERS
    assert (
        contents(loader(make(datasets, kind), 0, 2).epoch(1)) | contents(loader(make(datasets, kind), 1, 2).epoch(1))
        == whole
    )
    recwarn.clear()
    for stop in (1, 11, 17):
        before = loader(make(datasets, kind))
        batches = before.epoch(1)
        for _ in range(stop):
            next(batches)
        state = json.loads(json.dumps(before.state_dict()))
        after = loader(make(datasets, kind))
        after.load_state_dict(state)
        assert contents(after.epoch(1, stop)) == {key: value for key, value in whole.items() if key[0] >= stop}
    # The buffer of a shuffle is not in its state: what it leads to is found to differ, and not used.
    found = [str(warning.message) for warning in recwarn if "LS411" in str(warning.message)]
    assert len(found) == (2 if kind == "shuffled" else 0)


def test_a_share_of_hugging_faces_is_refused(datasets: Any) -> None:
    share = pytest.importorskip("datasets.distributed").split_dataset_by_node(make(datasets, "arrow"), 0, 2)
    with pytest.raises(ValueError, match="gives each rank a part of its own"):
        loader(share)


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
