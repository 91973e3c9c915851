"""`--resume [PATH]`: an option whose value may be left out, which typer does not support before arguments."""

import re
from collections.abc import Iterator, Sequence

from typer import Context
from typer.core import TyperCommand

from lockstep.runs.opening import NEWEST

_RESUME = "--resume"
_WITH_VALUE = frozenset({"--allow"})
"""Other options whose value is the next argument."""
_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")
_CONFIG = re.compile(r".*\.ya?ml", re.IGNORECASE)


class ResumingCommand(TyperCommand):
    """A command with an option `--resume [PATH]` and the arguments CONFIG and KEY=VALUE."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the arguments, after `--resume` was given its value."""
        return super().parse_args(ctx, give_value(args))


def give_value(args: Sequence[str]) -> list[str]:
    """Return the arguments with a value after each `--resume`: the path that follows it, or `NEWEST`.

    What follows is no path if it is an option, `key=value`, a YAML file, or the only argument that can be CONFIG.
    """
    given = list(args[: args.index("--")]) if "--" in args else list(args)
    found: list[str] = []
    for number, argument in enumerate(given):
        found.append(argument)
        follower = given[number + 1] if number + 1 < len(given) else None
        if argument == _RESUME and not (follower is not None and _may_be_path(follower) and _has_config(given, number)):
            found.append(NEWEST)
    return [*found, *args[len(given) :]]


def _may_be_path(argument: str) -> bool:
    return not (argument.startswith("-") or _OVERRIDE.match(argument) or _CONFIG.fullmatch(argument))


def _has_config(args: Sequence[str], number: int) -> bool:
    """Return whether something else than what follows `--resume` can be CONFIG."""
    return any(place != number + 1 for place in _positions(args))


def _positions(args: Sequence[str]) -> Iterator[int]:
    """Yield where arguments stand that are neither options, nor their values, nor overrides."""
    for place, argument in enumerate(args):
        is_value = place > 0 and args[place - 1] in _WITH_VALUE
        if not (argument.startswith("-") or is_value or _OVERRIDE.match(argument)):
            yield place
