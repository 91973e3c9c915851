"""The examples of docs/streams.md, run on small files."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.events import NULL_RECORDER
from lockstep.runs.config import read_config
from lockstep.runs.fit import FitResult, fit

PAGE = Path(__file__).parents[2] / "docs/streams.md"
EXAMPLES = re.findall(r"^```(python|yaml)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
MODEL = """
import torch
model = lambda: torch.nn.Linear(3, 2)
"""


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what the first example defines, and a trainer; the present folder has the files."""
    monkeypatch.chdir(tmp_path)
    for number in range(4):
        for folder in ("data", "data/test"):
            write_lines(tmp_path / folder / f"{number}.jsonl", 300 if folder == "data" else 5)
    found: dict[str, Any] = {}
    exec(EXAMPLES[0][1], found)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters())
    found["trainer"] = ls.Trainer(model, optimizer, loss=cross_entropy, num_shards=4, seed=0)
    return found


def write_lines(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"inputs": [place, 1.0, len(path.name)], "label": place % 2}) for place in range(number))
    path.write_text("\n".join(lines), encoding="utf-8")


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def run_example(mark: str, names: dict[str, Any]) -> None:
    exec(next(text for kind, text in EXAMPLES if kind == "python" and mark in text), names)


def test_the_loop_trains_and_resumes(names: dict[str, Any]) -> None:
    run_example("loader.epoch(0)", names)
    assert names["trainer"].global_step == 5
    run_example("trainer.save", names)
    assert names["trainer"].global_step == 15


def test_the_config_trains(names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names
    function = next(text for kind, text in EXAMPLES if "def data(folder)" in text and kind == "python")
    (tmp_path / "mine.py").write_text(EXAMPLES[0][1] + function + MODEL, encoding="utf-8")
    config = "model: mine:model\nepochs: 1\ndevice_ids: cpu\nreport: false\n"
    (tmp_path / "mine.yaml").write_text(config + next(text for kind, text in EXAMPLES if kind == "yaml"))
    (tmp_path / "run").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    result = fit(
        read_config(tmp_path / "mine.yaml"),
        device=torch.device("cpu"),
        run_dir=tmp_path / "run",
        recorder=NULL_RECORDER,
    )
    sys.modules.pop("mine")
    assert isinstance(result, FitResult)
    assert result.num_test_samples == 20
