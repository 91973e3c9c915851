"""environment.json: enough to repeat a start, nothing that is secret."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.comm import current_world
from lockstep.runs.environment import gather_facts, write_environment
from lockstep.settings import Settings


def write(run_dir: Path) -> list[dict[str, Any]]:
    write_environment(run_dir, gather_facts(current_world(), torch.device("cpu"), "a processor"), {"seed": 3}, Path())
    starts: list[dict[str, Any]] = json.loads((run_dir / "environment.json").read_text())
    return starts


def git(*arguments: str) -> str:
    command = ["git", "-c", "user.name=somebody", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run's directory outside the user's own, which is the current one."""
    (tmp_path / "code").mkdir()
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "code")
    return tmp_path / "run"


def test_versions_workers_and_the_fingerprint_are_noted(run_dir: Path) -> None:
    (start,) = write(run_dir)
    assert start["torch"]["version"] == torch.__version__
    assert start["packages"]["numpy"]
    assert start["fingerprint"] == {"seed": 3}
    assert start["workers"][0]["device_name"] == "a processor"
    assert start["directory"] == str(Path.cwd())
    assert start["code"] is None


def test_a_commit_and_what_is_not_in_it_are_kept(run_dir: Path) -> None:
    Path("train.py").write_text("before\n")
    git("init", "-q")
    git("add", "train.py")
    git("commit", "-qm", "first")
    assert write(run_dir)[0]["code"] | {"branch": ""} == {
        "repository": str(Path.cwd()),
        "commit": git("rev-parse", "HEAD"),
        "branch": "",
        "is_changed": False,
        "patch": None,
        "untracked": [],
        "num_untracked": 0,
    }
    Path("train.py").write_text("after\n")
    Path("new.py").touch()
    code = write(run_dir)[0]["code"]
    assert (code["is_changed"], code["untracked"]) == (True, ["new.py"])
    git("checkout", "-q", "train.py")
    git("apply", str(run_dir / code["patch"]))
    assert Path("train.py").read_text() == "after\n"


def test_only_the_folder_of_the_code_is_saved_of_a_repository_of_others(run_dir: Path) -> None:
    # Each run directory got a patch of 82 kB of other people's files.
    names = ("theirs.py", "mine/train.py")
    Path("mine").mkdir()
    for name in names:
        Path(name).write_text("before\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    for name in names:
        Path(name).write_text("after\n")
    Path("their_new.py").touch()
    assert write_environment(run_dir, [], {}, Path("mine"), saves_code=False) is None
    patch = write_environment(run_dir, [], {}, Path("mine"))
    assert patch is not None
    saved = (run_dir / patch).read_text()
    assert "mine/train.py" in saved
    assert "theirs" not in saved
    assert json.loads((run_dir / "environment.json").read_text())[0]["code"]["untracked"] == []


def test_bytes_of_any_kind_can_be_put_back_from_elsewhere(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {"crlf.py": b"a\r\nb\r\n", "latin.py": b"# caf\xe9\n", "weights.bin": bytes(range(256))}
    code = Path.cwd()
    for name in contents:
        Path(name).write_bytes(b"before\r\n")
    git("init", "-q")
    git("add", ".")
    git("-c", "core.autocrlf=false", "commit", "-qm", "first")
    for name, content in contents.items():
        Path(name).write_bytes(content)
    monkeypatch.chdir(run_dir)
    write_environment(run_dir, [], {}, code)
    (start,) = json.loads((run_dir / "environment.json").read_text())
    monkeypatch.chdir(code)
    git("checkout", "-q", ".")
    git("apply", str(run_dir / start["code"]["patch"]))
    assert {name: Path(name).read_bytes() for name in contents} == contents


def test_each_start_is_kept_the_newest_first(run_dir: Path) -> None:
    write(run_dir)
    assert len(write(run_dir)) == 2


def test_settings_hold_no_secret() -> None:
    secret = ("AWS_SECRET_ACCESS_KEY", "NVIDIA_API_KEY", "TORCH_HUB_TOKEN", "MASTER_PASSWORD", "LOCAL_DB_URL")
    environ = {"OMP_NUM_THREADS": "2", "NCCL_DEBUG": "INFO", **dict.fromkeys(secret, "x")}
    assert Settings(environ).recorded() == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"}


def test_a_file_that_cannot_be_read_is_kept_beside_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text("[{", encoding="utf-8")
    write_environment(tmp_path, [], {}, Path())
    assert (tmp_path / "environment.damaged.json").read_text(encoding="utf-8") == "[{"
    assert len(json.loads((tmp_path / "environment.json").read_text(encoding="utf-8"))) == 1
