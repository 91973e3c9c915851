"""Random generators that an object holds are found, whatever else it holds."""

import random
from typing import Any

import pytest
import torch

from lockstep.data.keyed import OwnGenerators
from lockstep.engine.networks import find_networks, networks_walk


def test_tensors_as_keys_are_not_printed() -> None:
    # The state of an optimizer has them. Their text took 70 ms in each search; a loss that mentions its trainer leads
    # there, and the first steps of each set of workers search.
    class Key(torch.Tensor):
        def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
            raise AssertionError("printed")

    key, generator, network = torch.ones(2).as_subclass(Key), random.Random(0), torch.nn.Linear(1, 1)
    state = {key: {"generator": generator, "network": network}}
    assert [found.path for found in OwnGenerators([("", state)]).find()] == [".0.generator"]
    assert find_networks(networks_walk([state]), torch.nn.Linear(1, 1)) == {"0.network": network}


def test_generators_under_objects_are_told_apart_by_their_places_alone() -> None:
    # The text of an object has its address: the seed of a generator under it was another one on each worker.
    class Key:
        def __repr__(self) -> str:
            raise AssertionError("printed")

    held = {Key(): random.Random(1), "named": torch.Generator(), Key(): random.Random(2)}
    assert [(each.path, each.generator) for each in OwnGenerators([("", held)]).find()] == [
        (f".{name}", generator) for name, generator in zip(["0", "named", "2"], held.values(), strict=True)
    ]


@pytest.mark.parametrize("root", [torch.zeros(2), random.Random, 3, None])
def test_there_are_none_in_what_holds_nothing(root: object) -> None:
    assert OwnGenerators([("", root)]).find() == []
