"""`SyncBatchNorm` on the GPU against torch's, which runs there too; skips itself without one.

Ranks share one GPU over Gloo: NCCL takes a device per rank.
"""

import pytest
import torch
import torch.distributed as dist
from tests.gpu.sharing import on_one_gpu
from torch import Tensor, nn

import lockstep as ls
from lockstep.parallel.sync_batchnorm import SyncBatchNorm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PARTS = {"even": (4, 4), "uneven": (5, 2), "first empty": (0, 3), "second empty": (3, 0)}
"""Samples per rank."""
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def on_device(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


def results(layer: nn.Module, inputs: Tensor) -> list[Tensor]:
    """Return output, gradients and buffers after one step."""
    leaf = inputs.clone(memory_format=torch.preserve_format).requires_grad_()
    output = layer(leaf)
    (output.float() * on_device(9, *inputs.shape)).sum().backward()
    # torch leaves an empty rank without gradients of weight and bias; ours are zeros.
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in layer.parameters()]
    return [output, leaf.grad, *gradients, *layer.buffers()]


def differences(found: list[Tensor], expected: list[Tensor], tolerance: float) -> list[str]:
    messages = []
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        try:
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        except AssertionError as error:
            messages.append(f"{number}: {error}")
    return messages


def compare(rank: int) -> dict[str, list[str]]:
    found = {}
    for name, sizes in PARTS.items():
        for layout_name, layout in LAYOUTS.items():
            for dtype, tolerance in ((torch.float32, 1e-4), (torch.float16, 1e-2)):
                if dtype == torch.float16 and 0 in sizes:
                    continue  # torch's ranks then send float16 and float32 to each other
                inputs = on_device(rank, sizes[rank], 3, 5, 4).add(rank).to(dtype).to(memory_format=layout)
                ours, theirs = (results(kind(3).cuda(), inputs) for kind in (SyncBatchNorm, nn.SyncBatchNorm))
                found[f"{name}, {layout_name}, {dtype}"] = differences(ours, theirs, tolerance)
    return found


def test_two_ranks_have_the_numbers_of_torchs() -> None:
    def work(run: ls.Run) -> dict[str, list[str]]:
        torch.cuda.set_device(0)
        store = dist.PrefixStore("on the GPU", dist.distributed_c10d._get_default_store())
        ls.destroy_process_group()
        dist.init_process_group("gloo", store=store, rank=run.rank, world_size=run.world_size)
        return compare(run.rank)

    for found in ls.launch(work, devices=on_one_gpu(2)):
        assert {name: messages for name, messages in found.items() if messages} == {}


def test_one_rank_under_nccl_is_batchnorm_bit_for_bit() -> None:
    def work(run: ls.Run) -> tuple[bool, bool]:
        inputs = on_device(0, 4, 3, 5, 4)
        ours, theirs = (results(kind(3).cuda(), inputs) for kind in (SyncBatchNorm, nn.BatchNorm2d))
        are_equal = all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
        return "nccl" in dist.get_backend(), are_equal

    assert ls.launch(work, devices=[0], force=True) == [(True, True)]
