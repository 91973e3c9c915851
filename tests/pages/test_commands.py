"""Pages whose examples are run as they stand: a block that begins with `# NAME.py` is a file, `$ ...` is a command.

Of what is shown below a command each line must come, in this order; `...` stands for anything.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.process import warm

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [
    "tutorial.md",
    "questions.md",
    "around-training.md",
    "same-bits.md",
    "shared-machine.md",
    "slow.md",
    "sweeps.md",
    "libraries.md",
]
LIBRARIES = ("hydra", "optuna", "transformers", "datasets", "peft")
"""What scripts of pages may import, and is not installed for development everywhere."""


def files(page: Path) -> dict[str, str]:
    blocks = re.findall(
        r"^```python\n# (\w+\.py)\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    return dict(blocks)


def commands(page: Path) -> list[tuple[str, str]]:
    text = "".join(re.findall(r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))
    return [(command, shown) for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)]


COMMANDS = [(page, command, shown) for page in PAGES for command, shown in commands(DOCS / page)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with the files of each page; its commands run there, one after the other."""
    folders = {page: tmp_path_factory.mktemp("page") for page in PAGES}
    for page, folder in folders.items():
        for name, code in files(DOCS / page).items():
            (folder / name).write_text(code, encoding="utf-8")
    return folders


def in_a_shell(command: str, folder: Path, printed: str = "") -> tuple[int, str]:
    """Run a command that may read what another one has printed; return its exit code and output."""
    environ = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "input": printed}
    done = subprocess.run(command, shell=True, cwd=folder, env=environ, check=False, **streams)
    return done.returncode, done.stdout


def without_an_import(command: str, folder: Path) -> tuple[int, str]:
    """Run Python or `lockstep`, and what reads its output, without the import of torch in each process."""
    words = shlex.split(command.partition(" | ")[0])
    if words[0] not in {"python", "lockstep"}:
        return in_a_shell(command, folder)
    words[0] = sys.executable if words[0] == "python" else words[0]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}  # the waiting threads of a pool take the cores of other tests
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with warm.PopenWithScripts(words, cwd=folder, env=environ, **streams) as process:
        printed, _ = process.communicate(timeout=100)
    reader = command.partition(" | ")[2]
    return in_a_shell(reader, folder, printed) if reader and process.returncode == 0 else (process.returncode, printed)


@pytest.mark.timeout(180)  # importing the libraries of a script takes long on a busy machine
@pytest.mark.parametrize(
    ("page", "command", "shown"), COMMANDS, ids=[f"{page}: {command}" for page, command, _ in COMMANDS]
)
def test_a_command_of_a_page_prints_what_the_page_shows(
    folders: dict[str, Path], page: str, command: str, shown: str
) -> None:
    script = files(DOCS / page).get(command.removeprefix("python ").partition(" ")[0], "")
    start = in_a_shell if re.search("[<>&$;]|portable", command) else without_an_import
    for library in LIBRARIES:
        if re.search(rf"^ *(import|from) {library}\b", script, re.MULTILINE):
            pytest.importorskip(library)
            start = in_a_shell
    code, printed = start(command, folders[page])
    assert code == 0, printed
    lines = [".*".join(map(re.escape, line.split("..."))) for line in shown.splitlines()]
    assert re.search(r"^" + r"$(?:.|\n)*?^".join(lines) + "$", printed, re.MULTILINE), printed


@pytest.mark.parametrize("page", PAGES)
def test_the_chinese_page_has_the_same_commands_and_files(page: str) -> None:
    chinese = (DOCS / page).with_suffix(".zh-CN.md")
    assert commands(chinese) == commands(DOCS / page)
    uncommented = [re.sub(r" *#.*", "", code) for path in (chinese, DOCS / page) for code in files(path).values()]
    assert uncommented[: len(uncommented) // 2] == uncommented[len(uncommented) // 2 :]


@pytest.mark.parametrize("page", ["../README.md", "own-loop.md"])
def test_the_loop_of_a_page_gives_one_digest_on_all_workers(page: str, tmp_path: Path) -> None:
    text = (DOCS / page).read_text("utf-8")
    loops = re.findall(r"^```python\n((?:(?!```).)*?ls\.launch\(.*?)^```", text, re.DOTALL | re.MULTILINE)
    resuming = re.findall(r"^```python\n(from pathlib(?:(?!```).)*)", text, re.DOTALL | re.MULTILINE)
    with_it = [loops[0].replace("\n\nprint(", f"\n\n{each}\n\nprint(") for each in resuming]
    digests = []
    for code in [loops[0], *with_it, *with_it]:  # what resumes does so when it is called again
        (tmp_path / "loop.py").write_text(code, encoding="utf-8")
        finished = warm.run([sys.executable, "loop.py"], cwd=tmp_path)
        assert finished.returncode == 0, finished.stderr
        digests.append(re.findall(r"[0-9a-f]{64}", finished.stdout))
    assert [len(each) for each in digests] == [2] * len(digests)
    assert len({each for found in digests for each in found}) == 1
