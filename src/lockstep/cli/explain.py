"""`lockstep explain`: what a code at the end of a message means, and what to do."""

import difflib
import re
from typing import Annotated

import typer

from lockstep.cli.main import command
from lockstep.errors import UsageError
from lockstep.explanations import CHINESE, ENGLISH, all_codes, page_of, title_of
from lockstep.settings import read_settings

_NUM_NEAR = 4


def explain(
    codes: Annotated[
        list[str] | None, typer.Argument(metavar="[CODE]...", help="Such as LS201; without one, all are listed.")
    ] = None,
    chinese: Annotated[
        bool | None, typer.Option("--zh/--en", help="In Chinese or in English; if not said, as the locale asks.")
    ] = None,
) -> None:
    """Show the page of a code that stands at the end of a message: what it means, the wrong and the mended lines."""
    is_chinese = read_settings().is_chinese() if chinese is None else chinese
    language = CHINESE if is_chinese else ENGLISH
    if not codes:
        typer.echo("\n".join(f"{code}  {title_of(code, language)}" for code in all_codes()))
        return
    pages = dict.fromkeys(page_of(_find(text), language) for text in codes)  # codes may share one
    typer.echo("\n".join(pages), nl=False)


def _find(text: str) -> str:
    """Return the code that was meant, also by `ls201`, `201` or `(LS201)`."""
    digits = re.search(r"\d+", text)
    code = f"LS{digits[0]}" if digits else text
    known = all_codes()
    if code in known:
        return code
    near = difflib.get_close_matches(code, known, n=_NUM_NEAR, cutoff=0.5)
    listed = "; ".join(f"{each}: {title_of(each)}" for each in near)
    raise UsageError(
        f"{text!r} is no code of a message. {f'Near are {listed}. ' if near else ''}`lockstep explain` lists all. "
        "(LS821)"
    )


COMMAND = command(explain)
