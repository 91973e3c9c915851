"""Making a command out of a function, as `main.py` finds it in each module of this package."""

from collections.abc import Callable, Mapping
from typing import Any

import typer
from typer.core import TyperCommand


def command(
    function: Callable[..., None],
    *,
    cls: type[TyperCommand] = TyperCommand,
    context_settings: Mapping[str, Any] | None = None,
) -> typer.Typer:
    """Return a typer app with this function as its only command."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(cls=cls, context_settings=dict(context_settings or {}))(function)
    return app
