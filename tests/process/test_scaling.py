"""Workers join and leave a launch that trains; the bits are those of a run that nobody disturbs."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.process.ranks import wait_until
from torch import Tensor, nn

import lockstep as ls
from lockstep.cli.scale import change
from lockstep.errors import UsageError
from lockstep.launch.control import CONTROL_NAME, ask, connect

pytestmark = pytest.mark.usefixtures("warm_workers")


def note(path: Path, text: str) -> None:
    """Write a file that nobody reads half written."""
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(text)
    beside.rename(path)


@torch.no_grad()
def move_teacher(teacher: nn.Sequential, model: nn.Sequential) -> None:
    for mine, other in zip(teacher[0].parameters(), model[-1].parameters(), strict=True):
        mine.lerp_(other[:, :8] if other.ndim > 1 else other, 0.1)


def train(folder: Path, last: int | None) -> tuple[int, str]:
    """Train to a step, or to one that a file names; return it and the digest."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3))  # beside the model: its buffers move in each forward

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            hint = teacher(batch[0])
        return nn.functional.cross_entropy(model(batch[0]) + hint, batch[1])

    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(120, 8, generator=generator), torch.randint(0, 3, (120,), generator=generator)
    data = torch.utils.data.TensorDataset(inputs, targets)
    trainer = ls.Trainer(model, optimizer, loss=loss, num_shards=4, on_worker_loss="continue")
    loader = ls.ShardedLoader(data, batch_size=24, num_shards=4)
    trainer.join()
    while True:
        for batch in loader.epoch(trainer.cursor.epoch, trainer.cursor.step):
            trainer.step(batch)
            move_teacher(teacher, model)
            step, world = trainer.global_step, trainer.world
            if (folder / f"hang-{os.getpid()}").exists():
                threading.Event().wait()
            if last is None:
                note(folder / f"pid-{os.getpid()}", f"{world.rank} {world.world_size} {step}")
                time.sleep(0.02)
                if world.rank == 0 and (folder / "end").exists() and not (folder / "last").exists():
                    note(folder / "last", str(step + 3))  # a step that nobody has taken
                # Who is a step behind sees the file too: rank 0 has written it before it took its next step.
                if (folder / "last").exists() and step >= int((folder / "last").read_text()):
                    return step, trainer.digest()
            elif step == last:
                return step, trainer.digest()


def work(run: ls.Run, folder: Path) -> tuple[int, str]:
    return train(folder, None)


class Places:
    """What the workers have noted about themselves."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def wait(self, world_size: int, *, but: int = -1) -> dict[int, int]:
        """Wait until so many workers train together; return their pids by rank."""
        found: dict[int, int] = {}

        def is_so() -> bool:
            found.clear()
            for path in self._folder.glob("pid-*"):
                rank, size, _ = map(int, path.read_text().split()) if path.suffix == "" else (0, -1, 0)
                pid = int(path.name.removeprefix("pid-").split(".")[0])
                if size == world_size and pid != but and Path(f"/proc/{pid}").exists():
                    found[rank] = pid
            return sorted(found) == list(range(world_size))

        wait_until(is_so, f"{world_size} workers")
        return found


def request(folder: Path, **fields: Any) -> list[dict[str, Any]]:
    """Send a request, and return the answers up to the last one."""
    answers = []
    with connect(folder) as client:
        for answer in ask(client, fields):
            answers.append(answer)
            if answer.keys() & {"done", "error"} or fields["op"] == "describe":
                break
    return answers


@pytest.mark.timeout(240)
def test_a_run_grows_shrinks_and_replaces_a_silent_worker(tmp_path: Path) -> None:
    said: list[Any] = []
    problems: list[BaseException] = []

    def disturb() -> None:
        places = Places(tmp_path)
        try:
            wait_until((tmp_path / CONTROL_NAME).exists, "the socket")
            first = places.wait(2)
            assert (tmp_path / CONTROL_NAME).stat().st_mode & 0o777 == 0o600
            said.extend(request(tmp_path, op="resize", workers=9))
            said.extend(request(tmp_path, op="resize", workers=0))
            said.extend(request(tmp_path, op="release", device="GPU0"))
            said.extend(request(tmp_path, op="resize", workers=3))
            assert places.wait(3)[0] == first[0]
            os.kill(first[1], signal.SIGSTOP)  # alive, but silent: it is killed, and replaced
            grown = places.wait(3, but=first[1])
            (tmp_path / f"hang-{grown[1]}").touch()  # it answers, but the others wait for it
            grown = places.wait(3, but=grown[1])
            os.kill(grown[0], signal.SIGTERM)  # leaves after a step
            places.wait(2)
            said.extend(request(tmp_path, op="describe"))
        except BaseException as problem:  # noqa: BLE001 - raised in the main thread
            problems.append(problem)
        finally:
            (tmp_path / "end").touch()

    thread = threading.Thread(target=disturb)
    thread.start()
    elastic = ls.Elastic(respawn=3, evict_after=4, folder=tmp_path)
    try:
        results = ls.launch(work, tmp_path, workers=2, devices="cpu:2", elastic=elastic)
    finally:
        (tmp_path / "end").touch()
        thread.join()
    assert not problems, problems
    assert len(results) == 2
    assert len(set(results)) == 1
    assert results[0] == train(tmp_path, results[0][0])
    texts = [str(next(iter(answer.values()))) for answer in said]
    assert "9 workers cannot share 4 shards" in texts[0]
    assert "fewer than min_workers" in texts[1]
    assert "No worker of this run uses GPU0" in texts[2]
    assert "will join" in texts[3]
    assert texts[4].startswith("3 workers: rank 0 (pid ")
    assert texts[5].startswith("2 workers: rank 0 (pid ")
    assert not (tmp_path / CONTROL_NAME).exists()
    with pytest.raises(UsageError, match="it has ended"):
        change(tmp_path, {"op": "describe"})
