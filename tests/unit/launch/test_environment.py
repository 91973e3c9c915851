"""The environment of a script's worker."""

import pytest

from lockstep.devices.choose import CPU, Device, Placement
from lockstep.launch.environment import device_variables, place_variables, share_cores, torchrun_variables
from lockstep.launch.scripts import ScriptJob

CARDS = Placement(
    devices=tuple(Device(name="cuda:0", visible=uuid, label=uuid) for uuid in ("GPU-b", "GPU-a")),
    reason="GPU 1, GPU 0",
    hint="they differ",
)


def cpus(count: int) -> Placement:
    return Placement(devices=(CPU,) * count, reason=f"CPU, {count} workers")


def test_a_worker_has_the_variables_of_torchrun() -> None:
    found = place_variables(rank=1, local_rank=0, world_size=3, port=4321)
    assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]) == ("1", "0", "3", "3")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("127.0.0.1", "4321")
    assert torchrun_variables(1, 3, is_served=True)["TORCHELASTIC_USE_AGENT_STORE"] == "True"


def test_workers_see_the_cards_of_the_launch_or_their_own() -> None:
    assert device_variables(CARDS, 1, own_card_only=False)["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"
    assert device_variables(CARDS, 1, own_card_only=True)["CUDA_VISIBLE_DEVICES"] == "GPU-a"


def test_workers_on_the_cpu_see_no_card() -> None:
    assert device_variables(cpus(2), 0, own_card_only=False)["CUDA_VISIBLE_DEVICES"] == ""


def test_threads_are_the_users_or_a_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [share_cores(*pair) for pair in ((16, 2), (2, 2), (2, 8), (7, 2))] == [8, 1, 1, 3]
    job = ScriptJob(program=("x",), arguments=(), placement=cpus(1000))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert job.threads == "1"
    assert job.describe().startswith("devices: CPU, 1000 workers; 1 thread each")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert job.threads == "5"
    asked = ScriptJob(program=("x",), arguments=(), placement=CARDS, num_threads=3)
    assert asked.describe().startswith("devices: GPU 1, GPU 0; 3 threads each")
    assert asked.describe().endswith("hint: they differ")
