"""`--resume [PATH]` among the other arguments."""

from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lockstep.cli.main import app
from lockstep.cli.options import ResumingCommand, give_value


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
