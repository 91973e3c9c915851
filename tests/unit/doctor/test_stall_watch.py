"""A job that stands still is explained by itself, once."""

import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest
from torch.distributed import HashStore

from lockstep.doctor import examination
from lockstep.doctor.activity import last_activity
from lockstep.doctor.diagnosis import Verdict
from lockstep.doctor.examination import examine
from lockstep.doctor.stacks import read_main_stack, take_stack
from lockstep.doctor.stall_watch import StallsElsewhere, StallWatch, is_told, last_moment, record_this_worker
from lockstep.doctor.system import look_at
from lockstep.errors import UsageError
from lockstep.processes import user_line
from lockstep.processes.user_line import find_user_stack_line
from lockstep.recording import (
    LAUNCHER,
    NULL_WORKER_RECORDER,
    EventKind,
    WorkerRecorder,
    open_recorder,
    own_recorder,
    stacks,
)
from lockstep.recording.reading import read_file
from lockstep.settings import Settings

STALLED = Verdict(kind="stalled", text="", is_certain=True)
OPENED: list[WorkerRecorder] = []


@pytest.fixture
def quick_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is this process shows no stack: it is not waited for long."""
    monkeypatch.setattr("lockstep.doctor.stacks._ANSWER_SECONDS", 0.1)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, quick_answers: None) -> Iterator[SimpleQueue[str]]:
    """Yield the warnings as they come."""
    warnings: SimpleQueue[str] = SimpleQueue()

    def note(record: logging.LogRecord) -> bool:
        warnings.put(record.getMessage())
        return True

    caplog.handler.addFilter(note)
    with caplog.at_level(logging.WARNING, "lockstep"):
        yield warnings
    caplog.handler.removeFilter(note)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


def recorded(folder: Path, rank: int) -> WorkerRecorder:
    OPENED.append(WorkerRecorder())
    assert open_recorder(OPENED[-1], folder, worker=rank, rank=rank, world_size=2, capacity=64)
    return OPENED[-1]


def wait_for_rank_1(recorder: WorkerRecorder) -> int:
    return recorder.begin(EventKind.WAITING, 1, 0, recorder.text("all_reduce(sum)"))


def test_two_watches_say_once_who_is_waited_for(tmp_path: Path, logged: SimpleQueue[str]) -> None:
    waiting, busy = recorded(tmp_path, 0), recorded(tmp_path, 1)
    wait_for_rank_1(waiting)
    busy.mark(EventKind.PHASE, 6, 0, 0)  # of an earlier step
    busy.begin(EventKind.SHARD, 3, 0, 0)
    watches = [StallWatch(tmp_path, 0.4, NULL_WORKER_RECORDER) for _ in range(2)]
    said = logged.get(timeout=20)
    seen = [dict(watch._seen) for watch in watches]
    deadline = time.monotonic() + 20
    while any(watch._next_look != float("inf") for watch in watches) and time.monotonic() < deadline:
        time.sleep(0.01)  # until the second one has found the same, and that it was said
    for watch in watches:
        watch.close()
    assert any(seen)
    assert logged.empty()
    assert said.startswith(f"The job stands still. Rank 1 (process {os.getpid()})")
    assert "computes shard 3" in said
    assert "Rank 0: waits for rank 1 in all_reduce(sum)" in said
    assert f"lockstep doctor {tmp_path}" in said


@pytest.mark.parametrize("has_stepped", [False, True])
def test_a_first_step_that_takes_long_is_called_that(
    tmp_path: Path, logged: SimpleQueue[str], *, has_stepped: bool
) -> None:
    waiting, compiling = recorded(tmp_path, 0), recorded(tmp_path, 1)
    wait_for_rank_1(waiting)
    compiling.mark(EventKind.PHASE, 3, 0, 0)
    if has_stepped:
        compiling.mark(EventKind.PHASE, 6, 0, 0)
    compiling.begin(EventKind.SHARD, 0, 0, 0)
    watch = StallWatch(tmp_path, 0.2, NULL_WORKER_RECORDER)
    said = logged.get(timeout=20)
    watch.close()
    assert logged.empty()
    assert said.startswith("The job stands still." if has_stepped else "The job has not finished its first step.")
    assert ("compiling may take long: then wait" in said) != has_stepped


@pytest.mark.usefixtures("quick_answers")
def test_a_worker_that_makes_its_data_is_said_to(tmp_path: Path) -> None:
    waiting, _ = recorded(tmp_path, 0), recorded(tmp_path, 1)
    wait_for_rank_1(waiting)
    time.sleep(0.01)
    found = examine(tmp_path, stall_seconds=0.001).verdict
    assert found.ranks == (1,)
    assert "it has not begun its first step: it imports modules, or makes its data or model" in found.text


def test_a_worker_that_watches_itself_says_it_once(tmp_path: Path, logged: SimpleQueue[str]) -> None:
    # What it recorded of the stall counted as a sign of life: it was said again after each stall time.
    waiting = recorded(tmp_path, 0)
    wait_for_rank_1(waiting)
    watch = StallWatch(tmp_path, 0.2, waiting)
    logged.get(timeout=20)
    time.sleep(1.0)
    watch.close()
    assert logged.empty()


def test_a_line_that_comes_late_is_said_when_it_comes(
    tmp_path: Path, logged: SimpleQueue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine a worker took longer than 3 s to show its stack. The stall was said once, without the line.
    waiting, busy = recorded(tmp_path, 0), recorded(tmp_path, 1)
    wait_for_rank_1(waiting)
    busy.begin(EventKind.SHARD, 3, 0, 0)
    late = iter([frozenset({1}), frozenset({1})])

    def examine_late(recording: Path, *, stall_seconds: float) -> examination.Examination:
        found = examine(recording, stall_seconds=stall_seconds)
        return replace(found, late_stacks=next(late, frozenset()))

    monkeypatch.setattr(examination, "examine", examine_late)
    watch = StallWatch(tmp_path, 0.2, NULL_WORKER_RECORDER)
    logged.get(timeout=20)
    logged.get(timeout=20)
    while watch._next_look != float("inf"):
        time.sleep(0.01)
    watch.close()
    assert logged.empty()


def test_who_is_waited_for_on_another_host_is_said_there_at_once(tmp_path: Path, logged: SimpleQueue[str]) -> None:
    store = HashStore()
    waiting, _ = recorded(tmp_path / "a", 0), recorded(tmp_path / "b", 1)
    wait_for_rank_1(waiting)
    watches = [StallWatch(tmp_path / "b", 1.0, NULL_WORKER_RECORDER, hosts=StallsElsewhere(store))]
    watches.append(StallWatch(tmp_path / "a", 1.0, NULL_WORKER_RECORDER, hosts=StallsElsewhere(store)))
    assert "All ranks of this host wait for rank 1, which is on another host" in logged.get(timeout=20)
    assert "Rank 1 (process " in logged.get(timeout=20)
    for watch in watches:
        watch.close()
    assert logged.empty()


def test_own_words_to_other_hosts_are_not_theirs() -> None:
    store = HashStore()
    ours, theirs = StallsElsewhere(store), StallsElsewhere(store)
    assert not ours.was_told()
    ours.tell()
    assert not ours.was_told()
    theirs.tell()
    assert ours.was_told()
    assert not ours.was_told()


def test_a_second_stall_is_said_too(tmp_path: Path, logged: SimpleQueue[str]) -> None:
    waiting, busy = recorded(tmp_path, 0), recorded(tmp_path, 1)
    watch = StallWatch(tmp_path, 0.4, NULL_WORKER_RECORDER)
    for _ in range(2):
        event = wait_for_rank_1(waiting)
        logged.get(timeout=20)
        waiting.end(event)
        busy.mark(EventKind.FORWARD, 0, 0, 0)
    watch.close()


@pytest.mark.parametrize("boot", ["", "8f2d7c1e-4b0a-4c39-9d57-1e6f3a2b4c5d "])
def test_a_stall_of_another_boot_does_not_count(tmp_path: Path, logged: SimpleQueue[str], boot: str) -> None:
    # A run that was resumed after a boot was silent until the machine was up for as long as it was before.
    (tmp_path / "stalls").write_text(f"{boot}{time.monotonic_ns() + 10**15}")
    waiting, _ = recorded(tmp_path, 0), recorded(tmp_path, 1)
    wait_for_rank_1(waiting)
    watch = StallWatch(tmp_path, 0.2, NULL_WORKER_RECORDER)
    logged.get(timeout=20)
    watch.close()


def test_a_worker_that_has_ended_its_recording_is_not_silent(tmp_path: Path) -> None:
    ended, runs = recorded(tmp_path, 0), recorded(tmp_path, 1)
    ended.close()
    watch = StallWatch(tmp_path, 1000.0, NULL_WORKER_RECORDER)
    watch._seconds = 0.0
    assert [path.name for path in watch._silent_workers()] == ["worker-1.rec"]
    watch.close()
    runs.close()


def test_the_last_moment_is_that_of_the_last_begin_or_end(tmp_path: Path) -> None:
    recorder = recorded(tmp_path, 0)
    first = recorder.begin(EventKind.SHARD, 0, 0, 0)
    recorder.mark(EventKind.FORWARD, 0, 0, 0)
    before = time.monotonic_ns()
    recorder.end(first)
    found = last_moment(tmp_path / "worker-0.rec")
    assert found is not None
    assert before <= found[1] <= time.monotonic_ns()
    assert found[0].pid == os.getpid()
    recorder.close()
    (tmp_path / "other.rec").write_bytes(bytes(10))
    assert last_moment(tmp_path / "other.rec") is None


def test_the_longest_shard_is_one_after_the_first_step(tmp_path: Path) -> None:
    # The first step loads libraries: with its shards a loop in all workers at once was told of late, or never.
    recorder = recorded(tmp_path, 0)
    for step in range(3):
        recorder.set_step(step)
        for shard in range(2):
            event = recorder.begin(EventKind.SHARD, shard, 0, 0)
            if step == 0:
                time.sleep(0.5)
            recorder.end(event)
    recorder.begin(EventKind.SHARD, 0, 0, 0)
    longest = last_activity(read_file(tmp_path / "worker-0.rec")).longest_shard
    recorder.close()
    assert 0 < longest < 0.5


def test_a_worker_that_has_not_come_to_lockstep_is_named(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as late:
        launcher = recorded(tmp_path, LAUNCHER)
        launcher.mark(EventKind.WORKER_STARTED, 1, late.pid, 0)
        early = recorded(tmp_path, 0)
        early.begin(EventKind.WAITING, -1, 0, early.text("the startup of the process group"))
        time.sleep(0.01)
        found = examine(tmp_path, stall_seconds=0.001).verdict
        late.kill()
    assert found.ranks == (1,)
    assert "has not imported Lockstep yet" in found.text


@pytest.mark.parametrize(
    ("verdict", "silence", "expected"),
    [
        (STALLED, 3.0, True),
        (Verdict(kind="stalled", text=""), 3.0, False),
        (Verdict(kind="stalled", text=""), 16.0, True),
        (Verdict(kind="running", text=""), 16.0, False),
    ],
)
def test_long_work_of_which_nobody_waits_is_given_more_time(verdict: Verdict, silence: float, expected: bool) -> None:
    assert is_told(verdict, silence, 3.0) is expected


def test_workers_of_a_launcher_of_ours_are_watched_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate()]

    monkeypatch.setenv("LOCKSTEP_RECORDING", "on")
    monkeypatch.setenv("LOCKSTEP_RECORDING_DIRECTORY", f"{os.getppid()},{tmp_path}")
    own_recorder().close()
    before = names().count("lockstep stall watch")
    record_this_worker(0, 2)
    assert own_recorder().directory == tmp_path
    assert names().count("lockstep stall watch") == before
    own_recorder().close()


def test_workers_without_a_launcher_of_ours_watch_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_RECORDING", "on")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own_recorder().close()
    before = {thread.ident for thread in threading.enumerate()}
    record_this_worker(0, 2)
    record_this_worker(0, 2)  # as the next wrapper does
    new = [thread for thread in threading.enumerate() if thread.ident not in before]
    assert [thread.name for thread in new] == ["lockstep stall watch"]
    own_recorder().close()


@pytest.mark.parametrize(
    ("text", "seconds"), [("5", 5.0), ("0", 0.0), ("-1", 0.0), (" 0.5 ", 0.5), ("", 60.0), (" ", 60.0)]
)
def test_the_time_is_settable(text: str, seconds: float) -> None:
    assert Settings({"LOCKSTEP_STALL_SECONDS": text}).stall_seconds() == seconds
    assert Settings({}).stall_seconds() == 60.0


@pytest.mark.parametrize("text", ["soon", "nan"])  # nan ended the thread that watches
def test_a_time_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"LOCKSTEP_STALL_SECONDS is '{text}', expected a number"):
        Settings({"LOCKSTEP_STALL_SECONDS": text}).stall_seconds()


# -- Reading what faulthandler has written -----------------------------------------------------------------------------


WRITTEN = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/usr/lib/python3.11/threading.py", line 975 in _bootstrap

Current thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/queue.py", line 171 in get
  File "/home/a b/train.py", line 31 in hook
  File "/home/a b/train.py", line 40 in <module>
"""


def test_the_main_thread_is_the_last_one() -> None:
    stack = read_main_stack(WRITTEN)
    assert [line.number for line in stack] == [171, 31, 40]


def test_a_main_thread_that_is_left_out_has_no_lines() -> None:
    # faulthandler writes 100 threads. The stack of the last one of these was taken for that of the main thread.
    assert read_main_stack(f"{WRITTEN}...\n") == []


def test_the_users_line_is_the_innermost_outside_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_line, "LIBRARIES", ("/usr/lib/python3.11",))
    frame = find_user_stack_line(read_main_stack(WRITTEN))
    assert str(frame) == "/home/a b/train.py:31 in hook"
    assert find_user_stack_line([]) is None


IN_DISK_SLEEP = """
import ctypes, os, runpy, sys, threading
from pathlib import Path

write_stacks_on_signal = runpy.run_path(sys.argv[1])["write_stacks_on_signal"]  # an import takes seconds: torch
path, fifo, keeps_gil = Path(sys.argv[2]), sys.argv[3], sys.argv[4] == "keeps"
gate = threading.Lock()
gate.acquire()

def waits_beside():
    gate.acquire()

threading.Thread(target=waits_beside, daemon=True).start()
print(write_stacks_on_signal(path), flush=True)

def stuck():
    # Until the new program has begun its parent waits as for a disk: here until the fifo is opened.
    if keeps_gil:
        os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 9, fifo, os.O_RDONLY, 0)])
    else:
        library, actions = ctypes.CDLL(None), ctypes.create_string_buffer(1024)
        library.posix_spawn_file_actions_init(actions)
        library.posix_spawn_file_actions_addopen(actions, 9, fifo.encode(), os.O_RDONLY, 0)
        library.posix_spawn(None, b"/bin/true", actions, None, (ctypes.c_char_p * 2)(b"true"), None)

stuck()
print("went on", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="It reads /proc.")
@pytest.mark.parametrize("gil", ["keeps", "releases"])
def test_of_a_main_thread_in_disk_sleep_another_one_writes_the_stack(tmp_path: Path, gil: str) -> None:
    # A worker whose disk did not answer was named without its line: it runs no signal handler.
    path, fifo = tmp_path / "a.stacks", tmp_path / "fifo"
    os.mkfifo(fifo)
    command = [sys.executable, "-c", IN_DISK_SLEEP, stacks.__file__, str(path), str(fifo), gil]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        number = int(process.stdout.readline())
        deadline = time.monotonic() + 30
        try:
            while (facts := look_at(process.pid)) is None or facts.state != "in disk sleep":
                assert time.monotonic() < deadline
                time.sleep(0.01)
            text = take_stack(path, process.pid, number)
        finally:
            writer = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)  # now it goes on
            went_on = process.stdout.readline()
            process.stdin.close()
            os.close(writer)
        assert went_on == "went on\n"
        assert "waits_beside" in text
        assert [frame.function for frame in read_main_stack(text)] == ["stuck", "<module>"]
