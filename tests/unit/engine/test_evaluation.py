"""What an evaluation leaves behind: nothing that depends on the number of workers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.comm import World
from lockstep.data import ShardedLoader
from lockstep.engine import Trainer
from lockstep.engine.evaluation import accuracy, add_means, has_classes
from lockstep.means import Mean

NUM_SHARDS = 3


class Observed(nn.Module):
    """A model whose forward writes buffers in evaluation too: a counter, a maximum, and one that is replaced."""

    count: Tensor
    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("largest", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        self.count += 1
        self.largest = torch.maximum(self.largest, inputs.abs().max())
        return self.norm(self.layer(inputs)) * self.count


def data() -> TensorDataset:
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.argmax(1) % 3)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def summed(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    return loss(model, batch) * len(batch[1]), len(batch[1])


def monte_carlo(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    model.train()  # for the dropout of a Monte-Carlo estimate, and BatchNorm with it
    return summed(model, batch)


def left_in_training(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    found = summed(model, batch)
    model.train()  # as after an evaluation in a loop of one's own
    return found


def run(world: World, metric: Callable[..., Any]) -> tuple[bool, float, str]:
    """Return whether the evaluation has left the model as it was, its result, and the digest after another epoch."""
    model = Observed()
    trainer = Trainer(model, torch.optim.Adam(model.parameters()), loss=loss, num_shards=NUM_SHARDS, world=world)
    loader = ShardedLoader(data(), batch_size=9, num_shards=NUM_SHARDS, world=world)
    for batch in loader.epoch(0):
        trainer.step(batch)
    before = trainer.digest()
    found = trainer.evaluate(loader, metric)["metric"]
    is_left = trainer.digest() == before
    for batch in loader.epoch(1):
        trainer.step(batch)
    return is_left, found.total, trainer.digest()


@pytest.mark.parametrize("metric", [summed, monte_carlo, left_in_training])
def test_buffers_that_an_evaluation_writes_are_put_back(metric: Callable[..., Any]) -> None:
    found = {answer for size in (1, 2, 3) for answer in run_ranks(size, lambda world: run(world, metric))}
    ((is_left, _, _),) = found
    assert is_left


def test_buffers_are_put_back_when_the_metric_fails() -> None:
    model = Observed()
    trainer = Trainer(model, torch.optim.Adam(model.parameters()), loss=loss, num_shards=NUM_SHARDS)
    before = trainer.digest()

    def fail(model: nn.Module, batch: Any) -> Any:
        model(batch[0])
        raise KeyError("no such class")

    with pytest.raises(KeyError):
        trainer.evaluate(ShardedLoader(data(), batch_size=9, num_shards=NUM_SHARDS), fail)
    assert trainer.digest() == before


# -- Accuracy ----------------------------------------------------------------------------------------------------------


def test_accuracy_counts_right_predictions() -> None:
    scores = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert accuracy(scores, torch.tensor([1, 0, 0])) == (2.0, 3)


@pytest.mark.parametrize("shape", [(2, 5, 4, 4), (2, 4, 4, 5)])
def test_accuracy_finds_the_class_dimension(shape: tuple[int, ...]) -> None:
    target = torch.randint(0, 5, (2, 4, 4))
    one_hot = torch.nn.functional.one_hot(target, 5).float()
    scores = one_hot if shape[-1] == 5 else one_hot.permute(0, 3, 1, 2)
    assert accuracy(scores, target) == (32.0, 32)


def test_shapes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[3, 2\] and targets of shape \[4\]"):
        accuracy(torch.zeros(3, 2), torch.zeros(4, dtype=torch.long))


def test_a_class_dimension_that_could_be_two_is_not_guessed() -> None:
    scores, target = torch.zeros(2, 5, 5), torch.zeros(2, 5, dtype=torch.long)
    assert not has_classes(scores, target)
    with pytest.raises(ValueError, match="or in two ways"):
        accuracy(scores, target)


@pytest.mark.parametrize(
    ("output", "target"),
    [
        (torch.zeros(3, 2), torch.zeros(3)),
        (torch.zeros(3, 2), torch.zeros(3, dtype=torch.bool)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.long)),
        ("text", torch.zeros(3, dtype=torch.long)),
    ],
)
def test_regression_has_no_classes(output: object, target: object) -> None:
    assert not has_classes(output, target)


def test_means_add_by_weight() -> None:
    total = add_means([Mean(total=2.0, weight=1), Mean(total=4.0, weight=3)])
    assert total.value == 1.5
    assert add_means([]).value != add_means([]).value  # NaN: the mean of nothing


# -- Metrics of torchmetrics -------------------------------------------------------------------------------------------


NUM_SAMPLES = 22


class InOrder(torchmetrics.Metric):
    """Returns the predictions as they came."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor]
        self.add_state("seen", default=[], dist_reduce_fx="cat")

    def update(self, prediction: Tensor, target: Tensor) -> None:
        assert len(prediction) == len(target)
        self.seen.append(prediction)

    def compute(self) -> Tensor:
        return torch.cat(self.seen)


def trainer_of_sums() -> Trainer:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return Trainer(model, torch.optim.SGD(model.parameters()), loss=lambda m, b: m(b[0]).mean(), num_shards=4)


def in_order(data: Any) -> ShardedLoader:
    return ShardedLoader(data, batch_size=8, num_shards=4, shuffle=False)


def test_a_metric_sees_every_sample_once_in_the_order_of_the_data() -> None:
    inputs = torch.arange(float(NUM_SAMPLES)).unsqueeze(1)
    data = TensorDataset(inputs, inputs)
    metric = InOrder()
    for _ in range(2):  # it is reset before
        assert torch.equal(trainer_of_sums().evaluate(in_order(data), metric), inputs)


def test_a_collection_gives_its_results_by_name() -> None:
    inputs = torch.arange(float(NUM_SAMPLES)).unsqueeze(1)
    metrics = torchmetrics.MetricCollection([torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()])
    found = trainer_of_sums().evaluate(in_order(TensorDataset(inputs, inputs + 2)), metrics)
    assert {name: float(value) for name, value in found.items()} == {"MeanSquaredError": 4.0, "MeanAbsoluteError": 2.0}


def test_batches_that_are_no_pairs_are_refused() -> None:
    with pytest.raises(TypeError, match=r"needs pairs \(input, target\)"):
        trainer_of_sums().evaluate(in_order(TensorDataset(torch.ones(NUM_SAMPLES, 1))), InOrder())
