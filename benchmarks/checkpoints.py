"""Cost of a checkpoint for the training: the pause at each save, and slower steps while it is written.

A multi-layer perceptron of the requested state size is trained with Adam in one process. Each round measures all sides
in this process:

- Lockstep in the background (`async_save: true`) and synchronously (`false`);
- `torch.save` to a file that is then closed: no checksums, no fsync;
- `torch.distributed.checkpoint.async_save`, without a process group.

A measurement is some steps without a save, a save, steps until the save is done, and a sync of the disk (not timed).
Files are written to TMPDIR, which should be on a disk.
"""

import argparse
import gc
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from tables import load_average, log, mark, print_row
from torch import Tensor, nn

from lockstep.checkpoint.manifest import Checkpoint, Manifest, encode_state
from lockstep.checkpoint.saver import Saver

SIDES = {
    "lockstep": "Lockstep, background",
    "lockstep-sync": "Lockstep, at once",
    "torch": "torch.save",
    "dcp": "DCP async_save",
}
BATCH = 16
NUM_LAYERS = 8
STEPS_BEFORE_SAVE = 5
MAX_STEPS = 400
MB = 1_000_000


@dataclass
class SaveTimes:
    """Times of one side, in seconds, one entry per round."""

    pauses: list[float] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    quiet: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)


class Training:
    def __init__(self, state_bytes: int) -> None:
        width = round((state_bytes / (3 * 4 * NUM_LAYERS)) ** 0.5)
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(NUM_LAYERS)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5)
        self._inputs = torch.randn(BATCH, width)
        self.step()

    def step(self) -> float:
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self._inputs).square().mean().backward()
        self.optimizer.step()
        return time.perf_counter() - began

    def state(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def checkpoint(self) -> Checkpoint:
        tensors: dict[str, Tensor] = {}
        optimizer = encode_state(self.optimizer.state_dict(), "optimizer", tensors)
        manifest = Manifest(
            epoch=0,
            step=0,
            global_step=0,
            num_shards=1,
            seed=0,
            digest="",
            optimizer=optimizer,
            scheduler=None,
            config=None,
        )
        return Checkpoint(model=self.model.state_dict(), optimizer=tensors, manifest=manifest)


class Contenders:
    """How each side saves: a call that returns when training may go on, and tells whether the save is done."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._saver, self._at_once = Saver(), Saver(is_async=False)

    def save(self, side: str, training: Training) -> Callable[[], bool]:
        match side:
            case "lockstep":
                done: list[Path] = []
                self._saver.save(self._folder / "lockstep.ckpt", training.checkpoint(), done.append)
                return lambda: bool(done)
            case "lockstep-sync":
                self._at_once.save(self._folder / "sync.ckpt", training.checkpoint())
            case "torch":
                torch.save(training.state(), self._folder / "torch.pt")
            case "dcp":
                place = self._folder / "dcp"
                shutil.rmtree(place, ignore_errors=True)
                response = dcp.async_save(training.state(), checkpoint_id=place, no_dist=True)
                return response.done if hasattr(response, "done") else response.upload_completion.done
        return lambda: True

    def close(self) -> None:
        self._saver.close()


def measure_side(side: str, training: Training, contenders: Contenders, times: SaveTimes) -> None:
    gc.collect()
    os.sync()
    times.quiet.append(statistics.median(training.step() for _ in range(STEPS_BEFORE_SAVE)))
    began = time.perf_counter()
    is_done = contenders.save(side, training)
    times.pauses.append(time.perf_counter() - began)
    during: list[float] = []
    while not is_done() and len(during) < MAX_STEPS:
        during.append(training.step())
    times.totals.append(time.perf_counter() - began)
    whole = during[:-1]  # the save may end in the middle of the last one
    if whole:
        times.during.append(statistics.median(whole))


def measure(state_bytes: int, sides: list[str], rounds: int) -> dict[str, SaveTimes]:
    training = Training(state_bytes)
    found = {side: SaveTimes() for side in sides}
    with tempfile.TemporaryDirectory(prefix="bench-checkpoints-") as folder:
        contenders = Contenders(Path(folder))
        for number in range(rounds + 1):
            log(f"{state_bytes / MB:.0f} MB, round {number} of {rounds} ...")
            for side in sides if number % 2 else reversed(sides):
                # The first round makes files and memory that later ones use again, and is shown apart.
                measure_side(side, training, contenders, found[side])
        contenders.close()
    return found


def print_side(size: int, side: str, times: SaveTimes) -> None:
    pauses, quiet = times.pauses[1:], times.quiet[1:]
    ratios = [during / still for during, still in zip(times.during[1:], quiet, strict=False)]
    print_row(
        f"{size} MB",
        SIDES[side],
        f"{1000 * times.pauses[0]:.0f}",
        f"{mark(pauses)}{1000 * statistics.median(pauses):.0f}",
        f"{1000 * statistics.median(times.totals[1:]):.0f}",
        f"{1000 * statistics.median(quiet):.0f}",
        f"{mark(ratios)}{statistics.median(ratios):.2f}" if ratios else "-",
    )


def main() -> None:
    """Run the benchmark and print its table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="100,1000", help="of the state, in MB; default 100,1000")
    parser.add_argument("--rounds", type=int, default=5, help="measurements per side after the first; default 5")
    parser.add_argument("--threads", type=int, default=1, help="of the training; default 1")
    parser.add_argument("--sides", default=",".join(SIDES), help=f"some of {','.join(SIDES)}")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\..*")
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, {options.threads} "
        f"training thread(s); load average before the run {load_average()}\n"
    )
    print_row(
        "state",
        "side",
        "first pause, ms",
        "pause, ms",
        "until done, ms",
        "quiet step, ms",
        "step during a save / quiet",
    )
    print_row(*["---"] * 7)
    sides = [side for side in SIDES if side in options.sides.split(",")]
    for size in map(int, options.sizes.split(",")):
        for side, times in measure(size * MB, sides, options.rounds).items():
            print_side(size, side, times)
    print(f"\nLoad average after the run {load_average()}.")


if __name__ == "__main__":
    main()
