"""Workers of `lockstep train` are killed, join and leave; the run ends with digest and rows of the undisturbed one.

The moments of kills are in the module of the run (`mortal.py` below): a worker kills itself there, by a real SIGKILL.
"""

import contextlib
import os
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from tests.process.commands import rows_of, train_undisturbed
from tests.process.ranks import wait_until
from typer.testing import CliRunner

from lockstep.checkpoint.file import load_checkpoint
from lockstep.cli.main import app
from lockstep.launch.control import ask, connect

pytestmark = pytest.mark.usefixtures("warm_workers")

MODULE = '''
import glob, os, signal, threading, time
from collections import Counter
import torch
from torch import nn
from torch.utils.data import TensorDataset

DEATHS = os.environ.get("DEATHS", "").split(",")
counts = Counter()
worker = os.getpid()

def reach(moment):
    """Count the moment, and die in it if DEATHS has "RANK MOMENT NUMBER", of which one worker dies, or all, once."""
    counts[moment] += 1
    num_workers = int(os.environ.get("WORLD_SIZE", 1))
    if f"all {moment} {counts[moment]}" in DEATHS and len(glob.glob("all-*")) < num_workers:
        open(f"all-{worker}", "w").close()
        while len(glob.glob("all-*")) < num_workers:
            time.sleep(0.001)
        os.kill(worker, signal.SIGKILL)
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
    reach("build")
    inputs = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    half = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return half, half

def loss(output, target):
    if "PACE" in os.environ and output.requires_grad and not os.path.exists("enough"):
        time.sleep(0.05)  # else the run is over before it was disturbed
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
keep_best: -ema_loss
ema: {decay: 0.5}
swa: {start_epoch: 1}
callbacks: [{lockstep:Freeze: {names: 0.*, until_epoch: 1}}]
track_grad_norm: true
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
        return rows_of(self.folder, *kinds)


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
def whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train_here(tmp_path_factory.mktemp("whole"))


def train_here(folder: Path, *overrides: str) -> Outcome:
    """Train undisturbed, in this process."""
    folder.mkdir(exist_ok=True)
    write_module(folder)
    digest = train_undisturbed(folder / "mortal.yaml", folder / "run", *overrides)
    return Outcome(0, f"digest {digest}\n", "", folder / "run")


def check_audit(run_dir: Path) -> None:
    """Take all steps again, with one worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(run_dir.parent)
        patch.setattr(sys, "path", list(sys.path))
        patch.setenv("DEATHS", "")
        result = CliRunner().invoke(app, ["audit", "run", "--workers", "1"])
    assert result.exit_code == 0, f"{result.stdout}{result.stderr}"
    assert f"confirmed {len(rows_of(run_dir, 'step'))} updates, and " in result.stdout


def check_equal(found: Outcome, whole: Outcome) -> None:
    assert found.code == 0, found.stderr
    assert found.digest == whole.digest
    assert found.rows("step", "epoch") == whole.rows("step", "epoch")
    assert "finished with 81 parameters" in found.stdout
    assert (found.folder / "best.ckpt").readlink() == (whole.folder / "best.ckpt").readlink()
    for path in sorted(whole.folder.glob("step-*.ckpt")):
        other, mine = load_checkpoint(found.folder / path.name), load_checkpoint(path)
        assert other.manifest.digest == mine.manifest.digest
        assert other.manifest.callbacks == mine.manifest.callbacks
        assert all(torch.equal(other.optimizer[name], tensor) for name, tensor in mine.optimizer.items())


@pytest.mark.parametrize("shared", ["false", "true"])
def test_one_rank_0_after_the_other_is_killed_at_its_own_work(
    whole: Outcome, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, shared: str
) -> None:
    # Ranks are those of the moment. One dies before the run has begun, so all begin again without it. The first rank 0
    # dies when the checkpoint of the first epoch has no name yet, the next one in the very last call of the run, when
    # half of a row is written.
    lost = train(tmp_path, 4, "3 build 1,0 fsync 1,0 finish 1", "audit=true", f"shard_optimizer={shared}")
    assert "before the training began. It starts again with 3 workers" in lost.stderr
    check_equal(lost, whole)
    names = {path.name for path in lost.folder.iterdir()}
    assert names >= {path.name for path in whole.folder.iterdir()}
    assert {name for name in names if name.startswith(".")} == {".ended", ".lock"}  # no temporary file, no socket
    changes = lost.rows("workers")
    assert [len(row["lost"]) for row in changes] == [1, 1]
    assert [row["shards"] for row in changes] == [[[0, 2], [2, 4]], [[0, 4]]]
    assert changes[1] == changes[1] | {"generation": 2, "epoch": 3, "step": 0, "repeats_step": False}
    assert "returned a result" not in caplog.text  # each loss was told when it happened
    of_workers = capfd.readouterr().out
    assert of_workers.count("killed by SIGKILL") >= 2
    assert of_workers.count("training 81 parameters") == 1
    assert [line.split()[1] for line in of_workers.splitlines() if line.startswith("epoch")] == ["1/3", "2/3", "3/3"]
    check_audit(lost.folder)


def pids_of(run_dir: Path, num_workers: int, *, but: int = 0) -> list[int]:
    """Wait until a run has so many workers, and one not any more; return their processes by rank."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), connect(run_dir) as client:
            found = [int(pid) for pid in re.findall(r"pid (\d+)", next(ask(client, {"op": "describe"}))["text"])]
            if len(found) == num_workers and but not in found:
                return found
        time.sleep(0.02)
    raise AssertionError(f"there were never {num_workers} workers")


def disturb(folder: Path, problems: list[BaseException]) -> None:
    """Kill rank 0, wait for its replacement, and let the one that took over as rank 0 leave."""
    run_dir = folder / "run"
    try:
        first = pids_of(run_dir, 2)
        wait_until((run_dir / "metrics.jsonl").exists, "the first step: then every worker has made its trainer")
        os.kill(first[0], signal.SIGKILL)
        replaced = pids_of(run_dir, 2, but=first[0])
        assert replaced[0] == first[1]
        os.kill(replaced[0], signal.SIGTERM)
        assert pids_of(run_dir, 1) == [replaced[1]]
    except BaseException as problem:  # noqa: BLE001 - raised in the main thread
        problems.append(problem)
    finally:
        (folder / "enough").touch()


@pytest.mark.timeout(200)
def test_workers_join_and_leave_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It evaluates, saves, and steps a scheduler between the steps at which they do so."""
    overrides = ("epochs=40", "save_every=8", "scheduler_args.milestones=[15, 30, 35]")
    whole = train_here(tmp_path / "whole", *overrides)
    problems: list[BaseException] = []
    thread = threading.Thread(target=disturb, args=(tmp_path, problems))
    monkeypatch.setenv("PACE", "1")
    thread.start()
    try:
        switches = ("respawn=true", "loader_workers=1", "audit=true", "shard_optimizer=true")
        found = train(tmp_path, 2, "", *switches, *overrides)
    finally:
        (tmp_path / "enough").touch()
        thread.join()
    assert not problems, f"{problems}\n{found.stdout}\n{found.stderr}"
    check_equal(found, whole)
    rows = found.rows("workers")
    assert [[len(row[what]) for what in ("lost", "joined", "left")] for row in rows] == [
        [1, 0, 0],
        [0, 1, 0],
        [0, 0, 1],
    ]
    assert [row["generation"] for row in rows] == [1, 2, 3]
    assert not (found.folder / ".control").exists()
    check_audit(found.folder)


@pytest.mark.parametrize(
    ("workers", "deaths", "since"), [(2, "all forward 9", "step-00000003"), (1, "all build 1", "")]
)
def test_a_run_whose_workers_are_all_killed_goes_on_from_its_newest_checkpoint(
    whole: Outcome, tmp_path: Path, workers: int, deaths: str, since: str
) -> None:
    # As where a container reaches its limit of memory. The launcher printed the command that does it.
    found = train(tmp_path, workers, deaths, "respawn=1", "async_save=false", "first_steps_verified=0")
    check_equal(found, whole)
    said = f"The run goes on from {since}.ckpt with 2 workers" if since else "It starts again with 1 worker"
    assert said in found.stderr


def kill_loading_process(folder: Path, problems: list[BaseException]) -> None:
    try:
        worker = psutil.Process(pids_of(folder / "run", 2)[1])
        wait_until(lambda: (folder / "run" / "metrics.jsonl").exists() and worker.children(), "a loading process")
        worker.children()[0].kill()
    except BaseException as problem:  # noqa: BLE001 - raised in the main thread
        problems.append(problem)
    finally:
        (folder / "enough").touch()


def test_a_killed_loading_process_is_a_loss_that_changes_nothing(
    whole: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It ended the run, whatever `respawn` was: 18 of 18 random kills.
    problems: list[BaseException] = []
    thread = threading.Thread(target=kill_loading_process, args=(tmp_path, problems))
    monkeypatch.setenv("PACE", "1")
    thread.start()
    try:
        found = train(tmp_path, 2, "", "loader_workers=1", "respawn=1")
    finally:
        (tmp_path / "enough").touch()
        thread.join()
    assert not problems, f"{problems}\n{found.stdout}\n{found.stderr}"
    check_equal(found, whole)
    (row,) = found.rows("workers")
    (lost,) = row["lost"]
    assert (row["is_loading"], row["generation"], lost["rank"]) == (True, 0, 1)
    assert lost["reason"].startswith("its loading process was killed by SIGKILL")


def test_a_run_of_which_all_was_killed_is_continued_by_the_same_command(whole: Outcome, tmp_path: Path) -> None:
    left = shutil.copytree(whole.folder, tmp_path / "run", symlinks=True)
    for path in sorted(left.glob("step-*.ckpt"))[1:]:
        path.unlink()
    (left / "best.ckpt").unlink()
    with (left / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "epo')
    again = train(tmp_path, 1, "", "--resume", "auto")
    assert "resuming from run/step-00000003.ckpt" in again.stdout
    check_equal(again, whole)
