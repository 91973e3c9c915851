"""Time that saving a model on the GPU takes, and a run that is resumed on the CPU and again on the GPU (--resume).

The pause: a model of 1 GB with Adam, so 3 GB of state, saved in turn by Lockstep in the background and at once, by
`torch.save` and by torch's distributed checkpoint. Files are written to the directory TMPDIR.

    --resume      on the GPU  4 steps ------------------------------> digests
                              2 steps, file A ->  2 steps ----------> must have the digests of the first line
                  on the CPU                 ->  1 step, file B
                  on the GPU                                  ->  1 step
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from checkpoints import MB, SIDES, STEPS_BEFORE_SAVE, Contenders, SaveTimes, Training, print_side
from gpu_device import DEVICE, name, synchronize
from gpu_models import LanguageModel, texts
from tables import log, print_row
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls

STATE_MB = 3000
SMALL_MB = 30
MOST_SECONDS = 30.0
"""How long a save may take."""
NUM_SHARDS = 2
BATCH = 8
EPOCH_STEPS = 4


class OnDevice(Training):
    """The training of benchmarks/checkpoints.py, on the GPU; a step ends when the device has done it."""

    def __init__(self, state_bytes: int) -> None:
        with DEVICE:
            super().__init__(state_bytes)

    def step(self) -> float:
        began = time.perf_counter()
        super().step()
        synchronize()
        return time.perf_counter() - began


def measure_side(side: str, training: OnDevice, contenders: Contenders, times: SaveTimes) -> None:
    """Take quiet steps, a save, and steps until the save is done."""
    gc.collect()
    times.quiet.append(statistics.median(training.step() for _ in range(STEPS_BEFORE_SAVE)))
    began = time.perf_counter()
    is_done = contenders.save(side, training)
    times.pauses.append(time.perf_counter() - began)
    during: list[float] = []
    while not is_done():
        if time.perf_counter() > began + MOST_SECONDS:
            raise RuntimeError(f"{side}: a save of {MOST_SECONDS:.0f} s is not done.")
        during.append(training.step())
    times.totals.append(time.perf_counter() - began)
    if during[:-1]:
        times.during.append(statistics.median(during[:-1]))


def measure_pauses(megabytes: int, rounds: int) -> None:
    """Print how long a save pauses the training, by side."""
    titles = ("state", "side", "first pause, ms", "pause, ms", "until done, ms", "quiet step, ms")
    print_row(*titles, "step during a save / quiet")
    print_row(*["---"] * (1 + len(titles)))
    training = OnDevice(megabytes * MB)
    found = {side: SaveTimes() for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="gpu-checkpoints-") as folder:
        contenders = Contenders(Path(folder))
        for number in range(rounds + 1):
            for side in SIDES if number % 2 else reversed(SIDES):
                log(f"{side}, round {number} of {rounds} ...")
                measure_side(side, training, contenders, found[side])
        contenders.close()
    for side, times in found.items():
        print_side(megabytes, side, times)


# -- A run that is resumed on another device ---------------------------------------------------------------------------


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def train_part(start: str, steps: int, end: str) -> dict[str, Any]:
    """Load the file `start`, if it is given, train so many steps, and save the file `end`, if it is given."""
    torch.manual_seed(0)
    model = LanguageModel(64, 16, 32, 2, 2).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    trainer = ls.Trainer(model, optimizer, loss=mean_loss, num_shards=NUM_SHARDS)
    torch.manual_seed(1)
    data = TensorDataset(*texts(EPOCH_STEPS * BATCH, 16, 64))
    loader = ls.ShardedLoader(data, batch_size=BATCH, num_shards=NUM_SHARDS)
    if start:
        trainer.load(start)
    loaded = trainer.digest()
    digests = []
    batches = loader.epoch(trainer.cursor.epoch, trainer.cursor.step)
    for _ in range(steps):
        trainer.step(next(batches))
        digests.append(trainer.digest())
    if end:
        trainer.save(end)
    return {"device": str(DEVICE), "loaded": loaded, "digests": digests}


def run_part(start: Path | None, steps: int, end: Path | None, *, on_cpu: bool = False) -> dict[str, Any]:
    """Call `train_part` in a new process; on the CPU that process sees no GPU."""
    command = [sys.executable, __file__, "--part", str(start or ""), str(steps), str(end or "")]
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {})}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(f"{steps} steps, {'CPU' if on_cpu else DEVICE}: {done.stderr.strip()[-2000:] or 'no warnings'}")
    if done.returncode != 0:
        raise RuntimeError(f"a part of the run ended with exit code {done.returncode}.")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def resume() -> None:
    """Resume from files on either device; exit with the list of what is not equal."""
    with tempfile.TemporaryDirectory(prefix="gpu-resume-") as folder:
        one, other = Path(folder) / "a.ckpt", Path(folder) / "b.ckpt"
        whole = run_part(None, EPOCH_STEPS, None)
        first = run_part(None, EPOCH_STEPS // 2, one)
        same_device = run_part(one, EPOCH_STEPS - EPOCH_STEPS // 2, None)
        on_cpu = run_part(one, 1, other, on_cpu=True)
        back = run_part(other, 1, None)
    checks = {
        "the first steps have the digests of the whole run": first["digests"] == whole["digests"][: EPOCH_STEPS // 2],
        "resumed on the same device: the digest of the file": same_device["loaded"] == first["digests"][-1],
        "resumed on the same device: the digests of the whole run": first["digests"] + same_device["digests"]
        == whole["digests"],
        "resumed on the CPU: the digest of the file": on_cpu["loaded"] == first["digests"][-1],
        "resumed on the CPU: on the CPU": on_cpu["device"] == "cpu",
        "back on the GPU: the digest of the file": back["loaded"] == on_cpu["digests"][-1],
        "back on the GPU: it goes on": back["digests"][-1] != back["loaded"],
    }
    for title, is_good in checks.items():
        print(f"{title}: {'yes' if is_good else 'NO'}")
    equal = on_cpu["digests"][0] == same_device["digests"][0]
    print(f"(a step on the CPU and one on the GPU have {'equal' if equal else 'other'} bits, which is not promised)")
    sys.exit("\n".join(f"not so: {title}" for title, is_good in checks.items() if not is_good) or 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side after the first; default 2")
    parser.add_argument("--resume", action="store_true", help="resume on the CPU and on the GPU again")
    parser.add_argument("--small", action="store_true", help="a dry run: a small state")
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        start, steps, end = options.part
        print(json.dumps(train_part(start, int(steps), end)))
    elif options.resume:
        print(f"{name()}\n")
        resume()
    else:
        print(f"{name()}\n")
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\..*")
        measure_pauses(SMALL_MB if options.small else STATE_MB, options.rounds)


if __name__ == "__main__":
    main()
