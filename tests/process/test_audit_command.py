"""`lockstep audit`: steps of real runs are taken again, from the beginning or a checkpoint."""

import re
from pathlib import Path

import pytest
from tests.process.commands import Command, lockstep_here

__all__ = ["lockstep_here"]

MODULE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))

def data():
    inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    half = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return half, half
"""
CONFIG = """
model: proved:Net
data: proved:data
loss: torch.nn.functional:mse_loss
batch_size: 16
num_shards: 4
epochs: 3
save_every: 3
keep: 9
device_ids: cpu
audit: true
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "proved.py").write_text(MODULE)
    (tmp_path / "proved.yaml").write_text(CONFIG)
    return tmp_path


def test_a_run_is_confirmed_until_its_data_or_its_log_are_others(folder: Path, lockstep_here: Command) -> None:
    said = lockstep_here("train", "proved.yaml", "workers=2", "run_dir=run")
    assert said.code == 0, said.stderr
    said = lockstep_here("audit", "run", "--workers", "1")
    assert said.code == 0, said.stdout + said.stderr
    assert "confirmed 12 updates, and 6 digests of the whole state" in said.stdout
    said = lockstep_here("audit", "run", "--steps", "8:10", "--workers", "3")
    assert "up to 10, from step-00000006.ckpt" in said.stdout
    assert "confirmed 4 updates" in said.stdout

    (folder / "proved.py").write_text(MODULE.replace("half = ", "inputs[7, 2] += 1e-6; half = "))
    said = lockstep_here("audit", "run", "--workers", "2")
    assert said.code == 1
    assert "NOT EQUAL at step" in said.stdout
    assert "the samples of shard" in said.stdout

    path = folder / "run" / "audit.jsonl"
    path.write_text(path.read_text().replace('"cursor":[1,0]', '"cursor":[1,9]'))
    said = lockstep_here("audit", "run")
    assert said.code == 1
    assert re.search(r"NOT INTACT: Line \d+ was altered", said.stdout)


def test_runs_part_at_the_step_where_one_has_another_loss(folder: Path, lockstep_here: Command) -> None:
    for name, workers, override in (("one", 1, ""), ("two", 2, ""), ("three", 1, "optimizer_args.weight_decay=0.2")):
        said = lockstep_here("train", "proved.yaml", f"workers={workers}", f"run_dir={name}", *filter(None, [override]))
        assert said.code == 0, said.stderr
    assert "equal in each of the 12 updates that both have" in lockstep_here("audit", "one", "two").stdout
    said = lockstep_here("audit", "one", "three")
    assert said.code == 1
    assert "weight_decay was not set and is now 0.2" in said.stdout
    assert "The runs part at step 1: the optimizer had other options" in said.stdout
    said = lockstep_here("train", "proved.yaml", "--resume", "one/step-00000009.ckpt", "run_dir=later", "epochs=4")
    assert said.code == 0, said.stderr
    assert "equal in each of the 3 updates that both have" in lockstep_here("audit", "one", "later").stdout
    refused = lockstep_here("audit", "one", "--steps", "5:99")
    assert refused.code == 2
    assert "expected FIRST:LAST within the steps of the log, 1:12" in refused.stderr
