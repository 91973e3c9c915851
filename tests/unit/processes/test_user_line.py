"""The line of the user's code, for messages."""

import _thread
import sys
import time
from types import CodeType, FunctionType

from lockstep.processes.user_line import find_user_frame


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
