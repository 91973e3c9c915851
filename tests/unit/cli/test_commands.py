"""The list of commands, which is written without importing them."""

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch
import typer
from rich.console import Console
from tests.unit.devices.machines import GIB, Card, FakeNvml, gpu, machine, refusal
from typer.testing import CliRunner

from lockstep.cli import devices as command
from lockstep.cli import doctor, failures, train
from lockstep.cli.check import try_script
from lockstep.cli.devices import BackendLinks
from lockstep.cli.doctor import gpu_use
from lockstep.cli.failures import FAILURE_EXIT, check_not_redirected, failures_shown
from lockstep.cli.main import _COMMANDS, app
from lockstep.cli.options import ResumingCommand, complete_config, find_config, find_examples, give_value
from lockstep.comm.link_check import LinkReport
from lockstep.devices import Placement, choose_devices
from lockstep.doctor.activity import Activity
from lockstep.doctor.diagnosis import Verdict, WorkerState
from lockstep.doctor.examination import Examination
from lockstep.doctor.report import print_examination
from lockstep.errors import ConfigError, LossError, PeerFailedError, UsageError, WorkerFailedError, WorkerFailure
from lockstep.launch.exits import describe_failures
from lockstep.processes.stop_signals import StopRequest
from lockstep.report import page
from lockstep.report.metrics_file import MetricsFile
from lockstep.report.page import run_data
from lockstep.runs.config import read_config
from lockstep.runs.fit import fit
from lockstep.runs.listing import FitResult


@pytest.mark.parametrize("name", list(_COMMANDS))
def test_each_listed_command_is_found(name: str) -> None:
    done = CliRunner().invoke(app, [name, "--help"])
    assert done.exit_code == 0, done.output
    assert f"Usage: lockstep {name}" in done.output or f"Usage: root {name}" in done.output


def test_an_unknown_command_is_refused() -> None:
    done = CliRunner().invoke(app, ["trian"])
    assert done.exit_code == 2
    assert "trian" in done.output


# -- What a command prints, and its exit code, when something fails ----------------------------------------------------


def shown(capsys: pytest.CaptureFixture[str], *errors: Exception) -> str:
    failures = tuple(
        WorkerFailure(rank=rank, reason=f"failure {rank}", traceback="Traceback", error=error)
        for rank, error in enumerate(errors)
    )
    raised = WorkerFailedError("The whole story.", failures)
    raised.__cause__ = errors[0]
    with pytest.raises(typer.Exit) as ended, failures_shown(debug=False):
        raise raised
    assert ended.value.exit_code == FAILURE_EXIT
    return capsys.readouterr().err


def test_errors_of_ours_are_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, LossError("Too much."), PeerFailedError("Rank 0 failed.")) == "error: Too much.\n"


def test_another_workers_own_error_is_not_hidden_by_one_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, LossError("Too much."), KeyError("the culprit")) == "error: The whole story.\n"


def test_a_condition_that_the_shell_took_for_a_redirection_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {"/proc/self/fd/1": "/home/me/=20GiB"}
    monkeypatch.setattr(os, "readlink", targets.__getitem__)
    with pytest.raises(UsageError, match="device_ids=auto:3@20GiB"):
        check_not_redirected()
    targets["/proc/self/fd/1"] = "/home/me/log=20.txt"
    check_not_redirected()


def test_frames_before_the_users_are_left_out_without_debug(capsys: pytest.CaptureFixture[str]) -> None:
    ours = f'  File "{failures.__file__}", line 1, in step\n    call()\n'
    trace = f'Traceback (most recent call last):\n{ours}  File "/mine.py", line 7, in f\n    x\nKeyError: 1\n'
    found = WorkerFailure(rank=0, reason="KeyError: 1", traceback=trace, error=KeyError(1))
    for debug in (False, True):
        with pytest.raises(typer.Exit), failures_shown(debug=debug):
            raise WorkerFailedError(describe_failures([found]), (found,)) from KeyError(1)
        said = capsys.readouterr().err
        assert ('File "/mine.py", line 7' in said, "in step" in said, "--debug" in said) == (True, debug, not debug)


def test_an_error_of_ours_that_no_line_of_the_user_led_to_has_no_frames(capsys: pytest.CaptureFixture[str]) -> None:
    error = TypeError("The metric worst returned a float, expected a pair. (LS528)")
    ours = f'  File "{failures.__file__}", line 1, in step\n    raise TypeError(\n'
    trace = f"Traceback (most recent call last):\n{ours}TypeError: {error}\n"
    for mine, has_frames in (("", False), ('  File "/mine.py", line 7, in f\n    x\n', True)):
        traced = trace.replace(ours, mine + ours)
        found = WorkerFailure(rank=0, reason=f"TypeError: {error}", traceback=traced, error=error)
        with pytest.raises(typer.Exit), failures_shown(debug=False):
            raise WorkerFailedError(describe_failures([found]), (found,)) from error
        said = capsys.readouterr().err
        assert ("The metric worst" in said, "Traceback" in said, "--debug" in said) == (True, has_frames, not mine)


# -- `lockstep init`: what it writes trains as it stands ---------------------------------------------------------------


@pytest.mark.parametrize("kind", ["blank", "images", "table", "text"])
def test_what_is_written_trains_and_predicts(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(app, ["init", kind, str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert f"lockstep train {tmp_path}/mine.yaml" in done.output
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("mine", None)
    config = read_config(tmp_path / "mine.yaml", ["epochs=1", "async_save=false"])
    result = fit(config, device=torch.device("cpu"), run_dir=tmp_path, recorder=MetricsFile(tmp_path / "metrics.jsonl"))
    assert isinstance(result, FitResult)
    assert len(sys.modules.pop("mine").new()) > 0


@pytest.mark.parametrize("kind", ["blank", "images", "table", "text"])
def test_what_is_commented_out_can_be_used(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CliRunner().invoke(app, ["init", kind, str(tmp_path)])
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("mine", None)
    text = (tmp_path / "mine.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(re.sub(r"^# (?=\w+: )(?!trackers)", "", text, flags=re.MULTILINE))
    config = read_config(tmp_path / "mine.yaml", ["dry_run=true", "async_save=false"])
    assert {config.scheduler, bool(config.ema), bool(config.early_stopping)} == {"cosine", True}
    result = fit(config, device=torch.device("cpu"), run_dir=tmp_path, recorder=MetricsFile(tmp_path / "metrics.jsonl"))
    assert isinstance(result, FitResult)
    assert len(result.test) > 2
    sys.modules.pop("mine")


@pytest.mark.parametrize(("workers", "num_shards"), [(1, 4), (3, 6), (6, 6)])
def test_the_workers_share_the_shards_evenly(workers: int, num_shards: int, tmp_path: Path) -> None:
    CliRunner().invoke(app, ["init", "table", str(tmp_path), "--workers", str(workers)])
    assert read_config(tmp_path / "mine.yaml").num_shards == num_shards


def test_a_kind_that_is_misspelt_is_told(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["init", "image", str(tmp_path)])
    assert done.exit_code == 2
    assert "Did you mean images? The kinds are blank, images, table, text." in done.output
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_and_own_pictures_are_kept(tmp_path: Path) -> None:
    for name in ("cats", "dogs"):
        (tmp_path / "images" / name).mkdir(parents=True)
    done = CliRunner().invoke(app, ["init", "images", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == ["cats", "dogs"]
    assert "num_classes: 2" in (tmp_path / "mine.yaml").read_text()
    again = CliRunner().invoke(app, ["init", "images", str(tmp_path)])
    assert again.exit_code == 2
    assert "exists already" in again.output


def test_a_config_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config(Path("digits")) == find_examples()["digits"]
    assert read_config(find_config(Path("digits"))).epochs == 20
    with pytest.raises(ConfigError, match="The examples are digits, text"):
        find_config(Path("digit"))
    (tmp_path / "mine.yaml").write_text("")
    assert find_config(Path("mine")) == Path("mine.yaml")
    for typed in ("mine.yml", "mien.yaml"):
        with pytest.raises(ConfigError, match=r"no config file .*Did you mean mine.yaml\?"):
            find_config(Path(typed))
    assert find_config(Path("other.yaml")) == Path("other.yaml")
    assert complete_config("m") == ["mine.yaml"]
    assert complete_config("dig") == ["digits"]


def test_a_dry_run_finds_a_tracker_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    (tmp_path / "mine.yaml").write_text("model: mine:Net\ndata: mine:datasets\ntrackers: [wandb]\n")
    tried = CliRunner().invoke(app, ["train", str(tmp_path / "mine.yaml"), "--dry-run"])
    assert (tried.exit_code, "trackers needs wandb" in tried.output) == (2, True)


def test_a_command_of_nearly_that_name_is_suggested() -> None:
    assert "Did you mean 'train'?" in CliRunner().invoke(app, ["trian"]).output


# -- `--resume [PATH]` among the other arguments -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "resumed"),
    [
        ("c.yaml --resume", ""),
        ("--resume c.yaml", ""),
        ("--resume config", ""),
        ("--resume c.yaml lr=1", ""),
        ("c.yaml --resume lr=1", ""),
        ("c.yaml --resume optimizer_args.lr=1 epochs=3", ""),
        ("c.yaml --resume --force", ""),
        ("--allow lr --resume config", ""),
        ("--resume config --overfit 2", ""),  # the number was taken for CONFIG, and `config` for the path
        ("c.yaml --resume -- lr=1", ""),
        ("c.yaml --resume runs/x lr=1", "runs/x"),
        ("c.yaml --resume runs/lr=1", "runs/lr=1"),
        ("config --resume runs/x", "runs/x"),
        ("--resume runs/x c.yaml", "runs/x"),
        ("--resume runs/x --allow lr c.yaml", "runs/x"),
        ("c.yaml lr=1 --resume=runs/x", "runs/x"),
        ("--resume=lr=1 c.yaml", "lr=1"),
        ("c.yaml --resume step-00000012.ckpt", "step-00000012.ckpt"),
    ],
)
def test_a_path_is_distinguished_from_other_arguments(given: str, resumed: str) -> None:
    parsed: dict[str, Any] = {}

    def command(
        config: str,
        overrides: list[str] = typer.Argument(None),  # noqa: B008 - the form that typer needs
        resume: str = typer.Option(None, "--resume"),
        allow: list[str] = typer.Option(None),  # noqa: B008 - likewise
        overfit: int = typer.Option(None),
        force: bool = typer.Option(False, "--force"),
    ) -> None:
        parsed.update(config=config, overrides=overrides, resume=resume)

    app = typer.Typer()
    app.command(cls=ResumingCommand)(command)
    CliRunner().invoke(app, given.split(), catch_exceptions=False)
    assert parsed["resume"] == resumed
    assert parsed["config"] in {"c.yaml", "config"}
    assert all("=" in each for each in parsed["overrides"] or ())


def test_without_it_a_run_is_new() -> None:
    assert give_value(["c.yaml", "lr=1"]) == ["c.yaml", "lr=1"]


def test_the_help_shows_that_the_path_may_be_left_out() -> None:
    assert "--resume [PATH]" in CliRunner().invoke(app, ["train", "--help"]).output


# -- What is printed and written at the end of `lockstep train` --------------------------------------------------------


def write_metrics(folder: Path) -> None:
    rows = [
        {"kind": "epoch", "epoch": epoch, "global_step": epoch, "train_loss": loss, "learning_rate": 0.1}
        for epoch, loss in enumerate((1.0, 0.25, 1.0))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_first_last_lowest_and_highest_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_metrics(tmp_path)
    train._show_summary(tmp_path)
    [_, row, *_] = capsys.readouterr().out.splitlines()
    # Of equal ones the first, which is best.ckpt.
    assert row.split() == ["train", "loss", "1", "1", "0.25", "(epoch", "2)", "1", "(epoch", "1)"]


def test_an_interruption_says_what_is_saved(tmp_path: Path) -> None:
    for name, said in ((None, "Nothing was saved"), ("step-00000003.ckpt", f"use --resume {tmp_path}")):
        (tmp_path / "metrics.jsonl").touch()  # else the directory is removed
        if name is not None:
            (tmp_path / name).touch()
        with (
            pytest.raises(KeyboardInterrupt) as caught,
            train._cleaning_up(tmp_path, StopRequest(), with_report=False),
        ):
            raise KeyboardInterrupt
        assert said in " ".join(caught.value.__notes__)


def test_a_report_that_fails_is_told_of_and_fails_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> None:
        raise ValueError("figures of a kind that Bokeh refuses")

    write_metrics(tmp_path)
    (tmp_path / "config.yaml").write_text("{}")
    monkeypatch.setattr(run_data, "read_run", fail)
    monkeypatch.setattr(page, "write_page", fail)
    train._write_report(tmp_path)
    said = capsys.readouterr().err
    assert "ValueError: figures of a kind that Bokeh refuses" in said
    assert f"lockstep report {tmp_path}" in said


# -- `lockstep check --run`: a job is ended after some steps, and what it said is kept ---------------------------------


JOB = """
import sys, tempfile, time, lockstep_command
lockstep_command._put_off_package_init()
from pathlib import Path
from lockstep.recording import EventKind, WorkerRecorder, open_recorder
workers = [WorkerRecorder() for _ in range(2)]
for rank, worker in enumerate(workers):
    folder = Path(tempfile.gettempdir()) / "lockstep-1" / "job"
    open_recorder(worker, folder, worker=rank, rank=rank, world_size=2, capacity=64)
    for _ in range(3 + rank):
        worker.end(worker.begin(EventKind.BACKWARD, 0, 0, 0))
for rank in range(2):
    print(f"[rank {rank}] train.py:3: UserWarning: The ranks train on other numbers of samples.", file=sys.stderr)
print("[rank 0] epoch 1", file=sys.stderr, flush=True)
if sys.argv[1] == "goes on":
    try:
        time.sleep(1000)
    except KeyboardInterrupt:
        sys.exit("[rank 0] [rank0]: RuntimeError: Operation timed out!")  # the others were ended before it
sys.exit("error: Worker 1 failed first")
"""
"""What `lockstep run` leaves of a script with the wrapper."""


def start_instead(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start_process = subprocess.Popen

    def start(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        assert command[1:5] == ["-m", "lockstep", "run", "--drop-in"]
        return start_process([sys.executable, "-c", JOB, how], **options)

    monkeypatch.setattr(subprocess, "Popen", start)


def test_a_script_without_end_is_ended_when_each_worker_has_taken_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    start_instead("goes on", monkeypatch)
    trial = try_script(Path("train.py"), 3)
    assert (trial.num_steps, trial.exit_code) == (3, None)
    assert trial.said == ("train.py:3: UserWarning: The ranks train on other numbers of samples.",)


def test_a_script_that_ends_before_shows_why(monkeypatch: pytest.MonkeyPatch) -> None:
    start_instead("ends", monkeypatch)
    trial = try_script(Path("train.py"), 100)
    assert trial.exit_code == 1
    assert trial.said[-1] == "error: Worker 1 failed first"


# -- `lockstep devices --test`: what it prints of what the workers found, and its exit code ----------------------------


APP = command.COMMAND
PAIR, OTHER, ALL = (0, 1), (0, 2), (0, 1, 2)
THREE = choose_devices("auto", inventory=machine(gpu(0), gpu(1), gpu(4)))


def found(*reports: tuple[tuple[int, ...], str], backend: str = "nccl", warning: str = "") -> BackendLinks:
    made = [LinkReport(ranks=ranks, seconds=0.0 if text else 0.0042, problem=text) for ranks, text in reports]
    return BackendLinks(backend=backend, device="cuda", reports=made, warning=warning)


def run(monkeypatch: pytest.MonkeyPatch, links: Sequence[BackendLinks], *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(command, "place_workers", lambda request, *, force: THREE)
    monkeypatch.setattr(command, "check_placement", lambda placement: links)
    result = CliRunner().invoke(APP, ["--test", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_right_sums_end_with_success(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run(monkeypatch, [found((PAIR, ""), (OTHER, ""), (ALL, ""))])
    assert (code, err) == (0, "")
    [row] = [line for line in out.splitlines() if "GPU 0 (NVIDIA GeForce RTX 3090) - GPU 4 (NVIDIA" in line]
    assert "nccl (cuda)" in row
    assert "4.2 ms" in row
    assert "all 3" in out
    assert out.endswith("Every sum was right.\n")


@pytest.mark.parametrize("problem", ["Rank 2: 1 of 262139 sums of torch.float32 are wrong.", "Rank 2: it did not end."])
def test_a_wrong_sum_is_named_and_ends_with_failure(monkeypatch: pytest.MonkeyPatch, problem: str) -> None:
    code, out, _ = run(monkeypatch, [found((PAIR, ""), (OTHER, problem))])
    assert code == 1
    assert problem in out
    assert "do not add up correctly: nccl between GPU 0 (NVIDIA GeForce RTX 3090) - GPU 4 (" in out
    assert "NCCL_P2P_DISABLE=1" in out
    code, out, _ = run(monkeypatch, [found((OTHER, problem))], "--json")
    assert code == 1
    assert f'"problem": "{problem}"' in out


def test_what_is_known_of_this_nccl_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run(monkeypatch, [found((ALL, ""), warning="NCCL 2.18.1 is known to return wrong results.")])
    assert (code, err) == (0, "warning: NCCL 2.18.1 is known to return wrong results.\n")
    assert out.endswith("Every sum was right.\n")


def test_one_device_or_several_requests_cannot_be_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = run(monkeypatch, [], "auto", "cpu")
    assert (code, err.splitlines()[0]) == (2, "error: --test takes one request, but 2 are given: auto cpu. (LS821)")
    one = Placement(devices=THREE.devices[:1], reason="GPU 0")
    monkeypatch.setattr(command, "place_workers", lambda request, *, force: one)
    result = CliRunner().invoke(APP, ["--test"])
    assert result.exit_code == 2
    assert result.stderr == (
        "error: --test needs two devices or more, but the request gets one: GPU 0. (LS821)\n"
        "`lockstep explain LS821` says more.\n"
    )


# -- What the doctor's command adds to the doctor: GPUs ----------------------------------------------------------------


def test_memory_and_load_of_the_workers_gpus_are_shown_and_who_else_is_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pid, other = os.getpid(), os.getppid()
    cards = (
        Card(load=97, computing={pid: 3 * GIB, other: GIB}),
        Card(load=50, computing={other: GIB}),  # no worker is on it
    )
    monkeypatch.setattr(doctor, "pynvml", FakeNvml(*cards))
    found = gpu_use([pid])
    assert found[pid] == "3,072 MiB on GPU 0, busy 97 %"
    assert found[other].startswith("1,024 MiB on GPU 0, busy 97 %")
    assert "GPU 1" not in found[other]
    worker = WorkerState(rank=0, pid=pid, activity=Activity(doing="has ended", since_ns=0), seconds=0.0, facts=None)
    verdict = Verdict(kind="running", text="All is well.")
    console = Console(width=250, record=True, file=io.StringIO())
    examination = Examination(recording=Path("r"), program="", workers=(worker,), stacks={}, verdict=verdict)
    print_examination(examination, console, with_stacks=False, gpus=found)
    text = console.export_text()
    assert "3,072 MiB on GPU 0, busy 97 %" in text
    assert f"Other processes on its GPUs: process {other}: 1,024 MiB on GPU 0" in text


def test_without_a_driver_or_workers_there_is_no_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "pynvml", FakeNvml(broken=refusal(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)))
    assert gpu_use([os.getpid()]) == {}
    monkeypatch.setattr(doctor, "pynvml", FakeNvml(Card(computing={1: GIB})))
    assert gpu_use([]) == {}
