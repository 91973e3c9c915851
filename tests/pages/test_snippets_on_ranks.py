"""Snippets of pages that do not stand alone: each is run on two ranks, after lines that make what it takes for granted.

Scripts, and commands with their output, are run by test_pages.py, and some pages by a test of their own.
"""

import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.pages.page_names import make_names
from tests.pages.test_commands import PAGES, without_an_import
from tests.pages.test_snippets import blocks
from tests.process import warm
from tests.process.ranks import RankPool, join_default_group

import lockstep as ls
from lockstep.recipes.digits import Net

DOCS = Path(__file__).parents[2] / "docs"
NO_GROUP = "import os\nls.destroy_process_group()\n"
LAUNCHED = NO_GROUP + "os.environ.update(RANK=str(run.rank), WORLD_SIZE='2')\n"
SAVED = (
    "trainer.close()\nls.destroy_process_group()\nfrom lockstep.recipes.digits import Net\nmodel = Net()\n"
    "trainer = ls.Trainer(model, torch.optim.AdamW(model.parameters()), loss=loss_fn, num_shards=8)\n"
    "Path('runs/digits').mkdir(parents=True)\n"
)
TRACKED = "trainer.close()\nloss, batch = loss_fn, next(iter(loader.epoch(0)))\n"
BEFORE = {
    ("checkpoint-format.md", 0): SAVED + "trainer.save('step-00000240.ckpt')\n",
    ("checkpoints.md", 0): SAVED + "trainer.save('runs/digits/step-00000240.ckpt')\n",
    ("doctor.md", 3): (
        "import os\nterminal, tty = os.openpty()\nos.environ['TTY'] = os.ttyname(tty)\n"
        "os.write(terminal, b'p 6 * 7\\ncontinue\\n')\n"
    ),
    ("from-torch.md", 0): (
        "trainer.close()\nloader = DataLoader(dataset, 8, sampler=ls.DistributedSampler(dataset))\n"
        "net, loss_fn = model, nn.functional.cross_entropy\n"
    ),
    ("from-torch.md", 1): "rank, log, example = run.rank, print, torch.randn(1, 8)\n",
    ("from-torch.md", 2): (
        "F, weights, inputs = nn.functional, torch.tensor([0.4, 2.2, 6.7]), torch.randn(2, 3, 5 + run.rank)\n"
        "targets, model = torch.arange(5 + run.rank).repeat(2, 1) % 3, nn.Conv1d(3, 3, 1)\ntargets[1, 3:] = -100\n"
        "model = ls.DistributedDataParallel(model)\n"
    ),
    ("from-torch.md", 3): "test_set, counts = dataset, torch.zeros(2)\n",
    ("from-torch.md", 4): "device, loss, right, total = 'cpu', torch.tensor(0.5), torch.tensor(3), torch.zeros(3)\n",
    ("from-torch.md", 5): NO_GROUP + "os.environ.update(SLURM_NTASKS='2', SLURM_PROCID=str(run.rank))\n",
    ("from-torch.md", 6): "path = 'weights.pt'\ntorch.save(model.state_dict(), path)\n",
    ("process-groups.md", 0): LAUNCHED,
    ("process-groups.md", 1): "def download(name):\n    Path(f'{name}-{run.rank}').touch()\n",
    ("questions.md", 2): "import random\nimport numpy as np\n",
    ("testing.md", 0): "from lockstep.comm import World\n",
    ("testing.md", 1): "def step(model):\n    model.weight.square().sum().backward()\n",
    ("trackers.md", 2): TRACKED,
    ("trackers.md", 3): "",
    ("sharded-optimizer.md", 1): "",
    ("sharded-optimizer.md", 2): "",
    ("wrapper.md", 0): LAUNCHED,
}
"""What stands before a snippet, by page and number of its block. Names come from tests/pages/page_names.py too."""
ELSEWHERE = {
    "drop-in.md": "tests/process/test_drop_in_libraries.py",
    "lost-workers.md": "below",
    "own-loop.md": "tests/pages/test_commands.py",
    "streams.md": "tests/pages/test_streams.py",
    "training.md": "tests/pages/test_training.py",
}
"""Pages whose snippets another test runs."""
HEAD = """
import torch
import lockstep as ls
from lockstep.recipes.digits import Net, datasets
"""
MADE = """
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = ls.ShardedLoader(datasets()[0], batch_size=512, num_shards=4)
    trainer = ls.Trainer(
        model,
        optimizer,
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        num_shards=4,
        on_worker_loss="continue",
    )
"""
AFTER = {
    ("doctor.md", 3): (
        "seen = b''\nwhile dist.get_rank() == 1 and b'(Pdb) 42' not in seen:\n    seen += os.read(terminal, 1000)\n"
    ),
    ("from-torch.md", 4): "assert int(total[2]) == 2 * len(labels)\n",
    ("process-groups.md", 0): "assert dist.get_world_size() == 2\n",
    ("process-groups.md", 1): "assert Path('data-0').exists() == ls.is_main()\n",
    ("testing.md", 0): "test_the_sum_is_that_of_all_ranks()\n",
    ("testing.md", 1): "test_the_step_does_not_wait_for_the_device()\n",
    ("trackers.md", 3): (
        "from types import SimpleNamespace\ntracker = MyTracker()\ntracker.start(SimpleNamespace(folder=Path()))\n"
        "tracker.log(1, {'loss': 0.5})\ntracker.end('finished')\n"
        "assert Path('mine.txt').read_text() == \"1 {'loss': 0.5}\\n\"\n"
    ),
    ("wrapper.md", 0): "assert isinstance(model, ls.DistributedDataParallel) and len(sampler) == len(dataset) // 2\n",
}
"""What must hold after it."""


def run_lines(run: ls.Run, lines: str, folder: str, port: int) -> None:
    """Run lines on a rank, in a folder of its own."""
    place = Path(folder, str(run.rank))
    place.mkdir()
    os.chdir(place)
    try:
        with mock.patch.dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)):
            exec(lines, make_names() | {"run": run, "__name__": "page"})
    finally:
        if dist.is_initialized():
            ls.destroy_process_group()  # the next lines get a new one


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, join_default_group) as pool:
        yield pool


@pytest.mark.parametrize(("page", "number"), BEFORE, ids=[f"{page}-{number}" for page, number in BEFORE])
@pytest.mark.filterwarnings("ignore")
def test_a_snippet_runs_on_two_ranks(page: str, number: int, pool: RankPool, tmp_path: Path) -> None:
    if page == "trackers.md" and number == 2:
        pytest.importorskip("tensorboard")
    _, lines = list(blocks(DOCS / page))[number]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    before, after = BEFORE[page, number], AFTER.get((page, number), "")
    pool.run(run_lines, f"{before}{lines}{after}", str(tmp_path), port)


def test_the_loop_that_gets_new_workers_runs(tmp_path: Path) -> None:
    _, lines = next(each for each in blocks(DOCS / "lost-workers.md") if each[0] == "python")
    made = re.sub(r"^    \.\.\..*", MADE, lines, flags=re.MULTILINE)
    assert made != lines
    (tmp_path / "loop.py").write_text(HEAD + made.replace(", spares=1", ""), encoding="utf-8")
    finished = warm.run([sys.executable, "loop.py"], cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr


def test_the_commands_for_checkpoints_and_reports_run(tmp_path: Path) -> None:
    shown = [text for page in ("checkpoints.md", "report.md") for _, text in blocks(DOCS / page)]
    lines = re.findall(r"^(?:\$ )?(lockstep [^#\n]*)", "".join(shown), re.MULTILINE)
    assert len(lines) >= 5
    for command in ("epochs=20", "epochs=1 run_dir=runs/digits-2"):
        made = f"lockstep train digits workers=1 device_ids=cpu report=false {command}"
        assert without_an_import(made, tmp_path)[0] == 0
    torch.save(Net().state_dict(), tmp_path / "old.pt")
    for line in lines:
        code, printed = without_an_import(line.strip(), tmp_path)
        assert code == 0, f"{line}\n{printed}"


def test_no_snippet_is_left_out() -> None:
    for page in [page for page in DOCS.glob("**/*.md") if ".zh-CN" not in page.name and page.name not in ELSEWHERE]:
        for number, (language, lines) in enumerate(blocks(page)):
            is_run = (page.name, number) in BEFORE or (page.name in PAGES and re.match(r"# \w+\.py\n", lines))
            assert language != "python" or is_run, f"no test runs block {number} of {page.name}"


def test_each_page_in_chinese_has_the_snippets_of_the_english_one() -> None:
    for page in sorted(DOCS.glob("*.zh-CN.md")):
        english = page.with_name(page.name.replace(".zh-CN", ""))
        found, expected = (
            [text for language, text in blocks(each) if language == "python"] for each in (page, english)
        )
        assert list(map(without_comments, found)) == list(map(without_comments, expected)), page.name


def without_comments(code: str) -> list[str]:
    return [line for line in (each.partition("#")[0].rstrip() for each in code.splitlines()) if line]
