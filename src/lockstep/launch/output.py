"""Forwarding what workers write: from their pipes to the terminal, whole lines at a time, and to log files.

Each pipe has a thread. A blocked terminal blocks the workers that write, as it would without a launcher. It does not
block the launcher, which must react to signals and failures. No buffer grows: output that cannot be written yet stays
in the pipe. `LineCutter` and `Tail` are pure: bytes and times come in.
"""

import contextlib
import errno
import os
import re
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, final

from lockstep.errors import UsageError
from lockstep.launch.signals import wait_to_read, wait_to_write

Stream = Literal["stdout", "stderr"]
MAX_LINE_BYTES = 1 << 20
"""A longer line is printed in parts, so that it does not fill the memory."""
PROGRESS_SECONDS = 1.0
"""How often a progress bar, which overwrites its line, is printed."""
TAIL_BYTES = 1 << 16
_TRACEBACK = b"Traceback (most recent call last):"
_TORCHS_RANK = re.compile(rb"^\[rank\d+\]: ")
_MOST_TRACEBACKS = 64
_CHUNK_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20
"""At least the capacity of a pipe. If more comes after all workers have ended, another process has written it."""
_FULL = {errno.ENOSPC, errno.EDQUOT}
"""A full disk, to which the user has redirected the output, is no reason to stop the workers."""
_TARGETS: dict[Stream, int] = {"stdout": 1, "stderr": 2}


@final
class LineCutter:
    """Turns chunks of bytes into whole lines with a prefix.

    A carriage return makes a terminal overwrite the line, as a progress bar does. Of the versions of such a line the
    last one is printed, and before that the current one every `PROGRESS_SECONDS`.
    """

    def __init__(self, prefix: bytes, once: "TracebacksOnce | None" = None) -> None:
        self._prefix = prefix
        self._once = once
        self._pending = b""
        self._shown_at = float("-inf")

    def feed(self, chunk: bytes, now: float) -> bytes:
        *lines, rest = (self._pending + chunk).split(b"\n")
        done = [_last_version(line) for line in lines]
        # A carriage return at the very end may be the first half of a line break.
        versions, _, last = rest[:-1].rpartition(b"\r")
        if versions:
            rest = last + rest[-1:]
            if (version := _last_version(versions)) and now - self._shown_at >= PROGRESS_SECONDS:
                self._shown_at = now
                done.append(version)
        if len(rest) > MAX_LINE_BYTES:
            done.append(rest)
            rest = b""
        self._pending = rest
        return self._join(done if self._once is None else self._once.pass_on(done))

    def finish(self) -> bytes:
        rest, self._pending = _last_version(self._pending), b""
        held = [] if self._once is None else self._once.finish()
        return self._join([*held, rest] if rest else held)

    def _join(self, lines: list[bytes]) -> bytes:
        return b"".join(self._prefix + line + b"\n" for line in lines)


@final
class TracebacksOnce:
    """Makes one line of a traceback that another worker has printed: all ranks raise what all have found."""

    def __init__(self, rank: int, printed: dict[bytes, int]) -> None:
        self._rank = rank
        self._printed = printed
        self._held: list[bytes] = []

    def pass_on(self, lines: list[bytes]) -> list[bytes]:
        passed: list[bytes] = []
        for line in lines:
            plain = _TORCHS_RANK.sub(b"", line)
            if plain != _TRACEBACK and not self._held:
                passed.append(line)
                continue
            self._held.append(line)
            if plain != _TRACEBACK and not plain.startswith(b" "):  # the error: the last line of a traceback
                passed += self.finish()
        return passed

    def finish(self) -> list[bytes]:
        held, self._held = self._held, []
        if not held:
            return []
        if len(self._printed) > _MOST_TRACEBACKS:
            self._printed.clear()
        text = b"\n".join(_TORCHS_RANK.sub(b"", line) for line in held)
        first = self._printed.setdefault(text, self._rank)
        return held if first == self._rank else [b"The same error and traceback as rank %d." % first]


@final
class Tail:
    """The end of what a worker wrote, and when its last traceback began."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self.traceback_at: float | None = None

    def add(self, chunk: bytes, now: float) -> None:
        known = max(len(self._bytes) - len(_TRACEBACK) + 1, 0)
        self._bytes += chunk
        if self._bytes.rfind(_TRACEBACK, known) >= 0:
            self.traceback_at = now
        if len(self._bytes) > 2 * TAIL_BYTES:
            del self._bytes[:-TAIL_BYTES]

    def text(self) -> str:
        return self._bytes.decode(errors="replace")


def _last_version(line: bytes) -> bytes:
    """Return about what a terminal shows of a line with carriage returns."""
    return next((version for version in reversed(line.split(b"\r")) if version), b"")


@final
class Relays:
    def __init__(self, *, has_prefix: bool, cuts_lines: bool, log_dir: Path | None) -> None:
        self._has_prefix = has_prefix
        self._cuts_lines = cuts_lines
        self._log_dir = log_dir
        self._terminal = threading.Lock()
        self._printed: dict[bytes, int] = {}
        self._threads: list[threading.Thread] = []
        # The writing end is closed when all workers have ended. The relays do not wait for the end of their pipes,
        # because a process that a worker has started may still hold them open.
        self._over, self._over_writer = os.pipe()

    def open(self, rank: int, stream: Stream) -> tuple[int, Tail]:
        """Return a new pipe's writing end, which the caller closes once the worker has it, and the output's tail."""
        source, written = os.pipe()
        tail = Tail()
        prefix = f"[rank {rank}] ".encode() if self._has_prefix else b""
        relay = _Relay(
            source=source,
            over=self._over,
            target=_TARGETS[stream],
            terminal=self._terminal,
            cutter=LineCutter(prefix, TracebacksOnce(rank, self._printed)) if self._cuts_lines else None,
            log=None if self._log_dir is None else _open_log(log_path(self._log_dir, rank, stream)),
            tail=tail,
        )
        thread = threading.Thread(target=relay.run, name=f"output of worker {rank}", daemon=True)
        thread.start()
        self._threads.append(thread)
        return written, tail

    def finish(self) -> None:
        if self._over_writer >= 0:
            os.close(self._over_writer)
            self._over_writer = -1

    def join(self, seconds: float) -> bool:
        """Wait up to `seconds` for each relay; return whether all output is written."""
        for thread in self._threads:
            thread.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)


@final
@dataclass(slots=True, kw_only=True)
class _Relay:
    source: int
    over: int
    target: int
    terminal: threading.Lock
    cutter: LineCutter | None
    log: BinaryIO | None
    tail: Tail
    is_shown: bool = True
    was_full: bool = False
    num_left_bytes: int = _PIPE_BYTES

    def run(self) -> None:
        """Forward until the pipe ends, or until all workers have ended and it is empty."""
        try:
            while chunk := self._read():
                now = time.monotonic()
                self.tail.add(chunk, now)
                self._write_log(chunk)
                self._show(chunk if self.cutter is None else self.cutter.feed(chunk, now))
                if not self.is_shown and self.log is None:
                    return  # the terminal is closed, so the worker's pipe is closed too, as without a launcher
            if self.cutter is not None:
                self._show(self.cutter.finish())
        finally:
            os.close(self.source)
            if self.log is not None:
                self.log.close()

    def _read(self) -> bytes:
        ready = wait_to_read(self.source, self.over)
        chunk = os.read(self.source, _CHUNK_BYTES) if self.source in ready else b""
        if self.over in ready:
            # A process that a worker has started may still write.
            self.num_left_bytes -= len(chunk)
        return chunk if self.num_left_bytes >= 0 else b""

    def _write_log(self, chunk: bytes) -> None:
        if self.log is None:
            return
        try:
            write_all(self.log.fileno(), chunk)
        except OSError as error:  # a full disk is no reason to stop the worker
            self._show(f"warning: writing to {self.log.name} has failed: {error.strerror}.\n".encode())
            self.log.close()
            self.log = None

    def _show(self, text: bytes) -> None:
        if not self.is_shown or not text:
            return
        with self.terminal:
            try:
                write_all(self.target, text)
            except OSError as error:
                if error.errno not in _FULL:  # closed at the other end, as by `| head`
                    self.is_shown = False
                elif not self.was_full:
                    self.was_full = True
                    print_message(f"warning: some of the workers' output is lost: {error.strerror}.")


def write_all(descriptor: int, text: bytes) -> None:
    """Write everything, also if another process has made the descriptor non-blocking."""
    rest = memoryview(text)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            wait_to_write(descriptor)


def log_path(directory: Path, rank: int, stream: Stream) -> Path:
    return directory / f"rank-{rank}.{stream}.log"


def make_log_directory(directory: Path) -> None:
    """Make the directory for log files. It may exist if it has no log files."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        found = sorted(directory.glob("rank-*.log"))
    except OSError as error:
        raise UsageError(
            f"The log directory {directory} cannot be created: {error.strerror}. Give another one. (LS122)"
        ) from error
    if found:
        raise _logs_of_another(found[0])
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError(f"The log directory {directory} cannot be written to. Give another one. (LS122)")


def _open_log(path: Path) -> BinaryIO:
    try:
        return path.open("xb", buffering=0)
    except FileExistsError as error:
        raise _logs_of_another(path) from error


def _logs_of_another(path: Path) -> UsageError:
    return UsageError(
        f"The log directory {path.parent} holds the logs of another launch ({path.name}), which are not overwritten. "
        "Give another directory, or remove them. (LS122)"
    )


def print_message(message: str) -> None:
    """Write a message to stderr; do nothing if the terminal has been closed."""
    with contextlib.suppress(OSError):
        write_all(_TARGETS["stderr"], f"{message}\n".encode(errors="replace"))


def flush_own_output() -> None:
    """Flush this process' buffers before workers write to the same terminal."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
