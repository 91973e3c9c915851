"""`lockstep verify` as a user runs it."""

import re
import sys
from functools import partial
from pathlib import Path

import pytest
from tests.process import warm
from tests.process.commands import Command

pytestmark = pytest.mark.usefixtures("warm_workers")

COMMAND = [str(Path(sys.executable).with_name("lockstep")), "verify"]

MODULE = """
import random, time
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

class Clock(Net):
    def forward(self, inputs): return super().forward(inputs) * (1 + time.time_ns() % 2**16 / 2**16)

class Counting(Net):
    def forward(self, inputs): return super().forward(inputs) * dist.get_world_size()

class PerRank(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(1e-3 * dist.get_rank())

def data():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(54, 6, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))
"""
CONFIG = """
model: mine:Net
data: mine:data
loss: torch.nn.functional:mse_loss
optimizer: torch.optim:SGD
optimizer_args: {lr: 0.1}
batch_size: 16
num_shards: 3
device_ids: cpu
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    return tmp_path


def test_equal_runs_are_shown_and_pass(project: Path) -> None:
    # 6 steps are an epoch and a half: 54 samples in batches of 16.
    command = [*COMMAND, "mine.yaml", "--workers", "1,3", "--steps", "6"]
    finished = warm.run(command, cwd=project)
    assert finished.returncode == 0, finished.stderr
    rows = re.findall(r"│ (\d+) +│ (\w{16}) +│ (\w{16}) +│", finished.stdout)
    assert [row[0] for row in rows] == list("123456")
    assert all(left == right for _, left, right in rows)
    assert len({left for _, left, _ in rows}) == 6
    assert re.search(r"^digest [0-9a-f]{64}$", finished.stdout, re.MULTILINE)
    assert "1 thread, 3 shards, seed 0, deterministic" in finished.stdout
    assert not list(project.glob("runs*"))


@pytest.fixture
def verify_here(project: Path, lockstep_here: Command) -> Command:
    return partial(lockstep_here, "verify", "mine.yaml")


def test_the_first_difference_of_a_run_that_is_not_reproducible_is_shown(verify_here: Command) -> None:
    # One number is run twice.
    finished = verify_here("model=mine:Clock", "--workers", "1", "--steps", "2")
    assert finished.code == 1
    said = " ".join(finished.stdout.split())
    assert "NOT equal: 1 worker, again against 1 worker: the first difference is after step 1, in 0.weight (and" in said
    assert "The run is not reproducible with any number of workers" in said


def test_a_run_that_depends_on_the_number_of_workers_is_reported(verify_here: Command) -> None:
    finished = verify_here("model=mine:Counting", "--workers", "1,2", "--steps", "1")
    assert finished.code == 1
    assert "Two runs with 1 worker give the same bits" in finished.stdout


def test_workers_of_one_run_that_differ_are_reported(verify_here: Command) -> None:
    # In the second step the trainer would see nothing: all have written as often.
    finished = verify_here("optimizer=mine:PerRank", "--workers", "2", "--steps", "1")
    assert finished.code == 1
    said = " ".join(finished.stdout.split())
    assert re.search(r"│ 1 │ \w{16} │ \w{16} ! │", said)
    assert "NOT equal: 2 workers, rank 1, against the first run: the first difference is after step 1, in 0.weight" in (
        said
    )
    assert "with 2 workers, rank 1 differs from rank 0" in said
    assert "fingerprint torch" in said


@pytest.mark.parametrize(
    ("workers", "said"), [("1,x", "expected numbers of workers such as 1,2,3"), ("1,4", "4 workers cannot share")]
)
def test_numbers_that_cannot_be_are_refused(verify_here: Command, workers: str, said: str) -> None:
    refused = verify_here("--workers", workers)
    assert refused.code == 2
    assert said in refused.stderr
