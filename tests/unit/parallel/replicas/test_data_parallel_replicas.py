"""Replicas are always those of the module as it is now, though their memory is kept; and buffers are replica 0's."""

import copy
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from tests.unit.parallel.replicas.replicated import TWO, Normed
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from lockstep.parallel.replicas.copies import Copies
from lockstep.parallel.replicas.data_parallel import DataParallel


class Net(nn.Module):
    """Offers every kind of thing that can be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second: nn.Module = nn.Linear(4, 4)
        self.offset: Tensor
        self.register_buffer("offset", torch.zeros(4))
        self.factor = 1.0
        self.settings = {"power": 1}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)) * self.factor + self.offset
        return self.second(hidden) ** self.settings["power"]


def _set_first_values(net: Net) -> None:
    with torch.no_grad():
        net.first.weight.fill_(0.5)


def _set_values_behind_autograds_back(net: Net) -> None:
    net.second.weight.data.mul_(2)


def _replace_data(net: Net) -> None:
    net.second.weight.data = torch.ones(4, 4, dtype=torch.float64).t()


def _load(net: Net) -> None:
    torch.manual_seed(9)
    net.load_state_dict(Net().state_dict())


def _replace_parameter(net: Net) -> None:
    net.first.bias = nn.Parameter(torch.ones(4, dtype=torch.float64))


def _drop_parameter(net: Net) -> None:
    net.first.register_parameter("bias", None)


def _replace_module(net: Net) -> None:
    torch.manual_seed(9)
    net.second = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.Tanh())


def _tie(net: Net) -> None:
    net.second.weight = net.first.weight


def _freeze(net: Net) -> None:
    net.first.requires_grad_(False)


def _evaluate(net: Net) -> None:
    net.norm.reset_running_stats()  # which differ: the variance of fewer samples is corrected by more
    net.eval()


def _set_attribute(net: Net) -> None:
    net.factor = 3.0


def _set_inside_attribute(net: Net) -> None:
    net.settings["power"] = 2


def _write_buffer(net: Net) -> None:
    net.offset += 1


def _replace_buffer(net: Net) -> None:
    net.offset = torch.full((4,), 2.0, dtype=torch.float64)


def _add_hook(net: Net) -> None:
    net.second.register_forward_hook(lambda _module, _inputs, output: output * 2)


def _parametrize(net: Net) -> None:
    parametrizations.weight_norm(net.first)


def _patch_class(net: Net) -> None:
    class Other(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    net.__class__ = Other


def _cast(net: Net) -> None:
    net.bfloat16()
    net.register_forward_pre_hook(lambda _module, inputs: (inputs[0].bfloat16(),))


CHANGES = [value for name, value in list(globals().items()) if name.startswith("_") and callable(value)]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.parametrize("before_backward", [False, True])
def test_a_change_is_seen_by_the_next_forward(change: Callable[[Net], None], before_backward: bool) -> None:
    torch.manual_seed(0)
    plain = Net().double()
    parallel = DataParallel(copy.deepcopy(plain), TWO)
    x = torch.randn(2, 4, dtype=torch.float64).repeat(
        2, 1
    )  # both parts alike, so that BatchNorm's statistics are those of the whole
    results = []
    for module, net in ((plain, plain), (parallel, parallel.module)):
        pending = [module(x) for _ in range(2)]
        if not before_backward:
            pending.pop().sum().backward()
        assert isinstance(net, Net)
        change(net)
        net.zero_grad()
        output = module(x)
        output.pow(2).sum().backward()
        gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
        results.append((output, gradients, net.offset))
    torch.testing.assert_close(results[1], results[0])


def test_what_forward_writes_into_a_replica_is_gone() -> None:
    class Counting(nn.Module):
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            self.extra = nn.Parameter(torch.ones(1))
            assert self.count == 1
            return x

    net = Counting()
    parallel = DataParallel(net, TWO)
    for _ in range(3):
        parallel(torch.zeros(2, 1))
    assert (net.count, list(net.parameters())) == (0, [])


def test_buffers_written_in_place_are_those_of_replica_0() -> None:
    plain = nn.BatchNorm1d(3)
    parallel = DataParallel(copy.deepcopy(plain), ["cpu"] * 3)
    x = torch.randn(8, 3)
    for _ in range(2):
        parallel(x).sum().backward()
        plain(x[:3])
    assert parallel.module.num_batches_tracked == 2
    torch.testing.assert_close(parallel.module.state_dict(), plain.state_dict())


def test_a_buffer_that_replica_0_replaces_is_the_modules() -> None:
    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean: Tensor
            self.register_buffer("mean", torch.zeros(()))
            self.register_buffer("unset", None)

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.5 * self.mean + 0.5 * x.mean()
            return x - self.mean

    net = nn.Sequential(Averaging())
    parallel = DataParallel(net, TWO)
    for _ in range(2):
        parallel(torch.tensor([[4.0], [100.0]]))
    assert net[0].mean == 3.0
    assert list(dict(net.named_buffers())) == ["0.mean"]


def test_a_buffer_whose_data_replica_0_replaces_is_the_modules() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: Tensor
            self.register_buffer("seen", torch.zeros(0))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.data = torch.cat([self.seen, x])
            return x

    net = Growing()
    parallel = DataParallel(net, TWO)
    for _ in range(2):
        parallel(torch.arange(4.0))
    assert net.seen.tolist() == [0, 1, 0, 1]


def test_a_class_that_sets_attributes_in_its_own_way_is_asked_to() -> None:
    class Caching(nn.Linear):
        """Like torch's recurrent networks, keeps its weights in a list as well."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "weight":
                self.weights = [value]

        def forward(self, x: Tensor) -> Tensor:
            assert self.weights[0] is self.weight
            return x @ self.weights[0]

    parallel = DataParallel(Caching(2, 2), TWO)
    parallel(torch.zeros(4, 2))


def test_parameter_written_by_forward_is_written_by_replica_0_only() -> None:
    plain = nn.Embedding(4, 3, max_norm=1.0)
    parallel = DataParallel(copy.deepcopy(plain), TWO)
    rows = torch.tensor([0, 1, 0, 1])
    for module in (plain, parallel):
        module(rows).sum().backward()
    torch.testing.assert_close(parallel.module.weight, plain.weight)


def test_cached_parametrization_within_one_forward() -> None:
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)))
    parallel = DataParallel(net, TWO)
    x = torch.randn(4, 4)
    with parametrize.cached():
        torch.testing.assert_close(parallel(x), net(x))


def test_compiled_call_does_not_run_the_module_itself() -> None:
    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert not isinstance(self.weight, nn.Parameter)
            return super().forward(x)

    net = Net(2, 2)
    net._compiled_call_impl = lambda *_: pytest.fail("ran the module")  # as module.compile() leaves it
    DataParallel(net, TWO)(torch.zeros(2, 2))


def test_a_compiled_module_is_replicated_uncompiled_and_not_changed() -> None:
    # Its replica wrote through to the module itself, whose submodules and state_dict were gone afterwards.
    plain = Normed()
    whole: Any = torch.compile(copy.deepcopy(plain), backend="eager")
    compiled: Any
    for compiled in (whole, copy.deepcopy(plain)):
        compiled.layer = torch.compile(compiled.layer, backend="eager")
        before = [*compiled.state_dict()]
        x = torch.randn(6, 4)
        output = DataParallel(compiled, TWO)(x)
        torch.testing.assert_close(output, DataParallel(copy.deepcopy(plain), TWO)(x))
        output.square().sum().backward()
        assert compiled.layer.weight.grad is not None
        assert compiled.norm.num_batches_tracked == 1
        assert [*compiled.state_dict()] == before
        compiled(x)


def test_hooks_on_a_compiled_module_are_not_lost_without_a_word() -> None:
    compiled: Any = torch.compile(nn.Linear(4, 4), backend="eager")
    compiled.register_forward_hook(lambda _module, _inputs, output: output + 1)
    with pytest.raises(RuntimeError, match=r"hooks on a compiled Linear.*Register them on the module itself"):
        DataParallel(compiled, TWO)(torch.randn(4, 4))


def _a_method(net: Normed) -> Any:
    return MethodType(lambda self, x: self.norm(self.layer(x)), net)


def _an_inner_method(net: Normed) -> Any:
    net.run = net.forward  # type: ignore[assignment]
    return MethodType(lambda self, x: self.run(x), net)


def _a_partial(net: Normed) -> Any:
    return partial(lambda module, x: module.norm(module.layer(x)), net)


def _a_partial_of_a_method(net: Normed) -> Any:
    return partial(net.forward)


@pytest.mark.parametrize("patch", [_a_method, _an_inner_method, _a_partial, _a_partial_of_a_method])
def test_a_forward_that_was_set_on_the_module_runs_on_the_replica(patch: Callable[[Normed], Any]) -> None:
    # It was bound to the module, which each replica ran: the statistics were updated twice.
    net = Normed()
    net.forward = patch(net)  # type: ignore[method-assign]
    plain = Normed()
    plain.load_state_dict(net.state_dict())
    x = torch.randn(6, 4)
    torch.testing.assert_close(DataParallel(net, TWO)(x), DataParallel(plain, TWO)(x))
    assert net.norm.num_batches_tracked == 1
    torch.testing.assert_close(net.state_dict(), plain.state_dict())


@pytest.fixture
def layer_addresses() -> tuple[DataParallel, list[int]]:
    """A parallel layer, and where replica 1 had its weight in each forward."""
    net = nn.Linear(4, 4)
    seen: list[int] = []

    def note(module: nn.Module, _inputs: object, output: Tensor) -> None:
        if module.weight.data_ptr() != net.weight.data_ptr():
            seen.append(module.weight.data_ptr())

    net.register_forward_hook(note)
    return DataParallel(net, TWO), seen


def test_memory_is_kept_from_step_to_step(layer_addresses: tuple[DataParallel, list[int]]) -> None:
    parallel, seen = layer_addresses
    x = torch.randn(4, 4, requires_grad=True)
    for _ in range(3):
        loss = parallel(x).pow(2).sum()
        loss.backward()  # and the loss, whose graph is spent, is still there
    with torch.no_grad():
        parallel(x)
    with torch.inference_mode():
        parallel(x)
    loss = parallel(x[:1]).sum()  # one part: no replica 1
    parallel(x).pow(2).sum().backward()
    assert len(seen) == 6
    assert len(set(seen)) == 1


def test_memory_that_a_graph_still_needs_is_left_alone(layer_addresses: tuple[DataParallel, list[int]]) -> None:
    parallel, seen = layer_addresses
    x = torch.randn(4, 4, requires_grad=True)
    pending = [parallel(x).pow(2).sum() for _ in range(3)]
    assert len(set(seen)) == 3
    for loss in pending:
        loss.backward()


def test_memory_that_a_user_still_holds_is_left_alone() -> None:
    class Net(nn.Linear):
        def forward(self, _x: Tensor) -> Tensor:
            return self.weight

    net = Net(2, 1, bias=False)
    parallel = DataParallel(net, TWO, gather_output=False)
    with torch.no_grad():
        net.weight.fill_(1)
        held = parallel(torch.zeros(2, 2))[1][0, 1:]  # a view
        net.weight.fill_(2)
        parallel(torch.zeros(2, 2))
    assert held.tolist() == [1]


def test_a_write_into_one_weight_of_a_replica_leaves_the_versions_of_others() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.rows = nn.Embedding(3, 2, max_norm=0.1)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layer(x)
            return hidden * self.rows(torch.zeros(len(x), dtype=torch.int64))

    DataParallel(Net(), TWO)(torch.randn(4, 2, requires_grad=True)).sum().backward()


def test_memory_of_removed_buckets_is_freed() -> None:
    copies = Copies()
    devices = [torch.device("cpu")] * 2
    tensors = [torch.zeros(3), torch.zeros(3, dtype=torch.int64)]
    assert [tensor.tolist() for tensor in copies.broadcast(tensors, devices)[1]] == [[0] * 3] * 2
    copies.broadcast(tensors[:1], devices)
    assert len(copies._kept) == 1


def test_large_models_have_several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.parallel.replicas.copies.BUCKET_BYTES", 100)
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    plain[2].double().register_forward_pre_hook(lambda _module, inputs: (inputs[0].double(),))
    plain[3].register_forward_pre_hook(lambda _module, inputs: (inputs[0].float(),))
    parallel = DataParallel(copy.deepcopy(plain), ["cpu"] * 3)
    x = torch.randn(6, 4)
    for module in (plain, parallel):
        module(x).pow(2).sum().backward()
    for one, other in zip(parallel.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert len(parallel._copies._kept) > 6


def test_forwards_of_several_threads_do_not_disturb_each_other() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
    parallel = DataParallel(net, ["cpu"] * 3)
    inputs = [torch.randn(12, 8) for _ in range(4)]
    expected = [torch.autograd.grad(net(x).pow(2).sum(), list(net.parameters())) for x in inputs]
    begin = threading.Barrier(len(inputs))

    def work(number: int) -> None:
        begin.wait()
        for _ in range(25):
            found = torch.autograd.grad(parallel(inputs[number]).pow(2).sum(), list(net.parameters()))
            torch.testing.assert_close(found, expected[number])

    with ThreadPoolExecutor(len(inputs)) as pool:
        list(pool.map(work, range(len(inputs))))


def test_memory_goes_with_the_object() -> None:
    parallel = DataParallel(nn.Linear(4, 4), TWO)
    held = parallel.replicate(parallel.module, TWO)[1].weight
    storage = held.untyped_storage()
    with_object = torch._C._storage_Use_Count(storage._cdata)
    del parallel
    gc.collect()
    assert torch._C._storage_Use_Count(storage._cdata) < with_object
