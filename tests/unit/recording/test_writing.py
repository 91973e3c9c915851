"""The recorder and the reader: whole events only, whatever happens to the process that writes them."""

import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.recording.headers import header

from lockstep.processes.host import start_ticks
from lockstep.recording.file_format import EVENT_BYTES, RING_START, TEXT_BYTES, EventKind
from lockstep.recording.reading import bound_offset, clock_offsets, read_file, read_recording
from lockstep.recording.writing import WorkerRecorder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "worker-0.rec"


@pytest.fixture
def recorder() -> WorkerRecorder:
    return WorkerRecorder()


def test_an_event_is_read_as_it_was_written(path: Path, recorder: WorkerRecorder) -> None:
    recorder.open(path, header(rank=1))
    recorder.set_step(7)
    before = time.monotonic_ns()
    number = recorder.begin(EventKind.SHARD, 3, 4096, recorder.text("train.py:12"))
    recorder.end(number)
    recorder.begin(EventKind.WAITING, -1, 0, 0)
    found = read_file(path)
    event = found.event(-2)
    assert (event.kind, event.index, event.size, event.text, event.step) == (EventKind.SHARD, 3, 4096, "train.py:12", 7)
    assert before <= event.begin <= event.end <= time.monotonic_ns()
    assert [each.index for each in found.under_way()] == [-1]
    assert (found.header.rank, found.header.host, found.header.world_size) == (1, "här", 2)


def test_a_recorder_that_is_not_open_writes_no_file(path: Path, recorder: WorkerRecorder) -> None:
    recorder.end(recorder.begin(EventKind.SHARD, 1, 2, recorder.text("x")))
    with recorder.during(EventKind.SAVING):
        recorder.mark(EventKind.PHASE, 1, 0, 0)
    recorder.set_step(1)
    recorder.set_place(0, 1, 1)
    recorder.close()
    recorder.open(path, header())
    recorder.close()
    recorder.mark(EventKind.PHASE, 1, 0, 0)
    assert [each["kind"] for each in read_file(path).table] == [EventKind.STARTED, EventKind.ENDED]
    assert read_file(path).header.ended_ns > 0


def test_moments_of_events_are_known_with_and_without_a_file(path: Path, recorder: WorkerRecorder) -> None:
    in_memory = recorder.begin(EventKind.SHARD, 0, 0, 0)
    assert recorder.moments(in_memory)[1] == 0  # under way
    recorder.end(in_memory)
    begin, end = recorder.moments(in_memory)
    assert 0 < begin <= end <= recorder.seconds() * 1e9 + 1000
    recorder.open(path, header(capacity=16))
    in_file = recorder.mark(EventKind.FORWARD, 0, 0, 0)
    recorder.end(in_memory)  # of the memory: no event of the file has its number
    assert recorder.moments(in_memory) == (0, 0)
    assert recorder.moments(in_file)[0] >= end
    for _ in range(16):
        recorder.mark(EventKind.FORWARD, 0, 0, 0)
    assert recorder.moments(in_file) == (0, 0)  # newer events have replaced it


def test_new_events_replace_the_oldest(path: Path, recorder: WorkerRecorder) -> None:
    recorder.open(path, header(capacity=16))
    old = recorder.begin(EventKind.LOADING, 0, 0, 0)
    for index in range(40):
        recorder.mark(EventKind.SHARD, index, 0, 0)
    recorder.end(old)  # its place belongs to another event now
    table = read_file(path).table
    assert list(table["index"]) == list(range(24, 40))
    assert (table["begin"] == table["end"]).all()


def test_torn_events_are_left_out(path: Path, recorder: WorkerRecorder) -> None:
    recorder.open(path, header())
    for index in range(3):
        recorder.mark(EventKind.SHARD, index, 0, 0)
    whole = bytearray(path.read_bytes())
    place = RING_START + 3 * EVENT_BYTES
    whole[place + 56 : place + 64] = bytes(8)  # its last word was not written
    path.write_bytes(whole)
    found = read_file(path)
    assert list(found.table["index"]) == [0, 0, 2]


def test_a_reader_beside_a_writer_sees_whole_events_only(path: Path, recorder: WorkerRecorder) -> None:
    recorder.open(path, header(capacity=64))
    is_over = threading.Event()

    def write() -> None:
        index = 0
        while not is_over.is_set():
            recorder.set_step(index)
            recorder.mark(EventKind.SHARD, index, -index, 0)
            index += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            rows = read_file(path).table
            rows = rows[rows["kind"] == EventKind.SHARD]
            assert (rows["step"] == rows["index"]).all()
            assert (rows["size"] == -rows["index"]).all()
    finally:
        is_over.set()
        writer.join()


def test_a_recording_outlives_a_killed_process(path: Path) -> None:
    program = (
        "import os, signal, sys, lockstep_command\n"
        "lockstep_command._put_off_package_init()\n"
        "from pathlib import Path\n"
        "from lockstep.recording import open_recorder, own_recorder\n"
        "open_recorder(own_recorder(), Path(sys.argv[1]), worker=0, rank=0, world_size=1, capacity=256)\n"
        "own_recorder().begin(5, 1, 2, own_recorder().text('reading'))\n"
        "child = os.fork()\n"
        "own_recorder().mark(3, 77, 0, 0) if child == 0 else os.waitpid(child, 0)\n"  # a child writes nothing
        "os._exit(0) if child == 0 else os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, path.parent], check=False)
    assert ended.returncode == -signal.SIGKILL
    (found,) = read_recording(path.parent)
    (event,) = found.under_way()
    assert (event.kind, event.text, found.header.ended_ns) == (EventKind.LOADING, "reading", 0)
    assert 77 not in found.table["index"]
    assert found.header.start_ticks != start_ticks(found.header.pid)


def test_texts_end_where_their_space_does(path: Path, recorder: WorkerRecorder) -> None:
    recorder.open(path, header())
    places = [recorder.text(f"{index:04d}" + "x" * 1000) for index in range(TEXT_BYTES // 400 + 1)]
    assert places[-1] == 0
    assert recorder.text("0000" + "x" * 1000) == places[0]
    recorder.mark(EventKind.LINE, 0, 0, places[1])
    recorder.mark(EventKind.LINE, 0, 0, places[-1])
    found = read_file(path)
    assert (found.event(-2).text[:6], found.event(-1).text) == ("0001xx", "")


@pytest.mark.parametrize("damage", [b"", b"LOCKSREC", b"x" * 5000])
def test_other_files_are_no_recordings(path: Path, damage: bytes) -> None:
    path.write_bytes(damage)
    with pytest.raises(ValueError, match=r"not a file of a recording|damaged|version"):
        read_file(path)
    assert read_recording(path.parent) == []


def test_a_file_of_another_version_is_refused(path: Path, recorder: WorkerRecorder) -> None:
    recorder.open(path, header())
    data = bytearray(path.read_bytes())
    data[8] = 99
    path.write_bytes(data)
    with pytest.raises(ValueError, match="version 99"):
        read_file(path)


def test_a_file_is_never_written_over(path: Path) -> None:
    path.write_text("somebody's")
    with pytest.raises(FileExistsError):
        WorkerRecorder().open(path, header())
    assert path.read_text() == "somebody's"


# -- Clocks of several hosts are brought together from what they recorded ----------------------------------------------


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
