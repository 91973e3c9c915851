"""YAML text of a config, of which a few lines could stand for more than fits into memory."""

from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from lockstep.errors import ConfigError

_MAX_VALUES = 100_000
"""How many values a config may hold, aliases written out."""


def _check_size(root: Any, source: str) -> None:
    """Refuse a document whose aliases stand for more than a config can hold: ten lines can stand for gigabytes."""
    sizes: dict[int, int] = {}
    under_way: set[int] = set()

    def count(node: Any) -> int:
        if id(node) in sizes:
            return sizes[id(node)]
        if id(node) in under_way:
            raise ConfigError(
                f"{source} has a value that contains itself: the alias of an anchor is inside of it. (LS801)"
            )
        under_way.add(id(node))
        value = node.value if isinstance(node.value, list) else []
        inner = [each for entry in value for each in (entry if isinstance(entry, tuple) else (entry,))]
        sizes[id(node)] = found = 1 + sum(map(count, inner))
        under_way.discard(id(node))
        return found

    num_values = count(root) if root is not None else 0
    if num_values > _MAX_VALUES:
        raise ConfigError(
            f"{source} stands for {num_values:,} values, and a config has at most {_MAX_VALUES:,}. Its aliases (*name) "
            "repeat what their anchors (&name) hold: write out what is needed. (LS801)"
        )


def parse_yaml(text: str, source: str) -> Any:
    """Return the values of a YAML 1.2 text."""
    try:
        _check_size(YAML(typ="safe", pure=True).compose(text), source)
        return YAML(typ="safe", pure=True).load(text)
    except RecursionError as error:
        raise ConfigError(f"{source} is nested too deeply for a config. (LS801)") from error
    except (YAMLError, ValueError) as error:  # ValueError: an invalid date
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{source} is not YAML{place}: {problem}. (LS801)") from error
