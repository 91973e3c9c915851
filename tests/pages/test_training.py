"""What docs/training.md shows works: its config is one, its loop runs, and both languages show the same."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ruamel.yaml import YAML
from tests.support.threaded_ranks import run_ranks

from lockstep.runs.config import Config, parse_config

PAGES = [Path(__file__).parents[2] / "docs" / name for name in ("training.md", "training.zh-CN.md")]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text("utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_config_is_one_and_every_key_of_the_table_exists(page: Path) -> None:
    whole, *parts = (YAML(typ="safe").load(text) for text in blocks(page, "yaml"))
    parse_config(whole, page.name)
    assert {key for part in parts for key in part} <= set(Config.model_fields)
    for keys in re.findall(r"^\| (`\w+`(?:[,、] ?`\w+`)*) \|", page.read_text("utf-8"), flags=re.MULTILINE):
        assert set(re.findall(r"`(\w+)`", keys)) <= set(Config.model_fields)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_of_a_config_is_on_a_page(page: Path) -> None:
    text = page.read_text("utf-8") + page.with_name(page.name.replace("training", "config")).read_text("utf-8")
    named = set(re.findall(r"`(\w+)`|^(\w+):", text, flags=re.MULTILINE))
    options = {name.replace("-", "_") for name in re.findall(r"--([\w-]+)", text)}
    assert set(Config.model_fields) <= {first or second for first, second in named} | options


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_both_pages_have_one_loop(page: Path) -> None:
    def without_comments(text: str) -> str:
        return re.sub(r"\s*#.*", "", text)

    assert list(map(without_comments, blocks(page, "python"))) == list(
        map(without_comments, blocks(PAGES[0], "python"))
    )


def test_the_loop_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(PAGES[0], "python")
    found: dict[str, Any] = {}
    exec(code.replace("print(ls.launch(main, workers=2))", ""), found)
    here = SimpleNamespace(device="cpu")
    assert len(run_ranks(1, lambda _: found["main"](here))[0]) == 64
    assert (tmp_path / "run.ckpt").exists()
