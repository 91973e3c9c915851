"""What the recording costs: an event by itself, and the steps of a small training with it and without, in turn."""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

import lockstep as ls
from lockstep.recording import EventKind, WorkerRecorder, open_recorder, own_recorder

CALLS = 5000


def time_of(call: Callable[[], object], rounds: int) -> float:
    """Return the least nanoseconds of a call, over rounds of many: what disturbs only adds."""
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        best = min(best, (time.perf_counter_ns() - began) / CALLS)
    return best


def begin_and_end(recorder: WorkerRecorder, text: int) -> None:
    recorder.end(recorder.begin(EventKind.COLLECTIVE, 1, 4096, text))


def show_events(rounds: int) -> None:
    closed, opened = WorkerRecorder(), WorkerRecorder()
    with tempfile.TemporaryDirectory() as folder:
        assert open_recorder(opened, Path(folder), worker=0, rank=0, world_size=1, capacity=16384)
        nothing = time_of(lambda: None, rounds)
        for name, recorder in (("memory", closed), ("file", opened)):
            calls: dict[str, Callable[[], object]] = {
                "mark": partial(recorder.mark, EventKind.PHASE, 1, 0, 0),
                "begin and end": partial(begin_and_end, recorder, recorder.text("all_reduce")),
                "text": partial(recorder.text, "all_reduce"),
            }
            for kind, call in calls.items():
                print(f"{name:6} {kind:14} {time_of(call, rounds) - nothing:7.0f} ns")
        opened.close()


def silence(recorder: WorkerRecorder) -> None:
    """Let a recorder that has no file keep nothing in memory either, until it gets one."""
    recorder.begin = recorder.mark = lambda *_: 0
    recorder.end = recorder.set_step = lambda *_: None
    recorder.moments = lambda *_: (0, 0)


def steps(run: ls.Run, rounds: int, per_round: int, folder: str) -> list[tuple[float, float]]:
    """Return the median seconds of a step without and with the recording, of each round."""
    own_recorder().close()
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(1536, 1, 8, 8), torch.randint(10, (1536,)))
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(2048, 10),
    )  # fmt: skip
    trainer = ls.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        num_shards=4,
    )
    own_recorder().close()
    loader = ls.ShardedLoader(data, batch_size=128, num_shards=4)
    batches = (batch for epoch in range(10**6) for batch in loader.epoch(epoch))
    found = []
    for number in range(rounds):
        medians = {}
        for is_on in (False, True) if number % 2 else (True, False):
            if is_on:
                open_recorder(
                    own_recorder(), Path(folder), worker=run.rank, rank=run.rank, world_size=2, capacity=16384
                )
            else:
                silence(own_recorder())
            times = []
            for _ in range(per_round):
                began = time.perf_counter()
                trainer.step(next(batches))
                times.append(time.perf_counter() - began)
            medians[is_on] = statistics.median(times)
            own_recorder().close()
        found.append((medians[False], medians[True]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    show_events(options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        rounds = ls.launch(steps, options.rounds, options.steps, folder, workers=options.workers, devices="cpu")[0]
    ratios = sorted(on / off for off, on in rounds)
    quarter = len(ratios) // 4
    print(
        f"step without {statistics.median(off for off, _ in rounds) * 1e3:.3f} ms, with "
        f"{statistics.median(on for _, on in rounds) * 1e3:.3f} ms; on / off {statistics.median(ratios):.4f}, middle "
        f"half of {len(ratios)} rounds {ratios[quarter]:.4f} to {ratios[-1 - quarter]:.4f}"
    )


if __name__ == "__main__":
    main()
