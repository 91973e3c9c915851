"""Connecting Gloo in time."""

from datetime import timedelta

import pytest
from torch.distributed import HashStore

from lockstep.comm.deadline import Deadline
from lockstep.comm.gloo import gloo_connected_in_time
from lockstep.comm.hosts import GroupMembers
from lockstep.errors import GroupError


def test_the_error_names_missing_ranks_of_a_subgroup_by_their_ranks_in_the_default_group() -> None:
    deadline = Deadline.after(timedelta(0))
    with (
        pytest.raises(GroupError, match=r"^Rank 6 of 2 did not connect"),
        gloo_connected_in_time(HashStore(), 0, GroupMembers(names=(4, 6)), deadline),
    ):
        pytest.fail("rank 6 did not connect")
