"""Parameters that a forward writes."""

from typing import Any

import pytest
import torch
from tests.unit.engine.test_trainer import loader, mean_loss, model, trainer
from torch import Tensor, nn

from lockstep.errors import LossError


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
