"""What groups say that they can, and where their ranks are."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.comm import GroupCapabilities, allocate_buffer, capabilities_of
from lockstep.comm.hosts import GroupHosts, host_identity, known_hosts

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    yield
    ls.destroy_process_group()


def make(backend: str, *, check: bool = False) -> dist.ProcessGroup:
    ls.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, check=check)
    group = dist.GroupMember.WORLD
    assert group is not None
    return group


def test_shared_memory_can_do_everything() -> None:
    found = capabilities_of(make("shm"))
    assert found == GroupCapabilities(
        owns_memory=True,
        adds_in_order=True,
        is_host_local=True,
        runs_in_callers_thread=True,
        compares_calls=True,
        reports_exits=True,
    )


def test_a_checked_group_compares_calls_and_reports_exits() -> None:
    found = capabilities_of(make("gloo", check=True))
    assert found == GroupCapabilities(is_host_local=True, compares_calls=True, reports_exits=True)


def test_of_a_group_of_torchs_only_the_hosts_are_known() -> None:
    assert capabilities_of(make("gloo")) == GroupCapabilities(is_host_local=True)


def test_of_a_group_that_torch_made_by_itself_nothing_is_known() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.GroupMember.WORLD
    assert group is not None
    assert known_hosts(group) is None
    assert capabilities_of(group) == GroupCapabilities()


def test_only_a_group_that_owns_memory_is_asked_for_a_buffer() -> None:
    group = make("shm")
    assert allocate_buffer(3, torch.float32, CPU, group).tolist() == [0.0, 0.0, 0.0]
    assert group._memory.locate(allocate_buffer(3, torch.float32, CPU, group)) >= 0  # type: ignore[attr-defined]
    ls.destroy_process_group()
    assert allocate_buffer(3, torch.float32, CPU, make("gloo")).tolist() == [0.0, 0.0, 0.0]


# -- Hosts -------------------------------------------------------------------------------------------------------------


def hosts_of(*identities: str, names: str = "abcd") -> GroupHosts:
    return GroupHosts(identities=identities, host_names=tuple(names[: len(identities)]))


def test_ranks_are_grouped_by_host_in_the_order_of_the_first() -> None:
    hosts = hosts_of("boot 2", "boot 1", "boot 2")
    assert hosts.hosts == ((0, 2), (1,))
    assert hosts.local_ranks(2) == (0, 2)
    assert not hosts.is_one_host
    assert hosts.why_not_shared([4, 5, 6]) == (
        "ranks 4 and 5 are not on one host, or not in one container, or not of one user"
    )


def test_a_subgroup_knows_its_hosts_from_the_default_group() -> None:
    hosts = hosts_of("boot 2", "boot 1", "boot 2").of_ranks([2, 0])
    assert hosts.host_names == ("c", "a")
    assert hosts.is_one_host
    assert hosts.why_not_shared([2, 0]) == ""


def test_ranks_that_cannot_share_memory_are_on_one_host_by_its_name() -> None:
    hosts = hosts_of("alone, no Linux", "alone, no Linux", names="aab")
    assert hosts.is_one_host
    assert hosts.why_not_shared([0, 1]) == "rank 0 cannot share memory (no Linux)"
    assert not hosts_of("alone, no Linux", "alone, no Linux").is_one_host


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_the_error_for_a_group_of_before_says_where_to_make_it_again(backend: str) -> None:
    make(backend, check=True)
    old = dist.new_group([0])
    ls.destroy_process_group()
    make(backend, check=True)
    with pytest.raises(ValueError, match=r"that was destroyed, as all groups are .* trainer\.on_new_world"):
        dist.all_reduce(torch.ones(2), group=old)


# -- Who may share memory with whom ------------------------------------------------------------------------------------


def test_processes_of_one_host_have_one_identity() -> None:
    mine = host_identity()
    assert mine == host_identity()
    assert mine.startswith("boot ")
    assert f"uid {os.geteuid()}" in mine
    for space in ("pid:[", "net:[", "user:["):
        assert space in mine


def test_another_user_has_another_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = host_identity()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert host_identity() != mine


def test_without_linux_a_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert host_identity().startswith("alone, shared memory without names needs Linux, not darwin")


@pytest.mark.parametrize("call", ["memfd_create", "pidfd_open"])
def test_a_kernel_that_lacks_a_call_is_alone(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, call, refuse)
    assert host_identity().startswith("alone, this kernel")
    assert "Operation not permitted" in host_identity()
