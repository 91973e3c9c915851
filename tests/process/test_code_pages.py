"""Pages of codes whose lines need two ranks: the wrong lines give the code on some rank, the mended ones on none."""

import logging
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.process.ranks import RankPool, join_default_group
from tests.unit.page_names import make_names

import lockstep as ls
from lockstep.explanations import codes_in, page_of

STEP = "\ntrainer.step(batch)\n"

AROUND: dict[str, tuple[str, str]] = {
    "LS201": ("loss = torch.ones(1)", "dist.broadcast(loss, 0)"),
    "LS203": (
        (
            "for number in range(3):\n    Path(f'{number}.npz').touch()\n"
            "folder, rank, world_size = Path(), run.rank, 2\n"
            "def train(file):\n    dist.all_reduce(torch.ones(1))\n"
        ),
        "ls.destroy_process_group()",
    ),
    "LS204": ("", ""),
    "LS207": ("", ""),
    "LS208": ("", ""),
    "LS209": ("mine = torch.ones(2)", ""),
    "LS210": ("mine = torch.ones(2)", ""),
    "LS301": ("", ""),
    "LS303": ("", ""),
    "LS325": ("", ""),
    "LS408": ("test_set = dataset", ""),
    "LS502": ("", ""),
    "LS509": ("", ""),
    "LS510": (
        (
            "model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))\n"
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        ),
        "",
    ),
    "LS520": ("", STEP),
}
"""What stands before and after the lines of a page, by code. Names come from tests/unit/page_names.py too."""


def codes_of(run: ls.Run, before: str, lines: str, after: str, folder: str) -> tuple[set[str], str]:
    """Run lines on a rank, and return the codes of its error, warnings and log, and the error."""
    texts: list[str] = []
    error = ""
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lockstep").addHandler(handler)
    place = Path(folder, str(run.rank))
    place.mkdir(parents=True, exist_ok=True)
    os.chdir(place)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            exec(f"{before}\n{lines}\n{after}", make_names() | {"run": run})
        except Exception as raised:  # noqa: BLE001 - its message is looked at
            error = f"{type(raised).__name__}: {raised}"
        texts.append(error)
        texts.extend(str(each.message) for each in warned)
    logging.getLogger("lockstep").removeHandler(handler)
    if dist.is_initialized():
        ls.destroy_process_group()  # the next lines get a new one
    return {code for text in texts for code in codes_in(text)}, error


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, join_default_group) as pool:
        yield pool


@pytest.mark.parametrize("code", AROUND)
def test_the_wrong_lines_get_the_message_and_the_mended_ones_do_not(code: str, pool: RankPool, tmp_path: Path) -> None:
    wrong, right = re.findall(r"^```python\n(.*?)^```", page_of(code), re.DOTALL | re.MULTILINE)
    before, after = AROUND[code]
    found = pool.run(codes_of, before, wrong, after, str(tmp_path / "wrong"))
    assert any(code in codes for codes, _ in found), found
    found = pool.run(codes_of, before, right, after, str(tmp_path / "right"))
    assert not any(code in codes or error for codes, error in found), found
