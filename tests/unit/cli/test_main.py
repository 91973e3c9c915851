"""The list of commands, which is written without importing them."""

import pytest
from typer.testing import CliRunner

from lockstep.cli.main import _COMMANDS, app


@pytest.mark.parametrize("name", list(_COMMANDS))
def test_each_listed_command_is_found(name: str) -> None:
    done = CliRunner().invoke(app, [name, "--help"])
    assert done.exit_code == 0, done.output
    assert f"Usage: lockstep {name}" in done.output or f"Usage: root {name}" in done.output


def test_an_unknown_command_is_refused() -> None:
    done = CliRunner().invoke(app, ["trian"])
    assert done.exit_code == 2
    assert "trian" in done.output
