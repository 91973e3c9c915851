from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pack_sequence

from lockstep.devices.transfer import to_device

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


def test_the_kind_of_a_mapping_is_kept() -> None:
    moved = to_device(OrderedDict(a=torch.zeros(1)), META)
    assert isinstance(moved, OrderedDict)
    assert moved["a"].device == META


def test_a_packed_sequence_keeps_its_batch_sizes_on_the_cpu() -> None:
    packed = pack_sequence([torch.ones(3, 1), torch.ones(2, 1)])
    moved = to_device(packed, META)
    assert moved.data.device == META
    assert moved.batch_sizes.device.type == "cpu"


def test_a_batch_with_a_to_method_moves_itself() -> None:
    assert to_device(OwnBatch(), META).place == META
