"""Slurm's lists of hosts, `"gpu[01-03,7],login"`, and of tasks per host, `"4(x2),1"`. Pure.

See `scontrol show hostnames` and the environment variables of srun(1).
"""

import itertools
import re
from collections.abc import Iterator

_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_node_list(text: str) -> list[str]:
    """Return the names in a list of hosts, in its order; ValueError if it is not such a list."""
    return [name for entry in _split(text) for name in _expand(entry)]


def expand_tasks_per_node(text: str) -> list[int]:
    """Return how many tasks each host has, in the order of the list of hosts; ValueError if it is not such a list."""
    counts: list[int] = []
    for part in text.split(","):
        match = _REPEATED.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a list of tasks per node such as '4(x2),1'.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _split(text: str) -> Iterator[str]:
    """Yield the entries: what stands between the commas outside brackets."""
    depth, entry = 0, ""
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if depth not in {0, 1}:
            raise _not_a_list(text)
        if letter == "," and depth == 0:
            yield entry
            entry = ""
        else:
            entry += letter
    if depth != 0 or not entry:
        raise _not_a_list(text)
    yield entry


def _expand(entry: str) -> Iterator[str]:
    pieces = re.split(r"\[([^\]]*)\]", entry)  # fixed text and the insides of brackets, in turn
    choices = [_numbers(piece, entry) if position % 2 else [piece] for position, piece in enumerate(pieces)]
    return map("".join, itertools.product(*choices))


def _numbers(inside: str, entry: str) -> list[str]:
    numbers: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _not_a_list(entry)
        width = len(match[1])
        numbers += [f"{number:0{width}}" for number in range(int(match[1]), int(match[2] or match[1]) + 1)]
    return numbers


def _not_a_list(text: str) -> ValueError:
    return ValueError(f"{text!r} is not a list of nodes such as 'gpu[01-03,7],login'.")
