"""How often the host waits for the GPU in a steady step: no more than torch's own. Skips itself without a GPU."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.gpu.sharing import DEVICE
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import TensorDataset

import lockstep as ls

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
WARM_UP_STEPS, NUM_STEPS = 4, 5


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    ).to(DEVICE)


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def make_data() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 3, 8, 8), torch.randint(0, 4, (16,))


def loop_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: tuple[Tensor, Tensor], clip: float | None
) -> None:
    optimizer.zero_grad()
    mean_loss(model, [column.to(DEVICE, non_blocking=True) for column in data]).backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


def make_loop(wrap: Callable[[nn.Module], nn.Module], clip: float | None) -> Callable[[], Any]:
    model = wrap(make_net())
    inputs, targets = make_data()
    data = (inputs.pin_memory(), targets.pin_memory()) if DEVICE.type == "cuda" else (inputs, targets)
    return partial(
        loop_step, model, torch.optim.SGD(model.parameters(), lr=1e-3, fused=DEVICE.type == "cuda"), data, clip
    )


def make_trainer(num_shards: int, clip: float | None) -> Callable[[], Any]:
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=DEVICE.type == "cuda")
    trainer = ls.Trainer(model, optimizer, loss=mean_loss, num_shards=num_shards, max_grad_norm=clip)
    loader = ls.ShardedLoader(
        TensorDataset(*make_data()), batch_size=16, num_shards=num_shards, pin_memory=DEVICE.type == "cuda"
    )
    batch = next(loader.epoch(0))
    warnings.filterwarnings("ignore", message="The batch is that of")  # it is the same one in every step
    return partial(trainer.step, batch)


def count_waits(step: Callable[[], Any]) -> int:
    for _ in range(WARM_UP_STEPS):
        step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if DEVICE.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(NUM_STEPS):
                step()
        finally:
            if DEVICE.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def count_all(_run: ls.Run, clip: float | None) -> dict[str, int]:
    ids = [DEVICE] if DEVICE.type == "cuda" else None
    steps = {
        "plain loop": make_loop(copy.copy, clip),
        "torch DDP": make_loop(partial(TorchDDP, device_ids=ids), clip),
        "DDP": make_loop(partial(ls.DistributedDataParallel, device_ids=ids), clip),
        "trainer": make_trainer(1, clip),
        "trainer, 4 shards": make_trainer(4, clip),
    }
    return {side: count_waits(step) for side, step in steps.items()}


@pytest.fixture(scope="module", params=[None, 1.0], ids=["", "clipping"])
def counts(request: pytest.FixtureRequest) -> dict[str, int]:
    devices = [0] if DEVICE.type == "cuda" else "cpu"
    return ls.launch(count_all, request.param, devices=devices, force=True)[0]


def test_ddp_waits_no_more_often_than_torchs(counts: dict[str, int]) -> None:
    assert counts["DDP"] <= counts["torch DDP"]


@pytest.mark.parametrize("side", ["trainer", "trainer, 4 shards"])
def test_a_trainer_waits_no_more_often_than_a_plain_loop(counts: dict[str, int], side: str) -> None:
    assert counts[side] <= counts["plain loop"]
