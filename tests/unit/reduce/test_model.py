"""Whether a change of a model is seen."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lockstep.reduce import TrainedModel


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def add_module(model: nn.Module) -> None:
    model.add_module("more", nn.Linear(1, 1))


def replace_parameter(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.zeros(3, 2))


def prune(model: nn.Module) -> None:
    model[0].weight.data = torch.zeros(1, 2)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "frozen": lambda model: model.get_parameter("0.weight").requires_grad_(False),
    "cast": lambda model: model.double(),
    "moved": lambda model: model.to("meta"),
    "a module more": add_module,
    "a module less": lambda model: model.__delitem__(2),
    "another parameter": replace_parameter,
    "another shape": prune,
    "another shape in the same memory": lambda model: setattr(model[0].weight, "data", model[0].weight.data.view(2, 3)),
    "one cast": lambda model: setattr(model[0].weight, "data", model[0].weight.data.double()),
    "a parameter more": lambda model: model.get_submodule("1").register_parameter("gain", nn.Parameter(torch.ones(1))),
    "a parameter less": lambda model: model.get_submodule("0").register_parameter("bias", None),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_seen(what: str) -> None:
    model = net()
    seen = TrainedModel(model)
    assert not seen.has_changed()
    CHANGES[what](model)
    assert seen.has_changed()
    assert seen.has_changed()  # until it is looked at
    seen.look()
    assert not seen.has_changed()


def test_training_is_no_change() -> None:
    model = net()
    seen = TrainedModel(model)
    model(torch.ones(4, 2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    model.eval()
    model.load_state_dict(net().state_dict())
    assert not seen.has_changed()


def test_shared_and_ignored_parameters_count_once_and_not() -> None:
    model = net()
    model.add_module("tied", nn.Linear(2, 3))
    model.get_submodule("tied").weight = model[0].weight
    names = [each.spec.name for each in TrainedModel(model, {"0.bias"}).trained]
    assert names == ["0.weight", "1.weight", "1.bias", "2.weight", "2.bias", "tied.bias"]


def test_sparse_embeddings_are_known() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(4, 2, sparse=True), "b": nn.Embedding(4, 2)})
    assert [each.spec.is_sparse for each in TrainedModel(model).trained] == [True, False]
