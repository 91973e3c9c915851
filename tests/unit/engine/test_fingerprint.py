"""What the bits of a run depend on: equal fingerprints mean equal digests."""

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import lockstep as ls
from lockstep.engine.fingerprint import USUAL, Fingerprint, take_fingerprint

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.device], Fingerprint]:
    """Take a fingerprint, of a GPU too: only its name is asked of CUDA."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H100")
    return lambda device: take_fingerprint(device, num_shards=4, seed=0)


PRECISIONS = [
    ("cuda.matmul", "tf32", {"cuda.matmul.fp32_precision"}),
    ("cudnn", "ieee", {"cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision"}),
    ("cudnn.conv", "ieee", {"cudnn.conv.fp32_precision"}),
    ("cudnn.rnn", "ieee", {"cudnn.rnn.fp32_precision"}),
    ("mkldnn.matmul", "bf16", {"mkldnn.matmul.fp32_precision"}),
    ("mkldnn.conv", "tf32", {"mkldnn.conv.fp32_precision"}),
]


@pytest.mark.parametrize(("backend", "precision", "changed"), PRECISIONS)
def test_a_precision_set_for_one_library_is_a_difference(
    take: Callable[[torch.device], Fingerprint], backend: str, precision: str, changed: set[str]
) -> None:
    # torch's older getters, which were used here, raise when the precision is set for one library. So Trainer(...) did.
    target: Any = torch.backends
    cudnn: Any = torch.backends.cudnn
    for name in backend.split("."):
        target = getattr(target, name)
    # Once it is set, an operator's precision does not follow its library's any more in this process; so it is set here.
    first = [(target, target.fp32_precision)]
    if backend == "cudnn":
        first = [(cudnn.conv, "none"), (cudnn.rnn, "none"), (torch.backends.cuda.matmul, "ieee"), (cudnn, "tf32")]
    was = [(each, each.fp32_precision) for each, _ in first]
    try:
        for each, value in first:
            each.fp32_precision = value
        before = take(CUDA)
        target.fp32_precision = precision
        now = take(CUDA)
    finally:
        for each, value in was:
            each.fp32_precision = value
    names = {difference.split(" is ")[0] for difference in before.differences(now)}
    assert names - {"matmul_precision"} == changed
    assert all(f"{name} {precision}" in str(now) for name in changed)
    assert before.differences(take(CUDA)) == []


SWITCHES: list[tuple[str, Callable[[bool], object]]] = [
    ("attention.flash", torch.backends.cuda.enable_flash_sdp),
    ("attention.mem_efficient", torch.backends.cuda.enable_mem_efficient_sdp),
    ("attention.math", torch.backends.cuda.enable_math_sdp),
    ("attention.cudnn", torch.backends.cuda.enable_cudnn_sdp),
    ("attention.math.reduced_precision", torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp),
    *(
        (f"cuda.matmul.{name}", lambda value, name=name: setattr(torch.backends.cuda.matmul, f"allow_{name}", value))
        for name in ("fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction", "fp16_accumulation")
    ),
    ("mkldnn", lambda value: setattr(torch.backends.mkldnn, "enabled", value)),
    ("mkldnn.deterministic", lambda value: setattr(torch.backends.mkldnn, "deterministic", value)),
]


@pytest.mark.parametrize(("name", "switch"), SWITCHES, ids=[name for name, _ in SWITCHES])
def test_a_switch_of_torch_is_a_difference(
    take: Callable[[torch.device], Fingerprint], name: str, switch: Callable[[bool], object]
) -> None:
    usual = bool(USUAL[name])
    before = take(CUDA)
    switch(not usual)
    try:
        now = take(CUDA)
    finally:
        switch(usual)
    assert before.differences(now) == [f"{name} is {usual} and {not usual}"]
    assert f"{name} {not usual}" in str(now)


@pytest.fixture
def _warns_only() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_warns_only")
def test_operators_that_only_warn_are_not_deterministic(take: Callable[[torch.device], Fingerprint]) -> None:
    assert take(CPU).switches["deterministic.warn_only"] is True


def test_libraries_and_their_variables_are_differences(
    take: Callable[[torch.device], Fingerprint], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = take(CUDA), take(CPU)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda: "_BlasBackend.Cublaslt")
    for name in ("CUBLAS_WORKSPACE_CONFIG", "MKL_CBWR"):
        monkeypatch.setenv(name, "other" + os.environ.get(name, ""))
    changed = {difference.split(" is ")[0] for difference in before[0].differences(take(CUDA))}
    assert changed == {"cuDNN", "CUDA", "cuda.blas", "$CUBLAS_WORKSPACE_CONFIG"}
    assert [difference.split(" is ")[0] for difference in before[1].differences(take(CPU))] == ["$MKL_CBWR"]
    monkeypatch.setattr(torch.__config__, "show", lambda: "BLAS_INFO=open, MKL-DNN v9")
    changed = {difference.split(" is ")[0] for difference in before[1].differences(take(CPU))}
    assert changed == {"BLAS", "MKL", "oneDNN", "$MKL_CBWR"}


@pytest.mark.parametrize("allows_tf32", [True, False])
def test_a_fingerprint_of_an_earlier_version_is_compared_by_what_it_has(
    take: Callable[[torch.device], Fingerprint], *, allows_tf32: bool
) -> None:
    # What was recorded before libraries and precisions were; a run that resumes from it is not warned for those.
    now = take(CUDA)
    old = {
        **json.loads(json.dumps(now.to_dict())),
        "switches": {
            **{name: now.switches[name] for name in ("default dtype", "mkldnn", "flush denormal", "cudnn")},
            **{name: now.switches[name] for name in ("cudnn.deterministic", "cudnn.benchmark")},
            "cudnn.allow_tf32": allows_tf32,
        },
    }
    operators = [] if allows_tf32 else ["conv", "rnn"]
    expected = [f"cudnn.{name}.fp32_precision is 'ieee' and 'tf32'" for name in operators]
    assert Fingerprint.from_dict(old).differences(now) == expected
    older = {name: value for name, value in old.items() if name != "switches"}
    assert Fingerprint.from_dict(older).differences(now) == []


def test_what_holds_for_gpus_alone_is_no_difference_on_the_cpu(take: Callable[[torch.device], Fingerprint]) -> None:
    before = take(CPU)
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    try:
        assert before.differences(take(CPU)) == []
    finally:
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark


def test_a_fingerprint_is_read_back_as_it_was_written(take: Callable[[torch.device], Fingerprint]) -> None:
    now = take(CPU)
    assert Fingerprint.from_dict(json.loads(json.dumps(now.to_dict()))) == now


def test_a_trainer_is_made_after_a_precision_was_set_for_one_library() -> None:
    model = torch.nn.Linear(2, 1)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = ls.Trainer(model, optimizer, loss=lambda net, batch: net(batch).mean(), num_shards=1, seed=0)
        assert trainer.fingerprint().matmul_precision == "set for each library"
        trainer.close()
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
