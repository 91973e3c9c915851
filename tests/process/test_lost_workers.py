"""Workers of `lockstep train` are killed at named moments; the others end with the digest and rows of the whole run.

The moments are in the module of the run (`mortal.py` below): a worker kills itself there, by a real SIGKILL.
"""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from typer.testing import CliRunner

from lockstep.checkpoint import load_checkpoint
from lockstep.cli.main import app
from lockstep.report import MetricsFile
from lockstep.runs.config import read_config
from lockstep.runs.fit import FitResult, fit

MODULE = '''
import os, signal, threading
from collections import Counter
import torch
from torch import nn
from torch.utils.data import TensorDataset

DEATHS = os.environ.get("DEATHS", "").split(",")
counts = Counter()
worker = os.getpid()

def reach(moment):
    """Count the moment, and die in it if DEATHS has "RANK MOMENT NUMBER", of which one worker dies."""
    counts[moment] += 1
    death = f"{os.environ.get('RANK')} {moment} {counts[moment]}"
    if death not in DEATHS:
        return
    try:
        os.mkdir(death)
    except FileExistsError:
        return
    if moment == "finish":
        with open(os.path.join(os.environ["RUN"], "metrics.jsonl"), "a") as file:
            file.write('{"kind": "step", "epo')
    os.kill(worker, signal.SIGKILL)
    threading.Event().wait()

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))

def data():
    inputs = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    half = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return half, half

def loss(output, target):
    reach("forward" if output.requires_grad else "evaluation")
    return nn.functional.mse_loss(output, target)

def report(model):
    reach("finish")
    return f"finished with {sum(p.numel() for p in model.parameters())} parameters"

if "RANK" in os.environ:  # a worker, of which a save reaches this when the file is written and has not got its name
    fsync = os.fsync
    os.fsync = lambda descriptor: (reach("fsync"), fsync(descriptor))[1]
'''
CONFIG = """
model: mortal:Net
data: mortal:data
loss: mortal:loss
finish: mortal:report
optimizer_args: {lr: 0.05}
scheduler: torch.optim.lr_scheduler:MultiStepLR
scheduler_args: {milestones: [1, 2], gamma: 0.3}
batch_size: 20
num_shards: 4
epochs: 3
keep: 9
keep_best: -loss
device_ids: cpu
threads_per_worker: 1
"""


class Outcome(NamedTuple):
    """What a run has left, and what it has printed."""

    code: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def digest(self) -> str:
        found = re.search(r"^digest (\w{64})$", self.stdout, re.MULTILINE)
        assert found is not None, self.stderr
        return found[1]

    def rows(self, *kinds: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [
            {name: value for name, value in row.items() if name != "samples_per_second"}
            for row in found
            if row["kind"] in kinds
        ]


def write_module(folder: Path) -> None:
    (folder / "mortal.py").write_text(MODULE)
    (folder / "mortal.yaml").write_text(CONFIG)


def train(folder: Path, workers: int, deaths: str = "", *overrides: str) -> Outcome:
    """Run the command in this process; its workers are processes all the same."""
    write_module(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))  # the command puts the folder of the config first
        patch.setenv("DEATHS", deaths)
        patch.setenv("RUN", "run")
        result = CliRunner().invoke(app, ["train", "mortal.yaml", f"workers={workers}", "run_dir=run", *overrides])
    return Outcome(result.exit_code, result.stdout, result.stderr, folder / "run")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    """Return the undisturbed run, trained in this process."""
    folder = tmp_path_factory.mktemp("whole")
    write_module(folder)
    (folder / "run").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        result = fit(
            read_config(folder / "mortal.yaml"),
            device=torch.device("cpu"),
            run_dir=folder / "run",
            recorder=MetricsFile(folder / "run" / "metrics.jsonl"),
            code=folder,
        )
        assert isinstance(result, FitResult)
        yield Outcome(0, f"digest {result.digest}\n", "", folder / "run")
        sys.modules.pop("mortal")


def check_equal(found: Outcome, whole: Outcome) -> None:
    assert found.code == 0, found.stderr
    assert found.digest == whole.digest
    assert found.rows("step", "epoch") == whole.rows("step", "epoch")
    assert "finished with 81 parameters" in found.stdout
    assert (found.folder / "best.ckpt").readlink() == (whole.folder / "best.ckpt").readlink()
    for path in sorted(whole.folder.glob("step-*.ckpt")):
        assert load_checkpoint(found.folder / path.name).manifest.digest == load_checkpoint(path).manifest.digest


def test_one_rank_0_after_the_other_is_killed_at_its_own_work(
    whole: Outcome, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Ranks are those of the moment. The first dies when the checkpoint of the first epoch has no name yet, the next one
    # in the very last call of the run, when half of a row is written.
    lost = train(tmp_path, 3, "0 fsync 1,0 finish 1")
    check_equal(lost, whole)
    names = {path.name for path in lost.folder.iterdir()}
    assert names == {path.name for path in whole.folder.iterdir()} | {"config.yaml", "curves.png", ".lock"}
    changes = lost.rows("workers")
    assert [len(row["lost"]) for row in changes] == [1, 1]
    assert [row["shards"] for row in changes] == [[[0, 2], [2, 4]], [[0, 4]]]
    assert changes[1] == changes[1] | {"generation": 2, "epoch": 3, "step": 0, "repeats_step": False}
    of_workers = capfd.readouterr().out
    assert of_workers.count("killed by SIGKILL") >= 2
    assert of_workers.count("training 81 parameters") == 1
    assert [line.split()[1] for line in of_workers.splitlines() if line.startswith("epoch")] == ["1/3", "2/3", "3/3"]


def test_a_run_of_which_all_was_killed_is_continued_by_the_same_command(whole: Outcome, tmp_path: Path) -> None:
    left = shutil.copytree(whole.folder, tmp_path / "run", symlinks=True)
    for path in sorted(left.glob("step-*.ckpt"))[1:]:
        path.unlink()
    (left / "best.ckpt").unlink()
    with (left / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "epo')
    again = train(tmp_path, 1, "", "resume=auto")
    assert "resuming from run/step-00000003.ckpt" in again.stdout
    check_equal(again, whole)
