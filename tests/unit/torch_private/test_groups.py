"""What we rely on of torch's process groups; each assertion says what breaks without it. One process is enough."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore, PrefixStore, ProcessGroup, ProcessGroupGloo, TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lockstep.comm import backends
from lockstep.torch_private.groups import (
    AnyFuture,
    GroupRequest,
    ReservedPort,
    abort_device_backends,
    backend_of,
    count_calls,
    default_group,
    default_timeout,
    device_types,
    gloo_num_threads,
    gloo_options,
    greeting,
    intercept_group_making,
    intercept_timeouts,
    list_groups,
    register_backend,
    root_mesh,
    set_default_backend,
    set_timeout,
    store_of,
)
from lockstep.torch_private.modules import localize_tensor_parallel

CPU = torch.device("cpu")
EXIT = "exit notices: the other ranks would wait for one that is done until their timeout"
DESTROYED = "a group that was destroyed would be used"


def make_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    gloo: Any = ProcessGroupGloo
    device = gloo.create_device(hostname="127.0.0.1", lazy_init=True)
    return gloo(store, rank, size, gloo_options(devices=[device], timeout=timeout, num_threads=1))


def test_a_default_group_is_named_alike_after_one_that_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    # A worker that gives the group up while it is made, and one that gives it up before, waited for each other.
    def give_up(*_arguments: object) -> None:
        raise RuntimeError("given up")

    store = HashStore()
    with monkeypatch.context() as patch:
        patch.setattr(backends, "make_shm_group", give_up)
        with pytest.raises(RuntimeError, match="given up"):
            dist.init_process_group("shm", store=PrefixStore("first", store), rank=0, world_size=1)
    dist.init_process_group("shm", store=PrefixStore("second", store), rank=0, world_size=1)
    assert default_group().group_name == "0"
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone_in_a_group")
def test_groups_are_listed_until_they_are_destroyed() -> None:
    world = dist.group.WORLD
    assert list_groups() == [world], EXIT
    group = dist.new_group([0])
    assert list_groups() == [world, group], EXIT
    dist.destroy_process_group(group)
    assert list_groups() == [world], DESTROYED
    dist.destroy_process_group()
    assert list_groups() == [], DESTROYED


@pytest.mark.usefixtures("alone_in_a_group")
def test_each_group_has_a_store_with_keys_of_its_own() -> None:
    group = dist.new_group([0])
    first, second = store_of(default_group()), store_of(group)
    first.set("key", "first")
    second.set("key", "second")
    assert (first.get("key"), second.get("key")) == (b"first", b"second"), "stall messages of two groups would mix"
    dist.destroy_process_group(group)
    assert store_of(group) is None, DESTROYED


def test_a_group_that_torch_did_not_make_has_no_store() -> None:
    assert store_of(ProcessGroup(HashStore(), 0, 1)) is None, DESTROYED


@pytest.mark.usefixtures("alone_in_a_group")
def test_the_default_group_is_the_world() -> None:
    assert default_group() is dist.group.WORLD
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="not been initialized"):
        default_group()


@pytest.mark.usefixtures("alone_in_a_group")
def test_the_default_timeout_is_that_of_a_group_made_without_one() -> None:
    options: Any = backend_of(default_group(), CPU).options
    assert default_timeout("gloo") == options._timeout, "set-up would wait for another time than torch does"


@pytest.mark.usefixtures("alone_in_a_group")
def test_a_group_has_backends_by_device() -> None:
    group = default_group()
    assert CPU in device_types(group), "comparing calls would ask a GPU"
    tensor = torch.ones(2)
    backend_of(group, CPU).allreduce([tensor]).wait()
    with pytest.raises(RuntimeError):
        backend_of(group, torch.device("xpu"))


def test_a_bare_group_works_with_backends_that_are_registered() -> None:
    group = ProcessGroup(HashStore(), 0, 1)
    kind = ProcessGroup.BackendType.GLOO
    register_backend(group, CPU, kind, make_gloo(HashStore(), 0, 1, timedelta(seconds=30)))
    assert group.name() == "undefined", "no longer needed: a group goes by its one backend"
    set_default_backend(group, kind)
    assert group.name() == "gloo", "checked groups: torch's logs and its monitored barrier would know no backend"
    tensor = torch.ones(2)
    group.allreduce([tensor]).wait()
    group.barrier().wait()
    assert tensor.tolist() == [1.0, 1.0], "checked groups make their calls through such a one"
    assert device_types(group) == [CPU]


def test_gloo_works_over_the_interface_of_our_choice_and_waits_as_long_as_it_is_told() -> None:
    store, results = HashStore(), [torch.ones(2), torch.ones(2)]
    backends: dict[int, Any] = {}

    def reduce(rank: int) -> None:
        backends[rank] = make_gloo(store, rank, 2, timedelta(seconds=3))
        backends[rank].allreduce([results[rank]]).wait()

    with ThreadPoolExecutor() as pool:
        list(pool.map(reduce, range(2)))
    assert [each.tolist() for each in results] == [[2.0, 2.0]] * 2, "the shm backend's sparse and GPU tensors"
    begin = time.monotonic()
    with pytest.raises(RuntimeError):
        backends[0].allreduce([torch.ones(2)]).wait()
    assert 1.5 < time.monotonic() - begin < 40, "the shm backend: a lost rank would be noticed after half an hour"


def test_gloo_has_threads() -> None:
    assert gloo_num_threads() >= 1, "DDP's logging data"
    options = gloo_options(devices=[], timeout=timedelta(seconds=3), num_threads=5)
    assert options._threads == 5


@pytest.mark.usefixtures("alone_in_a_group")
def test_the_making_of_groups_is_intercepted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_new_process_group_helper", "_set_pg_timeout"):
        monkeypatch.setattr(dist.distributed_c10d, name, getattr(dist.distributed_c10d, name))  # given back at the end
    for module in (dist, dist.distributed_c10d):
        if hasattr(module, "set_timeout"):  # from torch 2.14 on
            monkeypatch.setattr(module, "set_timeout", module.set_timeout)
    requests: list[GroupRequest] = []

    def intercept(request: GroupRequest) -> Any:
        requests.append(request)
        return request.make() if request.backend == "gloo" else request.make("gloo")

    intercept_group_making(intercept)
    groups = [dist.new_group([0]), dist.new_group([0], use_local_synchronization=True), dist.new_group(backend="shm")]
    assert [(request.ranks, request.backend) for request in requests] == [((0,), "gloo"), ((0,), "gloo"), ((0,), "shm")]
    assert [request.name.isdecimal() for request in requests] == [True, False, True], "ranks that make other groups"
    assert [dist.get_backend(group) for group in groups] == ["gloo", "gloo", "shm"], "groups that compare calls"
    assert type(groups[2]) is ProcessGroup, "groups that compare calls: no call would be compared"

    seen: list[Any] = []
    intercept_timeouts(lambda group, timeout: seen.append((group, timeout)) or group is groups[0])  # type: ignore[func-returns-value]
    for group in groups[:2]:
        getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)(timedelta(seconds=7), group)
    assert seen == [(group, timedelta(seconds=7)) for group in groups[:2]], "timeouts of shm and of comparisons"
    found = [backend_of(group, CPU).options._timeout.total_seconds() for group in groups[:2]]
    assert found[0] != found[1] == 7


def test_a_timeout_is_set() -> None:
    options = gloo_options(devices=[], timeout=timedelta(seconds=3), num_threads=1)
    set_timeout(options, timedelta(seconds=7))
    assert options._timeout == timedelta(seconds=7)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_nccl_has_a_timeout_of_this_name() -> None:
    options = dist.ProcessGroupNCCL.Options()
    set_timeout(options, timedelta(seconds=7))
    assert options._timeout == timedelta(seconds=7), "checked groups: NCCL would wait for ten minutes"


@pytest.mark.usefixtures("alone_in_a_group")
def test_every_future_is_one() -> None:
    work = dist.all_reduce(torch.ones(2), async_op=True)
    future: Any = work.get_future().then(lambda done: done.value()[0])
    future.wait()
    assert isinstance(future, AnyFuture), "DDP: communication hooks that torch takes would be refused"
    assert isinstance(torch.futures.Future(), AnyFuture)
    assert not isinstance(torch.ones(2), AnyFuture)


@pytest.mark.usefixtures("alone_in_a_group")
def test_a_mesh_knows_what_it_was_cut_from() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    assert root_mesh(mesh) == mesh, "DDP: a model on a mesh of its own would be taken for a tensor-parallel one"
    assert root_mesh(mesh["data"]) == mesh, "DDP: a tensor-parallel model would not be seen as one"
    assert mesh["data"] != mesh


@pytest.mark.usefixtures("alone_in_a_group")
def test_a_tensor_parallel_module_is_local_between_forwards() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tensor",))
    net = parallelize_module(nn.Sequential(nn.Linear(2, 2)), mesh, {"0": ColwiseParallel()})
    seen: list[type] = []
    net[0].register_forward_pre_hook(lambda module, _: seen.append(type(module.weight)))
    localize_tensor_parallel(net)
    assert not any(isinstance(each, DTensor) for each in net.parameters()), "DDP: DTensors do not go into buckets"
    output: Tensor = net(torch.ones(1, 2))
    output.sum().backward()
    assert seen == [DTensor], "DDP: such a module would compute with its own part alone"
    assert all(type(each.grad) is Tensor for each in net.parameters())


@pytest.mark.usefixtures("alone_in_a_group")
def test_a_group_counts_its_collectives() -> None:
    group = default_group()
    before = count_calls(group)
    dist.all_reduce(torch.ones(2))
    work = dist.all_reduce(torch.ones(2), async_op=True)
    assert work is not None
    assert count_calls(group) == before + 2, "a hook that fails after its call: this rank would make one call too many"
    work.wait()
    assert count_calls(None) == -1


@pytest.mark.usefixtures("alone_in_a_group")
def test_the_backend_of_the_cpu_is_not_aborted() -> None:
    abort_device_backends(default_group())
    dist.all_reduce(torch.ones(2))


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # it is open until the worker ends
def test_a_store_listens_at_a_reserved_port_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    # `ls.launch`: its port could be taken by whoever sets SO_REUSEADDR, or by nobody, also not by the function.
    monkeypatch.setattr(dist.TCPStore, "__init__", dist.TCPStore.__init__)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        ReservedPort().hold(held.dup().detach())
        for _ in range(2):
            with socket.socket() as stranger:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with pytest.raises(OSError, match="in use"):
                    stranger.bind(("127.0.0.1", port))
            store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            store.set("key", "value")
            assert dist.TCPStore("127.0.0.1", port, is_master=False).get("key") == b"value"
            del store


# -- What we rely on of the bytes that torch's TCPStore takes and sends ------------------------------------------------


@pytest.mark.parametrize("uses_libuv", [True, False])
def test_a_store_answers_the_greeting(uses_libuv: bool) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=uses_libuv)
    asked, expected = greeting(0x12345678)
    with socket.create_connection(("127.0.0.1", store.port), 30) as connection:
        connection.sendall(asked)
        assert connection.recv(len(expected)) == expected, "init_process_group finds no store where there is one"
