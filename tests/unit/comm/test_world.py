"""A worker that is alone."""

import gc
import weakref
from collections.abc import Callable

import pytest

from lockstep.comm import current_world


class Held:
    """Something that a frame holds."""


def make_failing(held: Held) -> Callable[[], None]:
    def fail() -> None:
        raise ValueError(f"no {held}")

    return fail


def test_an_error_of_rank_0_keeps_nothing_alive() -> None:
    # Its traceback had the frame that held it: what the frames hold stayed until a garbage collection.
    held = Held()
    found = weakref.ref(held)

    call = make_failing(held)
    gc.disable()
    try:
        with pytest.raises(ValueError, match="no "):
            current_world().from_first(call)
        del held, call
        assert found() is None
    finally:
        gc.enable()
