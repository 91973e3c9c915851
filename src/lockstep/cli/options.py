"""What several commands have in common: `--resume [PATH]`, which config is meant, options of a saved run's commands."""

import difflib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Context
from typer.core import TyperCommand

from lockstep.devices import Placement, place_workers
from lockstep.errors import ConfigError
from lockstep.launch.launcher import LaunchSettings, call_on_workers
from lockstep.runs.config import Config
from lockstep.runs.opening import NEWEST, SavedRun, search_path

_RESUME = "--resume"
_WITH_VALUE = frozenset({"--allow", "--devices", "--overfit", "--workers"})
"""Other options whose value is the next argument."""
_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")
_CONFIG = re.compile(r".*\.ya?ml", re.IGNORECASE)
_PACKAGE = Path(__file__).parent.parent
_FOLDERS = (_PACKAGE / "examples", _PACKAGE.parent.parent / "examples")

SAVED = Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT", help="A run directory, or a checkpoint.")]
OVERRIDES = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values that replace those of the run's config.")
]
DATA = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="A set of the run, such as val or train, or a function that returns one: mine:new.  "
        "[default: test, or else the first but train]",
    ),
]
WORKERS = Annotated[int | None, typer.Option("--workers", min=1, help="Number of workers.  [default: the config's]")]
DEVICES = Annotated[str | None, typer.Option("--devices", help="As device_ids in a config.  [default: the config's]")]
CODE = Annotated[
    Path | None,
    typer.Option("--code", help="The folder of the modules that the config names.  [default: that of the run]"),
]
WEIGHTS = Annotated[
    str | None, typer.Option("--weights", help="ema or swa: the averaged weights of the checkpoint, not its own.")
]


class ResumingCommand(TyperCommand):
    """A command with `--resume [PATH]`: typer has no option whose value may be left out before arguments."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:  # type: ignore[override]
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
        # An argument other than the one after `--resume` must be left for CONFIG.
        has_config = any(index != number + 1 for index in _positional_indices(given))
        if argument == _RESUME and not (follower is not None and _may_be_path(follower) and has_config):
            found.append(NEWEST)
    return [*found, *args[len(given) :]]


def _may_be_path(argument: str) -> bool:
    return not (argument.startswith("-") or _OVERRIDE.match(argument) or _CONFIG.fullmatch(argument))


def _positional_indices(args: Sequence[str]) -> Iterator[int]:
    """Yield the indices of arguments that are neither options, nor values of options, nor overrides."""
    for index, argument in enumerate(args):
        is_value = index > 0 and args[index - 1] in _WITH_VALUE
        if not (argument.startswith("-") or is_value or _OVERRIDE.match(argument)):
            yield index


def find_examples() -> Mapping[str, Path]:
    folder = next((each for each in _FOLDERS if each.is_dir()), None)
    return {} if folder is None else {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_config(given: Path) -> Path:
    """Return the file `given`, `given` with .yaml added, or the example of this name; a .yaml may not be there."""
    if given.exists():
        return given
    if given.suffix in {".yaml", ".yml"}:
        there = {path.stem: path for path in sorted(given.parent.glob("*.y*ml"))}
        near = difflib.get_close_matches(given.stem, there, n=1)
        if near:
            raise ConfigError(f"There is no config file {given}. Did you mean {there[near[0]]}? (LS801)")
        return given
    beside = given.with_name(f"{given.name}.yaml")
    if beside.exists():
        return beside
    examples = find_examples()
    if str(given) in examples:
        return examples[str(given)]
    known = f" The examples are {', '.join(examples)}." if examples else ""
    raise ConfigError(
        f"There is no config file {given}, nor {beside}, and no example of this name.{known} `lockstep init` writes a "
        "config and a module to begin with. (LS801)"
    )


def complete_config(incomplete: str) -> list[str]:
    folder, _, start = incomplete.rpartition("/")
    here = Path(folder or ("/" if incomplete.startswith("/") else "."))
    prefix = incomplete[: len(incomplete) - len(start)]
    found = [path for path in here.glob(f"{start}*") if path.suffix in {".yaml", ".yml"} or path.is_dir()]
    paths = [f"{prefix}{path.name}{'/' if path.is_dir() else ''}" for path in sorted(found)]
    return [*paths, *([name for name in find_examples() if name.startswith(incomplete)])]


CONFIG = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG", help="A YAML file, or the name of an example: digits.", autocompletion=complete_config
    ),
]
VALUES = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values that replace the file's.")]


def place_run(config: Config, *, force: bool) -> tuple[Placement, Config]:
    """Choose the devices of a run, and its shards where the config has none."""
    placement = place_workers(config.device_ids, workers=config.workers, force=force, max_workers=config.most_workers)
    is_said = config.workers is not None or str(config.device_ids).startswith("cpu")
    return placement, config.with_shards(len(placement.devices), is_said=is_said)


def call_on_saved(
    function: Callable[..., Any], saved: SavedRun, *arguments: Any, code: Path | None, force: bool, is_quiet: bool
) -> Any:
    """Call `function(run, saved, *arguments)` in workers; return rank 0's result. `is_quiet`: stdout has only that."""
    config = saved.config
    sys.path[:0] = search_path(saved, code)
    placement = place_workers(config.device_ids, workers=config.workers, force=force, max_workers=config.num_shards)
    config.check_workers(len(placement.devices))
    typer.echo(f"devices: {placement.reason}", err=is_quiet)
    settings = LaunchSettings(devices=placement, threads_per_worker=config.threads_per_worker, portable=config.portable)
    return call_on_workers(function, (saved, *arguments), {}, settings)[0]
