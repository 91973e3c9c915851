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
        """Add the value that `--resume` may lack, then parse the arguments."""
        return super().parse_args(ctx, give_value(args))


def give_value(args: Sequence[str]) -> list[str]:
    """Return the arguments with a value after each `--resume`: the path that follows it, or `NEWEST`.

    The argument after `--resume` is not its path if it is an option, `key=value`, a YAML file, or the only argument
    that can be CONFIG.
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
    """Return whether an argument other than the one after `--resume` can be CONFIG."""
    return any(index != number + 1 for index in _positional_indices(args))


def _positional_indices(args: Sequence[str]) -> Iterator[int]:
    """Yield the indices of arguments that are neither options, nor values of options, nor overrides."""
    for index, argument in enumerate(args):
        is_value = index > 0 and args[index - 1] in _WITH_VALUE
        if not (argument.startswith("-") or is_value or _OVERRIDE.match(argument)):
            yield index
