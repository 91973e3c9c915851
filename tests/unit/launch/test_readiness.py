"""Waiting for descriptors."""

import fcntl
import os
import resource

import pytest

from lockstep.launch.signals import wait_to_read, wait_to_write

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
