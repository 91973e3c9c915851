"""Clocks of several hosts are brought together from what they recorded."""

import random
from dataclasses import replace
from pathlib import Path

from tests.unit.recording.headers import header

from lockstep.recording.file_format import EventKind
from lockstep.recording.reading import bound_offset, clock_offsets, read_file
from lockstep.recording.writing import WorkerRecorder


def collectives(offset: int, seed: int) -> tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]]:
    """Return when two ranks entered and left collectives, the second by a clock that is ahead by `offset`."""
    source = random.Random(seed)
    here, there, now = {}, {}, 0
    for number in range(50):
        enters = [now + source.randrange(1000) for _ in range(2)]
        leaves = [max(enters) + source.randrange(50) for _ in range(2)]
        here[number] = enters[0], leaves[0]
        there[number] = enters[1] + offset, leaves[1] + offset
        now = max(leaves)
    return here, there


def test_the_offset_lies_within_its_bounds() -> None:
    for seed in range(20):
        offset = random.Random(seed).randrange(-(10**12), 10**12)
        bounds = bound_offset(*collectives(offset, seed))
        assert bounds is not None
        assert bounds[0] <= offset <= bounds[1] <= bounds[0] + 1000


def test_few_collectives_give_no_offset() -> None:
    here, there = collectives(5, 1)
    assert bound_offset({0: here[0]}, there) is None


def test_calls_that_contradict_each_other_give_no_offset() -> None:
    here, there = collectives(0, 1)
    assert bound_offset(here, {number: (begin + number * 10**6, end) for number, (begin, end) in there.items()}) is None


def test_wall_clocks_decide_where_nothing_is_common(tmp_path: Path) -> None:
    files = []
    for rank, boot in enumerate(("a", "b", "a")):
        path = tmp_path / f"worker-{rank}.rec"
        recorder = WorkerRecorder()
        recorder.open(path, replace(header(rank=rank, boot=boot, opened_ns=rank), opened_wall_ns=0))
        recorder.mark(EventKind.SHARD, 0, 0, 0)
        files.append(read_file(path))
    assert clock_offsets(files) == [0, 1, 0]
