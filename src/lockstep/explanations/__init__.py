"""A page for each mistake that a message names by a code, such as `(LS201)` at its end.

A code stands for what a reader needs one page for, not for a line that raises: several messages may share it. It is
written out in the message, so that a search for it finds both. The first digit is the area:

    1  starting workers, and their rendezvous      6  lost workers, other numbers of workers
    2  process groups and their calls              7  checkpoints and weight files
    3  wrappers: DistributedDataParallel, ...      8  configs, runs, commands
    4  samplers, loaders, data                     9  devices
    5  the trainer and its parts

The pages are `LS201.md` beside this file and, where it is translated, `zh/LS201.md`. A code is never given to another
mistake.
"""

import re
from pathlib import Path
from typing import Final

ENGLISH: Final = ""
CHINESE: Final = "zh"
_FOLDER: Final = Path(__file__).parent
_CODE: Final = re.compile(r"\((LS\d{3})\)")


def codes_in(message: str) -> list[str]:
    """Return the codes that a message names, each once."""
    return list(dict.fromkeys(_CODE.findall(message)))


def all_codes() -> list[str]:
    """Return every code that has a page, in order."""
    return sorted(path.stem for path in _FOLDER.glob("LS*.md"))


def page_of(code: str, language: str = ENGLISH) -> str:
    """Return the page of a code in a language, or in English where it is not translated."""
    translated = _FOLDER / language / f"{code}.md"
    return (translated if translated.exists() else _FOLDER / f"{code}.md").read_text(encoding="utf-8")


def title_of(code: str, language: str = ENGLISH) -> str:
    """Return the mistake in one line, without its code."""
    return page_of(code, language).partition("\n")[0].removeprefix(f"# {code}: ")
