"""`lockstep train` that is asked to stop by real signals, at scripted points, and goes on elsewhere."""

import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from functools import partial
from pathlib import Path
from typing import final

import psutil
import pytest
from tests.process import warm
from tests.process.commands import Command, rows_of, train_undisturbed
from tests.process.test_train_command import COMMAND, run

from lockstep.checkpoint.file import read_manifest

pytestmark = pytest.mark.usefixtures("warm_workers")

MODULE = """
import gc
import os
import signal
import subprocess
import time

import psutil
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.processes.stop_signals import StopRequest

calls = 0

class Net(nn.Sequential):
    def __init__(self, hidden=16):
        super().__init__(nn.Linear(6, hidden), nn.BatchNorm1d(hidden), nn.Dropout(0.2), nn.Linear(hidden, 1))

def data():
    inputs = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    half = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return half, half

def loss(output, target):
    script = os.environ.get("SCRIPT", "")
    if script:
        play(*script.split())
    return nn.functional.mse_loss(output.float(), target)

def play(rank, call, name, target, times="once"):
    # At its n-th call in this process somebody sends a signal; the loss goes on when it has arrived here.
    global calls
    calls += 1
    if rank != os.environ["RANK"] or calls != int(call):
        return
    number, pid = getattr(signal, name), os.getpid() if target == "worker" else os.getppid()
    if target == "family":  # as Slurm does, a process of its own
        family = [psutil.Process(), *psutil.Process().children()]
        subprocess.run(["kill", f"-{number}", *(str(each.pid) for each in family)], check=True)
    elif times == "stopped":  # this worker cannot take a signal when it comes
        subprocess.run(["sh", "-c", f"kill -STOP {os.getpid()}; kill -{number} {pid}"], check=True)
    else:
        os.kill(pid, number)
    if times == "twice":
        while True:  # until the launcher, which may have taken the first one late, takes it for another request
            time.sleep(1.2)
            os.kill(pid, number)
    while not any(each.is_made for each in gc.get_objects() if isinstance(each, StopRequest)):
        time.sleep(0.001)
"""
CONFIG = """
model: mine:Net
data: mine:data
loss: mine:loss
optimizer_args: {lr: 0.01}
scheduler: torch.optim.lr_scheduler:StepLR
scheduler_args: {step_size: 1, gamma: 0.5}
precision: float16
batch_size: 16
epochs: 3
device_ids: cpu
"""
# Of an epoch of 4 steps, trained and evaluated, each of 2 workers calls the loss twice a step: 8 times and 8 times.


def write_project(folder: Path) -> Path:
    (folder / "mine.py").write_text(MODULE)
    (folder / "mine.yaml").write_text(CONFIG)
    return folder


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_project(tmp_path)


@pytest.fixture
def said(project: Path, lockstep_here: Command) -> Command:
    return partial(lockstep_here, "train", "mine.yaml")


def script(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SCRIPT", text)


@final
class Runs:
    """A run that was not disturbed, and one that was stopped in the second step of its second epoch, on two workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = write_project(folder)
        with pytest.MonkeyPatch.context() as patch:
            script(patch, "1 19 SIGTERM launcher stopped")
            self.stopped = run(folder, "mine.yaml", "run_dir=run", "workers=2", "save_every=3", "keep=9")
        self.digest = train_undisturbed(folder / "mine.yaml", folder / "whole")

    def copy_to(self, folder: Path) -> None:
        shutil.copytree(self.folder / "run", folder / "run")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("stopped"))


def checkpoints(folder: str | Path) -> list[str]:
    return sorted(path.name for path in Path(folder).glob("*.ckpt"))


def test_sigterm_saves_after_the_step_and_prints_how_to_resume(runs: Runs) -> None:
    # One of the workers was stopped (SIGSTOP) when the signal came. It took a second signal to end such a run.
    assert runs.stopped.returncode == 75, runs.stopped.stderr
    said = runs.stopped.stderr
    assert said.startswith("Stopping after the current step or evaluation.")  # before a step that may hang
    assert (
        said.count("Stopped on request after step 2 of 4 of epoch 2. The run is saved in run/step-00000006.ckpt.") == 1
    )
    assert "Resume with: lockstep train mine.yaml run_dir=run workers=2 save_every=3 keep=9 --resume run" in said
    assert "Traceback" not in said
    assert checkpoints(runs.folder / "run") == [f"step-0000000{step}.ckpt" for step in (3, 4, 6)]


def test_a_stopped_run_ends_as_if_it_had_not_been(project: Path, runs: Runs, said: Command) -> None:
    runs.copy_to(project)
    refused = said("run_dir=run", "--resume", "max_grad_norm=1.0")
    assert refused.code == 2
    assert "max_grad_norm was None and is now 1.0" in refused.stderr
    assert "give --allow max_grad_norm;" in refused.stderr
    assert said("--resume", "run", "workers=1").digest == runs.digest
    assert rows_of(Path("run")) == rows_of(runs.folder / "whole")


def test_an_older_checkpoint_leads_to_the_same_end_in_a_new_directory(project: Path, runs: Runs, said: Command) -> None:
    runs.copy_to(project)
    forked = said("--resume", "run/step-00000003.ckpt", "run_dir=fork", "workers=3")
    assert "resuming from fork/step-00000003.ckpt" in forked.stdout
    assert "\n  workers was 2 and is now 3\n" in forked.stdout
    assert "continuing with epoch 1, step 4 of 4" in forked.stdout
    assert forked.digest == runs.digest
    assert rows_of(Path("fork")) == rows_of(runs.folder / "whole")
    assert checkpoints("run") == checkpoints(runs.folder / "run")


def test_one_worker_of_torchrun_is_asked_and_all_stop(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, "1 3 SIGTERM family")  # its loading process included
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    command = [str(Path(sysconfig.get_path("scripts")) / "lockstep"), "train", "mine.yaml", "run_dir=run"]
    command.append("loader_workers=1")
    ended = warm.run([*torchrun, *command], timeout=150)
    assert (
        ended.stderr.count("Stopped on request after step 2 of 4 of epoch 1. The run is saved in run/step-00000002")
        == 1
    )
    assert ended.stderr.count("exitcode  : 75") == 2
    manifest = read_manifest(Path("run/step-00000002.ckpt"))
    assert (manifest.epoch, manifest.step) == (0, 2)


def test_a_second_sigterm_ends_all_at_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, "0 3 SIGTERM launcher twice")
    process = warm.Popen(
        [*COMMAND, "mine.yaml", "run_dir=run", "workers=1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    children: list[psutil.Process] = []
    while process.poll() is None:
        children = psutil.Process(process.pid).children(recursive=True) or children
        time.sleep(0.1)
    assert process.returncode == -signal.SIGTERM
    assert children
    alive = psutil.wait_procs(children, timeout=60)[1]
    assert all(child.status() == psutil.STATUS_ZOMBIE for child in alive)  # whose new parent waits for nobody
    assert not list(Path("run").glob("*.ckpt"))
