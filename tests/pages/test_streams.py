"""The Python of docs/streams.md runs, block after block, and does what the page says.

Its functions for other libraries are called where these are installed, in test_streams_of_libraries.py too.
"""

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.events import Recorders
from lockstep.runs.config import read_config
from lockstep.runs.fit import fit
from lockstep.runs.listing import FitResult

DOCS = Path(__file__).parents[2] / "docs"
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


def test_the_config_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(Path("data"), NUM_RECORDS)
    write_lines(Path("data/test"), 8)
    text = (DOCS / "streams.md").read_text("utf-8")
    examples = re.findall(r"^```(python|yaml)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    functions = [
        code for kind, code in examples if kind == "python" and (code == examples[0][1] or "def data(" in code)
    ]
    Path("mine.py").write_text("".join([*functions, "import torch\nmodel = lambda: torch.nn.Linear(2, 2)\n"]), "utf-8")
    config = "model: mine:model\nepochs: 1\ndevice_ids: cpu\nreport: false\n"
    Path("mine.yaml").write_text(config + next(code for kind, code in examples if kind == "yaml"))
    (tmp_path / "run").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    result = fit(
        read_config(tmp_path / "mine.yaml"),
        device=torch.device("cpu"),
        run_dir=tmp_path / "run",
        recorder=Recorders([]),
    )
    sys.modules.pop("mine")
    assert isinstance(result, FitResult)
    assert result.num_test_samples == 8
