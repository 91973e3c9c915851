"""The entry point of `lockstep`."""

from importlib.metadata import version
from typing import Annotated

import typer

from lockstep.cli.checkpoint import checkpoint_app
from lockstep.cli.devices import devices
from lockstep.cli.resume_option import ResumingCommand
from lockstep.cli.run import CONTEXT, run
from lockstep.cli.scale import scale
from lockstep.cli.train import train
from lockstep.cli.verify import verify

app = typer.Typer(
    name="lockstep",
    help="Data-parallel training for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(checkpoint_app)
app.command(name="devices")(devices)
app.command(name="run", context_settings=CONTEXT)(run)
app.command(name="scale")(scale)
app.command(name="train", cls=ResumingCommand)(train)
app.command(name="verify")(verify)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lockstep {version('lockstep')}")
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
    """Run the command line."""
    app(prog_name="lockstep")


if __name__ == "__main__":
    main()
