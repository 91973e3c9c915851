"""A page for each mistake that a message names by a code, such as `(LS201)` at its end.

A code stands for what a reader needs one page for, not for a line that raises: several messages may share it. It is
written out in the message, so that a search for it finds both. The first digit is the area:

    1  starting workers, and their rendezvous      6  lost workers, other numbers of workers
    2  process groups and their calls              7  checkpoints and weight files
    3  wrappers: DistributedDataParallel, ...      8  configs, runs, commands
    4  samplers, loaders, data                     9  devices
    5  the trainer and its parts

The pages are `LS201.md` beside this file and, where it is translated, `zh/LS201.md`. Codes of one cause share a page:
its first line names them all, and each has a section. A code is never given to another mistake.
"""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ENGLISH: Final = ""
CHINESE: Final = "zh"
_FOLDER: Final = Path(__file__).parent
_CODE: Final = re.compile(r"\((LS\d{3})\)")


def codes_in(message: str) -> list[str]:
    return list(dict.fromkeys(_CODE.findall(message)))


@functools.cache
def _files() -> Mapping[str, str]:
    """Return the name of the file with the page of each code, in the order of the codes."""
    heads = {path.name: path.read_text(encoding="utf-8").partition(": ")[0] for path in _FOLDER.glob("LS*.md")}
    found = {code: name for name, head in heads.items() for code in head.removeprefix("# ").split(", ")}
    return dict(sorted(found.items()))


def all_codes() -> list[str]:
    return list(_files())


def page_of(code: str, language: str = ENGLISH) -> str:
    """Return the page of a code in a language, or in English where it is not translated."""
    translated = _FOLDER / language / _files()[code]
    return (translated if translated.exists() else _FOLDER / _files()[code]).read_text(encoding="utf-8")


def title_of(code: str, language: str = ENGLISH) -> str:
    """Return the mistake in one line, without its code."""
    title: str = re.findall(rf"^##? {code}: (.*)$", page_of(code, language), re.MULTILINE)[0]
    return title
