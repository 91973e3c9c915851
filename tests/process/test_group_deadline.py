"""Set-up has one limit for all its steps: a rank that stops halfway does not make the others wait for a second one."""

import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from tests.process.ranks import Rank, Ranks
from torch.distributed import PrefixStore

import lockstep as ls
from lockstep.comm.bootstrap.handshake import Announcement, run_handshake
from lockstep.errors import GroupError

SIZE = 3
LIMIT = timedelta(seconds=9)
LATE_SECONDS = 8.0
MARGIN_SECONDS = 7.0
"""Less than LATE_SECONDS, by which the limit was exceeded; the rest is for a machine that is busy."""
STEPS = ("handshake", "before Gloo connects")


def set_up_with_one_that_stops(rank: Rank, backend: str, last_step: str) -> tuple[float, str]:
    """Set up a group, of which the last rank comes late and goes no further than to a step; say how long it took."""
    if rank.number == SIZE - 1:
        time.sleep(LATE_SECONDS)  # the fault: most of the limit is used when it comes
        stop_after(rank, backend, STEPS.index(last_step))
        return 0.0, ""
    start = time.monotonic()
    with pytest.raises(GroupError) as caught:
        ls.init_process_group(backend, store=rank.store(), rank=rank.number, world_size=SIZE, timeout=LIMIT)
    return time.monotonic() - start, str(caught.value)


def stop_after(rank: Rank, backend: str, num_steps: int) -> None:
    store = rank.store()
    me = Announcement(rank=rank.number, world_size=SIZE, backend=backend, process="the late one", token="late")
    generation = run_handshake(store, me, timeout=LIMIT)
    own = PrefixStore(f"lockstep/{generation}/group", store)
    if num_steps > 0:
        own.set(f"gloo/is_late/{rank.number}", "False")
    rank.hear()


def test_a_rank_that_stops_halfway_does_not_double_the_limit(tmp_path: Path) -> None:
    # Each step had the whole limit for itself: a rank that came late and then stopped cost the others up to thrice as
    # long as they had asked for.
    stopped = [(backend, step) for backend in ("shm", "gloo") for step in STEPS[: 1 + (backend == "gloo")]]
    with ExitStack() as stack:
        groups = [Ranks(tmp_path, SIZE, set_up_with_one_that_stops, *how) for how in stopped]  # all wait at once
        for ranks in groups:
            stack.enter_context(ranks)
        for how, ranks in zip(stopped, groups, strict=True):
            for number in range(SIZE - 1):
                seconds, said = ranks.result(number)
                assert LATE_SECONDS < seconds < LIMIT.total_seconds() + MARGIN_SECONDS, how
                assert "9 s" in said, how
            ranks.say(SIZE - 1)
