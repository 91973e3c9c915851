"""`lockstep train` under fire: workers are killed, join and leave at seeded random moments, many times in each run.

    python benchmarks/killing.py [--runs 20] [--seed 0] [--only 3] [--kills 12] [--minutes 30] [--backend both]

Each run trains one of several models, evaluates and saves, and must end with the digest, the rows of `metrics.jsonl`
and the sample counts of the run that nobody disturbs. A worker kills itself by SIGKILL at the n-th moment of a kind: in
a forward, a backward, the update, after the workers have agreed on a step, while a sample is loaded, in an evaluation,
a save, a recovery, a transfer of the state, while it is built. Others are killed, stopped for a moment, or asked to
leave at a moment of the clock. So are loading processes killed, alone or together with a worker. One worker that has
the state of the run always lives: to die, a worker takes a lock, and looks whether there is another one. Lost workers
are replaced. Printed are the runs that differ, and counts.
"""

import argparse
import contextlib
import fcntl
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.launch.control import ask, connect

_MODULE = '''
import contextlib, fcntl, os, random, signal, threading, time
from collections import Counter
import torch
from torch import nn
from torch.utils.data import Dataset

FOLDER = os.environ.get("KILLING", "")
MOMENTS = ("forward", "backward", "update", "agreed", "load", "evaluation", "fsync", "rename", "meet", "transfer",
           "boundary", "build", "joined", "finish")
worker = os.getpid()
counts = Counter()
draw = random.Random(f"{os.environ.get('KILLING_SEED')} {os.environ.get('LOCAL_RANK')}")
moment_of_death = draw.choice(MOMENTS) if draw.random() < float(os.environ.get("KILLING_SHARE", 0)) else ""
HIGHEST = {"load": 60, "forward": 16, "backward": 16, "update": 6, "agreed": 6, "meet": 1, "build": 1}
number_of_death = draw.randint(1, HIGHEST.get(moment_of_death, 2))

@contextlib.contextmanager
def locked():
    with open(os.path.join(FOLDER, "lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

def die(moment):
    """Kill this worker, if another one has the state of the run and there were not too many kills."""
    with locked():
        holders = {name for name in os.listdir(FOLDER) if name.startswith("holder-")}
        mine = f"holder-{worker}"
        kills = [name for name in os.listdir(FOLDER) if name.startswith("kill-")]
        if not holders - {mine} or len(kills) >= int(os.environ["KILLING_MOST"]):
            return
        open(os.path.join(FOLDER, f"kill-{worker}-{moment}"), "w").close()
        if mine in holders:
            os.unlink(os.path.join(FOLDER, mine))
        os.kill(worker, signal.SIGKILL)
        threading.Event().wait()

def reach(moment):
    counts[moment] += 1
    if moment == moment_of_death and counts[moment] >= number_of_death and counts[moment] % number_of_death == 0:
        die(moment)

def arm():
    """Let the moments inside of the library count too."""
    import lockstep.engine.member as member
    from lockstep.comm.generations import Generations
    from lockstep.engine.step_table import StepTable
    def before(owner, name, moment):
        call = getattr(owner, name)
        def wrapped(*args, **kwargs):
            reach(moment)
            return call(*args, **kwargs)
        setattr(owner, name, wrapped)
    before(Generations, "join_next", "meet")
    before(Generations, "meet_at_boundary", "boundary")
    boundary = Generations.meet_at_boundary
    def leave(self, *args):
        if self._planned is not None and self._planned.rank is None:  # the others cannot continue from its state
            with locked(), contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(FOLDER, f"holder-{worker}"))
        return boundary(self, *args)
    Generations.meet_at_boundary = leave
    before(Generations, "become_member", "joined")
    before(member, "send_state", "transfer")
    before(os, "fsync", "fsync")
    before(os, "replace", "rename")
    exchange = StepTable.exchange
    def exchanged(self, numbers):
        result = exchange(self, numbers)
        reach("agreed")
        return result
    StepTable.exchange = exchanged

class Data(Dataset):
    def __init__(self, kind):
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randint(0, 50, (90, 6), generator=generator) if kind == "sparse" else torch.randn(
            90, 6, generator=generator)
        self.targets = torch.randint(0, 3, (90,), generator=generator)
    def __len__(self):
        return len(self.targets)
    def __getitem__(self, index):
        if os.getpid() == worker:
            reach("load")
        noise = torch.randn(6) if self.inputs.is_floating_point() else torch.zeros(6, dtype=torch.long)
        return self.inputs[index] + noise, self.targets[index]

def data(kind):
    reach("build")
    return Data(kind), Data(kind)

class Watched(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
    def forward(self, inputs):
        if self.training:
            self.seen += inputs.detach().double().mean().float()
        return inputs

class Plain(nn.Sequential):
    def __init__(self):
        super().__init__(Watched(), nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 3))

class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(50, 12, sparse=True, mode="sum")
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(12, 3)
    def forward(self, inputs):
        return self.last(self.drop(self.table(inputs)))

class Dying(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()
    @staticmethod
    def backward(ctx, gradient):
        reach("backward")
        return gradient

def loss(output, target):
    if FOLDER and output.requires_grad:
        if not counts["forward"]:
            open(os.path.join(FOLDER, f"holder-{worker}"), "w").close()
        if sum(name.startswith("kill-") for name in os.listdir(FOLDER)) < int(os.environ["KILLING_MOST"]):
            time.sleep(0.04)  # so that there is time for new workers to join
        reach("forward")
    elif FOLDER:
        reach("evaluation")
    return nn.functional.cross_entropy(Dying.apply(output), target)

class SGD(torch.optim.SGD):
    def step(self, closure=None):
        result = super().step(closure)
        reach("update")
        return result

class AdamW(torch.optim.AdamW):
    def step(self, closure=None):
        result = super().step(closure)
        reach("update")
        return result

def finish(model):
    reach("finish")
    return "finished"

if FOLDER and "RANK" in os.environ:
    arm()
'''
_LIMIT_SECONDS = 240.0
"""How long no epoch may end. A whole run has no limit: on a busy machine it is slow, and does not hang."""
_SIGNALS = {"leave": signal.SIGTERM, "freeze": signal.SIGSTOP, "kill": signal.SIGKILL, "kill two": signal.SIGKILL}
_LOADING = ("kill loading", "kill loading", "kill loading and worker")
_STOPPED = 75
"""The exit code of a run that can be resumed."""
_COMMON: dict[str, Any] = {
    "loss": "killed:loss",
    "finish": "killed:finish",
    "batch_size": 24,
    "num_shards": 6,
    "epochs": 20,
    "keep": 3,
    "keep_best": "-loss",
    "device_ids": "cpu",
    "threads_per_worker": 1,
}
_KINDS: dict[str, dict[str, Any]] = {
    "BatchNorm, dropout, AdamW, cosine per step": {
        "model": "killed:Plain",
        "data": "killed:data",
        "data_args": {"kind": "plain"},
        "optimizer": "killed:AdamW",
        "optimizer_args": {"lr": 0.01},
        "scheduler": "torch.optim.lr_scheduler:CosineAnnealingLR",
        "scheduler_args": {"T_max": 80},
        "scheduler_interval": "step",
        "save_every": 3,
    },
    "sparse embedding, SGD, two loading processes": {
        "loader_workers": 2,
        "model": "killed:Sparse",
        "data": "killed:data",
        "data_args": {"kind": "sparse"},
        "optimizer": "killed:SGD",
        "optimizer_args": {"lr": 0.05},
        "scheduler": "torch.optim.lr_scheduler:StepLR",
        "scheduler_args": {"step_size": 5},
        "async_save": False,
        "save_every": 5,
    },
    "bfloat16, loading processes, clipping": {
        "model": "killed:Plain",
        "data": "killed:data",
        "data_args": {"kind": "plain"},
        "optimizer": "killed:SGD",
        "optimizer_args": {"lr": 0.05, "momentum": 0.9},
        "precision": "bfloat16",
        "loader_workers": 1,
        "max_grad_norm": 1.0,
    },
}


def write_run(folder: Path, kind: str) -> None:
    """Write the module and the config of a run."""
    (folder / "killed.py").write_text(_MODULE)
    (folder / "killed.yaml").write_text(json.dumps({**_COMMON, **_KINDS[kind]}))  # JSON is YAML


def outcome(folder: Path, said: str) -> tuple[Any, ...]:
    """Return what must not depend on who was killed."""
    digest = re.search(r"^digest (\w{64})$", said, re.MULTILINE)
    counted = re.search(r"^test accuracy .*$", said, re.MULTILINE)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("samples_per_second", None)
    checkpoints = sorted(path.name for path in (folder / "run").glob("*.ckpt"))
    left = [path.name for path in (folder / "run").iterdir() if path.name.endswith(".tmp") or path.name == ".control"]
    best = (folder / "run" / "best.ckpt").readlink() if (folder / "run" / "best.ckpt").is_symlink() else None
    kept = [row for row in rows if row["kind"] != "workers"]
    return digest and digest[1], counted and counted[0], kept, checkpoints, best, left


def command(folder: Path, *overrides: str) -> list[str]:
    """Return the command of a run."""
    program = Path(sys.executable).parent / "lockstep"
    return [str(program), "train", str(folder / "killed.yaml"), "run_dir=run", *overrides]


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock with which a worker dies."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def members(folder: Path) -> list[int]:
    """Return the processes of the workers of a run, by rank; none if it has not begun or has ended."""
    with contextlib.suppress(OSError, StopIteration), connect(folder / "run") as client:
        client.settimeout(5)
        return [int(pid) for pid in re.findall(r"pid (\d+)", next(ask(client, {"op": "describe"}))["text"])]
    return []


def loading_processes(present: list[int]) -> list[int]:
    """Return the processes that load samples for these workers."""
    found: list[int] = []
    for pid in present:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # the thread has ended
                found += map(int, children.read_text().split())
    return found


def count_epochs(folder: Path) -> int:
    """Return how many epochs of a run have ended."""
    metrics = folder / "run" / "metrics.jsonl"
    return metrics.read_text().count('"kind": "epoch"') if metrics.exists() else 0


def attack(folder: Path, draw: random.Random, most: int, done: Counter[str]) -> None:
    """Do one thing from outside: kill one or two, stop one for a moment, let one leave, ask for another number."""
    what = draw.choice(["kill", "kill", "kill two", "kill two", "freeze", "stop", "leave", "resize", *_LOADING])
    present = members(folder)
    loading = loading_processes(present)
    if not present or (what in _LOADING and not loading):
        return
    if what in _LOADING:
        with contextlib.suppress(ProcessLookupError):
            os.kill(draw.choice(loading), signal.SIGKILL)
        if what == "kill loading and worker":
            end_some(folder, draw, most, "kill", present)
    elif what == "resize":
        with contextlib.suppress(OSError), connect(folder / "run") as client:
            client.settimeout(5)
            next(ask(client, {"op": "resize", "workers": draw.randint(2, 4)}), None)
    elif what == "stop":
        victim = draw.choice(present)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGSTOP)
            time.sleep(draw.uniform(0.05, 0.3))
            os.kill(victim, signal.SIGCONT)
    elif not end_some(folder, draw, most, what, present):
        return
    done[what] += 1


def end_some(folder: Path, draw: random.Random, most: int, what: str, present: list[int]) -> bool:
    """Kill one or two, or let one leave; return False if then no worker might be left that has the state."""
    with locked(folder):
        kills = len(list(folder.glob("kill-*")))
        holders = {int(path.name.removeprefix("holder-")) for path in folder.glob("holder-*")}
        victims = draw.sample(present, min(len(present), 2 if what == "kill two" else 1))
        if len(holders & set(present) - set(victims)) < 1 + (what == "leave") or kills + len(victims) > most:
            return False
        for pid in victims:
            (folder / f"holder-{pid}").unlink(missing_ok=True)
            if what != "leave":
                (folder / f"kill-{pid}-clock").touch()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, _SIGNALS[what])
    return True


def run_once(seed: str, kind: str, most: int, expected: tuple[Any, ...], backend: str) -> tuple[str, Counter[str]]:
    """Train once under fire; return what is wrong, empty for nothing, and what was done."""
    draw, done = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run(folder, kind)
        workers, clock = draw.choice([2, 3, 4]), draw.random() < 0.9  # noqa: PLR2004 - a share
        environment = {
            **os.environ,
            "PYTHONFAULTHANDLER": "1",
            "KILLING": name,
            "KILLING_SEED": seed,
            "KILLING_SHARE": str(draw.choice([0.7, 1.0])),
            "KILLING_MOST": str(most),
            "LOCKSTEP_CPU_BACKEND": backend,
        }
        process = subprocess.Popen(
            command(folder, f"workers={workers}", "respawn=1000", f"spares={draw.choice([0, 0, 1])}", "evict_after=4"),
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        num_epochs, since = 0, time.monotonic()
        while process.poll() is None and time.monotonic() - since < _LIMIT_SECONDS:
            if count_epochs(folder) > num_epochs:
                num_epochs, since = count_epochs(folder), time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(draw.uniform(0.05, 1.0) if clock else 1.0)
            if clock and process.poll() is None:
                attack(folder, draw, most, done)
        if process.poll() is None:
            for pid in members(folder):
                os.kill(pid, signal.SIGABRT)  # faulthandler says where it stands
            with contextlib.suppress(subprocess.TimeoutExpired):  # on a busy machine its text takes a while
                return f"no epoch has ended for {_LIMIT_SECONDS:g} s\n{process.communicate(timeout=20)[0]}", done
            process.kill()
            return f"no epoch has ended for {_LIMIT_SECONDS:g} s\n{process.communicate()[0]}", done
        said = process.communicate()[0]
        if process.returncode == _STOPPED:  # a worker that was to leave could not, because others were lost meanwhile
            done["resumed"] += 1
            process = subprocess.Popen(
                [*command(folder), "--resume"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            said += process.communicate()[0]
        done.update(path.name.split("-", 2)[2] for path in folder.glob("kill-*"))
        if process.returncode:
            return f"exit code {process.returncode}: {said}", done
        found = outcome(folder, said)
    names = ("digest", "sample count", "rows", "checkpoints", "best", "left behind")
    wrong = [name for name, one, other in zip(names, found, expected, strict=True) if one != other]
    return (f"{', '.join(wrong)} differ\n{said}" if wrong else ""), done


def main() -> None:
    """Run the campaign, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one run")
    parser.add_argument("--kills", type=int, default=12, help="in a run, at most")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so many")
    parser.add_argument("--backend", choices=["shm", "gloo", "both"], default="shm")
    options = parser.parse_args()
    backends = ["shm", "gloo"] if options.backend == "both" else [options.backend]
    expected: dict[str, tuple[Any, ...]] = {}
    for kind in _KINDS:
        with tempfile.TemporaryDirectory() as name:
            write_run(Path(name), kind)
            said = subprocess.run(
                command(Path(name), "workers=1"), cwd=name, capture_output=True, text=True, check=False
            )
            if said.returncode:
                raise SystemExit(said.stdout + said.stderr)
            expected[kind] = outcome(Path(name), said.stdout)
    kinds, began, failed, num_runs, total = list(_KINDS), time.monotonic(), 0, 0, Counter[str]()
    for number in range(options.runs) if options.only is None else [options.only]:
        if time.monotonic() - began > 60 * options.minutes:
            break
        kind = kinds[number % len(kinds)]
        started = time.monotonic()
        backend = backends[number // len(kinds) % len(backends)]
        problem, done = run_once(f"{options.seed} {number}", kind, options.kills, expected[kind], backend)
        seconds = time.monotonic() - started
        num_runs, failed, total = num_runs + 1, failed + bool(problem), total + done
        print(
            f"run {number} ({kind}, {backend}), {seconds:.0f} s: {dict(done)}{': ' + problem if problem else ''}",
            flush=True,
        )
    others = {"resize", "leave", "stop", "kill", "kill two", "freeze", "resumed", "kill loading and worker"}
    num_kills = sum(count for what, count in total.items() if what not in others)
    print(f"{num_runs - failed} of {num_runs} runs equal the undisturbed one; {num_kills} kills: {dict(total)}")
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"load {load} on {os.cpu_count()} cores")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
