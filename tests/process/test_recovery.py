"""Workers of `ls.launch` are killed; the others continue, and end with the bits of the undisturbed run."""

import atexit
import os
import re
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mortal_training import Kills, train
from tests.process.ranks import wait_until
from torch import nn

import lockstep as ls
from lockstep.comm.generations import Generations, current_generations
from lockstep.engine.step_engine import StepEngine
from lockstep.errors import WorkerFailedError

pytestmark = pytest.mark.usefixtures("warm_workers")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return ls.launch(train, {}, str(tmp_path_factory.mktemp("undisturbed")), workers=1)[0]


@pytest.mark.parametrize(
    ("backend", "kills", "workers", "left"),
    [
        pytest.param("shm", {"0 loss": 17}, 2, 1, id="rank 0 in a forward of epoch 1"),
        pytest.param("shm", {"2 loss": 5, "0 metric": 2}, 3, 1, id="one in a step, rank 0 in the evaluation"),
        pytest.param("shm", {"1 loss": 4, "2 loss": 4, "0 loader": 90}, 4, 1, id="two at once, one while it loads"),
        pytest.param("shm", {"1 step": 12}, 3, 2, id="after the last step"),
        pytest.param("gloo", {"0 loss": 3, "3 metric": 2}, 4, 2, id="rank 0 in a forward, on Gloo"),
    ],
)
def test_the_bits_are_those_of_the_undisturbed_run(
    backend: str,
    kills: Kills,
    workers: int,
    left: int,
    undisturbed: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCKSTEP_CPU_BACKEND", backend)
    results = ls.launch(train, kills, str(tmp_path), workers=workers)
    assert len(results) == left
    assert all(result == undisturbed for result in results)
    shown = capfd.readouterr().err
    assert shown.count("killed by SIGKILL") == len(kills)
    assert "continue" in shown


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_another_loss_while_the_engine_is_made_anew_is_one_more_loss(
    backend: str, undisturbed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die_or_wait(run: ls.Run, folder: str) -> Any:
        make, rank, made = StepEngine.__init__, run.rank, [0]

        def make_while_another_is_lost(self: StepEngine, *arguments: Any) -> None:
            made[0] += 1
            if made[0] == 2:
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                generations, deadline = current_generations(), time.monotonic() + 50
                assert generations is not None
                while not generations.has_next:
                    assert time.monotonic() < deadline, "the launcher announces no loss"
                    time.sleep(0.001)
            make(self, *arguments)

        StepEngine.__init__ = make_while_another_is_lost  # type: ignore[method-assign,assignment]
        return train(run, {"2 loss": 5}, folder)

    monkeypatch.setenv("LOCKSTEP_CPU_BACKEND", backend)
    assert ls.launch(die_or_wait, str(tmp_path), workers=3) == [undisturbed]


def test_a_loss_is_an_error_where_that_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailedError, match="Worker 1 failed first: killed by SIGKILL"):
        ls.launch(train, {"1 loss": 5}, str(tmp_path), on_worker_loss="stop", workers=2)


def test_an_error_of_the_function_is_an_error_of_the_launch() -> None:
    def fail(run: ls.Run) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ls.Trainer(model, optimizer, loss=lambda m, b: m(b).sum(), num_shards=2, on_worker_loss="continue")
        if run.rank == 1:
            raise KeyError("no such column")
        dist.barrier()

    with pytest.raises(WorkerFailedError, match="no such column"):
        ls.launch(fail, workers=2)


def test_a_loss_that_the_run_has_survived_is_not_the_cause_of_a_later_error(tmp_path: Path) -> None:
    # "Worker 2 failed first: killed by SIGKILL", of a loss long before, and the KeyError came last.
    def train_and_fail(run: ls.Run, folder: str) -> Any:
        digest = train(run, {"2 loss": 5}, folder)
        raise KeyError(digest)

    with pytest.raises(WorkerFailedError) as caught:
        ls.launch(train_and_fail, str(tmp_path), workers=3)
    first, *_, last = str(caught.value).splitlines()
    assert re.match(r"Worker [01] failed first: KeyError", first)
    assert last.startswith("Before that, the others had continued without worker 2 (killed by SIGKILL")
    assert {failure.rank for failure in caught.value.failures} <= {0, 1}


def test_a_collective_of_the_users_own_names_who_was_killed() -> None:
    def reduce_alone(run: ls.Run) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ls.Trainer(model, optimizer, loss=lambda m, b: m(b).sum(), num_shards=2, on_worker_loss="continue")
        if run.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(WorkerFailedError) as caught:
        ls.launch(reduce_alone, workers=2)
    assert "Worker 1 failed first: killed by SIGKILL" in str(caught.value).splitlines()[0]


def test_a_worker_that_has_returned_and_is_killed_counts_and_one_that_has_not_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The launcher watches workers that have returned, too: it frees the process ids of all that were killed."""

    def work(run: ls.Run, folder: Path) -> int:
        model = nn.Linear(2, 1)
        trainer = ls.Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loss=lambda m, b: m(b).sum(),
            num_shards=4,
            on_worker_loss="continue",
        )
        dist.barrier()
        rank, main = run.rank, threading.get_ident()
        (folder / f"{rank}.new").write_text(str(os.getpid()))
        (folder / f"{rank}.new").rename(folder / str(rank))
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)

        def end_when_returned() -> None:
            while "_wait_for_others" not in "".join(traceback.format_stack(sys._current_frames()[main])):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

        if rank == 1:
            threading.Thread(target=end_when_returned, daemon=True).start()
            return rank
        notes = (folder / "1", folder / "2")
        wait_until(
            lambda: all(each.exists() and not Path("/proc", each.read_text()).exists() for each in notes), "ends"
        )
        assert trainer.digest()
        return rank

    assert ls.launch(work, tmp_path, workers=3) == [0, 1]
    said = [record.message for record in caplog.records if "have returned a result" in record.message]
    assert len(said) == 1
    assert "2 of 3 workers have returned a result: worker 2 (pid" in said[0]


def test_a_worker_that_has_returned_does_not_wait_for_one_that_ends(tmp_path: Path) -> None:
    # Worker 1 is lost, and worker 0 waits for worker 2 to continue without it. But that returns, so all have, and ends:
    # worker 0 waited on until it was killed after 30 s.
    def work(run: ls.Run, folder: Path) -> int:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = ls.Trainer(model, optimizer, loss=lambda m, b: m(b).sum(), num_shards=4, on_worker_loss="continue")
        dist.barrier()
        if run.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if run.rank == 2:
            Generations.has_next = property(lambda _self: False)  # type: ignore[method-assign,assignment]
            wait_until((folder / "waits").exists, "worker 0 in the meeting", 50)
            return 2
        join = Generations.join_next

        def join_next(self: Generations) -> Any:
            (folder / "waits").touch()
            return join(self)

        Generations.join_next = join_next  # type: ignore[method-assign]
        atexit.register((folder / "has ended by itself").touch)
        atexit.register(lambda: trainer)
        return 0

    assert ls.launch(work, tmp_path, workers=3) == [0, 2]
    assert (tmp_path / "has ended by itself").exists()


def test_all_workers_are_started_again_after_a_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def count(run: ls.Run, folder: Path) -> int:
        number = len(list(folder.iterdir()))
        (folder / str(number)).touch()
        if number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    assert ls.launch(count, tmp_path, workers=1, max_restarts=2) == [1]
    assert "restart 1 of at most 2" in caplog.text
    assert "killed by SIGKILL" in caplog.text
