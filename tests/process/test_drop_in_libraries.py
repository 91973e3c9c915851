"""Accelerate, Transformers and Lightning, with torch's wrapper and with ours: unchanged, and with a plug-in.

These libraries are not installed for development, because they bring 250 MB of packages: the tests are skipped without
them. To run them: `.venv/bin/pip install -c constraints.txt accelerate transformers lightning`.
"""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.launch.environment import NOTICE

HERE = Path(__file__).parent
SCRIPTS = HERE / "unchanged_scripts"
PAGE = (HERE.parents[1] / "docs" / "drop-in.md").read_text(encoding="utf-8")
RUN = [str(Path(sys.executable).with_name("lockstep")), "run", "--workers", "2"]
LIBRARIES = {
    "with_accelerate": "accelerate",
    "with_hf_trainer": "transformers",
    "with_lightning": "lightning",
    "with_fabric": "lightning",
}


def needs(library: str) -> Any:
    missing = find_spec(library) is None or (library == "transformers" and find_spec("accelerate") is None)
    return pytest.mark.skipif(missing, reason=f"{library} is not installed; it is not needed for development")


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return done


def states(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [found] if "wrapper" in found else list(found.values())


def check_equal(torchs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Compare bit by bit: two ranks on the CPU."""
    for one, other in zip(states(torchs), states(ours), strict=True):
        assert one["wrapper"] == "torch.nn.parallel.distributed.DistributedDataParallel"
        assert other["wrapper"] == "lockstep.parallel.ddp.DistributedDataParallel"
        assert one["losses"] == other["losses"]
        assert len(one["losses"]) >= 6
        torch.testing.assert_close(other["state"], one["state"], rtol=0, atol=0)


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what a script finds with torch's classes; it is run once."""
    folder, found = tmp_path_factory.mktemp("torch"), {}

    def find(name: str) -> Any:
        if name not in found:
            run(*RUN, str(SCRIPTS / f"{name}.py"), str(folder / name), folder=folder)
            found[name] = torch.load(folder / name)
        return found[name]

    return find


CASES = [pytest.param(name, marks=needs(library)) for name, library in LIBRARIES.items()]


@pytest.mark.parametrize("name", CASES)
def test_a_library_trains_unchanged_as_with_torchs_classes(name: str, with_torch: Any, tmp_path: Path) -> None:
    done = run(*RUN, "--drop-in", str(SCRIPTS / f"{name}.py"), str(tmp_path / name), folder=tmp_path)
    assert done.stderr.count(NOTICE) == 1
    check_equal(with_torch(name), torch.load(tmp_path / name))


@pytest.mark.parametrize("name", CASES)
def test_a_library_trains_with_its_plug_in_as_with_torchs_classes(name: str, with_torch: Any, tmp_path: Path) -> None:
    run(*RUN, str(SCRIPTS / f"{name}.py"), str(tmp_path / name), "plugin", folder=tmp_path)
    check_equal(with_torch(name), torch.load(tmp_path / name))


@needs("lightning")
@pytest.mark.parametrize("options", [[], ["-m", "lockstep.drop_in"]], ids=["torch", "ours"])
def test_lightning_starts_its_own_ranks_with_the_same_classes(options: list[str], tmp_path: Path) -> None:
    # Its launcher starts the command of rank 0 again: without the drop-in, the ranks would have other classes.
    run(sys.executable, *options, str(SCRIPTS / "with_fabric.py"), str(tmp_path / "found"), folder=tmp_path)
    assert torch.load(tmp_path / "found")["wrapper"].startswith("lockstep" if options else "torch")


EXAMPLES = dict(re.findall(r"### (.*?)\n.*?```python\n(.*?)```", PAGE, re.DOTALL))


@pytest.mark.parametrize(
    "title",
    [
        pytest.param("Accelerate", marks=needs("accelerate")),
        pytest.param("Transformers", marks=needs("transformers")),
        pytest.param("Lightning", marks=needs("lightning")),
        pytest.param("Fabric", marks=needs("lightning")),
    ],
)
def test_the_example_of_the_page_runs(title: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(EXAMPLES[title])
    done = run(*RUN, "example.py", folder=tmp_path)
    assert done.stdout.count("lockstep.parallel.ddp.DistributedDataParallel") == 2
