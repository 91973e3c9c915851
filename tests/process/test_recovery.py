"""Workers of `ls.launch` are killed; the others continue, and end with the bits of the undisturbed run."""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lockstep as ls
from lockstep.errors import WorkerFailedError

Deaths = Mapping[str, int]
"""What the worker of a rank does last, as "rank moment number": "0 loss 3" is its third shard."""


def train(run: ls.Run, deaths: Deaths, folder: str, on_worker_loss: Literal["continue", "stop"] = "continue") -> Any:
    """Train, evaluate and save; return what must not depend on who was killed."""
    counts = dict.fromkeys(("loss", "metric", "loader", "step"), 0)

    def reach(moment: str) -> None:
        counts[moment] += 1
        if deaths.get(f"{run.rank} {moment}") == counts[moment]:
            os.kill(worker, signal.SIGKILL)

    class Data(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
        def __len__(self) -> int:
            return 110

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            reach("loader")
            return torch.randn(8), torch.tensor(index % 3)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        reach("loss")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def metric(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        reach("metric")
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    worker = os.getpid()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    trainer = ls.Trainer(model, optimizer, loss=loss, num_shards=6, scheduler=scheduler, on_worker_loss=on_worker_loss)
    loader = ls.ShardedLoader(Data(), batch_size=30, num_shards=6)
    seen: list[float] = []
    for epoch in range(3):
        for batch in loader.epoch(epoch):
            seen.append(trainer.step(batch).loss)
            reach("step")
        seen.append(trainer.evaluate(loader, metric)["metric"].value)
        trainer.save(Path(folder) / "run.ckpt")
    places = run.rank, run.world_size, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert places == (dist.get_rank(), dist.get_world_size()) * 2
    return trainer.digest(), seen, trainer.global_step


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return ls.launch(train, {}, str(tmp_path_factory.mktemp("undisturbed")), workers=1)[0]


@pytest.mark.parametrize(
    ("deaths", "workers", "left"),
    [
        pytest.param({"0 loss": 9}, 2, 1, id="rank 0 in a forward"),
        pytest.param({"2 loss": 5, "0 metric": 2}, 3, 1, id="one in a step, rank 0 in the evaluation"),
        pytest.param({"1 loss": 4, "2 loss": 4, "0 loader": 90}, 4, 1, id="two at once, one while it loads"),
        pytest.param({"1 step": 12}, 3, 2, id="after the last step"),
    ],
)
def test_the_bits_are_those_of_the_undisturbed_run(
    deaths: Deaths, workers: int, left: int, undisturbed: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results = ls.launch(train, deaths, str(tmp_path), workers=workers)
    assert len(results) == left
    assert all(result == undisturbed for result in results)
    shown = capfd.readouterr().err
    assert shown.count("killed by SIGKILL") == len(deaths)
    assert "continue" in shown


def test_a_loss_is_an_error_where_that_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailedError, match="Worker 1 failed first: killed by SIGKILL"):
        ls.launch(train, {"1 loss": 5}, str(tmp_path), "stop", workers=2)


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
        deadline = time.monotonic() + 50
        for other in ("1", "2"):
            while not (folder / other).exists() or Path("/proc", (folder / other).read_text()).exists():
                assert time.monotonic() < deadline, f"worker {other} is not looked after"
                time.sleep(0.01)
        assert trainer.digest()
        return rank

    assert ls.launch(work, tmp_path, workers=3) == [0, 1]
    said = [record.message for record in caplog.records if "have returned a result" in record.message]
    assert len(said) == 1
    assert "2 of 3 workers have returned a result: worker 2 (pid" in said[0]


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
