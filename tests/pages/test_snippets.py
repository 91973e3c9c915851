"""What all pages show: Python that compiles and names what exists, options that exist, configs with known keys.

Scripts and commands that a page shows with their output are run by tests/pages/test_commands.py.
"""

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch.distributed as dist
import typer
from ruamel.yaml import YAML
from tests.pages.page_names import make_names
from torch import Tensor

import lockstep as ls
from lockstep.cli.main import app
from lockstep.runs.config import Config, parse_config

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").glob("**/*.md"), *ROOT.glob("*.md")])


def example(value: Any) -> str:
    """Return the lines that a docstring shows before its sections; empty if there are none."""
    before_sections = re.split(
        r"^(?:Args|Returns|Raises|Attributes):$", inspect.getdoc(value) or "", flags=re.MULTILINE
    )[0]
    return "\n\n".join(dedent(block) for block in re.findall(r"(?:^    .*\n*)+", before_sections, re.MULTILINE))


@contextmanager
def single_rank_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of each block of a page."""
    for indent, language, text in re.findall(
        r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE
    ):
        yield language, dedent(text) if indent else text


def snippets(*languages: str) -> list[Any]:
    """Return the blocks of some languages as parameters, named by page and number."""
    return [
        pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, (language, text) in enumerate(blocks(page))
        if language in languages
    ]


@pytest.mark.parametrize("text", snippets("python"))
def test_python_compiles_and_names_what_exists(text: str) -> None:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "lockstep":
            for name in node.names:
                assert is_there(str(node.module), name.name), f"{node.module} has no {name.name}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ls":
            assert hasattr(ls, node.attr), f"lockstep has no {node.attr}"
        if isinstance(node, ast.Call):
            check_call(node)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_name_of_the_package_that_a_page_spells_out_exists(page: Path) -> None:
    # Looked for and not imported: to import lockstep.drop_in is to replace torch's names.
    for path in re.findall(r"\blockstep(?:[.:][A-Za-z_]\w*){2,}", page.read_text("utf-8")):
        place = ROOT / "src"
        for name in re.split("[.:]", path):
            below = [place / name, place / f"{name}.py"]
            if place.is_dir() and any(each.exists() for each in below):
                place = next(each for each in below if each.exists())
            else:
                source = (place / "__init__.py" if place.is_dir() else place).read_text("utf-8")
                assert re.search(rf"^(class |def |from .*\b|    |){name}\b", source, re.MULTILINE), path


NOT_RUN = {
    "DataParallel",
    "Elastic",
    "ReduceLROnPlateau",
    "Stream",
    "init_process_group",
    "launch",
    "once_per_host",
    "ordered_all_reduce",
}
"""Examples that need workers, GPUs, or what the reader has: they are only read."""


@pytest.mark.parametrize("name", [name for name in vars(ls)["__all__"] if example(getattr(ls, name))])
def test_the_example_of_a_public_name_is_true(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = example(getattr(ls, name))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            check_call(node)
    if name not in NOT_RUN:
        monkeypatch.chdir(tmp_path)
        with single_rank_group():
            names = make_names()
            data = {
                "train_set": names["dataset"],
                "test_set": names["dataset"],
                "net": names["model"],
                "targets": names["labels"],
            }
            exec(compile(text, name, "exec"), names | data | {"Tensor": Tensor})


def test_what_people_use_most_has_an_example() -> None:
    classes_and_functions = {
        name for name in vars(ls)["__all__"] if callable(getattr(ls, name)) and not name.endswith("Error")
    }
    assert {name for name in classes_and_functions if not example(getattr(ls, name))} <= {
        *("BucketLimits", "Continued", "Cursor", "Fingerprint", "LoadedState", "LoadedWeights", "ShardedBatch"),
        *("StepResult", "Track", "World", "destroy_process_group"),
    }


def is_there(module: str, name: str) -> bool:
    """Whether a module has a name; of one that needs what is not installed, whether its source defines it."""
    try:
        return hasattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("lockstep"):
            return False
    source = Path(*("src", *module.split("."))).with_suffix(".py")
    return bool(re.search(rf"^(class|def) {name}\b", (ROOT / source).read_text("utf-8"), re.MULTILINE))


def check_call(call: ast.Call) -> None:
    """Check the names of the arguments of a call of something public."""
    made = call.func
    if not (isinstance(made, ast.Attribute) and isinstance(made.value, ast.Name) and made.value.id == "ls"):
        return
    parameters = inspect.signature(getattr(ls, made.attr)).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        given = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
        assert given <= set(parameters), f"ls.{made.attr} has no argument {', '.join(given - set(parameters))}"


def commands() -> list[Any]:
    """Return the lines of blocks that call our command."""
    found: dict[str, str] = {}
    for page in PAGES:
        for language, text in blocks(page):
            if language in {"", "console", "bash", "sh"}:
                joined = text.replace("\\\n", " ")
                for line in re.findall(r"^(?:\$ |# )?((?:\w+=\S+ )*lockstep [a-z].*)$", joined, re.MULTILINE):
                    found.setdefault(line, f"{page.name}: {line}")
    return [pytest.param(line, id=name) for line, name in found.items()]


@pytest.mark.parametrize("line", commands())
def test_a_command_has_the_options_that_are_shown(line: str) -> None:
    words = shlex.split(re.sub(r"^(\w+=\S+ )*lockstep ", "", line), comments=True)
    shell = next(
        (number for number, word in enumerate(words) if word in {"|", "&", "&&", ">", "2>&1", ";"}), len(words)
    )
    name, *rest = words[:shell]
    command: Any = typer.main.get_command(app)
    context = command.make_context("lockstep", [], resilient_parsing=True)
    command = command.get_command(context, name)
    while hasattr(command, "commands"):
        name, *rest = rest
        command = command.get_command(context, name)
    assert command is not None, f"there is no command {name}"
    known = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
    own = rest if "--" not in rest else rest[: rest.index("--")]
    if name == "run":  # what follows the script is the script's
        own = own[: next((number + 1 for number, word in enumerate(own) if word.endswith(".py")), len(own))]
    options = {word.partition("=")[0] for word in own if re.match(r"--?[a-z]", word)}
    assert options <= known | {"--help"}, f"lockstep {name} has no option {', '.join(options - known)}"
    if name in {"train", "verify"}:
        keys = {word.partition("=")[0].partition(".")[0] for word in own if re.match(r"[a-z_.]+=", word)}
        assert keys <= set(Config.model_fields), f"a config has no key {', '.join(keys - set(Config.model_fields))}"


@pytest.mark.parametrize("text", snippets("yaml"))
def test_a_config_has_known_keys(text: str) -> None:
    values = YAML(typ="safe").load(text)
    required = {"model": "mine:Net", "data": "mine:data"}
    parse_config(required | values, "the page's config")


def test_each_variable_that_a_page_names_is_on_the_page_of_variables() -> None:
    named = re.compile(r"LOCKSTEP_[A-Z_]+")
    listed = set(named.findall(((ROOT / "docs") / "variables.md").read_text("utf-8"))) - {"LOCKSTEP_"}
    settings = (ROOT / "src/lockstep/settings.py").read_text("utf-8")
    assert listed <= {*named.findall(settings)}
    for page in (ROOT / "docs").glob("*.md"):
        assert set(named.findall(page.read_text("utf-8"))) - {"LOCKSTEP_"} <= listed, page.name
