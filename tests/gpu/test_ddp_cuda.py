"""`DistributedDataParallel` on a GPU: parity with torch's, and a module that lies on a GPU and on the CPU."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gpu.sharing import on_one_gpu
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep as ls
from lockstep.parallel.arguments import find_placement

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Split(nn.Module):
    """First layers on the GPU, the rest on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(8, 16).cuda()
        self.back = nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.back(self.front(inputs.cuda()).relu().cpu())


def inputs_of(rank: int, step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def train(wrap: Any, net: nn.Module, run: ls.Run, **options: Any) -> list[list[float]]:
    # Gloo, which moves tensors of either device: one GPU serves both ranks here.
    model = wrap(net, process_group=dist.new_group(backend="gloo"), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(inputs_of(run.rank, step)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu().flatten().tolist() for parameter in model.parameters()]


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).cuda()


def both(run: ls.Run) -> dict[str, Any]:
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    whole = Split()
    torch.manual_seed(0)
    return {
        "ours": train(ls.DistributedDataParallel, plain(), run, device_ids=[0]),
        "torch's": train(TorchDDP, plain(), run, device_ids=[0]),
        "split": train(ls.DistributedDataParallel, whole, run),
    }


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    return ls.launch(both, devices=on_one_gpu(2))


def test_training_on_a_gpu_is_torchs(answers: list[dict[str, Any]]) -> None:
    for found in answers:
        for mine, theirs in zip(found["ours"], found["torch's"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def test_a_module_on_two_devices_is_the_same_on_both_ranks(answers: list[dict[str, Any]]) -> None:
    assert answers[0]["split"] == answers[1]["split"]
    assert [parameter.device.type for parameter in Split().parameters()] == ["cuda", "cuda", "cpu", "cpu"]


def test_device_ids_for_several_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="only work with single-device"):
        find_placement(list(Split().parameters()), [0], None)
