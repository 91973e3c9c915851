"""Finding the config that a command was given: a file, or the name of an example."""

import difflib
from collections.abc import Mapping
from pathlib import Path

from lockstep.errors import ConfigError

_PACKAGE = Path(__file__).parent.parent
_FOLDERS = (_PACKAGE / "examples", _PACKAGE.parent.parent / "examples")
"""Where examples are: in the wheel, and in a checkout."""


def find_examples() -> Mapping[str, Path]:
    """Return the configs that come with Lockstep, by name."""
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
    """Return the configs whose names begin so, for the shell's completion."""
    folder, _, start = incomplete.rpartition("/")
    here = Path(folder or ("/" if incomplete.startswith("/") else "."))
    prefix = incomplete[: len(incomplete) - len(start)]
    found = [path for path in here.glob(f"{start}*") if path.suffix in {".yaml", ".yml"} or path.is_dir()]
    paths = [f"{prefix}{path.name}{'/' if path.is_dir() else ''}" for path in sorted(found)]
    return [*paths, *([name for name in find_examples() if name.startswith(incomplete)])]
