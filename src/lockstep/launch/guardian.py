"""The guardian: a process that kills a launch's workers, and all that they have started, when the launcher has ended.

It is a separate process, so it outlives the launcher, also after `kill -9`. It reads from a pipe that only the launcher
holds open:

    +123    a worker with process id 123 leads a session and a process group of that id
    -123    the session is over; another process may get its id
    (end)   the launcher has ended: kill every session that is left, and delete the folder of their temporary files

It imports only small modules of the standard library, so that it starts in milliseconds and takes little memory.
"""

import contextlib
import os
import signal
import sys

_CHUNK_BYTES = 4096
_MAX_PASSES = 100


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    source = int(sys.argv[1])
    sessions: set[int] = set()
    unread = b""
    while chunk := os.read(source, _CHUNK_BYTES):
        *lines, unread = (unread + chunk).split(b"\n")
        for line in lines:
            (sessions.add if line.startswith(b"+") else sessions.discard)(int(line[1:]))
    kill(sessions)
    if sys.argv[2] and os.path.exists(sys.argv[2]):  # noqa: PTH110 - pathlib is slow; the launcher was killed
        import shutil  # takes longer than all that is imported above

        shutil.rmtree(sys.argv[2], ignore_errors=True)


def kill(sessions: set[int]) -> None:
    """Kill each session's first process group with one call, then the processes that a shell put into other groups."""
    for session in sessions:
        with contextlib.suppress(OSError):  # all its processes have ended
            os.killpg(session, signal.SIGKILL)
    # Repeated, because a process may have started another one while this looked.
    for _ in range(_MAX_PASSES):
        members = find_members(sessions)
        if not members:
            return
        for member in members:
            with contextlib.suppress(OSError):
                os.kill(member, signal.SIGKILL)


def find_members(sessions: set[int]) -> list[int]:
    """Return the processes of these sessions that have not ended (Linux; elsewhere none is found)."""
    members = []
    for entry in os.scandir("/proc") if sessions and sys.platform == "linux" else ():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError), open(f"{entry.path}/stat", "rb") as stream:  # noqa: PTH123 - pathlib is slow
            # State, parent, group, session: after the name of the program, which may hold anything.
            state, _, _, session, *_ = stream.read().rpartition(b")")[2].split()
            if int(session) in sessions and state not in {b"Z", b"X"}:
                members.append(int(entry.name))
    return members


if __name__ == "__main__":
    main()
