"""`lockstep train` as a user runs it: real processes, real files, real mistakes."""

import ast
import json
import os
import pty
import re
import resource
import runpy
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import psutil
import pytest
import torch
from ruamel.yaml import YAML
from safetensors import safe_open
from safetensors.torch import load_file
from tests.process import warm
from tests.process.commands import Command

from lockstep.recipes.digits import Net, datasets
from lockstep.recording import EventKind
from lockstep.recording.reading import read_recording
from lockstep.runs.directory import lock_run

pytestmark = pytest.mark.usefixtures("warm_workers")

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
KNOWN = runpy.run_path(str(EXAMPLES / "known_digests.py"))
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


def write_project(folder: Path) -> Path:
    """Make a user's folder: a module and a config beside each other."""
    (folder / "mine.py").write_text(MODULE)
    (folder / "mine.yaml").write_text(CONFIG)
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write_project(tmp_path)


def run(folder: Path, *arguments: str, before: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    return warm.run([*COMMAND, *arguments], timeout=150, cwd=folder, preexec_fn=before)


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
    processor = torch.backends.cpu.get_cpu_capability()
    known = {each: name for name, each in KNOWN["DIGITS"].items() if name.startswith(processor)}
    if torch.__version__.startswith(KNOWN["TORCH"]) and known:
        assert digest in known
        said = warm.run([sys.executable, str(EXAMPLES / "known_digests.py")], timeout=60, cwd=tmp_path).stdout
        assert f"gives it on processors with {known[digest]}." in said
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
    assert {"config.yaml", "metrics.jsonl", "report.html"} <= {path.name for path in folder.iterdir()}
    assert YAML(typ="safe").load(folder / "config.yaml")["workers"] == 2
    *workers, launcher = read_recording(folder / "recording")
    assert [file.header.rank for file in workers] == [0, 1]
    for file in workers:
        done = {EventKind(kind) for kind in file.table["kind"][file.table["end"] > 0]}
        assert {EventKind.LOADING, EventKind.SHARD, EventKind.BUCKET, EventKind.EVALUATING, EventKind.ENDED} <= done
        assert not file.under_way()
        assert int(file.last(EventKind.SHARD).step) == epochs * 12 - 1
    assert EventKind.SAVING in set(workers[0].table["kind"])
    assert launcher.last(EventKind.WORKER_ENDED).text == "ended with exit code 0"


def first_example(readme: str) -> tuple[str, str]:
    """Return the module and the config of a README's first example."""
    text = (EXAMPLES.parent / readme).read_text(encoding="utf-8")
    [module] = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "def datasets" in block]
    [config] = [block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "model: mine:Net" in block]
    return module, config


def test_the_readmes_first_example_trains_as_it_stands(tmp_path: Path) -> None:
    module, config = first_example("README.md")
    (tmp_path / "mine.py").write_text(module)
    (tmp_path / "mine.yaml").write_text(config)
    finished = run(tmp_path, "mine.yaml", "epochs=1")
    digest_line(finished)
    assert "on 1,600 samples" in finished.stdout
    assert "of 400, each counted once" in finished.stdout


def test_the_readmes_first_example_is_the_same_in_chinese() -> None:
    # So the one that trains stands for both; comments are translated.
    (module, config), (module_zh, config_zh) = first_example("README.md"), first_example("README.zh-CN.md")
    assert ast.dump(ast.parse(module)) == ast.dump(ast.parse(module_zh))
    assert YAML(typ="safe").load(config) == YAML(typ="safe").load(config_zh)


def test_ctrl_c_while_the_command_imports_is_one_line(project: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(project)
        os.execv(COMMAND[0], [*COMMAND, "mine.yaml"])
    process = psutil.Process(pid)  # a fork of this one at first, where torch is there
    while process.cmdline()[-1:] != ["mine.yaml"] or not any("pydantic" in each.path for each in process.memory_maps()):
        pass
    os.write(terminal, b"\x03")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    output = read_all(terminal)
    assert code == 130
    assert "Interrupted" in output
    assert "Traceback" not in output


def read_all(terminal: int) -> str:
    """What has been written to a terminal whose programs have ended; the kernel hands it over in pieces."""
    pieces = []
    with suppress(OSError):  # EIO at its end
        while piece := os.read(terminal, 1 << 16):
            pieces.append(piece)
    os.close(terminal)
    return b"".join(pieces).decode()


OWN = [
    "mine.yaml",
    "model_args.hidden=4000",
    "loss=mine:LogCosh",
    "loss_args.scale=0.5",
    "optimizer=torch.optim:SGD",
    "optimizer_args={lr: 1e-4, momentum: 0.9}",
    "scheduler=torch.optim.lr_scheduler:MultiStepLR",
    "scheduler_args.milestones=[2, 3]",
    "finish=mine:report",
    "finish_args.greeting=hello",
    "keep=3",
]


@final
class Trained:
    """A folder in which two trainings of four epochs ran, begun at the same moment, on two workers and on one."""

    def __init__(self, folder: Path) -> None:
        (folder / "mine.yaml").write_text(CONFIG.replace("run_dir: run\n", ""))
        self.folder = folder
        started = [
            warm.Popen(
                [*COMMAND, *OWN, "epochs=4", f"workers={workers}"],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for workers in (2, 1)
        ]
        outputs = [process.communicate(timeout=150) for process in started]
        self.runs = [
            subprocess.CompletedProcess(process.args, process.returncode, *output)
            for process, output in zip(started, outputs, strict=True)
        ]
        self.digest = digest_line(self.runs[0])

    def copy_to(self, folder: Path, *kept: int) -> Path:
        """Copy a run to another folder, with the checkpoints of these epochs only; there are those of 2, 3 and 4."""
        shutil.copytree(self.folder / "runs" / "mine", folder / "run")
        checkpoints = sorted((folder / "run").glob("step-*.ckpt"))
        assert len(checkpoints) == 3
        for epoch, path in enumerate(checkpoints, start=2):
            if epoch not in kept:
                path.unlink()
        return folder / "run"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(write_project(tmp_path_factory.mktemp("trained")))


def test_two_trainings_at_the_same_time_do_not_disturb_each_other(trained: Trained) -> None:
    assert [digest_line(finished) for finished in trained.runs] == [trained.digest] * 2
    assert sorted(path.name for path in (trained.folder / "runs").iterdir()) == ["mine", "mine-2"]


def test_a_users_own_things_train(trained: Trained) -> None:
    for finished in trained.runs:
        assert "hello from 32001 parameters" in finished.stdout
        assert "test loss" in finished.stdout


def test_a_broken_checkpoint_is_told_of_and_the_one_before_taken_to_the_same_digest(
    project: Path, trained: Trained
) -> None:
    # The end of epoch 4 is gone, and that of epoch 3 cut off: epochs 3 and 4 are trained again. Between them
    # the rate falls, as it would not after the first epoch of a schedule that begins anew.
    folder = trained.copy_to(project, 2, 3)
    broken = max(folder.glob("step-*.ckpt"))
    broken.write_bytes(broken.read_bytes()[:-100])
    finished = run(project, *OWN, "epochs=4", "workers=1", "--resume")
    assert "warning" in finished.stderr
    assert broken.name in finished.stderr
    assert "continuing with epoch 3" in finished.stdout
    assert digest_line(finished) == trained.digest
    recorded = rows(folder / "metrics.jsonl")
    assert [row["global_step"] for row in recorded if row["kind"] == "step"] == list(range(1, 17))
    rates = [row["learning_rate"] for row in recorded if row["kind"] == "epoch"]
    assert rates == pytest.approx([1e-4, 1e-4, 1e-5, 1e-6])


def limit_file_size() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # the metrics fit, checkpoint and report do not


def test_a_full_disk_leaves_the_checkpoint_before_it_whole(project: Path, trained: Trained) -> None:
    folder = trained.copy_to(project, 4)
    [checkpoint] = folder.glob("*.ckpt")
    before = checkpoint.read_bytes()
    finished = run(project, *OWN, "epochs=5", "workers=1", "--resume", before=limit_file_size)
    assert "continuing with epoch 5" in finished.stdout  # of four once
    assert finished.returncode == 2, finished.stderr
    assert "error: The checkpoint" in finished.stderr
    assert "could not be written" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert [path.read_bytes() for path in folder.glob("*.ckpt")] == [before]
    assert not list(folder.glob(".*tmp"))


def test_a_full_disk_does_not_stop_a_training_that_is_to_go_on(project: Path, trained: Trained) -> None:
    folder = trained.copy_to(project, 2)
    [checkpoint] = folder.glob("*.ckpt")
    before = checkpoint.read_bytes()
    finished = run(
        project, *OWN, "epochs=4", "workers=1", "on_save_error=warn", "keep=1", "--resume", before=limit_file_size
    )
    assert digest_line(finished) == trained.digest
    assert finished.stderr.count("File too large. Earlier checkpoints are intact") == 2  # epochs 3 and 4
    assert [path.read_bytes() for path in folder.glob("*.ckpt")] == [before]
    assert not list(folder.glob(".*tmp"))


def test_a_second_training_in_a_directory_is_refused(lockstep_here: Command, project: Path, trained: Trained) -> None:
    folder = trained.copy_to(project, 4)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir() if path.name != ".lock")
    with lock_run(folder):
        finished = lockstep_here("train", *OWN, "epochs=5", "workers=1", "--resume")
    assert finished.code == 2
    assert f"Another training uses the run directory run: process {os.getpid()} on host" in finished.stderr
    assert sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir() if path.name != ".lock") == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gone.yaml"], "no config file"),
        (["mine.yaml", "workers=0"], "at least 1"),
        (["mine.yaml", "workers=5", "num_shards=4"], "5 workers cannot share num_shards = 4"),
        (["mine.yaml", "device_ids=[99]"], "asks for GPU 99"),
        (["mine.yaml", "--resume"], "no run directory run"),
        (["mine.yaml", "run_dir=taken"], "exists already"),
    ],
)
def test_bad_input_is_a_message_and_exit_code_2(
    project: Path, lockstep_here: Command, arguments: list[str], said: str
) -> None:
    (project / "taken").mkdir()
    finished = lockstep_here("train", *arguments)
    assert finished.code == 2
    assert said in finished.stderr
    assert "Traceback" not in finished.stderr
    assert finished.stderr.count("error:") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["batch_sise=3"], "Did you mean 'batch_size'?"),
        (["workers=2", "model=mine:not_a_model"], "not a torch.nn.Module"),  # as a worker finds
    ],
)
def test_bad_input_ends_the_process_alike(project: Path, arguments: list[str], said: str) -> None:
    finished = run(project, "mine.yaml", *arguments)
    assert finished.returncode == 2
    assert said in finished.stderr
    assert "Traceback" not in finished.stderr
    assert finished.stderr.count("error:") == 1
    assert not (project / "run").exists()  # so that the corrected command can take the name


@pytest.mark.usefixtures("project")
def test_debug_shows_the_traceback(lockstep_here: Command) -> None:
    finished = lockstep_here("train", "mine.yaml", "workers=1", "model=mine:not_a_model", "--debug")
    assert finished.code == 2
    assert "Traceback" in finished.stderr


@pytest.mark.usefixtures("project")
def test_a_failure_in_the_users_code_shows_their_line(lockstep_here: Command) -> None:
    finished = lockstep_here("train", "mine.yaml", "workers=1", "model=mine:Broken")
    assert finished.code == 1
    assert "KeyError: 'in the users own forward'" in finished.stderr
    assert "mine.py" in finished.stderr


@pytest.mark.usefixtures("project")
def test_a_diverging_loss_stops_with_a_message(lockstep_here: Command) -> None:
    finished = lockstep_here("train", "mine.yaml", "workers=1", "model=mine:Diverging")
    assert finished.code == 1
    assert "The loss of shard 0, run by rank 0, is nan at epoch 0, step 0" in finished.stderr
    assert "Traceback" not in finished.stderr


def press_ctrl_c_on_a_terminal(folder: Path, *arguments: str) -> tuple[int, str, list[psutil.Process]]:
    """Run the command on a pseudo terminal, press Ctrl-C after three epochs; return code, output, workers."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execv(COMMAND[0], [*COMMAND, *arguments])
    output = ""
    workers: list[psutil.Process] = []
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 0.5)[0]:
            continue
        try:
            chunk = os.read(terminal, 1 << 16)
        except OSError:  # the terminal is closed: every process has let go of it
            break
        output += chunk.decode(errors="replace")
        if (
            len(re.findall(r"epoch +\d+/", output)) >= 3 and not workers
        ):  # so the second save has begun, and the first is done
            workers = psutil.Process(pid).children(recursive=True)
            os.write(terminal, b"\x03")
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), output, workers


def test_ctrl_c_on_a_terminal_stops_every_process(project: Path) -> None:
    code, output, workers = press_ctrl_c_on_a_terminal(project, "mine.yaml", "epochs=100000", "loader_workers=1")
    assert code == 130
    assert "Interrupted; every worker has ended." in output
    assert "Traceback" not in output
    assert re.search(r"step \d+/", output)  # the progress bar
    assert re.search(r"left: epoch \d", output)
    assert len(workers) >= 4  # two workers, each with a loading process
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
    assert list((project / "run").glob("*.ckpt"))


def test_a_killed_launcher_takes_workers_and_loading_processes_with_it(project: Path) -> None:
    process = warm.Popen(
        [*COMMAND, "mine.yaml", "epochs=100000", "workers=1", "loader_workers=1"],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    while not process.stdout.readline().startswith("epoch"):
        assert process.poll() is None
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2  # a worker and its loading process
    process.kill()
    _, alive = psutil.wait_procs(workers, timeout=60)
    process.stdout.close()
    process.wait()
    assert not alive
