"""The entry point of `lockstep`. Each command is imported when it is used, so that `lockstep --help` is immediate."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from lockstep.processes.ending import exit_quickly
from lockstep.version import VERSION

if TYPE_CHECKING:
    from rich.console import Console

_COMMANDS = {
    "audit": "Take steps of a run again, and confirm that they had these bits; or find where two runs part.",
    "check": "Read training scripts, and list what goes wrong with several workers.",
    "checkpoint": "Look into checkpoint files, and convert them.",
    "devices": "Show the GPUs, the processes that use them, the CPU, and what `auto` would take right now.",
    "doctor": "Show what each worker of a job does, or did last; if it stands still, who is the cause.",
    "evaluate": "Evaluate a saved model: every sample once, with the same bits on any number of workers.",
    "explain": "Show what a code at the end of a message means, such as LS201, and what to do.",
    "init": "Write a config and a module that train at once: for images, a table, texts, or blank.",
    "predict": "Write what a saved model predicts for each sample, in the order of the data.",
    "report": "Write one HTML file about runs: curves, where the time goes, the last steps, other numbers of workers.",
    "run": "Start a script once per worker on this host, as torchrun does.",
    "runs": "List runs: state, progress, who runs them where, metrics, and what differs in their configs.",
    "scale": "Change the number of workers of a run that trains.",
    "train": "Train the model of a config file.",
    "verify": "Train a few steps on several numbers of workers and compare the digests.",
}
"""What `lockstep --help` says of each command; `lockstep.cli.NAME.COMMAND` is a typer app with it."""

JSON = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
FORCE = Annotated[bool, typer.Option("--force", help="Take GPUs that others hold, too.")]


class LazyCommands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            near = difflib.get_close_matches(cmd_name, _COMMANDS, n=1)
            if near and not ctx.resilient_parsing:
                ctx.fail(f"No such command {cmd_name!r}. Did you mean {near[0]!r}?")
            return None
        command: Any = typer.main.get_command(import_module(f"lockstep.cli.{cmd_name}").COMMAND)
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


app = typer.Typer(
    name="lockstep",
    cls=LazyCommands,
    help="Data-parallel training for PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def command(
    function: Callable[..., None],
    *,
    cls: type[TyperCommand] = TyperCommand,
    context_settings: Mapping[str, Any] | None = None,
) -> typer.Typer:
    """Return a typer app with this function as its only command, as `LazyCommands` finds it in each module."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(cls=cls, context_settings=dict(context_settings or {}))(with_failures_shown(function))
    return app


def with_failures_shown(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the option `--debug`, and turn what it raises into a message and an exit code."""

    @wraps(function)
    def call(*, debug: bool = False, **given: Any) -> None:
        from lockstep.cli.failures import failures_shown

        with failures_shown(debug=debug):
            function(**given)

    option = Annotated[bool, typer.Option("--debug", help="Show tracebacks of bad input too.")]
    signature = inspect.signature(function)
    added = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=option)
    call.__signature__ = signature.replace(parameters=[*signature.parameters.values(), added])  # type: ignore[attr-defined]
    call.__annotations__ = {**function.__annotations__, "debug": option}
    return call


def table_console(width_in_files: int = 160) -> "Console":
    """Return a console for a table: as wide as the terminal, and of this width in a file or a pipe."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = width_in_files
    return console


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lockstep {VERSION}")
        raise typer.Exit


@app.callback()
def describe(
    *,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Data-parallel training for PyTorch."""


def main() -> None:
    exit_quickly()
    app(prog_name="lockstep")


if __name__ == "__main__":
    main()
