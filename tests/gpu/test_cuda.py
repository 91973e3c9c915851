"""What only a GPU can show; every test here skips itself without one.

The GPU is taken by force: in a container this process' own use of it looks like somebody else's.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep as ls
from lockstep.recipes.digits import Net, datasets

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def train(run: ls.Run) -> tuple[str, str, str]:
    model = Net().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    trainer = ls.Trainer(
        model,
        optimizer,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        num_shards=4,
    )
    loader = ls.ShardedLoader(datasets()[0], batch_size=128, num_shards=4, pin_memory=True)
    for batch in loader.epoch(0):
        trainer.step(batch)
    return trainer.digest(), str(run.device), dist.get_backend()


def test_a_run_on_the_gpu_has_the_same_digest_twice() -> None:
    [first], [second] = (ls.launch(train, devices=[0], force=True) for _ in range(2))
    assert first == second
    assert first[1] == "cuda:0"


def test_ddp_on_the_gpu_keeps_gradients_in_its_buckets() -> None:
    def work(run: ls.Run) -> bool:
        model = ls.DistributedDataParallel(nn.Linear(3, 1).to(run.device), device_ids=[run.device])
        pointers = []
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(2, 3)).sum().backward()  # moved to the device by the wrapper
            pointers.append(model.module.weight.grad.untyped_storage().data_ptr())
        return pointers[0] == pointers[1]

    assert ls.launch(work, devices=[0], force=True) == [True]


def test_the_launcher_makes_no_cuda_context() -> None:
    ls.launch(lambda _run: None, devices=[0], force=True)
    assert not torch.cuda.is_initialized()
