"""What groups say that they can, and where their ranks are."""

import datetime
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.comm import GroupCapabilities, allocate_buffer, capabilities_of
from lockstep.comm.calls import LONGEST_CALL, describe_call, explain_mismatch
from lockstep.comm.checked import CheckedProcessGroup
from lockstep.comm.collectives import COLLECTIVES, Collective, refuse_one_output_twice
from lockstep.comm.hosts import GroupHosts, host_identity, known_hosts
from lockstep.comm.shm import native
from lockstep.comm.shm.file_layout import PAGE
from lockstep.comm.shm.group import ShmProcessGroup
from lockstep.errors import CollectiveMismatchError

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


def test_libraries_of_two_sources_on_one_host_do_not_share_memory() -> None:
    # Both mapped one file, and each took the words of the other for its own.
    assert f" library {native.load().lockstep_shm_source().decode()}" in host_identity()
    hosts = hosts_of("boot 1 library a", "boot 1 library b")
    assert hosts.is_one_host
    assert hosts.why_not_shared([0, 1]) == "ranks 0 and 1 have versions of lockstep whose shm.c differs"


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


# -- The table of collectives: it knows every collective of torch, and both kinds of groups read it --------------------


BY_NAME = {collective.name: collective for collective in COLLECTIVES}
NOT_IN_THE_TABLE = {"monitored_barrier", "send", "recv", "recv_anysource"}
"""Those that not all ranks make alike."""
ONE, TWO = torch.ones(3), torch.ones(2, dtype=torch.float64)


def describe(name: str, *arguments: Any, **keywords: Any) -> str:
    collective = BY_NAME[name]
    return collective.describe(collective.read(arguments, keywords), global_ranks=(0, 5)).decode()


def test_no_collective_of_torch_is_missing() -> None:
    # A method that is not overridden would go to torch's C++ class, which has no backend for it, or checks nothing.
    words = ("reduce", "gather", "scatter", "alltoall", "all_to_all", "broadcast", "barrier")
    torchs = {name for name in vars(dist.ProcessGroup) if any(word in name for word in words)}
    known = {name for collective in COLLECTIVES for name in collective.methods}
    assert torchs - known - NOT_IN_THE_TABLE == set()
    for group in (ShmProcessGroup, CheckedProcessGroup):
        assert known <= set(vars(group))


@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda collective: collective.name)
def test_torch_has_the_first_name(collective: Collective) -> None:
    if collective.name == "gather_single" and not hasattr(dist, "gather_single"):
        pytest.skip("torch has it from 2.15 on")
    assert hasattr(dist.ProcessGroup, collective.methods[0])
    if not collective.is_coalesced:  # those are never handed to a backend alone
        assert hasattr(dist.ProcessGroupGloo, collective.methods[0])


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("all_reduce", ([ONE],), "all_reduce(sum, float32 [3])"),
        ("all_reduce", (ONE, dist.ReduceOp.MAX), "all_reduce(max, float32 [3])"),
        ("all_reduce_coalesced", ([ONE, TWO],), "all_reduce_coalesced(sum, float32 [3], float64 [2])"),
        ("broadcast", ([ONE],), "broadcast(from rank 0, float32 [3])"),
        ("broadcast", (ONE, 1), "broadcast(from rank 5, float32 [3])"),
        ("broadcast", (ONE, 7), "broadcast(from rank 7, float32 [3])"),
        ("reduce", (ONE, 1, dist.ReduceOp.MIN), "reduce(min, to rank 5, float32 [3])"),
        ("all_gather", ([[ONE, ONE]], [TWO]), "all_gather(float64 [2])"),
        ("all_gather_coalesced", ([[ONE, TWO]] * 2, [ONE, TWO]), "all_gather_coalesced(float32 [3], float64 [2])"),
        ("reduce_scatter", ([TWO], [[ONE, ONE]]), "reduce_scatter(sum, float64 [2])"),
        ("all_to_all", ([ONE, ONE], [TWO, TWO]), "all_to_all(float64 [])"),
        ("all_to_all_single", (ONE, torch.ones(2, 3, 4), [], []), "all_to_all_single(rows of [3, 4], float32 [])"),
        ("gather", ([[ONE, ONE]], [ONE], 1), "gather(to rank 5, float32 [3])"),
        ("gather_single", (torch.empty(0), ONE, 1), "gather_single(to rank 5, float32 [3])"),
        ("scatter", ([TWO], [[TWO, TWO]]), "scatter(from rank 0, float64 [2])"),
        ("barrier", (), "barrier()"),
        ("barrier", (dist.BarrierOptions(),), "barrier()"),
    ],
)
def test_a_call_is_described_by_what_must_agree(name: str, arguments: Any, said: str) -> None:
    assert describe(name, *arguments) == said


def test_options_say_operation_root_and_whether_the_caller_waits() -> None:
    options: Any = dist.ReduceOptions()
    options.reduceOp, options.rootRank, options.asyncOp = dist.ReduceOp.PRODUCT, 1, False
    call = BY_NAME["reduce"].read(([ONE], options), {})
    assert (call.op, call.root, call.is_async) == (dist.ReduceOp.PRODUCT, 1, False)
    assert BY_NAME["barrier"].read((), {}).is_async


def test_arguments_may_be_given_by_name() -> None:
    options = dist.BarrierOptions()
    options.timeout = datetime.timedelta(seconds=3)
    assert BY_NAME["barrier"].read((), {"opts": options}).options == [options]
    call = BY_NAME["all_gather_into_tensor"].read((TWO,), {"input": ONE})
    assert call.outputs == [TWO]
    assert call.inputs == [ONE]


@pytest.mark.parametrize(
    ("arguments", "keywords", "said"),
    [
        ((TWO,), {}, r"missing arguments \['input'\]"),
        ((TWO, ONE), {"root": 1}, r"unknown arguments \['root'\]"),
        # These were accepted, and had no effect.
        ((TWO, ONE, "max"), {}, r"got \['max'\] after output, input, expected one options object"),
        ((TWO, ONE, dist.ReduceScatterOptions(), 1), {}, "expected one options object"),
        ((TWO, ONE, 1, None, None, None), {}, "expected one options object"),
    ],
)
def test_arguments_that_no_such_method_has_are_refused(arguments: Any, keywords: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        BY_NAME["all_gather_into_tensor"].read(arguments, keywords)


def test_an_argument_that_is_none_keeps_its_place() -> None:
    # The options came where the sizes belong.
    options: Any = dist.AllToAllOptions()
    call = BY_NAME["all_to_all_single"].read(
        (ONE, TWO), {"output_split_sizes": None, "input_split_sizes": None, "opts": options}
    )
    assert [*call.arguments[2:]] == [None, None, options]
    assert BY_NAME["broadcast"].read(([ONE], 1, None), {}).options == [1]
    timeout = datetime.timedelta(seconds=1)
    assert [*BY_NAME["all_reduce"].read(([ONE], None, timeout), {}).arguments[1:]] == [None, timeout]


def test_one_tensor_for_the_outputs_of_several_ranks_is_refused() -> None:
    # `[torch.zeros(3)] * world_size`: only what the last rank had sent was left.
    gather = BY_NAME["all_gather"]
    refuse_one_output_twice(gather.read(([[ONE, ONE.clone()]], [ONE]), {}))
    with pytest.raises(ValueError, match=r"all_gather: .* Make a tensor for each rank"):
        refuse_one_output_twice(gather.read(([[ONE] * 2], [ONE]), {}))
    refuse_one_output_twice(BY_NAME["all_reduce_coalesced"].read(([ONE, ONE],), {}))  # in place: nothing is lost


# -- What is compared between ranks, and what they are told when it differs --------------------------------------------


PAIR = ((torch.float32, torch.Size([2, 3])),)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (describe_call("all_reduce", PAIR, "sum"), b"all_reduce(sum, float32 [2, 3])"),
        (describe_call("all_gather", PAIR), b"all_gather(float32 [2, 3])"),
        (describe_call("barrier", ()), b"barrier()"),
        (
            describe_call("broadcast", ((torch.bool, torch.Size([])),), "from rank 1"),
            b"broadcast(from rank 1, bool [])",
        ),
        (describe_call("all_reduce_coalesced", PAIR * 2), b"all_reduce_coalesced(float32 [2, 3], float32 [2, 3])"),
    ],
)
def test_a_call_is_described_in_one_line(call: bytes, text: bytes) -> None:
    assert call == text


def test_a_long_call_is_cut_and_still_compared_whole() -> None:
    many = PAIR * 200
    last_differs = (*many[:-1], (torch.float32, torch.Size([2, 4])))
    calls = {describe_call("all_reduce_coalesced", tensors) for tensors in (many, last_differs)}
    assert len(calls) == 2
    for call in calls:
        assert len(call) <= LONGEST_CALL
        assert b"200 tensors, digest " in call
        assert call.endswith(b")")
    longest = describe_call("operation" * 5, many, "detail" * 100)
    assert len(longest) <= LONGEST_CALL


def test_the_longest_call_fits_its_page() -> None:
    assert 12 + LONGEST_CALL <= PAGE


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ({0: b"a()", 1: b"b()"}, "rank 0 calls a(); rank 1 calls b()."),
        ({0: b"a()", 1: b"b()", 2: b"a()"}, "ranks 0 and 2 call a(); rank 1 calls b()."),
        ({3: b"b()", 2: b"b()", 1: b"b()", 0: b"a()"}, "rank 0 calls a(); ranks 1, 2 and 3 call b()."),
        ({0: b"a()", 1: b"b()", 2: b"c()"}, "rank 0 calls a(); rank 1 calls b(); rank 2 calls c()."),
        ({0: b"\xff", 1: b"b()"}, "rank 0 calls \ufffd; rank 1 calls b()."),
    ],
)
def test_a_mismatch_names_every_call_and_who_makes_it(calls: dict[int, bytes], said: str) -> None:
    error = explain_mismatch(calls)
    assert isinstance(error, CollectiveMismatchError)
    assert f"do not make the same call: {said}" in str(error)
    assert "Every rank must make the same calls in the same order" in str(error)
