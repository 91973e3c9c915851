"""Starting processes so that none of them, nor any process that they start, is left when the launch is over.

Each leads a session, and a process group, of its own: its process id is the id of the session, and whatever it starts
belongs to it. Three things end them:

1. `Sessions.end`, however the launch ends in an orderly way;
2. the guardian, a process that waits for the launcher's end and kills the sessions then (`guardian.py`);
3. the kernel, which kills the leaders when the launcher ends, should the guardian have been killed with it
   (`script_entry.py`, and `worker.py` for the workers of `launch`).

[Note: process ids that are used again] The kernel may give a process id to another process when the first one was
waited for and its group is empty. So no worker is waited for before the end of the launch, and the guardian gets a
message first.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import final

import psutil

from lockstep.launch import guardian, script_entry

_POLL_SECONDS = 0.02
"""How often to look, while sessions end, whether anything is left of them."""
_KILLED_SECONDS = 5.0
"""How long to wait for what was killed: the kernel may have to finish something for it first."""
_ISOLATED = ("-I", "-S")
"""Python without site-packages or variables of the environment: it starts in a fraction of the time."""


@final
class Sessions:
    """The sessions of one launch."""

    def __init__(self) -> None:
        source, self._pipe = os.pipe()
        try:
            self._guardian = subprocess.Popen(  # noqa: S603 - our own interpreter
                [sys.executable, *_ISOLATED, guardian.__file__, str(source)],
                pass_fds=(source,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={},
                start_new_session=True,
            )
        finally:
            os.close(source)
        self._leaders: dict[int, subprocess.Popen[bytes]] = {}

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdin: int | None,
        outputs: tuple[int | None, int | None],
    ) -> subprocess.Popen[bytes]:
        """Start a program. Ask `exit_code` how it ended, and wait for it in no other way.

        Args:
            command: A path, and arguments.
            environment: All of its variables.
            stdin: `subprocess.DEVNULL`, or None for this process' own.
            outputs: Where stdout and stderr go; None for this process' own.
        """
        process = subprocess.Popen(  # noqa: S603 - what the user asked for
            [sys.executable, *_ISOLATED, script_entry.__file__, str(os.getpid()), str(self._pipe), *command],
            pass_fds=(self._pipe,),
            stdin=stdin,
            stdout=outputs[0],
            stderr=outputs[1],
            env=dict(environment),
            start_new_session=True,
        )
        self._leaders[process.pid] = process
        return process

    def adopt(self, leader: subprocess.Popen[bytes]) -> None:
        """Take over a process that was started as leader of a session. Until then the caller has to end it."""
        with contextlib.suppress(BrokenPipeError):  # the guardian was killed; the kernel is asked as well
            os.write(self._pipe, b"+%d\n" % leader.pid)
        self._leaders[leader.pid] = leader

    def end(self, first: signal.Signals, patience: float, is_hurried: Callable[[float], bool]) -> None:
        """End everything in the sessions; nothing is left when this returns.

        Args:
            first: The first signal. SIGINT goes to all processes, as from a terminal. Another one goes to the leader,
                which may need its data-loading processes until it ends, and to the rest when the leader has ended.
            patience: How many seconds they have before SIGKILL.
            is_hurried: Waits so many seconds, and returns whether to kill at once.
        """
        deadline = time.monotonic() + patience
        for session, leader in self._leaders.items():
            if exit_code(leader) is None:
                _send(os.killpg if first is signal.SIGINT else os.kill, session, first)
        asked: set[int] = set()
        while left := self._find_members():
            orphans = {member for member, session in left.items() if exit_code(self._leaders[session]) is not None}
            for orphan in orphans - asked:
                _send(os.kill, orphan, signal.SIGTERM)
            asked |= orphans
            if is_hurried(_POLL_SECONDS) or time.monotonic() >= deadline:
                break
        self._kill()

    def close(self) -> None:
        """Kill what is left in the sessions, and wait for their leaders and the guardian."""
        self._kill()
        for session, leader in self._leaders.items():
            with contextlib.suppress(BrokenPipeError):  # the guardian was killed
                os.write(self._pipe, b"-%d\n" % session)
            with contextlib.suppress(subprocess.TimeoutExpired):
                leader.wait(_KILLED_SECONDS)
        self._leaders.clear()
        os.close(self._pipe)
        self._guardian.wait()

    def _kill(self) -> None:
        deadline = time.monotonic() + _KILLED_SECONDS
        for session in self._leaders:
            _send(os.killpg, session, signal.SIGKILL)
        while (left := self._find_members()) and time.monotonic() < deadline:
            for member in left:
                _send(os.kill, member, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)

    def _find_members(self) -> dict[int, int]:
        """Return the session of each process that is in one of them and has not ended."""
        members = {}
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.Error):  # it has ended meanwhile
                session = os.getsid(pid)
                if session in self._leaders and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    members[pid] = session
        return members


def exit_code(leader: subprocess.Popen[bytes]) -> int | None:
    """Return how a process ended, -N for signal N, without freeing its process id; None while it runs."""
    if sys.platform == "darwin":  # where Python 3.11 has no waitid
        return leader.poll()
    try:
        found = os.waitid(os.P_PID, leader.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the calling program has waited for it, or ignores SIGCHLD
        return leader.poll()
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _send(send: Callable[[int, int], None], target: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or become another user's
        send(target, number)
