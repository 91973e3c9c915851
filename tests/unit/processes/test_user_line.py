"""The line of the user's code, for messages."""

import _thread
import multiprocessing
import sys
import sysconfig
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch

from lockstep.processes.host import StackLine, stack_of_thread
from lockstep.processes.user_line import (
    CodeLine,
    end_at_user,
    find_user_frame,
    find_user_stack_line,
    stacklevel_of_user,
    user_line,
)


def test_a_traceback_ends_with_the_users_line() -> None:
    def fail() -> None:
        torch.nn.Linear(2, 2)(torch.zeros(3))

    with pytest.raises(RuntimeError) as caught:
        fail()
    trace = caught.value.__traceback__
    assert trace is not None
    assert trace.tb_next is not None
    library, length = trace.tb_next.tb_next, len(traceback.extract_tb(trace))
    assert "torch" in traceback.extract_tb(library)[-1].filename
    end_at_user(library)  # without a line of the user's nothing is taken off
    assert len(traceback.extract_tb(library)) == length - 2
    end_at_user(trace)
    assert [each.name for each in traceback.extract_tb(trace)][-1] == "fail"


def test_the_first_lines_of_a_worker_are_not_the_users() -> None:
    # A rank that was in no code of the user's was said to be at `<string>:12`.
    def main() -> None:
        frames.append(find_user_frame(sys._getframe().f_back))

    main.__module__ = "lockstep.launch.worker"
    frames: list[object] = []
    command = "import threading, sys; main()"
    run_at_bottom(compile(command, "<string>", "exec"), {"main": main})
    assert frames == [None]


def run_at_bottom(code: CodeType, names: dict[str, object]) -> None:
    """Run code in a frame without a caller, as `python -c` does."""
    _thread.start_new_thread(FunctionType(code, names), ())
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not names["main"].__closure__[0].cell_contents:  # type: ignore[attr-defined]
        time.sleep(0.001)


def call_from(file: str, source: str, **names: Any) -> dict[str, Any]:
    """Run code of a file of that name in a thread, where no line of this test calls it; return its names."""
    thread = threading.Thread(target=FunctionType(compile(source, file, "exec"), names))
    thread.start()
    thread.join()
    return names


@pytest.mark.parametrize(
    "folder", [sysconfig.get_path("purelib"), str(Path(sysconfig.get_path("stdlib"), "site-packages"))]
)
def test_the_line_of_an_installed_program_is_found(folder: str) -> None:
    # Of a program in site-packages no line was known: all there were libraries, or below the folder of Python's own.
    file = f"{folder}/prog/train.py"
    assert call_from(file, "\nline = user_line()", user_line=user_line)["line"] == CodeLine(file, 2)


def test_a_library_between_us_and_the_user_is_passed_over() -> None:
    # A wrapper that a library calls took the library's line for the user's.
    installed = compile("def call(function): return function()", f"{sysconfig.get_path('purelib')}/lib/it.py", "exec")
    names: dict[str, Any] = {}
    exec(installed, names)
    assert names["call"](user_line).file == __file__
    with warnings.catch_warnings(record=True, action="always") as caught:
        names["call"](lambda: warnings.warn("here", stacklevel=stacklevel_of_user()))
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("below", "expected"),
    [
        ("forkserver.py", None),  # the line that begins a loading process
        ("spawn.py", None),
        ("process.py", "<string>"),  # a line of the user's: python -c "...; process.join()"
    ],
)
def test_what_begins_a_process_is_not_the_users(below: str, expected: str | None) -> None:
    folder = Path(multiprocessing.__file__).parent
    found = find_user_stack_line([StackLine(str(folder / below), 3, "f"), StackLine("<string>", 1, "<module>")])
    assert (None if found is None else found.file) == expected


# -- What another thread runs ------------------------------------------------------------------------------------------


def test_a_thread_that_waits_is_seen_with_its_callers() -> None:
    begun, end = threading.Event(), threading.Event()

    def wait_here() -> None:
        begun.set()
        end.wait(20)

    thread = threading.Thread(target=wait_here)
    thread.start()
    begun.wait(20)
    stack = stack_of_thread(thread.ident)
    end.set()
    thread.join()
    functions = [line.function for line in stack]
    assert functions.index("wait") < functions.index("wait_here")
    [own] = [line for line in stack if line.function == "wait_here"]
    assert own == StackLine(__file__, wait_here.__code__.co_firstlineno + 2, "wait_here")


def test_this_thread_is_seen_too() -> None:
    assert stack_of_thread(threading.get_ident())[1].function == "test_this_thread_is_seen_too"


def test_a_thread_that_is_not_there_has_no_lines() -> None:
    assert stack_of_thread(None) == []
    assert stack_of_thread(0) == []


def test_a_thread_that_runs_on_can_be_looked_at_again_and_again() -> None:
    # Frames that were walked one after the other had been left meanwhile: a generator's value stood in place of one.
    end = threading.Event()

    def values() -> Iterator[list[int]]:
        for number in range(1 << 30):
            yield [number]

    def run() -> None:
        for _ in values():
            if end.is_set():
                return

    thread = threading.Thread(target=run)
    thread.start()
    stacks = [stack_of_thread(thread.ident) for _ in range(200)]
    end.set()
    thread.join()
    assert all("run" in {line.function for line in stack} for stack in stacks)
