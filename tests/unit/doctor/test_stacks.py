"""Reading what faulthandler has written."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.doctor.stacks import read_main_stack, take_stack
from lockstep.doctor.system import look_at
from lockstep.processes import user_line
from lockstep.processes.user_line import find_user_stack_line
from lockstep.recording import stacks

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
