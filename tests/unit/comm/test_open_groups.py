"""The calls of all groups of a process are ended together."""

import gc
import os

from lockstep.comm.open_calls import OpenGroups
from lockstep.errors import GroupError


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
