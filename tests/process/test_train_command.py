"""`lockstep train` as a user runs it: real processes, real files, real mistakes."""

import json
import os
import pty
import re
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ruamel.yaml import YAML
from safetensors import safe_open
from safetensors.torch import load_file

from lockstep.recipes.digits import Net, datasets

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
COMMAND = [str(Path(sys.executable).with_name("lockstep")), "train"]

MODULE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Sequential):
    def __init__(self, hidden=16):
        super().__init__(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 1))

def not_a_model(): return 3

class Broken(Net):
    def forward(self, inputs): raise KeyError("in the users own forward")

class Diverging(Net):
    def forward(self, inputs): return super().forward(inputs) * float("nan")

def data(length=60):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(length, 6, generator=generator)
    half = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return half, half

class LogCosh(nn.Module):
    def __init__(self, scale): super().__init__(); self.scale = scale
    def forward(self, output, target): return (self.scale * (output - target)).cosh().log().mean()

def report(model, greeting): return f"{greeting} from {sum(p.numel() for p in model.parameters())} parameters"
"""
CONFIG = """
model: mine:Net
data: mine:data
loss: torch.nn.functional:mse_loss
batch_size: 16
epochs: 2
run_dir: run
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's folder: a module and a config beside each other."""
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    return tmp_path


def run(folder: Path, *arguments: str, before: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
        preexec_fn=before,
        stdin=subprocess.DEVNULL,
    )


def digest_line(finished: subprocess.CompletedProcess[str]) -> str:
    assert finished.returncode == 0, finished.stderr
    last = finished.stdout.splitlines()[-1]
    assert last.startswith("digest ")
    assert len(last) == len("digest ") + 64
    return last


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_digits_train_and_the_checkpoint_bears_out_the_accuracy(tmp_path: Path) -> None:
    finished = run(tmp_path, str(EXAMPLES / "digits.yaml"), "workers=2", "device_ids=cpu")
    digest = digest_line(finished).split()[1]
    folder = tmp_path / "runs" / "digits"
    newest = max(folder.glob("step-*.ckpt"))
    tensors = {name: value for name, value in load_file(newest).items() if not name.startswith("optimizer/")}
    model = Net()
    model.load_state_dict(tensors)
    images, labels = datasets()[1].tensors
    with torch.no_grad():
        right = int((model.eval()(images).argmax(1) == labels).sum())
    assert len(labels) == 360
    assert f"({right} of 360, each counted once)" in finished.stdout
    assert right / 360 >= 0.98
    with safe_open(newest, framework="pt") as file:
        assert json.loads(file.metadata()["lockstep"])["digest"] == digest
    assert "\x1b" not in finished.stdout  # not a terminal: plain lines
    epochs = YAML(typ="safe").load(EXAMPLES / "digits.yaml")["epochs"]
    assert sum(line.startswith("epoch") for line in finished.stdout.splitlines()) == epochs
    assert f"run directory {Path('runs/digits')}" in finished.stdout
    assert {"config.yaml", "metrics.jsonl", "curves.png"} <= {path.name for path in folder.iterdir()}
    assert YAML(typ="safe").load(folder / "config.yaml")["workers"] == 2


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_the_readmes_first_example_trains_as_it_stands(tmp_path: Path, readme: str) -> None:
    text = (EXAMPLES.parent / readme).read_text(encoding="utf-8")
    [module] = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "def datasets" in block]
    [config] = [block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "model: mine:Net" in block]
    (tmp_path / "mine.py").write_text(module)
    (tmp_path / "mine.yaml").write_text(config)
    finished = run(tmp_path, "mine.yaml", "epochs=1")
    digest_line(finished)
    assert "on 1,600 samples" in finished.stdout
    assert "of 400, each counted once" in finished.stdout


def test_a_broken_checkpoint_is_told_of_and_the_one_before_taken(project: Path) -> None:
    digest = digest_line(run(project, "mine.yaml", "workers=1", "epochs=3", "run_dir=run"))
    newest = max((project / "run").glob("step-*.ckpt"))
    newest.write_bytes(newest.read_bytes()[:-100])
    finished = run(project, "mine.yaml", "workers=1", "epochs=3", "--resume")
    assert "warning" in finished.stderr
    assert newest.name in finished.stderr
    assert "going on with epoch 3" in finished.stdout
    assert digest_line(finished) == digest
    steps = [row["global_step"] for row in rows(project / "run" / "metrics.jsonl") if row["kind"] == "step"]
    assert steps == list(range(1, 13))


def test_ctrl_c_while_the_command_imports_is_one_line(project: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(project)
        os.execv(COMMAND[0], [*COMMAND, "mine.yaml"])
    while not any("libtorch" in mapped.path for mapped in psutil.Process(pid).memory_maps()):
        pass
    os.write(terminal, b"\x03")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    output = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert code == 130
    assert "Interrupted" in output
    assert "Traceback" not in output


def test_a_users_own_things_train_and_resume_to_the_same_digest(project: Path) -> None:
    own = [
        "mine.yaml",
        "loss=mine:LogCosh",
        "loss_args.scale=0.5",
        "optimizer=torch.optim:SGD",
        "optimizer_args={lr: 1e-2, momentum: 0.9}",
        "scheduler=torch.optim.lr_scheduler:MultiStepLR",
        "scheduler_args.milestones=[1, 3]",
        "finish=mine:report",
        "finish_args.greeting=hello",
    ]
    whole = run(project, *own, "epochs=4", "run_dir=whole")
    assert "hello from 129 parameters" in whole.stdout
    assert "test loss" in whole.stdout
    digest_line(run(project, *own, "epochs=2", "run_dir=halves"))
    resumed = run(project, *own, "epochs=4", "run_dir=halves", "--resume")
    assert "going on with epoch 3" in resumed.stdout
    assert digest_line(resumed) == digest_line(whole)
    rates = [row["learning_rate"] for row in rows(project / "halves" / "metrics.jsonl") if row["kind"] == "epoch"]
    assert rates == pytest.approx([0.01, 0.001, 0.001, 0.0001])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gone.yaml"], "no config file"),
        (["mine.yaml", "batch_sise=3"], "Did you mean 'batch_size'?"),
        (["mine.yaml", "workers=0"], "at least 1"),
        (["mine.yaml", "workers=5"], "5 workers cannot share num_shards = 4"),
        (["mine.yaml", "device_ids=[99]"], "asks for GPU 99"),
        (["mine.yaml", "--resume"], "no run directory run"),
        (["mine.yaml", "run_dir=taken"], "exists already"),
    ],
)
def test_bad_input_is_a_message_and_exit_code_2(project: Path, arguments: list[str], said: str) -> None:
    (project / "taken").mkdir()
    finished = run(project, *arguments)
    assert finished.returncode == 2
    assert said in finished.stderr
    assert "Traceback" not in finished.stderr
    assert finished.stderr.count("error:") == 1


def test_bad_input_that_a_worker_finds_is_the_same(project: Path) -> None:
    finished = run(project, "mine.yaml", "workers=2", "model=mine:not_a_model")
    assert finished.returncode == 2
    assert "not a torch.nn.Module" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert finished.stderr.count("error:") == 1
    assert not (project / "run").exists()  # so that the corrected command can take the name


def test_debug_shows_the_traceback(project: Path) -> None:
    finished = run(project, "mine.yaml", "workers=1", "model=mine:not_a_model", "--debug")
    assert finished.returncode == 2
    assert "Traceback" in finished.stderr


def test_a_failure_in_the_users_code_shows_their_line(project: Path) -> None:
    finished = run(project, "mine.yaml", "model=mine:Broken")
    assert finished.returncode == 1
    assert "KeyError: 'in the users own forward'" in finished.stderr
    assert "mine.py" in finished.stderr


def test_a_diverging_loss_stops_with_a_message(project: Path) -> None:
    finished = run(project, "mine.yaml", "model=mine:Diverging")
    assert finished.returncode == 1
    assert "The loss of shard 0, run by rank 0, is nan at epoch 0, step 0" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_full_disk_leaves_the_checkpoint_before_it_whole(project: Path) -> None:
    small = ["mine.yaml", "workers=1", "epochs=1", "optimizer=torch.optim:SGD", "optimizer_args.lr=0.001"]
    digest_line(run(project, *small, "model_args.hidden=4000"))
    [checkpoint] = (project / "run").glob("*.ckpt")
    before = checkpoint.read_bytes()

    def limit_file_size() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # the metrics fit, checkpoint and curves do not

    arguments = [*small, "model_args.hidden=4000", "epochs=2", "--resume"]
    finished = run(project, *arguments, before=limit_file_size)
    assert finished.returncode == 2, finished.stderr
    assert "error: The checkpoint" in finished.stderr
    assert "could not be written" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert [path.read_bytes() for path in (project / "run").glob("*.ckpt")] == [before]
    assert not list((project / "run").glob(".*tmp"))


def press_ctrl_c_on_a_terminal(folder: Path, *arguments: str) -> tuple[int, str, list[psutil.Process]]:
    """Run the command on a pseudo terminal, press Ctrl-C after two epochs; return code, output, workers."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execv(COMMAND[0], [*COMMAND, *arguments])
    output = ""
    workers: list[psutil.Process] = []
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 0.5)[0]:
            continue
        try:
            chunk = os.read(terminal, 1 << 16)
        except OSError:  # the terminal is closed: every process has let go of it
            break
        output += chunk.decode(errors="replace")
        if output.count("samples/s") == 2 and not workers:  # so the first epoch's checkpoint is written
            workers = psutil.Process(pid).children(recursive=True)
            os.write(terminal, b"\x03")
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), output, workers


def test_ctrl_c_on_a_terminal_stops_every_process(project: Path) -> None:
    code, output, workers = press_ctrl_c_on_a_terminal(project, "mine.yaml", "epochs=100000", "loader_workers=1")
    assert code == 130
    assert "Interrupted; every worker has ended." in output
    assert "Traceback" not in output
    assert "steps" in output  # the progress bar
    assert len(workers) >= 4  # two workers, each with a loading process
    _, alive = psutil.wait_procs(workers, timeout=2)
    assert not alive
    assert list((project / "run").glob("*.ckpt"))


def test_a_killed_launcher_takes_workers_and_loading_processes_with_it(project: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "mine.yaml", "epochs=100000", "loader_workers=1"],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    while not process.stdout.readline().startswith("epoch"):
        assert process.poll() is None
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 4
    process.kill()
    _, alive = psutil.wait_procs(workers, timeout=2)
    process.stdout.close()
    process.wait()
    assert not alive


def test_two_trainings_at_the_same_time_do_not_disturb_each_other(project: Path) -> None:
    (project / "mine.yaml").write_text(CONFIG.replace("run_dir: run\n", ""))
    started = [
        subprocess.Popen([*COMMAND, "mine.yaml", "workers=1"], cwd=project, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=55)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert outputs[0].splitlines()[-1] == outputs[1].splitlines()[-1]
    assert sorted(path.name for path in (project / "runs").iterdir()) == ["mine", "mine-2"]
