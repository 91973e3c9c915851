"""Parameters that a forward writes."""

from typing import Any

import pytest
import torch
from tests.unit.engine.test_trainer import loader, mean_loss, model, trainer
from torch import Tensor, nn

from lockstep.engine import parameters
from lockstep.errors import LossError
from lockstep.reduce.tensor_bits import sum_of_bits


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # An exclusive or of all elements is 0 before and after: a bias that went from zeros to ones was not found.
        (torch.zeros(6), torch.ones(6)),
        (torch.zeros(3, dtype=torch.complex64), torch.tensor([1j, 0, 0])),
        (torch.zeros(2, 2).t(), torch.eye(2)),
    ],
)
def test_a_write_through_data_is_found(before: Tensor, after: Tensor) -> None:
    net = model()
    net.extend([nn.ParameterList([torch.zeros(0), torch.zeros(2, dtype=torch.bfloat16), before]).requires_grad_(False)])
    written = net[4][2]

    def loss(net: Any, batch: Any) -> Tensor:
        written.data.copy_(after)
        return mean_loss(net[:4], batch)

    training = trainer(net, loss=loss)
    batch = next(iter(loader().epoch(0)))
    with pytest.raises(LossError, match=r"Parameter 4\.2 was written on rank 0"):
        training.step(batch)


def test_workers_that_change_do_not_read_all_parameters_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Three steps after each loss or join took longer by the reading of all parameters, twice in each.
    training = trainer(model())
    batches = (batch for epoch in range(3) for batch in loader().epoch(epoch))
    for _ in range(3):
        training.step(next(batches))
    num_read: list[None] = []

    def read(tensors: list[Tensor]) -> Tensor:
        num_read.append(None)
        return sum_of_bits(tensors)

    monkeypatch.setattr(parameters, "sum_of_bits", read)
    training._present._replace_engine(training._present.world, None)  # as with other workers
    training.step(next(batches))
    assert not num_read
    training._present._replace_engine(training._present.world, [])  # as after parameters were unfrozen
    training.step(next(batches))
    assert num_read
