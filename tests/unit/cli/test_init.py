"""`lockstep init`: what it writes trains as it stands."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lockstep.cli.main import app
from lockstep.cli.options import complete_config, find_config, find_examples
from lockstep.errors import ConfigError
from lockstep.report.metrics_file import MetricsFile
from lockstep.runs.config import read_config
from lockstep.runs.fit import fit
from lockstep.runs.listing import FitResult


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
