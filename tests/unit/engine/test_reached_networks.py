"""Networks that a loss function uses: those that it mentions, not all that its object holds."""

from typing import Any

import torch
from torch import nn

from lockstep.engine.networks import find_networks, networks_walk


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
        found = find_networks(networks_walk([loss]), loop.model)
        assert {id(each) for each in found.values()} == {id(loop.teacher), id(loop.critics[0])}
        assert set(found) == {"teacher", "critics.0"}


def make_loss() -> Any:
    teacher = nn.Linear(2, 2)
    return teacher, lambda model, batch: model(batch) + teacher(batch)


def test_two_networks_of_one_name_are_both_found() -> None:
    # The second one of two loss functions' got neither care for its buffers nor a comparison.
    (first, one), (second, other) = make_loss(), make_loss()
    assert find_networks(networks_walk([one, other]), nn.Linear(2, 2)) == {"teacher": first, "teacher (2)": second}
    assert find_networks(networks_walk([one, one]), nn.Linear(2, 2)) == {"teacher": first}


class Settings:
    """A global object, of which a loss mentions one network."""

    def __init__(self) -> None:
        self.teacher, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    @property
    def center(self) -> nn.Module:
        return self._make()

    def _make(self) -> nn.Module:
        return CENTERS[0]


CENTERS = [nn.Linear(2, 2)]
SETTINGS = Settings()


@torch.no_grad()
def teach(batch: Any) -> Any:
    return SETTINGS.teacher(batch) + SETTINGS.center(batch)


def test_what_a_decorated_function_mentions_of_a_global_object_is_found() -> None:
    found = find_networks(networks_walk([lambda model, batch: model(batch) + teach(batch)]), nn.Linear(2, 2))
    assert set(map(id, found.values())) == {id(SETTINGS.teacher), id(CENTERS[0])}
