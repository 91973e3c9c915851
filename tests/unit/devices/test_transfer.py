from typing import Any, NamedTuple

import torch

from lockstep.devices import to_device

META = torch.device("meta")


class Pair(NamedTuple):
    left: torch.Tensor
    right: list[torch.Tensor]


class OwnBatch:
    def __init__(self, place: torch.device | None = None) -> None:
        self.place = place

    def to(self, device: torch.device) -> "OwnBatch":
        return OwnBatch(device)


def test_containers_are_rebuilt_with_moved_tensors() -> None:
    tensor = torch.zeros(2)
    value: dict[str, Any] = {"pair": Pair(tensor, [tensor]), "tuple": (tensor, 3), "text": "kept"}
    moved = to_device(value, META)
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].left.device == moved["pair"].right[0].device == moved["tuple"][0].device == META
    assert (moved["tuple"][1], moved["text"]) == (3, "kept")
    assert tensor.device.type == "cpu"


def test_a_batch_with_a_to_method_moves_itself() -> None:
    assert to_device(OwnBatch(), META).place == META
