"""`DataParallel` where there are GPUs: against the plain module, and against torch's where there are two."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import DeviceError
from lockstep.parallel.replicas.criterion import DataParallelCriterion
from lockstep.parallel.replicas.data_parallel import DataParallel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
PLACES = [
    pytest.param(["cuda:0", "cpu"], id="cuda:0+cpu"),
    pytest.param(["cuda:0", "cuda:0"], id="cuda:0 twice"),
    pytest.param([0, 1], id="two", marks=needs_two),
    pytest.param([1, 0], id="two, the second first", marks=needs_two),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        assert x.device == self.layers[0].weight.device
        return self.layers(x)


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, check_device=False)


@pytest.mark.parametrize("devices", PLACES)
def test_training_is_that_of_the_plain_module(devices: list[Any]) -> None:
    torch.manual_seed(0)
    plain = Net().double()
    plain.layers[1].eval()  # statistics of parts are others than those of the whole
    parallel = DataParallel(copy.deepcopy(plain).to(torch.device(devices[0])), devices, output_device="cuda:0")
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (plain, parallel)]
    for _ in range(4):
        x = torch.randn(7, 2, 4, 4, dtype=torch.float64)
        outputs = [module(x) for module in (plain, parallel)]
        assert outputs[1].device == torch.device("cuda:0")
        same(outputs[1], outputs[0])
        for optimizer, output in zip(optimizers, outputs, strict=True):
            optimizer.zero_grad()
            output.pow(2).mean().backward()
            optimizer.step()
    same(parallel.module.state_dict(), plain.state_dict())
    assert parallel.module.unused.weight.grad is None


@pytest.mark.parametrize("devices", PLACES)
def test_two_forwards_then_two_backwards(devices: list[Any]) -> None:
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    parallel = DataParallel(copy.deepcopy(plain).to(torch.device(devices[0])), devices)
    inputs = [torch.randn(6, 4, dtype=torch.float64) for _ in range(2)]
    for module in (plain, parallel):
        for loss in [module(x).pow(2).sum() for x in inputs]:
            loss.backward()
    same([p.grad for p in parallel.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("devices", PLACES)
def test_memory_is_kept_unless_the_stream_is_another(devices: list[Any]) -> None:
    seen: list[int] = []
    net = nn.Linear(64, 64).to(torch.device(devices[0]))

    def note(module: nn.Module, *_: Any) -> None:
        if module.weight.data_ptr() != net.weight.data_ptr():
            seen.append(module.weight.data_ptr())

    net.register_forward_hook(note)
    parallel = DataParallel(net, devices)
    x = torch.randn(4, 64)
    for _ in range(3):
        parallel(x).sum().backward()
    with torch.cuda.stream(torch.cuda.Stream(0)):
        held = parallel(x)
    torch.cuda.synchronize()
    assert len(set(seen[:3])) == 1
    same(held, net(x.to(net.weight.device)))


@pytest.mark.parametrize("devices", PLACES)
def test_loss_where_the_outputs_are(devices: list[Any]) -> None:
    plain = nn.Linear(4, 3).double()
    parallel = DataParallel(copy.deepcopy(plain).to(torch.device(devices[0])), devices, gather_output=False)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), ignore_index=1)
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 2, 1])
    expected = criterion(plain(x), y)
    found = DataParallelCriterion(copy.deepcopy(criterion).to(torch.device(devices[0])))(parallel(x), y)
    same(found, expected)
    for loss in (found, expected):
        loss.backward()
    same(parallel.module.weight.grad, plain.weight.grad)


def test_autocast_of_the_caller_is_that_of_replicas() -> None:
    parallel = DataParallel(nn.Linear(4, 4).cuda(), ["cuda:0", "cuda:0"])
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert parallel(torch.randn(4, 4)).dtype == torch.bfloat16


def test_replicas_run_on_the_callers_stream() -> None:
    stream = torch.cuda.Stream(0)
    seen: list[bool] = []
    net = nn.Linear(4, 4).cuda()
    net.register_forward_hook(lambda *_: seen.append(torch.cuda.current_stream(0) == stream))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        DataParallel(net, ["cuda:0", "cuda:0"])(torch.randn(4, 4))
    torch.cuda.synchronize()
    assert seen == [True, True]


def test_defaults_are_torchs() -> None:
    net = nn.Linear(4, 4).cuda()
    ours, theirs = DataParallel(net), nn.DataParallel(net)
    assert (ours.device_ids, ours.output_device) == (theirs.device_ids, theirs.output_device)
    assert (ours.dim, ours.src_device_obj) == (theirs.dim, theirs.src_device_obj)
    x = torch.randn(4, 4)
    same(ours(x), theirs(x))
    with pytest.raises(DeviceError, match="can be seen here"):
        DataParallel(net, [0, torch.cuda.device_count()])


@needs_two
def test_module_elsewhere_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"on device cuda:1 .*found one of them on device: cuda:0"):
        DataParallel(nn.Linear(4, 4).cuda(0), [1, 0])(torch.zeros(4, 4))


@needs_two
def test_training_is_that_of_torchs() -> None:
    torch.manual_seed(0)
    net = Net().cuda()
    x = torch.randn(8, 2, 4, 4)
    modules: list[nn.Module] = [DataParallel(copy.deepcopy(net), [0, 1]), nn.DataParallel(copy.deepcopy(net), [0, 1])]
    for module in modules:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(x).pow(2).mean().backward()
            optimizer.step()
    same(modules[0].state_dict(), modules[1].state_dict())
