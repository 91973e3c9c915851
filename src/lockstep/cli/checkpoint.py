"""`lockstep checkpoint`: commands on checkpoints."""

import typer

from lockstep.cli.convert import convert

checkpoint = typer.Typer(help="Convert checkpoints.", no_args_is_help=True, rich_markup_mode=None)
checkpoint.command(name="convert")(convert)
