"""Waits for messages of Gloo that can be ended."""

import threading
from typing import Any, cast

import pytest
from torch.distributed import Work

from lockstep.comm.open_calls import InterruptibleWaits
from lockstep.errors import GroupError, PeerLostError


class Message:
    """Ends when it is told to."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.may_end = threading.Event()
        self.is_waited_for = threading.Event()
        self.error = error
        self.thread: Any = None

    def wait(self) -> bool:
        self.thread = threading.current_thread()
        self.is_waited_for.set()
        self.may_end.wait()
        if self.error is not None:
            raise self.error
        return True

    @property
    def as_work(self) -> Work:
        return cast("Work", self)


def test_a_wait_returns_or_raises_what_the_message_does_and_threads_are_used_again() -> None:
    waits, first, second = InterruptibleWaits(), Message(), Message(RuntimeError("Connection reset by peer"))
    first.may_end.set()
    second.may_end.set()
    assert waits.wait(first.as_work)
    with pytest.raises(RuntimeError, match="reset by peer"):
        waits.wait(second.as_work)
    assert first.thread is second.thread is not threading.current_thread()
    waits.end(GroupError("over"))
    first.thread.join(20)
    assert not first.thread.is_alive()


def test_a_wait_ends_though_its_message_never_does() -> None:
    waits, message, caught = InterruptibleWaits(), Message(), []

    def wait() -> None:
        with pytest.raises(PeerLostError) as error:
            waits.wait(message.as_work)
        caught.append(error.value)

    caller = threading.Thread(target=wait)
    caller.start()
    assert message.is_waited_for.wait(20)
    lost = PeerLostError("Rank 1 is lost.", rank=1)
    waits.end(lost)
    caller.join(20)
    assert caught == [lost]
    with pytest.raises(PeerLostError):
        waits.wait(Message().as_work)
    message.may_end.set()
    message.thread.join(20)
    assert not message.thread.is_alive(), "the thread that was left alone ends with the message"
