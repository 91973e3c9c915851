"""Cutting output into lines."""

import fcntl
import os
import resource

import pytest

from lockstep.launch.output import MAX_LINE_BYTES, PROGRESS_SECONDS, TAIL_BYTES, LineCutter, Tail, TracebacksOnce
from lockstep.launch.signals import wait_to_read, wait_to_write


def cut(*chunks: bytes, prefix: bytes = b"> ") -> bytes:
    cutter = LineCutter(prefix)
    return b"".join(cutter.feed(chunk, 0.0) for chunk in chunks) + cutter.finish()


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_are_whole_however_they_arrive(size: int) -> None:
    text = b"one\n\ntwo \xff\xfe not text\r\nthree"
    assert (
        cut(*(text[at : at + size] for at in range(0, len(text), size)))
        == b"> one\n> \n> two \xff\xfe not text\n> three\n"
    )


def test_nothing_is_shown_before_its_line_is_complete() -> None:
    cutter = LineCutter(b"")
    assert cutter.feed(b"half", 0.0) == b""
    assert cutter.feed(b" and half\nnext", 0.0) == b"half and half\n"
    assert cutter.finish() == b"next\n"
    assert cutter.finish() == b""


def test_a_progress_bar_is_shown_now_and_then_and_at_its_end() -> None:
    cutter = LineCutter(b"> ")
    shown = b"".join(cutter.feed(b"\r%3d%%" % percent, percent * PROGRESS_SECONDS / 10) for percent in range(100))
    assert shown.splitlines()[:2] == [b">   0%", b">  10%"]
    assert len(shown.splitlines()) == 10
    assert cutter.feed(b"\r100%\n", 10.0 * PROGRESS_SECONDS).endswith(b"> 100%\n")


def test_a_bar_that_ends_its_updates_with_a_carriage_return_keeps_the_last() -> None:
    assert cut(b"1%\r", b"2%\r", b"done\r").splitlines()[-1] == b"> done"


def test_an_endless_line_goes_out_in_parts() -> None:
    cutter = LineCutter(b"> ")
    chunk = b"x" * (1 << 16)
    out = b"".join(cutter.feed(chunk, 0.0) for _ in range(40)) + cutter.finish()
    assert max(map(len, out.splitlines())) <= MAX_LINE_BYTES + len(chunk) + 2
    assert out.replace(b"\n", b"").replace(b"> ", b"") == chunk * 40


def test_the_tail_keeps_the_end_and_when_the_last_traceback_began() -> None:
    tail = Tail()
    tail.add(b"a" * 10 * TAIL_BYTES, 1.0)
    tail.add(b"Traceback (most recent", 2.0)
    before = tail.traceback_at
    tail.add(b" call last):\nboom\xff", 3.0)
    tail.add(b" and more", 4.0)
    assert (before, tail.traceback_at) == (None, 3.0)
    assert tail.text().endswith("aTraceback (most recent call last):\nboom\ufffd and more")
    assert len(tail.text()) <= 2 * TAIL_BYTES


# -- Waiting for descriptors -------------------------------------------------------------------------------------------


BEYOND_SELECT = 1024


def test_a_descriptor_may_have_any_number() -> None:
    # Hundreds of workers with log files: select() refused their pipes, and each thread that passed on output died.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard <= BEYOND_SELECT + 1:
        pytest.skip("this system lets nobody have so many descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, BEYOND_SELECT + 2), hard))
    source, written = os.pipe()
    high_source = fcntl.fcntl(source, fcntl.F_DUPFD, BEYOND_SELECT)
    high_written = fcntl.fcntl(written, fcntl.F_DUPFD, BEYOND_SELECT)
    try:
        assert wait_to_read(high_source, seconds=0) == set()
        wait_to_write(high_written)
        os.write(high_written, b".")
        assert wait_to_read(high_source, source) == {high_source, source}
    finally:
        for descriptor in (source, written, high_source, high_written):
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_end_of_a_pipe_is_something_to_read() -> None:
    source, written = os.pipe()
    os.close(written)
    assert wait_to_read(source) == {source}
    os.close(source)


def test_a_traceback_that_another_worker_has_printed_is_one_line() -> None:
    # What all ranks find out together, all of them raise: it was printed once for each.
    printed: dict[bytes, int] = {}
    cutters = [LineCutter(b"", TracebacksOnce(rank, printed)) for rank in range(3)]
    trace = "{0}Traceback (most recent call last):\n{0}  File 'a.py', line 3\n{0}KeyError: {1}\n"
    shown = [
        cutter.feed(f"one\n{trace.format(f'[rank{rank}]: ', rank // 2)}two\n".encode(), 0.0)
        for rank, cutter in enumerate(cutters)
    ]
    assert shown[0].endswith(b"[rank0]: KeyError: 0\ntwo\n")
    assert shown[1] == b"one\nThe same error and traceback as rank 0.\ntwo\n"
    assert shown[2].endswith(b"[rank2]: KeyError: 1\ntwo\n")
    cutters[1].feed(b"Traceback (most recent call last):\n  File", 0.0)
    assert cutters[1].finish() == b"Traceback (most recent call last):\n  File\n"  # of one that was killed
    assert cutters[1].finish() == b""
