"""Networks that a loss function uses: those that it mentions, not all that its object holds."""

from typing import Any

from torch import nn

from lockstep.engine.reached_networks import find_networks


class Loop:
    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.teacher = nn.Linear(2, 2)
        self.critics = [nn.Linear(2, 2)]
        self.average = nn.Linear(2, 2)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return model(batch) + self.teach(batch) + sum(critic(batch) for critic in self.critics)

    def teach(self, batch: Any) -> Any:
        return self.teacher(batch) if len(batch) else self.teach(batch)

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        return self.loss(model, batch)


def test_a_network_that_the_object_of_a_loss_holds_beside_is_not_used() -> None:
    loop = Loop()
    for loss in (loop.loss, loop):
        found = find_networks([loss], loop.model)
        assert {id(each) for each in found.values()} == {id(loop.teacher), id(loop.critics[0])}
        assert set(found) == {"teacher", "critics.0"}
