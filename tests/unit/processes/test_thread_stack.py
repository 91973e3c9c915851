"""What another thread runs."""

import threading
from collections.abc import Iterator

from lockstep.processes.host import StackLine, stack_of_thread


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
