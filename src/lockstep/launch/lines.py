"""Cutting a worker's output into lines, and keeping the end of it. Pure: bytes and times come in."""

from typing import final

MAX_LINE_BYTES = 1 << 20
"""A longer line is printed in parts, so that it does not fill the memory."""
PROGRESS_SECONDS = 1.0
"""How often a progress bar, which overwrites its line, is printed."""
TAIL_BYTES = 1 << 16
_TRACEBACK = b"Traceback (most recent call last):"


@final
class LineCutter:
    """Turns chunks of bytes into whole lines with a prefix.

    A carriage return makes a terminal overwrite the line, as a progress bar does. Of the versions of such a line the
    last one is printed, and before that the current one every `PROGRESS_SECONDS`.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._pending = b""
        self._shown_at = float("-inf")

    def feed(self, chunk: bytes, now: float) -> bytes:
        """Return the lines that this chunk completes."""
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
        return b"".join(self._prefix + line + b"\n" for line in done)

    def finish(self) -> bytes:
        """Return what is left, as a line."""
        rest, self._pending = _last_version(self._pending), b""
        return self._prefix + rest + b"\n" if rest else b""


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
        """Return the kept end as text; bytes that are not UTF-8 are replaced."""
        return self._bytes.decode(errors="replace")


def _last_version(line: bytes) -> bytes:
    """Return about what a terminal shows of a line with carriage returns."""
    return next((version for version in reversed(line.split(b"\r")) if version), b"")
