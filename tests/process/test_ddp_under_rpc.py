"""`DistributedDataParallel` under `torch.distributed.autograd`: refused on every rank, with RPC running for real."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.process.ranks import Rank, Ranks
from torch import nn
from torch.distributed import autograd, rpc

import lockstep as ls
from lockstep.errors import ReductionError


def scene(rank: Rank) -> Any:
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TP_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=rank.store(), rank=rank.number, world_size=rank.size)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{rank._folder}/rpc")
    rpc.init_rpc(f"worker{rank.number}", rank=rank.number, world_size=rank.size, rpc_backend_options=options)
    layer = nn.Linear(3, 1, bias=False)
    model = ls.DistributedDataParallel(layer)
    inputs = torch.full((1, 3), float(rank.number + 1))
    with autograd.context() as context:
        # Gradients were each rank's own in the context, and nothing said so.
        with pytest.raises(ReductionError) as refused:
            autograd.backward(context, [model(inputs).sum()])
        with torch.no_grad():
            model(inputs)
    model(inputs).sum().backward()
    averaged = layer.weight.grad.tolist()
    rpc.shutdown()
    dist.destroy_process_group()
    return str(refused.value), averaged


def test_distributed_autograd_is_refused_on_every_rank(tmp_path: Any) -> None:
    with Ranks(tmp_path, 2, scene) as ranks:
        for said, averaged in ranks.results():
            assert "would not be averaged over the ranks" in said
            assert "torch.distributed.autograd.context()" in said
            assert averaged == [[1.5] * 3]  # outside of the context nothing has changed
