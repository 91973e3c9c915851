"""The time of a record of a stream, beside torch's DataLoader over the same data.

Both sides read, collate and are looped over in this process, without a transform and without loading processes. They
take turns, and each round measures both, so that what else the machine does affects both equally. torch's DataLoader
reads in order; the loader shuffles among 1,000 records, and cuts each batch into shards. With lengths each shard reads
a share of its own.

Processor time counts, not the time of day: on a machine that others use, the latter is theirs, too.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from tables import load_average, log, mark, print_row
from torch.utils.data import DataLoader, IterableDataset

import lockstep as ls
from lockstep.comm import World

_NUM_PARTS = 64
_NUM_KEPT = 8192
"""So many tensors are made before; the records are these, again and again."""


class Records(IterableDataset[Any]):
    """Numbers, tensors of 8 numbers, or tensors with a label; `length` of them."""

    def __init__(self, kind: str, length: int) -> None:
        self.kind = kind
        self.length = length
        self.rows = list(torch.randn(_NUM_KEPT, 8))

    def __iter__(self) -> Iterator[Any]:
        if self.kind == "numbers":
            return iter(range(self.length))
        if self.kind == "tensors":
            return (self.rows[number % _NUM_KEPT] for number in range(self.length))
        return ((self.rows[number % _NUM_KEPT], number % 8) for number in range(self.length))


def make_loader(records: Records, batch_size: int, num_shards: int, *, has_lengths: bool) -> ls.ShardedLoader:
    stream: Any = records
    if has_lengths:
        share = Records(records.kind, records.length // _NUM_PARTS)
        stream = ls.Stream(range(_NUM_PARTS), read=lambda _: iter(share), lengths=[share.length] * _NUM_PARTS)
    alone = World(rank=0, world_size=1, group=None)
    return ls.ShardedLoader(stream, batch_size=batch_size, num_shards=num_shards, world=alone)


def measure(batches: Iterator[Any], num_records: int) -> float:
    """Return the nanoseconds of processor time that a record takes."""
    begun = time.process_time()
    for _ in batches:
        pass
    return (time.process_time() - begun) / num_records * 1e9


def compare(kind: str, num_records: int, batch_size: int, num_shards: int, rounds: int, *, has_lengths: bool) -> None:
    records = Records(kind, num_records)
    torchs = DataLoader(records, batch_size=batch_size)
    loader = make_loader(records, batch_size, num_shards, has_lengths=has_lengths)
    sides = {"torch": partial(iter, torchs), "lockstep": partial(loader.epoch, 0)}
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, begin in sides.items():
            spent = measure(begin(), num_records)
            if number:  # the first round is a warm-up
                found[name].append(spent)
    ours, theirs = statistics.median(found["lockstep"]), statistics.median(found["torch"])
    ratios = [mine / other for mine, other in zip(found["lockstep"], found["torch"], strict=True)]
    lengths = "yes" if has_lengths else "no"
    figures = f"{theirs:,.0f} ns", f"{ours:,.0f} ns", f"{statistics.median(ratios):.2f}{mark(ratios)}"
    print_row(kind, lengths, f"{batch_size:,}", str(num_shards), *figures)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=["numbers", "tensors", "pairs"])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[64, 4096])
    parser.add_argument("--shards", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--records", type=int, default=65_536)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    log(f"torch {torch.__version__}, load averages at the beginning: {load_average()}")
    print_row("records", "lengths", "batch", "shards", "torch", "lockstep", "ratio")
    print_row(*["---"] * 7)
    for kind in chosen.kinds:
        for has_lengths in (False, True):
            for batch_size in chosen.batch_sizes:
                for shards in chosen.shards:
                    compare(kind, chosen.records, batch_size, shards, chosen.rounds, has_lengths=has_lengths)
    log(f"Load averages at the end: {load_average()}")


if __name__ == "__main__":
    main()
