"""Which backends carry the tensors of accelerators, and which of their calls are compared."""

import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.comm.bootstrap import process_group
from lockstep.comm.bootstrap.process_group import backend_on_hosts, choose_backend
from lockstep.comm.checked import CheckedProcessGroup
from lockstep.comm.hosts import GroupHosts, say_not_shared
from lockstep.comm.nccl_defects import DEFECTS, explain_defects
from lockstep.comm.shm.group import ShmProcessGroup
from lockstep.comm.shm.work import CallRunner

CALLS: list[tuple[str, Any]] = []
ONE_HOST = GroupHosts(identities=("a", "a"), host_names=("a", "a"))
TWO_HOSTS = GroupHosts(identities=("a", "b"), host_names=("a", "b"))


class RecordingGroup(dist.ProcessGroup):
    """A backend of an accelerator that only records its calls."""

    def __init__(self, _store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this form
        CALLS.append(("made", timeout))

    def __getattribute__(self, name: str) -> Any:
        if name in {"allreduce", "send", "set_timeout"}:
            return lambda *arguments: CALLS.append((name, arguments[0]))
        return super().__getattribute__(name)


@pytest.fixture(autouse=True)
def recording_backend() -> Iterator[None]:
    if not hasattr(dist.Backend, "RECORDING"):
        dist.Backend.register_backend("recording", RecordingGroup, devices=["meta"])
        dist.Backend.default_device_backend_map.pop("meta")  # other tests have no backend for it
    CALLS.clear()
    yield
    ls.destroy_process_group()


def join(backend: str, **options: Any) -> Any:
    ls.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)
    return dist.group.WORLD


def test_shared_memory_hands_tensors_of_an_accelerator_to_its_backend() -> None:
    group = join("cpu:shm,meta:recording")
    assert isinstance(group, ShmProcessGroup)
    assert dist.get_backend_config() == "cpu:shm,meta:recording"
    tensor = torch.ones(3, device="meta")
    group.allreduce([tensor])
    group.send([tensor], 0, 7)
    assert [name for name, _ in CALLS] == ["made", "allreduce", "send"]
    assert isinstance(group._get_backend(torch.device("meta")), RecordingGroup)
    assert group._device_types == [torch.device("cpu"), torch.device("meta")]


def test_a_changed_timeout_reaches_the_backend_of_an_accelerator() -> None:
    group = join("cpu:shm,meta:recording")
    group.allreduce([torch.ones(3, device="meta")])
    dist.distributed_c10d._set_pg_timeout(timeout := timedelta(seconds=7), group)
    assert CALLS[-1] == ("set_timeout", timeout)


@pytest.mark.parametrize("check", [True, False])
def test_calls_of_an_accelerator_are_compared_on_demand(check: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    group = join("cpu:shm,meta:recording", check=check)
    compared: list[bytes] = []
    monkeypatch.setattr(CallRunner, "compare", lambda _self, call: compared.append(call))
    group.allreduce([torch.ones(3, device="meta")])
    assert compared == [b"all_reduce(sum, float32 [3])"] * check


def test_the_calls_of_a_destroyed_group_can_be_ended() -> None:
    # The thread that reads the launcher's channel does it. An error there would end the thread, and no generation that
    # the launcher decides would reach the worker any more.
    from torch.testing._internal.distributed import fake_pg  # registers the backend

    assert fake_pg
    group = join("cpu:gloo,cuda:fake", check=True)
    assert isinstance(group, CheckedProcessGroup)
    ls.destroy_process_group()
    group.end_calls(ls.GroupError("Rank 1 is lost."))


def test_a_device_without_a_backend_is_named() -> None:
    group = join("shm")
    with pytest.raises(ls.GroupError, match="no backend for mtia tensors"):
        group._get_backend(torch.device("mtia"))


@pytest.mark.parametrize(("kind", "name"), [("cuda", "nccl"), ("xpu", "xccl")])
def test_the_backend_of_the_accelerator_is_chosen(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: backend == name)
    assert choose_backend() == choose_backend(torch.device(kind, 1)) == f"cpu:shm,{kind}:{name}"
    assert choose_backend(torch.device("cpu")) == "shm"
    monkeypatch.setattr(dist, "is_backend_available", lambda _backend: False)
    assert choose_backend() == "shm"


@pytest.mark.parametrize(
    ("hosts", "is_chosen", "reason"),
    [
        (TWO_HOSTS, True, ""),
        (TWO_HOSTS, False, "ranks 0 and 1 are not on one host"),
        (GroupHosts(identities=("boot 1", "alone, here"), host_names=("a", "a")), False, "rank 1 cannot share memory"),
        (GroupHosts(identities=("alone, here",) * 2, host_names=("a", "a")), True, "rank 0 cannot share memory (here)"),
    ],
)
def test_gloo_replaces_shared_memory_beside_an_accelerator_where_there_is_none(
    hosts: GroupHosts, is_chosen: bool, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    both = "cpu:shm,cuda:nccl"
    say_not_shared.cache_clear()
    assert backend_on_hosts(both, ONE_HOST, 0, is_chosen=True) == both
    assert backend_on_hosts("shm", hosts, 0, is_chosen=True) == "shm"  # the shm backend does so itself
    for rank in (1, 0, 0):
        assert backend_on_hosts(both, hosts, rank, is_chosen=is_chosen) == "cpu:gloo,cuda:nccl"
    assert [reason in line for line in caplog.messages] == [True] * bool(reason)  # once, and on rank 0 alone


@pytest.mark.parametrize(
    ("backend", "check", "hosts", "is_checked", "is_logged"),
    [
        ("gloo", None, ONE_HOST, True, False),
        ("gloo", False, ONE_HOST, False, False),
        ("gloo", None, TWO_HOSTS, False, True),
        ("gloo", True, TWO_HOSTS, True, False),
        ("cpu:shm,cuda:nccl", None, ONE_HOST, False, True),
        ("cpu:shm,cuda:nccl", True, ONE_HOST, True, False),
        ("shm", True, ONE_HOST, False, False),
        ("gloo", None, GroupHosts(identities=("a",), host_names=("a",)), False, False),
    ],
)
def test_calls_are_compared_where_it_is_cheap_and_else_a_line_says_so(
    backend: str,
    check: bool | None,
    hosts: GroupHosts,
    is_checked: bool,
    is_logged: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "lockstep")
    assert process_group._decide_check(check, backend, 0, hosts) is is_checked
    assert ["set LOCKSTEP_CHECK=1" in record.message for record in caplog.records] == [True] * is_logged
    caplog.clear()
    process_group._decide_check(check, backend, 1, hosts)
    assert not caplog.records


# -- Which versions of NCCL are warned of, and where -------------------------------------------------------------------


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.source)
def test_the_version_that_fixes_a_defect_is_not_warned_of_it(defect: object) -> None:
    fixed = getattr(defect, "fixed")  # noqa: B009 - an id makes pytest pass it as an object
    for world_size, is_one_host in ((1, True), (2, True), (2, False)):
        assert getattr(defect, "effect") not in explain_defects(  # noqa: B009
            fixed, world_size=world_size, is_one_host=is_one_host
        )


def test_a_defect_is_named_where_it_can_show() -> None:
    assert "one network card per GPU" in explain_defects((2, 18, 1), world_size=16, is_one_host=False)
    assert explain_defects((2, 18, 1), world_size=8, is_one_host=True) == ""
    assert "ReduceOp.AVG" in explain_defects((2, 27, 5), world_size=1, is_one_host=True)
    assert explain_defects((2, 27, 5), world_size=8, is_one_host=True) == ""
    assert explain_defects((2, 29, 7), world_size=1, is_one_host=True) == ""


def test_several_defects_are_one_warning_that_names_the_version_without_them() -> None:
    text = explain_defects((2, 12, 5), world_size=8, is_one_host=True)
    assert text.startswith("NCCL 2.12.5 is known to return wrong results: ")
    assert "NVLink" in text
    assert "aligned" in text
    assert "Use NCCL 2.15.5 or later" in text
