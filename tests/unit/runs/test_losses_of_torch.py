"""A run's gradient with a loss of torch is that of the whole batch, on any number of shards; or the loss is refused."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.errors import ConfigError
from lockstep.runs.build import as_loss, build_criterion, build_metrics
from lockstep.runs.config import parse_config

NUM_SAMPLES, NUM_CLASSES, LENGTH = 24, 4, 5
pytestmark = pytest.mark.usefixtures("double_precision")

CPU = torch.device("cpu")
CLASS_WEIGHTS = [0.4, 2.2, 6.7, 1.0]


class Net(nn.Module):
    """Scores [N, C], or [N, C, T] where `length` is T."""

    def __init__(
        self, outputs: int = NUM_CLASSES, length: int = 0, after: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(3, outputs * max(length, 1))
        self.shape = (-1, outputs, length) if length else (-1, outputs)
        self.after = after

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.linear(inputs).reshape(self.shape)
        return output if self.after is None else self.after(output)


def targets(kind: str) -> Tensor:
    torch.manual_seed(5)
    if kind == "numbers":
        return torch.randn(NUM_SAMPLES, NUM_CLASSES)
    if kind == "probabilities":
        return torch.rand(NUM_SAMPLES, NUM_CLASSES).softmax(1)
    if kind == "bits":
        return torch.randint(2, (NUM_SAMPLES, NUM_CLASSES)).double()
    if kind == "signs":
        return torch.randint(2, (NUM_SAMPLES, NUM_CLASSES)).double() * 2 - 1
    classes = torch.randint(NUM_CLASSES, (NUM_SAMPLES, LENGTH) if kind == "padded" else (NUM_SAMPLES,))
    if kind == "padded":  # texts of other lengths, one of nothing
        classes[torch.arange(LENGTH) >= torch.arange(NUM_SAMPLES)[:, None] % (LENGTH + 1)] = -100
    if kind == "ignored":
        classes[: NUM_SAMPLES // 2] = 1
    return classes


def make_criterion(loss: str, loss_args: dict[str, Any]) -> Any:
    values = {"data": "m:d", "model": "m:n", "optimizer": "torch.optim:SGD", "batch_size": NUM_SAMPLES}
    return build_criterion(parse_config({**values, "loss": loss, "loss_args": loss_args}, "config"), CPU)


def gradient(net: Net, loss: Any, target: Tensor, num_shards: int) -> Tensor:
    """Return the gradient of one step over all samples."""
    before = net.linear.weight.detach().clone()
    trainer = ls.Trainer(net, torch.optim.SGD(net.parameters(), lr=1.0), loss=loss, num_shards=num_shards)
    torch.manual_seed(7)
    data = TensorDataset(torch.randn(NUM_SAMPLES, 3), target)
    for batch in ls.ShardedLoader(data, batch_size=NUM_SAMPLES, num_shards=num_shards, shuffle=False).epoch(0):
        trainer.step(batch)
    return before - net.linear.weight.detach()


CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "cross_entropy": ("torch.nn.functional:cross_entropy", {}, "classes", {}),
    "weights": ("torch.nn.functional:cross_entropy", {"weight": CLASS_WEIGHTS}, "classes", {}),
    "weights of a class": ("torch.nn:CrossEntropyLoss", {"weight": CLASS_WEIGHTS}, "classes", {}),
    "weights, smoothed": (
        "torch.nn:CrossEntropyLoss",
        {"weight": CLASS_WEIGHTS, "label_smoothing": 0.2},
        "classes",
        {},
    ),
    "ignored class": ("torch.nn:CrossEntropyLoss", {"ignore_index": 1}, "ignored", {}),
    "padded": ("torch.nn.functional:cross_entropy", {}, "padded", {"length": LENGTH}),
    "padded, weights": ("torch.nn:CrossEntropyLoss", {"weight": CLASS_WEIGHTS}, "padded", {"length": LENGTH}),
    "probabilities": ("torch.nn:CrossEntropyLoss", {"weight": CLASS_WEIGHTS}, "probabilities", {}),
    "nll": ("torch.nn:NLLLoss", {"weight": CLASS_WEIGHTS}, "classes", {"after": nn.LogSoftmax(1)}),
    "nll, padded": ("torch.nn.functional:nll_loss", {}, "padded", {"length": LENGTH, "after": nn.LogSoftmax(1)}),
    "mse": ("torch.nn:MSELoss", {}, "numbers", {}),
    "l1": ("torch.nn.functional:l1_loss", {}, "numbers", {}),
    "smooth l1": ("torch.nn:SmoothL1Loss", {"beta": 0.5}, "numbers", {}),
    "huber": ("torch.nn:HuberLoss", {}, "numbers", {}),
    "bce": ("torch.nn:BCELoss", {}, "bits", {"after": nn.Sigmoid()}),
    "bce with logits": ("torch.nn:BCEWithLogitsLoss", {"pos_weight": CLASS_WEIGHTS}, "bits", {}),
    "bce, weights": ("torch.nn.functional:binary_cross_entropy_with_logits", {"weight": CLASS_WEIGHTS}, "bits", {}),
    "kl, mean": ("torch.nn:KLDivLoss", {"reduction": "mean"}, "probabilities", {"after": nn.LogSoftmax(1)}),
    "kl, batchmean": ("torch.nn:KLDivLoss", {"reduction": "batchmean"}, "probabilities", {"after": nn.LogSoftmax(1)}),
    "poisson": ("torch.nn:PoissonNLLLoss", {}, "bits", {}),
    "soft margin": ("torch.nn:SoftMarginLoss", {}, "signs", {}),
    "hinge": ("torch.nn:HingeEmbeddingLoss", {}, "signs", {}),
    "multi label": ("torch.nn:MultiLabelSoftMarginLoss", {"weight": CLASS_WEIGHTS}, "bits", {}),
    "multi margin": ("torch.nn:MultiMarginLoss", {"weight": CLASS_WEIGHTS}, "classes", {}),
    "gaussian": ("torch.nn.functional:gaussian_nll_loss", {"var": 1.5}, "numbers", {}),
}


class HandsOn(nn.CrossEntropyLoss):
    def __init__(self, gamma: float = 2.0, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.gamma = gamma


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_the_whole_batch(name: str, num_shards: int) -> None:
    loss, arguments, kind, changes = CASES[name]
    target, net = targets(kind), Net(**changes)
    torch.manual_seed(7)
    output = net(torch.randn(NUM_SAMPLES, 3))
    known = getattr(nn if hasattr(nn, loss.partition(":")[2]) else functional, loss.partition(":")[2])
    given = {key: torch.tensor(each) if isinstance(each, list) else each for key, each in arguments.items()}
    whole = known(**given)(output, target) if isinstance(known, type) else known(output, target, **given)
    (expected,) = torch.autograd.grad(whole, net.linear.weight)
    found = gradient(net, as_loss(make_criterion(loss, arguments)), target, num_shards)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("loss", "arguments"),
    [
        ("torch.nn:MSELoss", {"reduction": "sum"}),
        ("torch.nn.functional:cross_entropy", {"reduction": "sum"}),
        ("torch.nn.functional:mse_loss", {"reduction": "sum"}),
        ("torch.nn:CrossEntropyLoss", {"size_average": False}),
        ("torch.nn.functional:mse_loss", {"size_average": False}),
    ],
)
@pytest.mark.filterwarnings("ignore:size_average")
def test_a_sum_is_refused(loss: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"adds up the losses of samples.*reduction: mean.*24"):
        make_criterion(loss, arguments)


@pytest.mark.parametrize(
    ("loss", "arguments", "message"),
    [
        ("torch.nn:LinearCrossEntropyLoss", {"in_features": 4, "num_classes": 9}, r"parameters of its own \(linear"),
        ("torch.nn:MSELoss", {"reduction": "none"}, r"a loss for each sample.*reduction: mean"),
        ("torch.nn.functional:cross_entropy", {"reduce": False}, r"a loss for each sample.*reduction: mean"),
        ("CTCLoss", {}, r"cannot be called with \(output, target\).*input_lengths"),
        ("torch.nn:CTCLoss", {}, r"cannot be called with \(output, target\).*input_lengths"),
        ("torch.nn.functional:triplet_margin_loss", {}, r"cannot be called with \(output, target\).*negative"),
    ],
)
@pytest.mark.filterwarnings("ignore:size_average")
def test_what_is_no_loss_of_output_and_target_is_refused(loss: str, arguments: dict[str, Any], message: str) -> None:
    if not hasattr(nn, loss.partition(":")[2]) and loss.startswith("torch.nn:"):
        pytest.skip("this torch has no such loss")
    with pytest.raises(ConfigError, match=message):
        make_criterion(loss, arguments)


@pytest.mark.parametrize(
    ("loss", "arguments", "kind", "outputs", "message"),
    [
        ("torch.nn:CrossEntropyLoss", {"weight": [1.0, 2.0]}, "classes", 4, r"\[24, 4\].*all 4 classes"),
        ("torch.nn:BCEWithLogitsLoss", {"pos_weight": [1.0, 2.0]}, "bits", 4, r"\[24, 4\].*must match"),
        ("torch.nn:CrossEntropyLoss", {}, "classes", 2, r"\[24, 2\].*out of bounds"),
        ("torch.nn:PoissonNLLLoss", {}, "column", 1, r"\[24, 1\].*\[24\].*several targets"),
        ("torch.nn.functional:hinge_embedding_loss", {}, "column", 1, r"\[24, 1\].*\[24\].*several targets"),
        ("torch.nn.functional:kl_div", {}, "column", 1, r"\[24, 1\].*\[24\].*several targets"),
    ],
)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_a_loss_that_cannot_be_computed_is_told_with_shapes(
    loss: str, arguments: dict[str, Any], kind: str, outputs: int, message: str
) -> None:
    target = targets("classes").double() if kind == "column" else targets(kind)
    with pytest.raises(ConfigError, match=message):
        make_criterion(loss, arguments)(Net(outputs)(torch.randn(NUM_SAMPLES, 3)), target)


def test_scores_whose_last_dimension_is_the_classes_are_told_what_to_write() -> None:
    criterion = make_criterion("torch.nn.functional:cross_entropy", {})
    with pytest.raises(ConfigError, match=r"\[4, 20, 3\].*\[4, 20\].*scores\.transpose\(1, 2\)"):
        criterion(torch.randn(4, 20, 3), torch.zeros(4, 20, dtype=torch.int64))


def test_class_weights_are_a_list_too_where_a_class_hands_its_keywords_on() -> None:
    output, target = torch.randn(NUM_SAMPLES, NUM_CLASSES), targets("classes")
    found = make_criterion(f"{__name__}:HandsOn", {"weight": CLASS_WEIGHTS, "gamma": 1.0})(output, target)
    assert found.loss == functional.cross_entropy(output, target, torch.tensor(CLASS_WEIGHTS))


@dataclass
class Scaled:
    """A loss without a hash, as a data class is."""

    factor: float

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self.factor * (output - target).square().mean()


doubled = Scaled(2.0)


def test_an_object_without_a_hash_may_be_a_loss() -> None:
    assert make_criterion(f"{__name__}:doubled", {})(torch.ones(3), torch.zeros(3)) == 2


def test_an_evaluation_counts_what_the_loss_counts() -> None:
    target, net = targets("padded"), Net(length=LENGTH)
    criterion = make_criterion("torch.nn.functional:cross_entropy", {"weight": CLASS_WEIGHTS})
    values = {"data": "m:d", "model": "m:n", "optimizer": "torch.optim:SGD", "batch_size": NUM_SAMPLES}
    metric, _ = build_metrics(parse_config(values, "config"), criterion, CPU)
    torch.manual_seed(7)
    data = TensorDataset(torch.randn(NUM_SAMPLES, 3), target)
    trainer = ls.Trainer(net, torch.optim.SGD(net.parameters(), lr=0.1), loss=as_loss(criterion), num_shards=3)
    found = trainer.evaluate(ls.ShardedLoader(data, batch_size=6, num_shards=3, shuffle=False), metric)
    output = net(data.tensors[0])
    expected = functional.cross_entropy(output, target, torch.tensor(CLASS_WEIGHTS))
    assert math.isclose(found["loss"].value, expected.item(), rel_tol=1e-12)
    counted = target != -100
    assert found["accuracy"].weight == counted.sum()
    assert found["accuracy"].value == (output.argmax(1) == target)[counted].double().mean()
