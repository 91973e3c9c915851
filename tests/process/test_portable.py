"""`portable`: the same bits on processors with AVX512, AVX2 and neither, for which the variables of libraries stand."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.errors import UsageError, WorkerFailedError

PROCESSORS: Mapping[str, Mapping[str, str]] = {
    "this one": {},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"},
    "neither": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "MKL_CBWR": "COMPATIBLE",
        "GLIBC_TUNABLES": "glibc.malloc.arena_max=2:glibc.cpu.hwcaps=-AVX2",
        "OMP_NUM_THREADS": "2",
    },
}


class Sequence(nn.Module):
    """A part that sees 8 rows of 8 numbers, and what follows sees its last row."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.end = part, nn.Linear(8, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.part(inputs.view(-1, 8, 8))
        last: torch.Tensor = self.end((found[0] if isinstance(found, tuple) else found)[:, -1])
        return last


CASES: Mapping[str, tuple[Callable[[], nn.Module], Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "layers": (
        lambda: nn.Sequential(nn.Linear(64, 90), nn.Tanh(), nn.LayerNorm(90), nn.Linear(90, 10)),
        torch.optim.AdamW,
        {"max_grad_norm": 1.0},
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(288, 10),
        ),
        torch.optim.SGD,
        {},
    ),
    "recurrent": (lambda: Sequence(nn.LSTM(8, 8, batch_first=True)), torch.optim.RMSprop, {}),
    "attention": (
        lambda: Sequence(nn.TransformerEncoderLayer(8, 2, 32, batch_first=True, activation="gelu")),
        torch.optim.Adam,
        {},
    ),
    "half": (
        lambda: nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 10)),
        torch.optim.NAdam,
        {"precision": "bfloat16"},
    ),
    "double": (
        lambda: nn.Sequential(nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 10)).double(),
        torch.optim.Adam,
        {},
    ),
}


def train(run: ls.Run, wanted_threads: int = 1) -> dict[str, str]:
    """Train each case for three steps; `torch.set_num_threads` is what scripts call."""
    torch.set_num_threads(wanted_threads)
    digests = {}
    for name, (make, optimizer, options) in CASES.items():
        torch.manual_seed(0)
        model = make()
        kind = next(model.parameters()).dtype
        data = TensorDataset(torch.randn(96, 64, dtype=kind).atan() + torch.randn(96, 1).sum(), torch.arange(96) % 10)
        trainer = ls.Trainer(
            model,
            optimizer(model.parameters(), lr=0.01),
            loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
            num_shards=2,
            verify_steps=0,
            **options,
        )
        for batch in trainer.loader(data, batch_size=32).epoch(0):
            trainer.step(batch)
        digests[name] = trainer.digest()
        trainer.close()
    numbers = np.random.default_rng(0).random(999) + 0.1
    matrix = numbers[:900].reshape(30, 30)
    digests["numpy"] = str([np.exp(numbers).sum(), np.tan(numbers.astype("f")).sum(), np.linalg.inv(matrix).sum()])
    digests["math"] = str(
        [math.fsum(map(function, numbers.tolist())) for function in (math.exp, math.tan, math.lgamma)]
    )
    return {**digests, "fingerprint": str(trainer.fingerprint())}


def operators(_run: ls.Run) -> None:
    """The forms of operators that are replaced take and return what torch's own do."""
    for function, exact in ((torch.sqrt, np.sqrt), (torch.atan, np.arctan)):
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64):
            values = torch.arange(12).reshape(3, 4).to(dtype).t()
            wide = values.float() if dtype == torch.bfloat16 else values
            expected = torch.from_numpy(exact(wide.numpy())).to(dtype)
            found, into, within = function(values), torch.empty(0, dtype=dtype), values.clone()
            assert found.dtype == dtype
            assert found.stride() == values.stride()
            getattr(torch, f"{function.__name__}_")(within)
            assert all(each.equal(expected) for each in (found, function(values, out=into), into, within))
        assert function(torch.tensor(4)).dtype == torch.float32
        with pytest.raises(RuntimeError, match="can't be cast"):
            torch.empty(2, dtype=torch.int64).sqrt_()
    values = torch.rand(5, requires_grad=True)
    root = values.detach().sqrt()
    assert (values**0.5).equal(root)
    assert values.detach().clone().pow_(0.5).equal(root)
    assert (values**2).equal(values * values)
    (values**0.5).sum().backward()
    assert values.grad is not None
    assert torch.allclose(values.grad, 0.5 / root)
    assert root.equal(torch.from_numpy(np.sqrt(values.detach().numpy())))


def set_processor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in PROCESSORS[name].items():
        monkeypatch.setenv(variable, value)


def test_portable_runs_are_equal_on_every_processor_and_with_any_threads() -> None:
    found, others = [], []
    for threads, name in zip((1, 2, 4), PROCESSORS, strict=True):
        with pytest.MonkeyPatch.context() as monkeypatch:
            set_processor(name, monkeypatch)
            found += ls.launch(train, threads, workers=threads % 3, threads_per_worker=threads, portable=True)
            others += ls.launch(train, workers=1) if PROCESSORS[name] else []
    assert "cpu portable, 1 thread" in found[0]["fingerprint"]
    assert all(each == found[0] for each in found)
    assert all(others[0][name] != others[1][name] for name in CASES), "the variables stand for one processor"


def test_replaced_operators_are_torchs_in_every_other_way() -> None:
    ls.launch(operators, workers=1, portable=True)


def test_processes_that_cannot_be_portable_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch).square().mean()
        return loss

    def compiled(_run: ls.Run) -> None:
        model = nn.Linear(64, 10)
        ls.Trainer(model, torch.optim.SGD(model.parameters()), loss=square, num_shards=1, compile=True)

    def least_squares(_run: ls.Run) -> None:
        torch.linalg.lstsq(torch.eye(3), torch.ones(3, 1))

    for function, named in ((compiled, "torch.compile"), (least_squares, r"torch\.linalg\.lstsq")):
        with pytest.raises(WorkerFailedError, match=rf"{named}.* \(LS128\)"):
            ls.launch(function, workers=1, portable=True)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"export .*MKL_CBWR.* \(LS128\)"):
        ls.launch(train, portable=True)
