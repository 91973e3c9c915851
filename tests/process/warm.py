"""Interpreters that need not import torch, for tests that are not about how an interpreter starts.

`Popen` and `run` take commands as those of `subprocess` do: Python with a script, `-c` or `-m`, and `lockstep`. Such a
process is forked from the server of `ranks.py`, which has imported torch and Lockstep: a twentieth of a second, and not
one or two. In all else it is what `subprocess` starts: a child of this process with the descriptors, variables, folder
and signal mask that it is given. The workers that it starts with `ls.launch` are forked from it, without an import too;
of a `PopenWithScripts` also those that `lockstep run` starts.

    this process                           server         first fork               second fork: the process
    1 adopts orphans
    2 asks for a process          ->       forks     ->   forks             ->     waits for the end of the first one
    3 reads its id                <-                      sends it, ends
    4 is now its parent                                                            runs the program

What such a process cannot show: the import of torch, options of the interpreter, a search path with other modules of
names that are imported already, PYTHONHASHSEED and variables that the linker reads.
"""

import atexit
import fcntl
import multiprocessing.process
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, reduction, set_start_method
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from tests.process.ranks import SERVER

from lockstep.launch import functions, script_entry, scripts, template

_FREE_DESCRIPTORS = 400
"""From here on a process of the server has no descriptor open."""


@dataclass(frozen=True)
class _Program:
    """What a process runs, and with what."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str
    mask: frozenset[signal.Signals]
    leads_session: bool
    before: Callable[[], None] | None
    """What to call first, of a module: `preexec_fn`."""
    forks_scripts: bool
    """Whether what `lockstep run` starts is forked, if it is a script of Python."""


class _ForkingPopen(subprocess.Popen[Any]):
    """A Popen that forks in place of starting a program; each kind says how."""

    forks_scripts = False

    def _start(self, program: _Program, descriptors: Mapping[int, int]) -> int:
        raise NotImplementedError

    # Of `subprocess.Popen`, which calls it with pipes that it has made; -1 for none.
    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: Sequence[int],
        cwd: Any,
        env: Any,
        startupinfo: Any,
        creationflags: int,
        shell: bool,
        *pipes_and_rest: Any,
    ) -> None:
        stdin, _, _, stdout, _, stderr = pipes = pipes_and_rest[:6]
        start_new_session = pipes_and_rest[11]
        assert not shell
        program = _Program(
            command=tuple(map(str, args)),
            environment=dict(os.environ if env is None else env),
            folder=os.path.abspath(cwd or "."),  # noqa: PTH100 - of a str or a path
            mask=frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            leads_session=start_new_session,
            before=preexec_fn,
            forks_scripts=self.forks_scripts,
        )
        streams = {0: stdin} if stdin >= 0 else {}
        streams |= {1: 1 if stdout < 0 else stdout, 2: 2 if stderr < 0 else stderr}
        try:
            self.pid = self._start(program, streams | {number: number for number in pass_fds})
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class Popen(_ForkingPopen):
    """A process of the server, for a command of Python or `lockstep`."""

    def _start(self, program: _Program, descriptors: Mapping[int, int]) -> int:
        sent = {number: _Descriptor(source) for number, source in descriptors.items()}
        ours, theirs = SERVER.Pipe()
        with template.adopting_orphans():
            first = SERVER.Process(target=_fork_again, args=(theirs, program, sent))
            first.start()
            theirs.close()
            pid: int = ours.recv()
            first.join()
        first.close()
        ours.close()
        return pid


class PopenWithScripts(Popen):
    """The same, and what `lockstep run` starts there is forked too, without what depends on the start of a script:
    the drop-in, the store of a single worker, and what Lockstep does while it is imported, as for the place of a crash.
    """

    forks_scripts = True


class _PopenHere(_ForkingPopen):
    def _start(self, program: _Program, descriptors: Mapping[int, int]) -> int:
        pid = os.fork()
        if not pid:
            _become(program, descriptors)
        return pid


def _popen_of_run(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start what `lockstep run` starts: a worker that is a script of Python, or another program, as its guardian."""
    is_forked = script_entry.__file__ in command and sys.executable in command[1:]
    return (_PopenHere if is_forked else subprocess.Popen)(command, **options)


def run(command: Sequence[str | Path], timeout: float = 100.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Do what `subprocess.run` does with `capture_output` and `text`."""
    with Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


class _Descriptor:
    """A descriptor that is sent to a process of the server; what arrives there is its number there."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return _received, (reduction.DupFd(self._number),)


def _received(descriptor: Any) -> int:
    number: int = descriptor.detach()
    return number


def _fork_again(line: Connection, program: _Program, descriptors: Mapping[int, int]) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, program.mask)
    first = os.getpid()
    pid = os.fork()
    if pid:
        line.send(pid)
        os._exit(0)
    while os.getppid() == first:
        time.sleep(0.0005)
    _become(program, descriptors)


def _become(program: _Program, descriptors: Mapping[int, int]) -> NoReturn:
    """Run the program in this process, and end."""
    code: Any = 1
    try:
        if program.leads_session:
            os.setsid()
        _place(descriptors)
        vars(weakref.finalize)["_registry"].clear()  # or this process removes what the one that forked it still uses
        os.environ.clear()
        os.environ.update(program.environment)
        os.chdir(program.folder)
        for option in program.environment.get("PYTHONWARNINGS", "").split(","):
            if option:
                warnings._setoption(option)  # type: ignore[attr-defined]
        if program.before is not None:
            program.before()
        _forget_signal_handlers()
        set_start_method(None, force=True)
        torch.set_num_threads(int(program.environment.get("OMP_NUM_THREADS") or torch.get_num_threads()))
        vars(multiprocessing.process)["_parent_process"] = None
        buffering = 1 if "PYTHONUNBUFFERED" in program.environment else -1
        sys.stdout = sys.__stdout__ = _writer(1, buffering=buffering)  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = _writer(2, buffering=1, errors="backslashreplace")  # type: ignore[misc]
        for module in (functions, template):
            vars(module)["subprocess"] = SimpleNamespace(**vars(subprocess) | {"Popen": _PopenHere})
        if program.forks_scripts:
            vars(scripts)["subprocess"] = SimpleNamespace(**vars(subprocess) | {"Popen": _popen_of_run})
            vars(script_entry)["os"] = SimpleNamespace(**vars(os) | {"execv": _go_on_as})
        code = _exit_code(_program(program.command))
    finally:
        os._exit(code)


def _forget_signal_handlers() -> None:
    """Do to signals what `exec` does to them, and then Python."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _go_on_as(_path: str, command: Sequence[str]) -> NoReturn:
    """Do what `os.execv` does, for a script of Python."""
    os._exit(_exit_code(_program(command)))


def _writer(descriptor: int, **options: Any) -> Any:
    return open(descriptor, "w", closefd=False, **options)


def _place(descriptors: Mapping[int, int]) -> None:
    """Give the descriptors their numbers, and close all others."""
    sources = {number: fcntl.fcntl(given, fcntl.F_DUPFD, _FREE_DESCRIPTORS) for number, given in descriptors.items()}
    os.closerange(0, _FREE_DESCRIPTORS)
    os.open(os.devnull, os.O_RDONLY)
    for number, source in sources.items():
        os.dup2(source, number)
        os.close(source)


def _program(command: Sequence[str]) -> Callable[[], object]:
    """Set the arguments and the search path as the command's interpreter does; return what to call."""
    name, *arguments = command
    if Path(name).name == "lockstep":
        from lockstep_command import main

        sys.argv = [name, *arguments]
        return main
    while arguments[0] in {"-P", "-u"}:
        del arguments[0]
    if script_entry.__file__ in arguments:
        sys.argv = arguments[arguments.index(script_entry.__file__) :]
        return script_entry.main
    kind, *rest = arguments
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        main_module = sys.modules["__main__"] = ModuleType("__main__")
        compiled = compile(rest[0], "<string>", "exec")
        return lambda: exec(compiled, vars(main_module))
    if kind == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = rest
        return lambda: runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    sys.path.insert(0, str(Path(kind).resolve().parent))
    sys.argv = arguments
    return lambda: runpy.run_path(kind, run_name="__main__")


def _exit_code(program: Callable[[], object]) -> int:
    """Call a program and end as an interpreter does; return its exit code."""
    code: Any = 0
    try:
        program()
    except SystemExit as request:
        code = request.code or 0
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    number: int = code
    return number


@pytest.fixture(scope="module")
def warm_workers() -> Iterator[None]:
    """Let `ls.launch`, called in the tests of the file, start workers that need not import torch."""
    forkserver.ensure_running()  # now, with no signal blocked
    with pytest.MonkeyPatch.context() as patch:
        for module in (functions, template):
            patch.setattr(module, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Popen}))
        yield
