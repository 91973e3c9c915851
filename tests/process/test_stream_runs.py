"""Training on a stream: killed, or stopped and resumed, it ends with the digest of one worker."""

import os
import queue
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.process.commands import Command, train_undisturbed
from torch import Tensor, nn

import lockstep as ls

pytestmark = pytest.mark.usefixtures("warm_workers")

MODULE = """
import gc, os, signal, time

import torch
import lockstep as ls
from lockstep.processes.stop_signals import StopRequest

SIZES = [30, 7, 51, 32]
model = lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(), torch.nn.Linear(4, 2))
calls = []

class Places:  # a source that tells its place
    def __init__(self):
        self.place = 0

    def __iter__(self):
        while self.place < 120:
            self.place += 1
            yield self.place
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]

def read(part):
    yield from range(sum(SIZES[:part]), sum(SIZES[: part + 1]))

def decode(number):
    return torch.randn(3) + number % 2, number % 2

def data(kind):
    parts = ls.Stream(range(4), read=read, transform=decode, buffer_size=20, lengths=SIZES)
    place = ls.Stream(Places(), transform=decode, buffer_size=20)
    return {"train": parts if kind == "parts" else place, "test": ls.Stream(range(2), read=read, transform=decode)}

def loss(output, target):
    calls.append(1)
    rank, call, name = os.environ.get("SCRIPT", "0 0 no").split()
    if rank == os.environ.get("RANK") and len(calls) == int(call) and not os.path.exists("played"):
        os.mkdir("played")
        if name == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(os.getppid(), signal.SIGTERM)  # to the launcher; the step ends when the request has come here
        while not any(each.is_made for each in gc.get_objects() if isinstance(each, StopRequest)):
            time.sleep(0.001)
    return torch.nn.functional.cross_entropy(output, target)
"""
CONFIG = """
model: streamed:model
data: streamed:data
loss: streamed:loss
batch_size: 12
num_shards: 3
epochs: 2
save_every: 3
report: false
device_ids: cpu
run_dir: run
"""
Train = Callable[..., str]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lockstep_here: Command) -> Train:
    """Run the command in this process, with workers of its own; return the digest, or "" of a run that was stopped."""
    (tmp_path / "streamed.py").write_text(MODULE)
    (tmp_path / "streamed.yaml").write_text(CONFIG)

    def run(script: str, *arguments: str) -> str:
        shutil.rmtree("played", ignore_errors=True)
        monkeypatch.setenv("SCRIPT", script or "0 0 no")
        ended = lockstep_here("train", "streamed.yaml", *arguments)
        assert Path("played").exists() == bool(script), ended
        if "SIGTERM" not in script:
            return ended.digest
        assert ended.code == 75, ended
        return ""

    return run


def digest_of_one_worker(kind: str) -> str:
    return train_undisturbed(Path("streamed.yaml").resolve(), Path("whole"), f"data_args={{kind: {kind}}}")


@pytest.mark.parametrize("kind", ["parts", "place"])
def test_a_killed_worker_of_a_stream_does_not_change_the_digest(kind: str, train: Train) -> None:
    # Rank 1 of 3 is killed in the middle of epoch 0: the others read its slices of the step again.
    assert train("1 5 SIGKILL", "workers=3", f"data_args={{kind: {kind}}}") == digest_of_one_worker(kind)


@pytest.mark.parametrize("kind", ["parts", "place"])
def test_a_stream_that_is_stopped_twice_and_resumed_on_others_has_the_same_digest(kind: str, train: Train) -> None:
    arguments = [f"data_args={{kind: {kind}}}"]
    assert train("1 4 SIGTERM", "workers=2", *arguments) == ""
    assert train("1 3 SIGTERM", "workers=3", "--resume", "run", *arguments) == ""
    assert train("", "workers=1", "--resume", "run", *arguments) == digest_of_one_worker(kind)


def fetched_ahead(batches: Iterator[ls.ShardedBatch], number: int) -> Iterator[ls.ShardedBatch]:
    """Yield batches that a thread has fetched, so many ahead."""
    waiting: queue.Queue[ls.ShardedBatch | None] = queue.Queue(number)

    def fetch() -> None:
        for batch in batches:
            waiting.put(batch)
        waiting.put(None)

    thread = threading.Thread(target=fetch)
    thread.start()
    while (batch := waiting.get()) is not None:
        yield batch
    thread.join()


def train_fetching_ahead(run: ls.Run, ahead: list[int], kill: tuple[int, int]) -> str:
    calls = [0]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        calls[0] += 1
        if (run.rank, calls[0]) == kill and run.world_size == len(ahead) > 1:  # not one that has this rank later
            os.kill(os.getpid(), signal.SIGKILL)
        return model(batch[:, None].float() / 120).square().mean()

    torch.manual_seed(0)
    model = nn.Linear(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = ls.Trainer(model, optimizer, loss=loss, num_shards=3, on_worker_loss="continue")
    stream = ls.Stream(range(4), read=lambda part: map(float, range(30 * part, 30 * part + 30)), buffer_size=20)
    loader = ls.ShardedLoader(stream, batch_size=12, num_shards=3)
    for epoch in range(2):
        batches = loader.epoch(epoch)
        for batch in fetched_ahead(batches, ahead[run.rank]) if ahead[run.rank] else batches:
            trainer.step(batch)
    assert trainer.global_step == 20
    return trainer.digest()


@pytest.mark.parametrize("ahead", [[1, 1, 1], [3, 0, 0]])
def test_batches_that_a_thread_has_fetched_ahead_are_trained_on_when_a_worker_is_killed(ahead: list[int]) -> None:
    # They had no samples any more: 48 were dropped where rank 0 fetched ahead, and the step failed where all did.
    undisturbed = ls.launch(train_fetching_ahead, [0], (1, 4), workers=1)
    assert ls.launch(train_fetching_ahead, ahead, (1, 4), workers=3) == undisturbed * 2
