from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.data import ShardedLoader
from lockstep.engine import Trainer

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


def trainer() -> Trainer:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return Trainer(model, torch.optim.SGD(model.parameters()), loss=lambda m, b: m(b[0]).mean(), num_shards=4)


def loader(data: Any) -> ShardedLoader:
    return ShardedLoader(data, batch_size=8, num_shards=4, shuffle=False)


def test_a_metric_sees_every_sample_once_in_the_order_of_the_data() -> None:
    inputs = torch.arange(float(NUM_SAMPLES)).unsqueeze(1)
    data = TensorDataset(inputs, inputs)
    metric = InOrder()
    for _ in range(2):  # it is reset before
        assert torch.equal(trainer().evaluate(loader(data), metric), inputs)


def test_a_collection_gives_its_results_by_name() -> None:
    inputs = torch.arange(float(NUM_SAMPLES)).unsqueeze(1)
    metrics = torchmetrics.MetricCollection([torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()])
    found = trainer().evaluate(loader(TensorDataset(inputs, inputs + 2)), metrics)
    assert {name: float(value) for name, value in found.items()} == {"MeanSquaredError": 4.0, "MeanAbsoluteError": 2.0}


def test_batches_that_are_no_pairs_are_refused() -> None:
    with pytest.raises(TypeError, match=r"needs pairs \(input, target\)"):
        trainer().evaluate(loader(TensorDataset(torch.ones(NUM_SAMPLES, 1))), InOrder())
