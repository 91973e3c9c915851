"""A process that has imported torch and Lockstep, of which workers on CPUs are forked (Linux).

To import them takes a worker two seconds, and as many workers as there are cores share the cores meanwhile. Forked, a
worker begins in a few milliseconds: at the start, when it replaces a lost one, when all are started again. And workers
share the memory of what was imported.

    launcher                         template               first fork              second fork: the worker
    1 adopts orphans
    2 asks for a worker      ->      forks         ->       forks          ->       waits for the end of the first one
                                     waits for its end  <-  ends
    3 reads the worker's id  <-      sends it
    4 is its parent                                                                 reads its task

Two forks, because the launcher is to be the worker's parent: it sees how the worker ends, and the kernel ends the
worker with the launcher.

[Note: one thread] A forked process has only the thread that has forked. What another thread was doing, with the locks
that it held, stays half done. So the template starts no thread, and refuses if an import has started one: then, and
where the template has ended, workers are started as new interpreters. So are workers on GPUs.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, final

from lockstep.processes.ending import die_with_parent
from lockstep.settings import read_settings, write_variables

_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_GET_CHILD_SUBREAPER: Final = 37
_ADOPTING: Final = threading.Lock()
_MESSAGE_BYTES: Final = 1 << 17
"""Of a message to or from the template, at most."""
_IMPORT_SECONDS: Final = 300.0
_FORK_SECONDS: Final = 10.0
_END_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.001
_BOOTSTRAP: Final = """
import gc, json, os, signal, socket, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
line = socket.socket(fileno=int(sys.argv[1]))
sys.path[:] = json.loads(line.recv(1 << 17) or b"[]")
gc.disable()
from lockstep.launch.template import fork_workers
down, *descriptors = fork_workers(line, int(sys.argv[2]), sys.argv[3:])
del line
stream = os.fdopen(down, "rb")
search_path = stream.readline()
if not search_path.endswith(b"\\n"):  # the launcher was interrupted before it sent it
    sys.exit(1)
sys.path[:] = json.loads(search_path)
from lockstep.launch.worker import main
main(stream, *descriptors)
"""


@final
class ForkedProcess:
    """A worker that was forked: what `subprocess.Popen` is for one that was started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # the calling program has waited for it; as `subprocess` does
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"worker with process id {self.pid}", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code


Process = subprocess.Popen[bytes] | ForkedProcess


@final
class WorkerTemplate:
    """The launcher's end of it. The process begins to import at once; `fork` is for later.

    `seed`, `threads` and `portable` are those of the workers, for variables that are read once, when one starts.
    `modules` are imported with Lockstep.
    """

    def __init__(self, *, seed: int, threads: int, portable: bool = False, modules: Sequence[str] = ()) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        variables = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        own = read_settings()
        if portable:
            variables |= own.portable_variables()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter
                # -P: the current directory, where others may write, is not searched for the modules of _BOOTSTRAP.
                [sys.executable, "-P", "-c", _BOOTSTRAP, str(theirs.fileno()), str(os.getpid()), *modules],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=own.for_worker(variables, seed=seed),
                start_new_session=True,
            )
        self._is_usable: bool | None = None
        with contextlib.suppress(OSError):
            self._line.send(json.dumps(sys.path).encode())

    def is_usable(self) -> bool:
        """Wait until it has imported everything; return False if it cannot fork."""
        if self._is_usable is None:
            self._line.settimeout(_IMPORT_SECONDS)
            self._is_usable = self._receive() == {"num_threads": 1}
        return self._is_usable

    def fork(self, descriptors: Sequence[int], variables: Mapping[str, str]) -> ForkedProcess | None:
        """Fork a worker, with the signals blocked that are blocked here; None if that cannot be done.

        `descriptors` are those of `worker.main`. They stay open here.
        """
        if not self.is_usable():
            return None
        try:
            folder = os.getcwd()  # noqa: PTH109 - a str for JSON
        except FileNotFoundError:  # deleted meanwhile: that of the template, which is the same
            folder = "."
        request = {
            "variables": dict(variables),
            "folder": folder,
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        }
        with adopting_orphans():
            self._line.settimeout(_FORK_SECONDS)
            try:
                socket.send_fds(self._line, [json.dumps(request).encode()], descriptors)
            except OSError:
                answer: Any = None
            else:
                answer = self._receive()
        if isinstance(answer, int):
            return ForkedProcess(answer)
        self._is_usable = False
        return None

    def close(self) -> None:
        """End it, and wait for that; workers run on."""
        self._line.close()
        try:
            self._process.wait(0.0 if self._is_usable is None else _END_SECONDS)
        except subprocess.TimeoutExpired:  # it still imports, or was stopped
            self._process.kill()
            self._process.wait()

    def _receive(self) -> Any:
        try:
            return json.loads(self._line.recv(_MESSAGE_BYTES) or b"null")
        except (OSError, ValueError):  # it has ended, or does not answer
            return None


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make this process the parent of processes below it whose parents end meanwhile; see prctl(2).

    The calling program may be one already, as a program that supervises others, and is one afterwards then.
    """
    libc = ctypes.CDLL(None)
    was_adopting = ctypes.c_int()
    with _ADOPTING:
        libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(was_adopting), 0, 0, 0)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            yield
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, was_adopting.value, 0, 0, 0)


def fork_workers(line: socket.socket, launcher_pid: int, modules: Sequence[str]) -> list[int]:
    """Import, and fork a worker for each request; returns in the worker alone, with its descriptors."""
    die_with_parent(launcher_pid)
    for name in ("lockstep", "lockstep.launch.worker", *modules):
        importlib.import_module(name)
    gc.freeze()
    with contextlib.suppress(OSError):  # the launcher has ended
        line.send(json.dumps({"num_threads": len(os.listdir("/proc/self/task"))}).encode())  # noqa: PTH208 - a count
    while True:
        try:
            message, descriptors, *_ = socket.recv_fds(line, _MESSAGE_BYTES, 8)
        except OSError:
            message = b""
        if not message:
            os._exit(0)
        request = json.loads(message)
        pid = _fork_twice()
        if not pid:
            line.close()
            _begin(request)
            gc.enable()
            return descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        line.send(json.dumps(pid).encode())


def _fork_twice() -> int:
    """Fork a process whose parent has ended; return its id, and 0 in it."""
    source, written = os.pipe()
    first = os.fork()
    if not first:
        first = os.getpid()
        pid = os.fork()
        if pid:
            os.write(written, b"%d" % pid)
            os._exit(0)
        os.close(source)
        os.close(written)
        while os.getppid() == first:
            time.sleep(_POLL_SECONDS)
        return 0
    os.close(written)
    with os.fdopen(source, "rb") as stream:
        pid = int(stream.read())
    os.waitpid(first, 0)
    return pid


def _begin(request: Mapping[str, Any]) -> None:
    """Become what an interpreter that the launcher has started would be."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # which is ignored
    os.chdir(request["folder"])
    write_variables(request["variables"])
