"""The page of each code of a message: both languages have the same parts, and their lines do what they say.

Those that need two ranks are in test_codes_on_ranks.py.
"""

import ast
import functools
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.pages.page_names import make_names, section_of

import lockstep as ls
from lockstep.cli.main import _COMMANDS as COMMANDS
from lockstep.explanations import CHINESE, ENGLISH, all_codes, codes_in, page_of, title_of
from lockstep.runs.config import parse_config, parse_yaml

ROOT = Path(__file__).parents[2]


def is_translated(code: str) -> bool:
    return page_of(code, CHINESE) != page_of(code, ENGLISH)


def blocks(page: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("code", [code for code in all_codes() if is_translated(code)])
def test_both_pages_have_the_same_parts(code: str) -> None:
    english, chinese = section_of(code), section_of(code, CHINESE)
    parts = {"Wrong": "错误写法", "Right": "正确写法", "Other causes": "其他原因"}
    headings = re.findall(r"^###? (?!LS)(.*)$", english, re.MULTILINE)
    assert set(headings) <= set(parts)
    assert re.findall(r"^###? (?!LS)(.*)$", chinese, re.MULTILINE) == [parts[heading] for heading in headings]
    assert blocks(english) == blocks(chinese)
    assert page_of(code).partition(": ")[0] == page_of(code, CHINESE).partition(": ")[0]
    for language in (ENGLISH, CHINESE):
        section = section_of(code, language)
        assert title_of(code, language)
        assert len(section.splitlines()) <= 45
        assert len(re.findall(r"^- ", section, re.MULTILINE)) == len(re.findall(r"^- ", english, re.MULTILINE))
        for document in re.findall(r"docs/[\w./-]+\.md", page_of(code, language)):
            assert (ROOT / document).exists(), document


@pytest.mark.parametrize("code", all_codes())
def test_a_page_begins_with_a_message_and_each_message_is_one_of_the_code(code: str) -> None:
    assert blocks(page_of(code))[0][0] == "text"
    assert {codes_in(message)[-1] for language, message in blocks(section_of(code)) if language == "text"} <= {code}


ANY = "\0"
"""Stands for any text: for a value that a message names, for what a page leaves out."""
COMPOSED = {"LS304", "LS808"}
"""Codes of messages that are put together of several texts."""


@functools.cache
def messages() -> Mapping[str, set[str]]:
    """Return the texts of the package that end with a code, by code, with ANY for each value in them."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "src" / "lockstep").rglob("*.py"):
        source = path.read_text("utf-8")
        for node in ast.walk(ast.parse(source)) if codes_in(source) else ():
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else ANY for part in parts)
            for code in codes_in(text):
                found.setdefault(code, set()).add(re.sub(r"%\w|\{\}", ANY, " ".join(text.split())))
    return found


def fits(message: str, quoted: str) -> bool:
    """Whether two texts can be the same, with ANY in either: a row for each character of the one, as in a diff."""
    row = [all(each == ANY for each in quoted[:length]) for length in range(len(quoted) + 1)]
    for mine in message:
        above, row = row, [row[0] and mine == ANY]
        for place, its in enumerate(quoted):
            either = ANY in {mine, its}
            row.append((either and (above[place + 1] or row[place])) or (mine == its and above[place]))
    return row[-1]


@pytest.mark.parametrize("code", [code for code in all_codes() if code not in COMPOSED])
def test_a_page_quotes_what_the_message_says(code: str) -> None:
    for language, text in blocks(section_of(code)):
        if language == "text":
            quoted = " ".join(text.split()).replace("...", ANY)
            assert any(fits(message, quoted) for message in messages()[code]), text


@pytest.mark.parametrize("code", all_codes())
def test_the_lines_on_a_page_can_be_used(code: str) -> None:
    for language, text in blocks(section_of(code)):
        if language == "python":
            assert not [name for name in names_of_lockstep(ast.parse(text)) if not hasattr(ls, name)]
        elif language == "sh":
            for line in re.findall(r"(?:^|&& )lockstep (\w[^#\n]*)", text, re.MULTILINE):
                assert options_in(line) <= options_of(*[*line.split(), ""][:2])
        else:
            assert language in {"text", "yaml"}


def options_in(line: str) -> set[str]:
    """Return the options in a command line, before those of a script that it starts."""
    own = line.partition(".py")[0]
    return set(re.findall(r"(?<= )--[\w-]+", own))


@functools.cache
def options_of(name: str, subcommand: str) -> set[str]:
    """Return the options that a command takes; a KeyError where there is no such command."""
    assert name in COMMANDS
    command: Any = typer.main.get_command(import_module(f"lockstep.cli.{name}").COMMAND)
    command = getattr(command, "commands", {}).get(subcommand, command)
    return {option for parameter in command.params for option in parameter.opts}


def config_blocks(heading: str) -> list[tuple[str, str]]:
    block = re.compile(rf"## {heading}\n\n```yaml\n(.*?)```", re.DOTALL)
    return [(code, text) for code in all_codes() for text in block.findall(section_of(code))]


@pytest.mark.parametrize(("code", "text"), config_blocks("Right"))
def test_the_mended_lines_of_a_config_can_be_read(code: str, text: str) -> None:
    values = parse_yaml((ROOT / "examples" / "digits.yaml").read_text("utf-8"), "digits.yaml")
    parse_config({**values, **parse_yaml(text, code)}, code)


USED = "trainer = ls.Trainer(model, optimizer, loss=loss_fn, num_shards=8, seed=0)\ntrainer.step(batch)\n"
"""How a trainer uses a loss function."""
RUN_ALONE = {
    **dict.fromkeys(("LS401", "LS403", "LS404", "LS407", "LS501", "LS503", "LS504"), ""),
    **dict.fromkeys(("LS506", "LS511", "LS517", "LS525", "LS526", "LS529"), ""),
    **dict.fromkeys(("LS507", "LS530"), USED),
    "LS513": "trainer.step(batch)",
    "LS528": "trainer.evaluate(loader, accuracy)",
}
"""Pages whose lines run in one process, by code, and what uses them."""
MADE = "trainer = ls.Trainer(model, optimizer, loss=loss_fn, num_shards=8, seed=0)\n"
PREPARED = {
    "LS352": (
        (
            "class Scaled(Net):\n    def forward(self, inputs, scale):\n"
            "        return super().forward(inputs) * scale\n"
            "model, images = ls.DataParallel(Scaled(), device_ids=['cpu', 'cpu']), inputs\n"
        ),
        "",
    ),
    "LS353": (
        "",
        "Mine = type('Mine', (Net,), {'forward': forward})\nls.DataParallel(Mine(), ['cpu', 'cpu'])(inputs)\n",
    ),
    "LS354": (
        (
            "class Mine(nn.CrossEntropyLoss):\n    def forward(self, inputs, targets):\n        return inputs.sum()\n"
            "net, images, targets, criterion = Net(), inputs, labels, ls.DataParallelCriterion(Mine())\n"
        ),
        "",
    ),
    "LS405": ("samples, new = list(dataset), dataset[0]\n", "list(loader.epoch(0))\n"),
    "LS508": ("other_model = Net()\n", f"{MADE}trainer.step(batch)\n"),
    "LS518": (
        (
            "def forward(self, inputs):\n    return self.layer(inputs)\n"
            "def loss_fn(model, batch):\n    return nn.functional.mse_loss(model(batch[0]), batch[1])\n"
        ),
        (
            "model = type('Counts', (nn.Module,), {'forward': forward})()\nmodel.num_calls = 0\n"
            "model.layer = nn.Sequential(nn.Linear(8, 1), nn.Flatten(0))\n"
            f"optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n{MADE}trainer.step(batch)\n"
        ),
    ),
    "LS521": (
        (
            "dataset = torch.utils.data.TensorDataset(inputs, torch.ones(64, 3))\n"
            "loader = ls.ShardedLoader(dataset, batch_size=32, num_shards=8, seed=0)\n"
            "batch, make_features = next(iter(loader.epoch(0))), lambda: nn.Linear(8, 8)\n"
        ),
        f"{MADE}trainer.step(batch)\n",
    ),
    "LS532": (
        "",
        (
            "model = type('Bank', (nn.Module,), {'forward': forward})()\n"
            "model.layer = nn.Linear(8, 3)\nmodel.register_buffer('rows', torch.zeros(128, 3))\n"
            f"optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n{MADE}trainer.step(batch)\n"
            "if 'write_rows' in globals():\n    write_rows(model, batch, 1)\n    assert model.rows.any(1).sum() == 32\n"
        ),
    ),
    "LS533": (
        (
            "import torch.nn.functional as F\n"
            "dataset = torch.utils.data.TensorDataset(inputs, torch.arange(64) // 2 % 3)\n"
            "loader = ls.ShardedLoader(dataset, batch_size=64, num_shards=8, shuffle=False)\n"
            "batch = next(iter(loader.epoch(0)))\n"
        ),
        (
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
            f"{MADE.replace('loss_fn', 'loss')}trainer.step(batch)\n"
        ),
    ),
    "LS704": (
        "import random\n",
        (
            "mine = Mine()\nmine.random = random.Random(0)\n"
            f"{MADE.replace(')', ', callbacks=[mine])')}trainer.save('run.safetensors')\n"
        ),
    ),
    "LS706": ("from safetensors.torch import save_file\nsave_file(model.state_dict(), 'weights.safetensors')\n", ""),
    "LS720": ("torch.save({'generator': model.state_dict(), 'critic': model.state_dict()}, 'gan.pt')\n", ""),
    "LS721": ("", "ls.load_weights('model.pt', Net())\n"),
    "LS724": ("torch.save(Net().state_dict(), 'model.pt')\n", ""),
    "LS727": ("torch.save(Net(10).state_dict(), 'model.pt')\n", ""),
}
"""Such pages that need more than the usual names: what stands before their lines, and what uses them."""


@pytest.mark.parametrize("code", [*RUN_ALONE, *PREPARED])
def test_the_wrong_lines_get_the_message_and_the_mended_ones_do_not(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong, right = (text for language, text in blocks(section_of(code)) if language == "python")
    before, after = PREPARED.get(code) or ("", RUN_ALONE[code])
    with pytest.raises(Exception, match=rf"\({code}\)"):
        exec(f"{before}{wrong}{after}", make_names())
    exec(f"{before}{right}{after}", make_names())


def names_of_lockstep(tree: ast.AST) -> set[str]:
    """Return NAME of each `ls.NAME`."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {each.attr for each in attributes if isinstance(each.value, ast.Name) and each.value.id == "ls"}


def test_each_title_is_a_line() -> None:
    assert not [code for code in all_codes() for text in (title_of(code),) if not text or text.endswith(".")]
