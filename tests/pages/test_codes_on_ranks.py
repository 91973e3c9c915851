"""The lines of pages of codes on two ranks: the wrong lines give the code on some rank, the mended ones on none."""

import logging
import os
import re
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from unittest import mock

import pytest
import torch.distributed as dist
from tests.pages.page_names import make_names, section_of
from tests.process.ranks import RankPool, join_default_group

import lockstep as ls
from lockstep.explanations import codes_in

LAUNCHED = "ls.destroy_process_group()\n"
WRAPPED = "model = ls.DistributedDataParallel(model)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
BACKWARD = "model(inputs).sum().backward()\n"
TRAIN = (
    "for _ in range(4):\n    for inputs, labels in loader:\n"
    "        nn.functional.cross_entropy(model(inputs), labels).backward()\n        optimizer.step()\n"
)
NORMALIZED = "net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))\n"
TRAINS_ANYTHING = "def train(_batch): torch.ones(1, requires_grad=True).backward()\n"
MADE = "trainer = ls.Trainer(model, optimizer, loss=loss_fn, num_shards=8, seed=0)\n"
STEP = "trainer.step(batch)\n"

AROUND: dict[str, tuple[str, str]] = {
    "LS103": (LAUNCHED, ""),
    "LS106": (LAUNCHED, "main(run)"),
    "LS108": (LAUNCHED, ""),
    "LS123": (f"{LAUNCHED}def main(run):\n    pass\n", ""),
    "LS127": (LAUNCHED, ""),
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
    "LS205": (
        "",
        (
            "Numbers.__len__ = lambda self: 4\nnumbers = Numbers()\nnumbers.values = list(range(4))\n"
            "assert len(list(DataLoader(numbers, num_workers=1, multiprocessing_context='fork'))) == 4\n"
        ),
    ),
    "LS207": ("", ""),
    "LS208": ("", ""),
    "LS209": ("mine = torch.ones(2)", ""),
    "LS210": ("mine = torch.ones(2)", ""),
    "LS301": ("", ""),
    "LS303": ("", ""),
    "LS305": (
        "torch.manual_seed(run.rank)\nnet = nn.Sequential(nn.Linear(8, 64))\nnet.head = nn.Linear(64, 3)\n",
        "for _ in range(3):\n    model(inputs).sum().backward()\n",
    ),
    "LS308": ("", "model = ls.DistributedDataParallel(nn.Sequential(tokens, head))\nmodel(labels).sum().backward()\n"),
    "LS309": (WRAPPED, f"model.register_comm_hook(None, hook)\n{BACKWARD}"),
    "LS311": (f"{WRAPPED}micro_batches = [inputs * run.rank, inputs]\n", ""),
    "LS312": (f"{WRAPPED}probabilities = model(inputs) * 0\n", ""),
    "LS314": (
        "dataset = torch.utils.data.Subset(dataset, range(63))\n",
        WRAPPED + TRAIN,
    ),
    "LS315": ("torch.manual_seed(0)\n", WRAPPED + TRAIN),
    "LS316": (
        "sampler = ls.DistributedSampler(dataset)\nloader = DataLoader(dataset, 8, sampler=sampler)\n"
        + TRAINS_ANYTHING,
        "",
    ),
    "LS317": ("rank = run.rank\n", f"loader = DataLoader(dataset, 8, sampler=sampler)\n{WRAPPED}{TRAIN}"),
    "LS318": (
        (
            f"{WRAPPED}criterion, targets = nn.functional.cross_entropy, labels\n"
            "for number in range(3):\n    inputs = torch.ones(64, 8) / (number + run.rank - 1)\n    if True:\n"
        ),
        "",
    ),
    "LS319": (
        "body, head, model = nn.Linear(8, 4), nn.Linear(4, 3), None\n",
        (
            "for _ in range(3):\n    (head(body(inputs)) if model is None else model(inputs)).sum().backward()\n"
            "    optimizer.step()\n    inputs = inputs * (run.rank + 2)\n"
        ),
    ),
    "LS320": (
        (
            f"{WRAPPED}rank, evaluate = run.rank, lambda model: model.module(inputs)\n"
            "loader = [inputs, inputs]\ndef train(model, batch):\n    model(batch).sum().backward()\n"
        ),
        "",
    ),
    "LS321": (f"{WRAPPED}{BACKWARD}loss = torch.tensor(5.0 + 10 * run.rank)\n", BACKWARD * 2),
    "LS322": (f"{WRAPPED}def train(batch):\n    model(inputs).sum().backward()\n", ""),
    "LS325": ("", ""),
    "LS326": (f"{WRAPPED}weight = model.module.body.weight\n", ""),
    "LS330": (
        (
            f"{NORMALIZED}net = ls.SyncBatchNorm.convert_sync_batchnorm(net)\nrank = run.rank\n"
            "model = ls.DistributedDataParallel(net, broadcast_buffers=False)\n"
        ),
        "",
    ),
    "LS332": (
        f"{NORMALIZED}model = ls.SyncBatchNorm.convert_sync_batchnorm(net)\ngradient = inputs.requires_grad_()\n",
        "gradient.sum().backward()\n",
    ),
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
    "LS515": ("torch.save(Net().state_dict(), 'weights.pt')\n", STEP),
    "LS520": ("", STEP),
    "LS523": (
        (
            "dataset = torch.utils.data.TensorDataset(inputs, (torch.arange(64) < 63).long())\n"
            "loader = ls.ShardedLoader(dataset, batch_size=64, num_shards=8, seed=0)\n"
            "batch = next(iter(loader.epoch(0)))\n"
        ),
        MADE + STEP,
    ),
    "LS524": (
        ("first, second = loader.epoch(0)\ntrainer.step(first)\nstate = trainer.state_dict()\ntrainer.step(second)\n"),
        "trainer.step(second)\n",
    ),
}
"""What stands before and after the lines of a page, by code. Names come from tests/pages/page_names.py too."""


def arranged(before: str, lines: str, after: str) -> str:
    """Put lines between others: where these end with a colon, into their block."""
    last = before.rstrip().rpartition("\n")[2]
    depth = len(last) - len(last.lstrip()) + 4 if last.endswith(":") else 0
    return f"{before}\n{indent(lines, ' ' * depth)}\n{after}"


def codes_of_both(
    run: ls.Run, right: str, wrong: str, folder: str, port: int
) -> tuple[tuple[set[str], str], tuple[set[str], str]]:
    """Run the mended lines on a rank, and then the wrong ones, which may leave it without a group that works."""
    variables = {"RANK": str(run.rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with mock.patch.dict(os.environ, variables):
        mended = codes_of(run, right, Path(folder, "right", str(run.rank)))
        if not dist.is_initialized():
            ls.init_process_group()
        mistaken = codes_of(run, wrong, Path(folder, "wrong", str(run.rank)))
    if dist.is_initialized():
        ls.destroy_process_group()  # the next lines get a new one
    return mended, mistaken


def codes_of(run: ls.Run, lines: str, place: Path) -> tuple[set[str], str]:
    """Run lines on a rank, and return the codes of its error, warnings and log, and the error."""
    texts: list[str] = []
    error = ""
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lockstep").addHandler(handler)
    place.mkdir(parents=True)
    os.chdir(place)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            exec(lines, make_names() | {"run": run, "__name__": "page"})
        except Exception as raised:  # noqa: BLE001 - its message is looked at
            error = f"{type(raised).__name__}: {raised}"
        texts.append(error)
        texts.extend(str(each.message) for each in warned)
    logging.getLogger("lockstep").removeHandler(handler)
    return {code for text in texts for code in codes_in(text)}, error


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, join_default_group) as pool:
        yield pool


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.parametrize("code", AROUND)
def test_the_wrong_lines_get_the_message_and_the_mended_ones_do_not(code: str, pool: RankPool, tmp_path: Path) -> None:
    wrong, right = re.findall(r"^```python\n(.*?)^```", section_of(code), re.DOTALL | re.MULTILINE)
    before, after = AROUND[code]
    lines = arranged(before, right, after), arranged(before, wrong, after)
    found = pool.run(codes_of_both, *lines, str(tmp_path), free_port())
    assert not any(code in codes or error for (codes, error), _ in found), found
    assert any(code in codes for _, (codes, _) in found), found
