"""What a script's worker is told."""

import pytest

from lockstep.launch.environment import ScriptPlace, device_variables, share_cores, world_variables
from lockstep.launch.scripts import ScriptJob

CARDS = ("cuda:1", "cuda:0", "cuda:2")


def place(*, rank: int = 1, own_card_only: bool = False) -> ScriptPlace:
    return ScriptPlace(rank=rank, world_size=3, port=4321, is_served=True, run_id="abc", own_card_only=own_card_only)


def test_a_worker_is_told_what_torchrun_tells() -> None:
    told = world_variables(place())
    assert (told["RANK"], told["LOCAL_RANK"], told["WORLD_SIZE"], told["LOCAL_WORLD_SIZE"]) == ("1", "1", "3", "3")
    assert (told["MASTER_ADDR"], told["MASTER_PORT"]) == ("127.0.0.1", "4321")
    assert told["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert world_variables(place(own_card_only=True))["LOCAL_RANK"] == "0"


@pytest.mark.parametrize(
    ("visible", "own", "seen"),
    [(None, False, "1,0,2"), (None, True, "0"), ("7,5,3", False, "5,7,3"), ("GPU-a,GPU-b,GPU-c", True, "GPU-a")],
)
def test_workers_see_the_cards_of_the_launch_or_their_own(visible: str | None, own: bool, seen: str) -> None:
    assert device_variables(CARDS, 1, visible, own_card_only=own) == {"CUDA_VISIBLE_DEVICES": seen}


def test_workers_on_the_cpu_see_no_card() -> None:
    assert device_variables(("cpu", "cpu"), 0, "0,1", own_card_only=False) == {"CUDA_VISIBLE_DEVICES": ""}


def test_threads_are_the_users_or_a_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [share_cores(*pair) for pair in ((16, 2), (2, 2), (2, 8), (7, 2))] == [8, 1, 1, 3]
    job = ScriptJob(program=("x",), arguments=(), placement=("cpu",) * 1000)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert job.threads == "1"
    assert job.describe().startswith("1000 workers on cpu, 1 thread each")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert job.threads == "5"
    asked = ScriptJob(program=("x",), arguments=(), placement=("cuda:0",), num_threads=3)
    assert asked.describe().startswith("1 worker on cuda:0, 3 threads each")
