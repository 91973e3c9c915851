"""`DataParallelCriterion`: the loss of the whole batch, from outputs that stayed where they were."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.parallel.replicas.criterion import DataParallelCriterion
from lockstep.parallel.replicas.data_parallel import DataParallel

NUM_CLASSES = 4


pytestmark = pytest.mark.usefixtures("double_precision")


def classes(num_samples: int) -> Tensor:
    return torch.randint(NUM_CLASSES, (num_samples,))


def mostly_ignored(num_samples: int) -> Tensor:
    """All but the last two samples: whole replicas have nothing to learn from."""
    targets = torch.full((num_samples,), -100)
    targets[-2:] = torch.tensor([1, 2])[-min(num_samples, 2) :]
    return targets


def values(num_samples: int) -> Tensor:
    return torch.rand(num_samples, NUM_CLASSES)


def log_probabilities(criterion: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def of_outputs(outputs: Tensor, targets: Tensor) -> Tensor:
        return criterion(outputs.log_softmax(1), targets)

    return of_outputs


WEIGHT = torch.tensor([1.0, 0.2, 3.0, 0.0], dtype=torch.float64)
CASES: dict[str, tuple[Callable[[], Any], Callable[[int], Tensor]]] = {
    "cross entropy": (nn.CrossEntropyLoss, classes),
    "class weights": (lambda: nn.CrossEntropyLoss(weight=WEIGHT[:3].repeat(2)[:4].clone()), classes),
    "weights of zero": (lambda: nn.CrossEntropyLoss(weight=WEIGHT), lambda n: classes(n).clamp(max=2)),
    "ignored": (nn.CrossEntropyLoss, mostly_ignored),
    "smoothed": (lambda: nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.2), mostly_ignored),
    "probabilities": (lambda: nn.CrossEntropyLoss(weight=WEIGHT), lambda n: values(n).softmax(1)),
    "nll": (lambda: nn.NLLLoss(weight=WEIGHT, ignore_index=1), lambda n: classes(n).clamp(max=2)),
    "summed": (lambda: nn.CrossEntropyLoss(reduction="sum"), classes),
    "each": (lambda: nn.MSELoss(reduction="none"), values),
    "mse": (nn.MSELoss, values),
    "batchmean": (lambda: nn.KLDivLoss(reduction="batchmean"), values),
    "function": (lambda: nn.functional.cross_entropy, mostly_ignored),
    "partial": (lambda: partial(nn.functional.cross_entropy, weight=WEIGHT, label_smoothing=0.1), mostly_ignored),
    "partial sum": (lambda: partial(nn.functional.mse_loss, reduction="sum"), values),
    "nll function": (lambda: partial(nn.functional.nll_loss, ignore_index=1), lambda n: classes(n).clamp(max=2)),
}


@pytest.mark.parametrize("num_samples", [9, 4, 2])
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
@pytest.mark.parametrize(("criterion", "targets"), CASES.values(), ids=CASES)
def test_loss_and_gradients_are_those_of_the_whole_batch(
    criterion: Callable[[], Any], targets: Callable[[int], Tensor], num_replicas: int, num_samples: int
) -> None:
    plain = nn.Linear(3, NUM_CLASSES)
    parallel = DataParallel(copy.deepcopy(plain), ["cpu"] * num_replicas, gather_output=False)
    loss_of = criterion()
    x, y = torch.randn(num_samples, 3), targets(num_samples)
    expected = loss_of(plain(x), y)
    found = DataParallelCriterion(loss_of)(parallel(x), y)
    torch.testing.assert_close(found, expected)
    for loss in (expected, found):
        loss.sum().backward()
    torch.testing.assert_close(parallel.module.weight.grad, plain.weight.grad)
    assert getattr(loss_of, "reduction", None) == getattr(criterion(), "reduction", None)


@pytest.mark.parametrize("case", ["class weights", "partial"])
def test_a_target_may_be_given_by_name(case: str) -> None:
    # It was overlooked then, and the parts were weighted by samples: another loss, without a word.
    criterion = CASES[case][0]()
    outputs, target = torch.randn(9, NUM_CLASSES), mostly_ignored(9)
    found = DataParallelCriterion(criterion)(list(outputs.chunk(2)), target=target)
    torch.testing.assert_close(found, criterion(outputs, target=target))


@pytest.mark.parametrize(
    "options", [{"weight": WEIGHT}, {"ignore_index": 2}, {"reduction": "sum"}, {"reduction": "none"}], ids=str
)
def test_options_of_a_loss_function_are_not_cut(options: dict[str, Any]) -> None:
    outputs, target = torch.randn(9, NUM_CLASSES), classes(9).clamp(max=2)
    loss_of = nn.functional.cross_entropy
    found = DataParallelCriterion(loss_of)(list(outputs.chunk(2)), target, **options)
    torch.testing.assert_close(found, loss_of(outputs, target, **options))


def test_a_classification_loss_with_a_forward_of_its_own_says_its_weight() -> None:
    class OfLogits(nn.CrossEntropyLoss):
        def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
            return super().forward(outputs * 2, target)

    patched = nn.CrossEntropyLoss()
    patched.forward = nn.functional.cross_entropy  # type: ignore[method-assign]
    outputs, target = torch.randn(4, NUM_CLASSES), classes(4)
    for criterion in (OfLogits(), patched):
        with pytest.raises(TypeError, match=r"an overridden forward.*Return ls.Mean\(total, weight\)"):
            DataParallelCriterion(criterion)(list(outputs.chunk(2)), target)
    summed = DataParallelCriterion(OfLogits(reduction="sum"))(list(outputs.chunk(2)), target)
    torch.testing.assert_close(summed, OfLogits(reduction="sum")(outputs, target))


def test_a_compiled_loss_is_the_loss_that_was_compiled() -> None:
    outputs, target = torch.randn(9, NUM_CLASSES), mostly_ignored(9)
    compiled = torch.compile(nn.CrossEntropyLoss(), backend="eager")
    found = DataParallelCriterion(compiled)(list(outputs.chunk(2)), target)
    torch.testing.assert_close(found, nn.CrossEntropyLoss()(outputs, target))
    function = torch.compile(nn.functional.cross_entropy, backend="eager")
    with pytest.raises(TypeError, match=r"a compiled cross_entropy.*CrossEntropyLoss\(\) instead"):
        DataParallelCriterion(function)(list(outputs.chunk(2)), target)


def test_a_criterion_that_knows_its_weight() -> None:
    def mean_of_real_tokens(outputs: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        real = tokens > 0
        return (outputs * real).sum() / real.sum(), real.sum()

    outputs = torch.randn(5, 3)
    tokens = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0]])
    whole, _ = mean_of_real_tokens(outputs, tokens)
    torch.testing.assert_close(DataParallelCriterion(mean_of_real_tokens)(list(outputs.chunk(2)), tokens), whole)


def test_a_criterion_that_learns() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.calls: Tensor
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            self.calls += 1
            return (self.scale * (outputs - targets) ** 2).mean()

    plain = Scaled()
    parallel = DataParallelCriterion(copy.deepcopy(plain))
    outputs, targets = torch.randn(5, 3), torch.randn(5, 3)
    plain(outputs, targets).backward()
    parallel(list(outputs.chunk(3)), targets).backward()
    assert isinstance(parallel.criterion, Scaled)
    torch.testing.assert_close(parallel.criterion.scale.grad, plain.scale.grad)
    assert parallel.criterion.calls == 1
    compiled = torch.compile(parallel, backend="eager")  # which leaves it alone
    torch.testing.assert_close(compiled(list(outputs.chunk(3)), targets), plain(outputs, targets))


def test_half_precision_keeps_its_kind_and_does_not_overflow() -> None:
    outputs = torch.zeros(40_000, 4, dtype=torch.float16)
    outputs[:, 0] = 10
    targets = torch.ones(40_000, dtype=torch.int64)
    loss = DataParallelCriterion(nn.CrossEntropyLoss())(list(outputs.chunk(2)), targets)
    assert loss.dtype == torch.float16
    assert abs(loss - 10) < 0.1


def test_structured_outputs_and_keyword_targets() -> None:
    def criterion(outputs: dict[str, Tensor], *, targets: Tensor, power: int) -> Tensor:
        return (outputs["a"] - targets).abs().pow(power).mean()

    outputs, targets = torch.randn(5), torch.randn(5)
    parts = [{"a": part} for part in outputs.chunk(2)]
    found = DataParallelCriterion(criterion)(parts, targets=targets, power=3)
    torch.testing.assert_close(found, (outputs - targets).abs().pow(3).mean())


def test_no_targets() -> None:
    outputs = torch.randn(5)
    torch.testing.assert_close(DataParallelCriterion(torch.mean)(list(outputs.chunk(2))), outputs.mean())


def test_misuse_is_explained() -> None:
    criterion = DataParallelCriterion(nn.MSELoss())
    outputs = list(torch.zeros(6).chunk(3))
    with pytest.raises(
        TypeError, match=r"expects the list of the replicas' outputs, but got Tensor.*gather_output=False"
    ):
        criterion(torch.zeros(6), torch.zeros(6))
    with pytest.raises(ValueError, match="There are 3 outputs, but the targets split into 2 parts"):
        criterion(outputs, torch.zeros(2))
    with pytest.raises(TypeError, match="output without a tensor"):
        criterion([None, torch.zeros(2)], torch.zeros(2))
    with pytest.raises(ValueError, match=r"a loss of shape \(2,\) for a replica"):
        DataParallelCriterion(lambda output, target: output - target)(outputs, torch.zeros(6))
    with pytest.raises(ValueError, match="Outputs are on meta, but device_ids is cpu"):
        DataParallelCriterion(nn.MSELoss(), ["cpu"])([torch.zeros(2, device="meta")], torch.zeros(2))
