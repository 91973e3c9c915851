"""Scripts that know nothing of Lockstep, run with torch's classes and with ours in their place."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from lockstep.launch.environment import NOTICE

SCRIPTS = Path(__file__).parent / "unchanged_scripts"
RUN = [str(Path(sys.executable).with_name("lockstep")), "run"]
FOR_TORCHRUN = ("multi_gpu_torchrun", "mingpt_ddp", "imagenet")
"""Those that are started once per rank; `ddp_tutorial` starts its ranks itself."""
AGENT_STORE = {**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "True"}
TORCHS = "torch.nn.parallel.distributed.DistributedDataParallel"
OURS = "lockstep.parallel.ddp.DistributedDataParallel"


def run(*command: str, **options) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done


@contextmanager
def rendezvous(count: int) -> Iterator[list[str]]:
    """Serve rendezvous, and yield their ports, which were free."""
    with ExitStack() as stack:
        stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(count)]
        stack.callback(stores.clear)
        yield [str(store.port) for store in stores]


def run_for_torchrun(folder: Path, *options: str) -> dict[str, Any]:
    folder.mkdir()
    with rendezvous(len(FOR_TORCHRUN)) as ports:
        scripts = [f"{SCRIPTS / name}.py:{port}" for name, port in zip(FOR_TORCHRUN, ports, strict=True)]
        run(*RUN, "--workers", "2", *options, str(SCRIPTS / "run_all.py"), str(folder), *scripts)
    return {name: torch.load(folder / f"{name}.pt") for name in FOR_TORCHRUN}


@pytest.fixture(scope="module")
def torchs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the scripts for torchrun found, with torch's classes."""
    return run_for_torchrun(tmp_path_factory.mktemp("torchs") / "found")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What they found with ours."""
    return run_for_torchrun(tmp_path_factory.mktemp("ours") / "found", "--drop-in")


def check_equal(torchs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Compare bit by bit: two ranks, on Gloo, on the CPU."""
    assert (torchs["wrapper"], ours["wrapper"]) == (TORCHS, OURS)
    assert torchs["losses"] == ours["losses"]
    assert len(torchs["losses"]) >= 6
    torch.testing.assert_close(ours["state"], torchs["state"], rtol=0, atol=0)


# Each of the two launches has the time of a test to itself.
@pytest.mark.parametrize("name", FOR_TORCHRUN)
def test_a_script_for_torchrun_has_torchs_classes_without_the_drop_in(name: str, torchs: Any) -> None:
    assert torchs[name]["wrapper"] == TORCHS


@pytest.mark.parametrize("name", FOR_TORCHRUN)
def test_a_script_for_torchrun_trains_as_with_torchs_classes(name: str, torchs: Any, ours: Any) -> None:
    check_equal(torchs[name], ours[name])


def run_spawning(folder: Path, *options: str) -> dict[str, Any]:
    with rendezvous(1) as ports:
        run(sys.executable, *options, str(SCRIPTS / "ddp_tutorial.py"), str(folder / "found"), *ports, env=AGENT_STORE)
    return torch.load(folder / "found")


@pytest.fixture(scope="module")
def spawned_with_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a script found that spawns its ranks, with torch's classes."""
    return run_spawning(tmp_path_factory.mktemp("spawned"))


def test_a_script_that_spawns_its_ranks_has_torchs_classes_without_the_drop_in(
    spawned_with_torch: dict[str, Any],
) -> None:
    assert spawned_with_torch["wrapper"] == TORCHS


def test_a_script_that_spawns_its_ranks_trains_as_with_torchs_classes(
    spawned_with_torch: dict[str, Any], tmp_path: Path
) -> None:
    check_equal(spawned_with_torch, run_spawning(tmp_path, "-m", "lockstep.drop_in"))


CHILDREN = """
import subprocess, sys
import torch
from torch.utils.data import DataLoader, Dataset

class Names(Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, index):
        return torch.nn.SyncBatchNorm.__module__

if __name__ == "__main__":
    print(torch.nn.SyncBatchNorm.__module__)
    print(next(iter(DataLoader(Names(), num_workers=1, multiprocessing_context="spawn")))[0])
    # Lockstep imports torch while it is being imported itself.
    program = "import lockstep, torch; print(torch.nn.SyncBatchNorm.__module__)"
    print(subprocess.check_output([sys.executable, "-c", program], text=True).strip())
    program = "import sys; print('torch' in sys.modules)"
    print(subprocess.check_output([sys.executable, "-c", program], text=True).strip())
"""


def test_every_process_that_is_started_has_the_same_classes(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CHILDREN)
    done = run(*RUN, "--workers", "1", "--drop-in", str(tmp_path / "script.py"))
    ours = "lockstep.parallel.sync_batchnorm"
    assert done.stdout.split() == [ours, ours, ours, "False"]
    assert done.stderr.count("\n") == 2
    assert done.stderr.count(NOTICE) == 1


def test_a_script_without_torch_and_a_sitecustomize_of_the_users_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.is_users_own = True")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; print(sys.is_users_own, sys.argv, 'torch' in sys.modules, __name__, __spec__, len(sys.path))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    plain = run(sys.executable, str(script), "--lr", "1", env=environment)
    done = run(*RUN, "--workers", "1", "--drop-in", str(script), "--lr", "1", env=environment)
    assert plain.stdout.startswith("True ")
    assert done.stdout == plain.stdout


def test_the_first_line_of_a_script_prints_one_line_on_rank_0(tmp_path: Path) -> None:
    program = "import lockstep.drop_in, torch; print(torch.nn.SyncBatchNorm.__module__)"
    (tmp_path / "script.py").write_text(program)
    done = run(*RUN, "--workers", "2", "--no-prefix", str(tmp_path / "script.py"))
    assert done.stdout.split() == ["lockstep.parallel.sync_batchnorm"] * 2
    assert done.stderr.count(NOTICE) == 1


def test_the_module_without_a_script_explains_itself() -> None:
    command = [sys.executable, "-m", "lockstep.drop_in"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "usage: python -m lockstep.drop_in SCRIPT ARGS" in done.stderr
