"""What the template changes in the process that launches."""

import ctypes
import sys

import pytest

from lockstep.launch.template import adopting_orphans

SET, GET = 36, 37

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked on Linux alone")


def is_adopting() -> bool:
    found = ctypes.c_int()
    assert ctypes.CDLL(None).prctl(GET, ctypes.byref(found), 0, 0, 0) == 0
    return bool(found.value)


@pytest.mark.parametrize("before", [False, True])
def test_a_process_adopts_orphans_afterwards_as_it_did_before(before: bool) -> None:
    # A program that supervises others, and adopts what they leave, did so no more after a launch.
    was_adopting = is_adopting()
    try:
        ctypes.CDLL(None).prctl(SET, int(before), 0, 0, 0)
        with adopting_orphans():
            assert is_adopting()
        assert is_adopting() is before
    finally:
        ctypes.CDLL(None).prctl(SET, int(was_adopting), 0, 0, 0)
