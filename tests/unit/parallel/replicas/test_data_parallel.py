"""`DataParallel` against the plain module on the whole batch: what torch promises of it, on replicas on the CPU."""

import copy
import gc
import io
import itertools
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.parallel.replicas.replicated import CPU, THREE, TWO
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lockstep.errors import DeviceError
from lockstep.parallel.replicas.data_parallel import DataParallel, as_device, as_id, data_parallel

pytestmark = pytest.mark.usefixtures("double_precision")


class Tied(nn.Module):
    """A parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.decoder = nn.Linear(4, 4)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x).tanh())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 5, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        self.rnn.flatten_parameters()
        return self.rnn(x[:, None, :].expand(-1, 3, -1))[0]


class Scaled(nn.Module):
    """Parameters in a list and a dict, and a buffer through which a gradient flows."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(2)])
        self.offsets = nn.ParameterDict({"a": nn.Parameter(torch.randn(4))})
        self.register_buffer("trained", torch.randn(4, requires_grad=True))
        self.register_parameter("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors[0] * self.factors[1] + self.offsets["a"] * self.trained


def frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    net[0].weight.requires_grad_(False)
    return net


class Listed(nn.Module):
    """Refers to a submodule by a plain list as well; torch's replicas leave such a list as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(4, 4)
        self.all = [self.only]

    def forward(self, x: Tensor) -> Tensor:
        return self.all[0](x)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
    "tied": Tied,
    "recurrent": Recurrent,
    "containers": Scaled,
    "frozen": frozen,
    "listed": Listed,
    "parametrized": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "channels last": lambda: _channels_last(),  # noqa: PLW0108  it stands below
    "transposed": lambda: _transposed(nn.Linear(4, 4)),
}


def _channels_last() -> nn.Module:
    convolution: Any = nn.Conv2d(2, 3, 3, padding=1)
    return nn.Sequential(nn.Unflatten(1, (2, 2, 1)), convolution.to(memory_format=torch.channels_last), nn.Flatten())


def _transposed(layer: nn.Linear) -> nn.Linear:
    layer.weight = nn.Parameter(torch.randn(4, 4).t())
    return layer


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    return {name.removeprefix("module."): tensor.grad for name, tensor in tensors}


@pytest.mark.parametrize("num_samples", [7, 2, 1])
@pytest.mark.parametrize("devices", [TWO, THREE], ids=["2", "3"])
@pytest.mark.parametrize("build", MODULES.values(), ids=MODULES)
def test_outputs_and_gradients_are_those_of_the_plain_module(
    build: Callable[[], nn.Module], devices: list[str], num_samples: int
) -> None:
    plain = build()
    parallel = DataParallel(copy.deepcopy(plain), devices)
    for _ in range(2):
        results = []
        for module in (plain, parallel):
            torch.manual_seed(1)
            x = torch.randn(num_samples, 4, requires_grad=True)
            output = module(x)
            output.pow(2).mean().backward()
            results.append((output, x.grad, gradients(module)))
        torch.testing.assert_close(results[1], results[0])
        with torch.no_grad():
            for one, other in zip(plain.parameters(), parallel.parameters(), strict=True):
                one.sub_(0.1)
                other.sub_(0.1)
    assert set(parallel.state_dict()) == {f"module.{name}" for name in plain.state_dict()}


def test_gradients_do_not_depend_on_which_replica_is_first() -> None:
    build = MODULES["mlp"]
    net = build().to(torch.float32)
    parallel = DataParallel(net, ["cpu"] * 4)
    x = torch.randn(64, 4, dtype=torch.float32)
    seen = set()
    for _ in range(20):
        net.zero_grad()
        parallel(x).pow(2).sum().backward()
        seen.add(b"".join(parameter.grad.numpy().tobytes() for parameter in net.parameters()))
    assert len(seen) == 1


def test_a_parameter_has_a_gradient_where_any_replica_uses_it() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used_by_one, self.unused = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.used_by_one if x.sum() > 0 else x

    net = Net()
    DataParallel(net, TWO)(torch.tensor([[0.0] * 3, [1.0] * 3]).requires_grad_()).sum().backward()
    assert net.used_by_one.grad.tolist() == [1, 1, 1]
    assert net.unused.grad is None


def test_sparse_gradients_are_added() -> None:
    plain = nn.Embedding(10, 3, sparse=True)
    parallel = DataParallel(copy.deepcopy(plain), THREE)
    numbers = torch.randint(10, (8, 5))
    for module in (plain, parallel):
        module(numbers).pow(2).sum().backward()
    assert parallel.module.weight.grad.is_sparse
    torch.testing.assert_close(parallel.module.weight.grad.to_dense(), plain.weight.grad.to_dense())


def test_gradcheck_of_first_and_second_order() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    parallel = DataParallel(net, TWO)
    x = torch.randn(3, 2, requires_grad=True)

    def run(x: Tensor, *_parameters: Tensor) -> Tensor:
        return parallel(x)

    assert torch.autograd.gradcheck(run, (x, *net.parameters()))
    assert torch.autograd.gradgradcheck(run, (x, *net.parameters()))


def test_step_between_forward_and_backward_is_an_error_as_without() -> None:
    net = MODULES["mlp"]()
    loss = DataParallel(net, TWO)(torch.randn(4, 4)).pow(2).sum()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_checkpointed_replicas() -> None:
    class Net(nn.Module):
        def __init__(self, *, use_reentrant: bool) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.use_reentrant = use_reentrant

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=self.use_reentrant)

    for use_reentrant in (True, False):
        plain = Net(use_reentrant=use_reentrant)
        parallel = DataParallel(copy.deepcopy(plain), TWO)
        x = torch.randn(4, 4, requires_grad=True)
        for module in (plain, parallel):
            first = module(x)
            module(x).pow(2).sum().backward()  # a second forward, before the first recomputes
            first.pow(3).sum().backward()
        torch.testing.assert_close(gradients(parallel), gradients(plain))


def test_within_what_is_compiled_it_runs_as_without() -> None:
    # The compiler traced into the forward, and failed in the copying of weights.
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(6, 4)
    expected = plain(x)
    compiled = torch.compile(DataParallel(plain, TWO), backend="eager")
    around = torch.compile(nn.Sequential(DataParallel(plain[:2], TWO), plain[2]), backend="eager")
    for module in (compiled, around):
        plain.zero_grad()
        output = module(x)
        output.sum().backward()
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(plain[2].bias.grad, torch.full((2,), 6.0))


def test_scripted_module_is_replicated_and_a_mixed_one_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    x = torch.randn(4, 4)
    parallel = DataParallel(scripted, TWO)
    torch.testing.assert_close(parallel(x), scripted(x))
    parallel(x).sum().backward()
    assert scripted[0].weight.grad is not None
    scripted._modules._python_modules["python"] = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="python modules are children of ScriptModule"):
        parallel(x)


def test_lazy_module_is_refused() -> None:
    with warnings.catch_warnings(action="ignore"):
        parallel = DataParallel(nn.LazyLinear(3), TWO)
    with pytest.raises(RuntimeError, match="dummy forward pass"):
        parallel(torch.randn(4, 2))


def test_parameters_are_plain_tensors_on_replicas() -> None:
    kinds = []

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            kinds.append((type(self.weight), list(self.parameters()), "weight" in self._former_parameters))
            with pytest.warns(UserWarning, match="has no effect"):
                self.zero_grad()
            return super().forward(x)

    with warnings.catch_warnings(action="ignore"):  # pytest.warns in threads leaves the filters of others
        DataParallel(Net(4, 4), ["cpu", "cpu"])(torch.randn(1, 4))
    assert kinds == [(Tensor, [], True)]


def test_hooks_run_in_every_replica() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    seen: list[str] = []
    net.register_forward_pre_hook(lambda *_: seen.append("pre"))
    net[0].register_forward_hook(lambda *_: seen.append("forward"))
    net[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    DataParallel(net, THREE)(torch.randn(6, 4, requires_grad=True)).sum().backward()
    assert sorted(seen) == ["backward"] * 3 + ["forward"] * 3 + ["pre"] * 3


def test_gradient_hook_of_a_parameter_sees_the_sum() -> None:
    net = nn.Linear(3, 1)
    seen: list[list[float]] = []
    net.bias.register_hook(lambda gradient: seen.append(gradient.tolist()))
    DataParallel(net, THREE)(torch.randn(6, 3)).sum().backward()
    assert seen == [[6.0]]


def test_isinstance_attributes_and_one_device() -> None:
    net = nn.Linear(2, 2)
    parallel = DataParallel(net, [CPU], dim=1)
    assert isinstance(parallel, nn.DataParallel)
    assert (parallel.device_ids, parallel.output_device, parallel.dim) == ([CPU], CPU, 1)
    assert (parallel.module, parallel.src_device_obj) == (net, CPU)
    x = torch.randn(3, 2)
    assert torch.equal(parallel(x), net(x))
    assert torch.equal(DataParallel(net, ["cpu"], gather_output=False)(x)[0], net(x))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="of a machine without accelerators")
def test_without_accelerators_the_module_is_called_as_it_is() -> None:
    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = x
            return super().forward(x)

    net = Net(2, 2)
    parallel = DataParallel(net)
    x = torch.randn(3, 2)
    assert parallel.device_ids == nn.DataParallel(net).device_ids == []
    assert torch.equal(parallel(x), net(x))
    assert net.seen is x
    assert torch.equal(data_parallel(net, x), net(x))
    with pytest.raises(DeviceError, match=r"no accelerator can be seen here.*Leave device_ids out"):
        DataParallel(net, [0, 1])


def test_devices_that_make_no_sense() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="device_ids is empty"):
        DataParallel(net, [])
    with pytest.raises(TypeError, match="True names no device"):
        DataParallel(net, [True])
    for device in ("meta", "cuda:17", -2):
        with pytest.raises(DeviceError, match="can be seen here"):
            DataParallel(net, ["cpu", device])
    assert DataParallel(net, TWO, output_device=-1).output_device == CPU


def test_all_that_torch_takes_for_a_device_means_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.cuda.device(1) was a TypeError; torch's DataParallel takes it for the current device.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    devices = [0, torch.device("cuda:1"), "cuda:0", torch.cuda.device(1), torch.device("cuda"), np.int64(1)]
    assert [as_id(as_device(each)) for each in devices] == [0, 1, 0, 1, 1, 1]
    with pytest.raises(DeviceError, match="on device 'cuda:2', but 2 of cuda can be seen here"):
        as_device(torch.cuda.device(2))
    with pytest.raises(DeviceError, match="can be seen here"):
        as_device(torch.xpu.device(0))


def test_module_on_another_device_is_refused_in_torchs_words() -> None:
    words = "module must have its parameters and buffers on device cpu .*found one of them on device: meta"
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(RuntimeError, match=words):
        DataParallel(net, TWO)(torch.randn(4, 2))
    for devices in (TWO, ["cpu"]):
        with pytest.raises(RuntimeError, match=words):
            data_parallel(net, torch.randn(4, 2), devices)


def test_functional_form() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, y: Tensor, factor: float, z: Tensor | None = None) -> Tensor:
            return factor * (x * y if z is None else x * y + z)

    x, y, z = (torch.randn(5, 5, requires_grad=True) for _ in range(3))
    for devices, named in itertools.product((TWO, ["cpu"]), (None, {"z": z})):
        expected = torch.autograd.grad(Net()(x, y, 2.0, **(named or {})).sum(), (x, y))
        output = data_parallel(Net(), (x, y, 2.0), devices, module_kwargs=named)
        torch.testing.assert_close(torch.autograd.grad(output.sum(), (x, y)), expected)
    layer = nn.Linear(5, 2)
    torch.testing.assert_close(data_parallel(layer, x, TWO, dim=0), layer(x))

    class Constant(nn.Module):
        def forward(self) -> Tensor:
            return torch.ones(3)

    assert data_parallel(Constant(), None, TWO).tolist() == [1, 1, 1]


def test_copies_and_pickles_train_on_their_own() -> None:
    parallel = DataParallel(nn.Linear(2, 2), TWO)
    x = torch.randn(4, 2)
    parallel(x)
    for twin in (copy.deepcopy(parallel), pickle.loads(pickle.dumps(parallel))):
        twin(x).sum().backward()
        assert torch.equal(twin(x), parallel(x))
        assert parallel.module.weight.grad is None
    torch.save(parallel.state_dict(), io.BytesIO())
    with torch.no_grad():
        torch.save(parallel.replicate(parallel.module, TWO), io.BytesIO())


@pytest.mark.usefixtures("no_garbage_collection")
def test_a_forward_leaves_nothing_to_collect() -> None:
    parallel = DataParallel(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), TWO)
    x = torch.randn(4, 1)
    parallel(x).sum().backward()
    gc.collect()
    found = []
    for _ in range(3):  # threads of other tests may leave something once
        parallel(x)
        found.append(gc.collect())
    assert min(found) == 0
    output = parallel(x)
    parts: list[Any] = parallel.replicate(parallel.module, TWO)
    gone = [weakref.ref(part) for part in parts]
    del output, parts
    assert [ref() for ref in gone] == [None, None]


def test_methods_may_be_overridden_as_torchs() -> None:
    class Own(DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            return tuple((row[None],) for row in inputs[0]), tuple({} for _ in inputs[0])

        def gather(self, outputs, output_device):
            return [super(Own, self).gather([output], output_device) for output in outputs]

    layer = nn.Linear(2, 2)
    x = torch.randn(3, 2)
    torch.testing.assert_close(Own(layer, THREE)(x), list(layer(x).split(1)))
