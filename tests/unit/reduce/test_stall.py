"""Who says what when a rank waits, with threads for ranks and a store in memory."""

import logging
import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist

from lockstep.errors import UsageError
from lockstep.reduce.stall import StallWatch, where
from lockstep.settings import read_stall_seconds


def on_record(call: Callable[[], object]) -> Callable[[logging.LogRecord], bool]:
    def note(_record: logging.LogRecord) -> bool:
        call()
        return True

    return note


def watch(store: dist.Store, rank: int, waited: Callable[[], float | None], seconds: float = 0.1) -> StallWatch:
    return StallWatch(store, rank, 2, seconds, waited, lambda: f"is at {rank}")


def test_every_rank_says_where_all_of_them_stand(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    both_said = threading.Semaphore(0)
    caplog.handler.addFilter(on_record(both_said.release))
    with caplog.at_level(logging.WARNING, "lockstep"):
        # Half of these seconds are for the answer of the other, which may be slow.
        watches = [watch(store, 0, lambda: 3.0, seconds=3.0), watch(store, 1, lambda: 0.0, seconds=3.0)]
        for _ in watches:
            assert both_said.acquire(timeout=20)
        for each in watches:
            each.close()
    assert len(caplog.messages) == 2  # once each, though the wait goes on
    for said in caplog.messages:
        assert "  rank 0 is at 0\n  rank 1 is at 1\n" in said


def test_a_rank_that_is_gone_is_said_not_to_answer(caplog: pytest.LogCaptureFixture) -> None:
    said = threading.Event()
    caplog.handler.addFilter(on_record(said.set))
    with caplog.at_level(logging.WARNING, "lockstep"):
        alone = watch(dist.HashStore(), 0, lambda: 1.0)
        assert said.wait(20)
        alone.close()
    assert "  rank 1 does not answer\n" in caplog.messages[0]


def test_a_rank_that_has_ended_its_training_has_said_so(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    said = threading.Event()
    caplog.handler.addFilter(on_record(said.set))
    with caplog.at_level(logging.WARNING, "lockstep"):
        watch(store, 1, lambda: 0.0).close()
        alone = watch(store, 0, lambda: 1.0)
        assert said.wait(20)
        alone.close()
    assert "  rank 1 has ended its training\n" in caplog.messages[0]


def test_a_watch_ends_with_its_owner() -> None:
    ended = watch(dist.HashStore(), 0, lambda: None)
    ended._thread.join(20)
    assert not ended._thread.is_alive()


def test_the_users_line_is_found() -> None:
    assert "test_stall.py" in where(threading.get_ident())
    assert where(0) == ""


@pytest.mark.parametrize(("text", "seconds"), [("5", 5.0), ("0", 0.0), ("-1", 0.0), ("0.5", 0.5)])
def test_the_time_is_settable(text: str, seconds: float) -> None:
    assert read_stall_seconds({"LOCKSTEP_STALL_SECONDS": text}) == seconds
    assert read_stall_seconds({}) == 60.0


def test_a_time_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="LOCKSTEP_STALL_SECONDS is 'soon', expected a number"):
        read_stall_seconds({"LOCKSTEP_STALL_SECONDS": "soon"})
