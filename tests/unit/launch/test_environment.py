"""The environment of a script's worker."""

import os

import pytest

from lockstep.devices.choose import CPU, Device, Placement
from lockstep.launch.environment import STARTUP_FOLDER, command_of_script, has_drop_in, with_drop_in, without_drop_in
from lockstep.launch.rendezvous import Rendezvous
from lockstep.launch.scripts import ScriptJob, script_variables

CARDS = Placement(
    devices=tuple(Device(name="cuda:0", visible=uuid, label=uuid) for uuid in ("GPU-b", "GPU-a")),
    reason="GPU 1, GPU 0",
    hint="they differ",
)


def cpus(count: int) -> Placement:
    return Placement(devices=(CPU,) * count, reason=f"CPU, {count} workers")


def variables(placement: Placement, rank: int, *, own_card_only: bool = False) -> dict[str, str]:
    job = ScriptJob(program=("x",), arguments=(), placement=placement, own_card_only=own_card_only)
    return script_variables(job, rank, Rendezvous(port=4321, is_served=True), is_piped=False)


def test_a_worker_has_the_variables_of_torchrun() -> None:
    found = variables(cpus(3), 1)
    assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]) == ("1", "1", "3", "3")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("127.0.0.1", "4321")
    assert found["TORCHELASTIC_USE_AGENT_STORE"] == "True"


def test_workers_see_the_cards_of_the_launch_or_their_own() -> None:
    assert variables(CARDS, 1)["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"
    own = variables(CARDS, 1, own_card_only=True)
    assert (own["CUDA_VISIBLE_DEVICES"], own["LOCAL_RANK"]) == ("GPU-a", "0")


def test_workers_on_the_cpu_see_no_card() -> None:
    assert variables(cpus(2), 0)["CUDA_VISIBLE_DEVICES"] == ""


def test_threads_are_the_users_or_a_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    job = ScriptJob(program=("x",), arguments=(), placement=cpus(1000))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert job.threads == "1"
    assert job.describe().startswith("devices: CPU, 1000 workers; 1 thread each")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert job.threads == "5"
    asked = ScriptJob(program=("x",), arguments=(), placement=CARDS, num_threads=3)
    assert asked.describe().startswith("devices: GPU 1, GPU 0; 3 threads each")
    assert asked.describe().endswith("hint: they differ")


# -- The command and the folder that `lockstep run` replaces torchrun's with -------------------------------------------


@pytest.mark.parametrize("given", [None, "", "/a", f"/a{os.pathsep}/b", f"/a{os.pathsep}"])
def test_the_folder_comes_first_and_goes_without_a_trace(given: str | None) -> None:
    changed = with_drop_in(given)
    assert changed.split(os.pathsep)[0] == STARTUP_FOLDER
    assert has_drop_in(changed)
    assert not has_drop_in(given)
    assert with_drop_in(changed) == changed
    assert without_drop_in(changed) == (given or None)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python -m lockstep.drop_in train.py --lr 1", "python train.py --lr 1"),
        ("python -u -W error -m lockstep.drop_in train.py", "python -u -W error train.py"),
        ("python -um lockstep.drop_in train.py", "python -u train.py"),
        ("python -mlockstep.drop_in train.py", "python train.py"),
        ("python -m lockstep.drop_in -m package.train -m x", "python -m package.train -m x"),
        ("python -m coverage run -m lockstep.drop_in train.py", "python -m coverage run train.py"),
        ("python train.py --model lockstep.drop_in", None),
        ("python train.py --m lockstep.drop_in", None),
        ("python", None),
    ],
)
def test_the_script_gets_a_command_of_its_own(command: str, expected: str | None) -> None:
    assert command_of_script(command.split()) == (None if expected is None else expected.split())
