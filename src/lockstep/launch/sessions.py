"""What every launch starts in: sessions of processes, of which none is left at its end; its descriptors; its recording.

Each worker leads a new session and process group. The id of the session is its process id, and all processes that it
starts belong to the session. Three things end them:

1. `Sessions.end`, at every orderly end of the launch;
2. the guardian, a process that waits until the launcher ends and then kills the sessions (`guardian.py`);
3. the kernel, which kills the leaders when the launcher ends, also if the guardian was killed with it
   (`script_entry.py`, and `worker.py` for the workers of `launch`).

[Note: process ids that are used again] After `waitpid`, and when the group is empty, the kernel may give the process id
to another process. So the launcher calls `waitpid` for workers only at the end of the launch, after it has removed the
sessions from the guardian.
"""

import contextlib
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import final

import psutil

from lockstep.doctor.stall_watch import StallWatch
from lockstep.doctor.system import UsageEvents
from lockstep.errors import UsageError, counted
from lockstep.launch import guardian
from lockstep.launch.exits import KILLED_SECONDS
from lockstep.launch.template import Process
from lockstep.processes.host import exit_code_of_child
from lockstep.recording import LAUNCHER, WorkerRecorder, open_recorder
from lockstep.settings import read_settings

_POLL_SECONDS = 0.02
"""How often to check, while sessions end, whether they still have processes."""
_MOMENT_SECONDS = 0.25
"""After how long somebody who waits for the end is told why."""
_LONGEST_PARENT = 107 - len("/ls-12345678/listener-12345678")
"""The path of a socket has 107 bytes at most. Where TMPDIR was longer, a data-loading process never sent anything."""
_NUM_SPARE = 16
"""Descriptors that do not depend on the number of workers: the rendezvous, pipes while a process starts, imports."""
ISOLATED = ("-I", "-S")
"""Options of Python: without site-packages and environment variables it starts much faster."""


@final
class Sessions:
    """The sessions of one launch.

    `folder` is private, for temporary files of their processes; it is deleted at the end. Empty if none could be made.
    """

    def __init__(self) -> None:
        self.folder = _make_folder()
        source, self._pipe = os.pipe()
        try:
            self._guardian = subprocess.Popen(  # noqa: S603 - our own interpreter
                [sys.executable, *ISOLATED, guardian.__file__, str(source), self.folder],
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
        self._leaders: dict[int, Process] = {}

    def adopt(self, leader: Process) -> None:
        """Take over a process that was started as leader of a session. Until then the caller must end it.

        Use `exit_code` to see whether it has ended, and never its `wait` or `poll`.
        """
        with contextlib.suppress(BrokenPipeError):  # the guardian was killed; the kernel still ends the leader
            os.write(self._pipe, b"+%d\n" % leader.pid)
        self._leaders[leader.pid] = leader

    def end(
        self, first: signal.Signals, patience: float, is_hurried: Callable[[float], bool], tell: Callable[[], None]
    ) -> None:
        """End all processes of the sessions before this returns; after `patience` seconds it kills them.

        SIGINT is sent to all processes, as from a terminal; any other `first` to the leader, which may need its
        data-loading processes until it ends. `is_hurried` waits so many seconds, and returns whether to kill at once.
        `tell` is called once if all that takes longer than a moment.
        """
        began = time.monotonic()
        has_told = False
        for session, leader in self._leaders.items():
            if exit_code(leader) is None:
                _send(os.killpg if first is signal.SIGINT else os.kill, session, first)
                wake(session)
        asked: set[int] = set()
        while left := self._find_members():
            orphans = {member for member, session in left.items() if exit_code(self._leaders[session]) is not None}
            for orphan in orphans - asked:
                _send(os.kill, orphan, signal.SIGTERM)
            asked |= orphans
            if not has_told and time.monotonic() - began >= _MOMENT_SECONDS:
                has_told = True
                tell()
            if is_hurried(_POLL_SECONDS) or time.monotonic() - began >= patience:
                break
        self._kill()

    def release(self, leader: Process) -> None:
        """Kill what a leader that has ended has left behind, and free its process id."""
        _send(os.killpg, leader.pid, signal.SIGKILL)
        for member, session in self._find_members().items():
            if session == leader.pid:  # a shell put it into another group
                _send(os.kill, member, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):  # the guardian was killed
            os.write(self._pipe, b"-%d\n" % leader.pid)
        del self._leaders[leader.pid]
        leader.wait()

    def close(self) -> None:
        """Kill all processes that are left, and wait for the leaders and the guardian."""
        self._kill()
        for session, leader in self._leaders.items():
            with contextlib.suppress(BrokenPipeError):  # the guardian was killed
                os.write(self._pipe, b"-%d\n" % session)
            with contextlib.suppress(subprocess.TimeoutExpired):
                leader.wait(KILLED_SECONDS)
        self._leaders.clear()
        if self.folder:  # the guardian would import what this process has imported
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._pipe)
        self._guardian.wait()

    def _kill(self) -> None:
        deadline = time.monotonic() + KILLED_SECONDS
        for session in self._leaders:
            _send(os.killpg, session, signal.SIGKILL)
        while (left := self._find_members()) and time.monotonic() < deadline:
            for member in left:
                _send(os.kill, member, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)

    def _find_members(self) -> dict[int, int]:
        """Return the processes of the sessions that have not ended, each with the id of its session."""
        members = {}
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.Error):  # it has ended meanwhile
                session = os.getsid(pid)
                if session in self._leaders and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    members[pid] = session
        return members


def _make_folder() -> str:
    with contextlib.suppress(OSError):  # no folder for temporary files, or a full disk
        parent = tempfile.gettempdir()
        is_short = len(os.fsencode(parent)) <= _LONGEST_PARENT
        return tempfile.mkdtemp(prefix="ls-", dir=parent if is_short else "/tmp")  # noqa: S108 - private all the same
    return ""


def exit_code(leader: Process) -> int | None:
    # The calling program may have waited for it, or ignore SIGCHLD.
    return exit_code_of_child(leader.pid, leader.poll)


def wake(session: int) -> None:
    """Let the processes of a session that are stopped, by SIGSTOP or Ctrl-Z, go on: they take signals only then."""
    _send(os.killpg, session, signal.SIGCONT)


def _send(send: Callable[[int, int], None], target: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or become another user's
        send(target, number)


def check_descriptors(num_workers: int, num_per_worker: int) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = psutil.Process().num_fds() + num_workers * num_per_worker + _NUM_SPARE
    if limit != resource.RLIM_INFINITY and needed > limit:
        needs = "needs" if num_workers == 1 else "need"
        raise UsageError(
            f"{counted(num_workers, 'worker')} {needs} {needed} file descriptors in the process that starts them, but "
            f"its limit is {limit} (`ulimit -n`). Raise the limit with `ulimit -n {needed}`, or start fewer "
            "workers. (LS121)"
        )


def check_current_directory() -> None:
    """Check that the current directory exists: torch would end each worker in an error about another file."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError(
            "The current directory was deleted. Change to one that exists (`os.chdir`), and start again. (LS123)"
        ) from None


@contextlib.contextmanager
def launch_recorded(recording: Path | None, world_size: int) -> Iterator[WorkerRecorder]:
    """Record a launch within the block, unless `recording` is None, and log why its workers stand still if they do."""
    recorder = WorkerRecorder()
    if recording is None:
        yield recorder
        return
    settings = read_settings()
    how = settings.recording()
    open_recorder(recorder, recording, worker=LAUNCHER, rank=LAUNCHER, world_size=world_size, capacity=how.capacity)
    watch = StallWatch(recording, settings.stall_seconds() or math.inf, recorder, UsageEvents(recorder))
    try:
        yield recorder
    finally:
        watch.close()
        recorder.close()
        if not how.is_kept:
            shutil.rmtree(recording, ignore_errors=True)
