"""The Python of docs/streams.md runs, block after block, and does what the page says.

Its functions for other libraries are called where these are installed, in test_streams_of_libraries.py too.
"""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls

DOCS = Path(__file__).parents[3] / "docs"
NUM_RECORDS = 600


def write_lines(folder: Path, num_records: int) -> None:
    """Write records into two files."""
    folder.mkdir(parents=True)
    records = [json.dumps({"inputs": [n / num_records, 1.0], "label": n % 2}) for n in range(num_records)]
    for name, part in (("a", records[::2]), ("b", records[1::2])):
        (folder / f"{name}.jsonl").write_text("\n".join(part) + "\n", encoding="utf-8")


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def make_trainer() -> ls.Trainer:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    return ls.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, num_shards=4, seed=0)


@pytest.mark.parametrize("page", ["streams.md", "streams.zh-CN.md"])
def test_the_blocks_of_the_page_run_one_after_the_other(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(Path("data"), NUM_RECORDS)
    write_lines(Path("data/test"), 8)
    names: dict[str, Any] = {"trainer": make_trainer()}
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text("utf-8"), re.DOTALL | re.MULTILINE)

    for text in blocks:
        exec(compile(text, page, "exec"), names)
    digest = names["trainer"].digest()
    names["trainer"].close()

    # The page trains an epoch, saves, loads, and goes on to the third.
    other = make_trainer()
    loader = ls.ShardedLoader(names["stream"](), batch_size=256, num_shards=4, seed=0)
    for epoch in range(3):
        for batch in loader.epoch(epoch):
            other.step(batch)
    assert other.digest() == digest
    other.close()

    found = names["data"]("data")
    assert {name: sum(1 for _ in part) for name, part in found.items()} == {"train": NUM_RECORDS, "test": 8}
    if find_spec("datasets") is not None:
        assert next(iter(names["from_hub"]()))["label"] in {0, 1}
