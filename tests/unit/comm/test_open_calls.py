"""The calls of all groups of a process are ended together."""

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from torch.distributed import Work

from lockstep.comm.open_calls import InterruptibleWaits, OpenGroups
from lockstep.errors import GroupError, PeerLostError


class Group:
    """Notes with which error its calls were ended."""

    def __init__(self) -> None:
        self.errors: list[GroupError] = []

    def end_calls(self, error: GroupError) -> None:
        self.errors.append(error)


def test_groups_made_before_and_after_an_announcement_are_ended_until_renewed() -> None:
    groups, before, after, later = OpenGroups(), Group(), Group(), Group()
    groups.add(before)
    lost = GroupError("Rank 1 is lost.")
    groups.end_calls(lost)
    groups.add(after)
    groups.renew()
    groups.add(later)
    assert before.errors == after.errors == [lost]
    assert later.errors == []


def test_a_group_is_not_kept_and_a_forked_child_has_groups_of_its_own() -> None:
    # A worker may be forked from a process that has imported this already: then its groups were never ended, and a rank
    # could wait for a message of a lost one until the timeout.
    groups, group = OpenGroups(), Group()
    groups.add(Group())
    gc.collect()
    groups.add(group)
    child = os.fork()
    if child == 0:
        own = Group()
        groups.add(own)
        groups.end_calls(GroupError("in the child"))
        os._exit(10 * len(group.errors) + len(own.errors))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


# -- Waits for messages of Gloo that can be ended ----------------------------------------------------------------------


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
    waits, message = InterruptibleWaits(), Message()
    lost = PeerLostError("Rank 1 is lost.", rank=1)
    with ThreadPoolExecutor() as pool:
        calling = pool.submit(waits.wait, message.as_work)
        assert message.is_waited_for.wait(20)
        waits.end(lost)
        assert calling.exception(20) is lost
    with pytest.raises(PeerLostError):
        waits.wait(Message().as_work)
    message.may_end.set()
    message.thread.join(20)
    assert not message.thread.is_alive(), "the thread that was left alone ends with the message"
