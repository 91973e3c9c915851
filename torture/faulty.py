"""A training in which one worker does something wrong: `faults.py` starts it. It says when, in the file FAULTY_AT.

FAULTY is the name of the fault, "place" or "place:function"; FAULTY_RANK is the worker, -1 for all.
"""

import ctypes
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lockstep as ls

PLACE, _, KIND = os.environ.get("FAULTY", ":").partition(":")
RANK = int(os.environ.get("FAULTY_RANK", "1"))
STEP = int(os.environ.get("FAULTY_STEP", "3"))
AT = os.environ.get("FAULTY_AT", "")
FOLDER = Path(os.environ.get("FAULTY_FOLDER", tempfile.gettempdir()))
PROCESSES = int(os.environ.get("FAULTY_LOADERS", "0"))
STATE = {"step": 0, "rank": int(os.environ.get("RANK", "0"))}
SAMPLES = int(os.environ.get("FAULTY_SAMPLES", "32"))
SLOW = os.environ.get("FAULTY_SLOW", "")
LOCK = threading.Lock()


def say() -> None:
    """Say when the fault happens."""
    if AT and not Path(AT).exists():
        Path(AT).write_text(str(time.monotonic()), encoding="ascii")


def at(place: str) -> None:
    """Do what is wrong, if this is the place, the step and the worker."""
    if place == PLACE and RANK in {-1, STATE["rank"]} and STATE["step"] >= STEP:
        say()
        FAULTS[KIND]()


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def loop() -> None:
    while True:
        pass


def sleep() -> None:
    time.sleep(1000)


def lock() -> None:
    LOCK.acquire()
    LOCK.acquire()


def two_threads() -> None:
    first, second = threading.Lock(), threading.Lock()
    both = threading.Barrier(2)

    def other() -> None:
        with second:
            both.wait()
            with first:
                pass

    threading.Thread(target=other, daemon=True).start()
    with first:
        both.wait()
        with second:
            pass


def fifo() -> None:
    path = FOLDER / "a-fifo"
    os.mkfifo(path)
    path.read_text(encoding="ascii")


def ask() -> None:
    input("go on? ")


def child() -> None:
    subprocess.run(["sleep", "1000"], check=True)


def fork() -> None:
    pid = os.fork()
    if pid == 0:
        time.sleep(1000)
    os.waitpid(pid, 0)


def network() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    connection = socket.create_connection(server.getsockname())
    connection.recv(10)


def regex() -> None:
    re.match(r"(a+)+$", "a" * 40 + "b")


def pipe() -> None:
    _, write = os.pipe()
    while True:
        os.write(write, b"a line that nobody reads\n")


def file_lock() -> None:
    path = FOLDER / "a-lock"
    with path.open("w") as file, path.open("w") as again:
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.flock(again, fcntl.LOCK_EX)


def allocate() -> None:
    torch.empty(1 << 45)


def memory_limit() -> None:
    import resource

    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used, used))
    bytearray(1 << 32)


def fail() -> None:
    raise RuntimeError("this worker has had enough")


def leave() -> None:
    sys.exit(0)


def vanish() -> None:
    os._exit(3)


def crash() -> None:
    ctypes.string_at(0)


def all_reduce() -> None:
    dist.all_reduce(torch.ones(3))


def barrier() -> None:
    dist.barrier()


def broadcast_or_reduce() -> None:
    if STATE["rank"] == 0:
        dist.all_reduce(torch.ones(3))
    else:
        dist.broadcast(torch.ones(3), 0)


def shapes() -> None:
    dist.all_reduce(torch.ones(3 + STATE["rank"]))


def full_disk() -> None:
    with (FOLDER / "small" / "a-file").open("wb") as file:
        file.write(bytes(1 << 22))


def slow_disk() -> None:
    """Wait in a state that no signal interrupts, as for a file system that does not answer."""
    path = FOLDER / "a-fifo"
    os.mkfifo(path)
    opened = (os.POSIX_SPAWN_OPEN, 9, str(path), os.O_RDONLY, 0)  # before the new program begins its parent waits so
    os.posix_spawn("/bin/true", ["true"], dict(os.environ), file_actions=[opened])


FAULTS: dict[str, Callable[[], object]] = {
    name: value for name, value in list(globals().items()) if callable(value) and not isinstance(value, type)
}


class Data(Dataset[Any]):
    """Random numbers."""

    def __len__(self) -> int:
        return 320

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index % 32 == 31 or PROCESSES == 0:
            at("getitem")
        return torch.full((8,), float(index % 7)), torch.tensor(index % 3)


def collate(samples: list[Any]) -> Any:
    """Put samples together."""
    at("collate")
    return torch.utils.data.default_collate(samples)


class Net(nn.Module):
    """A small net."""

    def __init__(self) -> None:
        super().__init__()
        width = 2000 if PLACE == "save" else 16  # more than fits on the full disk
        self.layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        at("forward")
        outputs: Tensor = self.layers(inputs)
        if outputs.requires_grad and PLACE == "hook":
            outputs.register_hook(lambda _grad: at("hook"))
        return outputs


def loss_function(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss."""
    at("loss")
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def metric(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Count what is right."""
    at("metric")
    inputs, targets = batch
    return (model(inputs).argmax(1) == targets).sum(), len(targets)


class Watching(ls.Callback):
    """Has each moment."""

    def on_step(self, _trainer: Any, _result: Any) -> None:
        STATE["step"] += 1
        at("callback")

    def on_save(self, _trainer: Any, _path: Any) -> None:
        at("saved")


def train_with_trainer(run: ls.Run) -> None:
    """Train with `ls.Trainer`."""
    STATE["rank"] = run.rank
    net = Net()
    trainer = ls.Trainer(
        net,
        torch.optim.SGD(net.parameters(), 0.1),
        loss=loss_function,
        num_shards=4,
        seed=0,
        callbacks=[Watching()],
        on_worker_loss="stop",
    )
    loader = ls.ShardedLoader(Data(), batch_size=32, num_shards=4, seed=0, num_workers=PROCESSES, collate_fn=collate)
    for epoch in range(100):
        for batch in loader.epoch(epoch):
            try:
                trainer.step(batch)
            except ZeroDivisionError:
                continue
            at("between")
        if epoch == 0:
            trainer.evaluate(loader, metric)
            if PLACE == "save":
                say()
            trainer.save(FOLDER / ("small/a.ckpt" if PLACE == "save" else "a.ckpt"))
        if PLACE == "evaluate" and run.rank == RANK:
            say()
            trainer.evaluate(loader, metric)


def slowly(what: str, seconds: float) -> None:
    """Take time, if this is what is slow on this worker."""
    if what == SLOW and RANK in {-1, STATE["rank"]}:
        time.sleep(seconds)


class SlowData(Data):
    """Takes its time."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        slowly("getitem", 0.005)
        return torch.full((8,), float(index % 7)), torch.tensor(index % 3)


class SlowSGD(torch.optim.SGD):
    """Takes its time too."""

    def step(self, closure: Any = None) -> Any:
        slowly("optimizer", 0.05)
        return super().step(closure)


class SlowCallback(ls.Callback):
    """Takes its time at each step."""

    def on_step(self, _trainer: Any, _result: Any) -> None:
        slowly("callback", 0.05)


def slow_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss, late."""
    slowly("loss", 0.02)
    inputs, targets = batch
    if SLOW == "matmul":
        torch.ones(1500, 1500) @ torch.ones(1500, 1500)
    if SLOW == "unequal":
        model(inputs.repeat(500, 1))
    return nn.functional.cross_entropy(model(inputs), targets)


def slow_metric(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Count what is right, late."""
    slowly("metric", 0.1)
    return metric(model, batch)


class Wide(nn.Module):
    """Has 24 MB of gradients, and little to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(60_000, 100)
        self.head = nn.Linear(108, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = self.table((inputs[:, 0].abs() * 1000).long())
        scores: Tensor = self.head(torch.cat([inputs, rows], 1))
        return scores


def train_slowly(run: ls.Run) -> None:
    """Train for a long time, with something that is slow."""
    STATE["rank"] = run.rank
    (FOLDER / f"pid-{run.rank}").write_text(str(os.getpid()), encoding="ascii")
    width = int(os.environ.get("FAULTY_WIDTH", "200"))
    net: nn.Module = nn.Sequential(
        nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
    )

    if SLOW == "bytes":
        net = Wide()
    shards = 3 if SLOW == "unequal" else 4
    optimizer = SlowSGD(net.parameters(), 0.01)
    trainer = ls.Trainer(net, optimizer, loss=slow_loss, num_shards=shards, seed=0, callbacks=[SlowCallback()])
    loader = ls.ShardedLoader(SlowData(), batch_size=SAMPLES, num_shards=shards, seed=0)
    for epoch in range(100_000):
        for batch in loader.epoch(epoch):
            trainer.step(batch)
            if SLOW == "print":
                show(epoch)
            if SLOW == "save":
                trainer.save(FOLDER / "a.ckpt")
            if SLOW == "metric":
                trainer.evaluate(loader, slow_metric)


def show(number: int) -> None:
    """Print much, to a terminal that is slow."""
    for line in range(20):
        print(f"{number} {line} " + "x" * 100, flush=True)
        time.sleep(0.003)


def train_with_wrapper() -> None:
    """Train with the wrapper, in a loop as it is written for torch."""
    at("start")
    ls.init_process_group()
    rank = STATE["rank"] = dist.get_rank()
    torch.manual_seed(0)
    model = ls.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = Data()
    sampler: Any = ls.DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=PROCESSES, collate_fn=collate)
    for epoch in range(100):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            STATE["step"] += 1
            if PLACE == "fewer" and rank == RANK and number == len(loader) - 1:
                say()
                break
            optimizer.zero_grad()
            try:
                if PLACE == "try" and rank == RANK and STATE["step"] == STEP:
                    say()
                    fail()
                loss_function(model, batch).backward()
            except RuntimeError:
                if PLACE != "try":
                    raise
                continue
            optimizer.step()
            at("between")
        if PLACE == "ends" and rank == RANK and epoch == 0:
            say()
            break


def datasets() -> tuple[Data, Data]:
    """Return what `lockstep train` trains and tests on."""
    at("data")
    return Data(), Data()


class Timed(nn.Module):
    """A loss for `lockstep train`."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        STATE["step"] += torch.is_grad_enabled()
        at("criterion")
        return nn.functional.cross_entropy(outputs, targets)


if __name__ == "__main__":
    train_with_wrapper()
