"""Workers that share one GPU are killed; the others continue, with the bits of the undisturbed run."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.sharing import on_one_gpu
from tests.support.mortal_training_on_device import train

import lockstep as ls

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BACKENDS = ["gloo", "nccl"] if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else ["gloo"]


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    return ls.launch(train, "gloo", {}, devices=on_one_gpu(1))[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_bits_are_those_of_the_undisturbed_run(backend: str, undisturbed: Any) -> None:
    assert ls.launch(train, backend, {"0 update": 3, "2 metric": 1}, devices=on_one_gpu(3)) == [undisturbed]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_new_worker_gets_the_state_from_the_gpu_of_another_one(
    backend: str, undisturbed: Any, tmp_path: Path
) -> None:
    elastic = ls.Elastic(respawn=1)
    results = ls.launch(train, backend, {"1 loss": 3}, tmp_path / "joins", devices=on_one_gpu(2), elastic=elastic)
    assert [digest for digest, _ in results] == [undisturbed[0]] * 2
