"""The trainer's promise on GPUs: the same bits on any number of workers, over NCCL and over Gloo."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gpu.sharing import on_one_gpu
from tests.process.training_cases import image_net, images, mean_loss
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.comm import current_world

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
NUM_SHARDS = 5
DEVICE = torch.device("cuda", 0)


def half_loss(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cuda", torch.float16):
        return mean_loss(model, batch)


def token_loss(model: nn.Module, batch: Any) -> ls.Mean:
    with torch.autocast("cuda", torch.bfloat16):
        scores = model(batch[0])
    counts = batch[1] != 1
    losses = nn.functional.cross_entropy(scores.float(), batch[1], reduction="none")
    return ls.Mean((losses * counts).sum(), counts.sum())


def texts() -> TensorDataset:
    words = torch.randint(0, 50, (43, 8), generator=torch.Generator().manual_seed(2))
    return TensorDataset(words, words.sum(1) % 3)


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 3)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encoder(self.embedding(words)).mean(1))
        return scores


def train(_run: ls.Run, *, over_gloo: bool) -> list[str]:
    """Return the digest after every step of every kind of run."""
    world = current_world(dist.new_group(backend="gloo")) if over_gloo else None
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**20, growth_interval=3)
    kinds: list[tuple[nn.Module, Any, TensorDataset, dict[str, Any]]] = [
        (image_net(), mean_loss, images(), {"max_grad_norm": 1.0}),
        (image_net(), half_loss, images(), {"scaler": scaler}),
        (Text(), token_loss, texts(), {}),
    ]
    digests = []
    for model, loss, data, options in kinds:
        model.to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        trainer = ls.Trainer(model, optimizer, loss=loss, num_shards=NUM_SHARDS, world=world, **options)
        loader = ls.ShardedLoader(data, batch_size=10, num_shards=NUM_SHARDS, world=world, pin_memory=True)
        for batch in loader.epoch(0):
            trainer.step(batch)
            digests.append(trainer.digest())
    return digests


@pytest.fixture(scope="module")
def reference() -> list[str]:
    digests: list[str] = ls.launch(train, devices=[0], force=True, over_gloo=False)[0]
    return digests


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_workers_on_one_gpu_over_gloo_have_the_bits_of_one(reference: list[str], num_workers: int) -> None:
    assert ls.launch(train, devices=on_one_gpu(num_workers), over_gloo=True) == [reference] * num_workers


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_workers_on_two_gpus_over_nccl_have_the_bits_of_one(reference: list[str]) -> None:
    assert ls.launch(train, devices="auto:2", force=True, over_gloo=False) == [reference] * 2
