"""CUDA_VISIBLE_DEVICES, read as CUDA reads it."""

import pytest
from tests.unit.devices.machines import gpu, instance

from lockstep.devices.look import find_by_bytes, find_visible, needs_driver
from lockstep.settings import Settings

THREE = (gpu(0), gpu(1), gpu(2))
SPLIT = (instance(0, 0), instance(0, 1), gpu(1))


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("", []),
        ("-1", []),
        ("none", []),
        ("1", [1]),
        ("2,0", [0, 2]),
        (" 2 , 0 ", [0, 2]),
        ("1,-1,2", [1]),
        ("1,7,2", [1]),
        ("1,x,2", [1]),
        ("1st,2nd", [1, 2]),
        ("1,1", []),
        ("1,GPU-2a", [1]),
        ("GPU-2a,GPU-0a", [0, 2]),
        ("GPU-2a,GPU-9,GPU-0a", [2]),
        ("GPU-2a,1", [2]),
        ("GPU-2a,GPU-2a2a", []),
        ("GPU-", []),
    ],
)
def test_the_list_ends_where_cudas_does(variable: str, expected: list[int]) -> None:
    assert sorted(gpu.index for gpu in find_visible(variable, THREE)) == expected


def test_instances_are_shown_by_their_own_names() -> None:
    assert find_visible("MIG-01", SPLIT) == {SPLIT[1]}
    assert find_visible("0", SPLIT) == {SPLIT[0], SPLIT[1]}


@pytest.mark.parametrize(
    ("variable", "order", "gpus", "expected"),
    [
        ("1,0", None, THREE, True),
        ("1,0", "FASTEST_FIRST", THREE, True),
        ("1,0", "PCI_BUS_ID", THREE, False),
        ("0", None, THREE[:1], False),
        ("", None, THREE, False),
        ("GPU-0a", None, THREE, False),
        ("0", "PCI_BUS_ID", SPLIT, True),
        ("GPU-0", "PCI_BUS_ID", SPLIT, True),
        ("MIG-01", None, SPLIT, False),
    ],
)
def test_the_driver_is_needed_for_an_order_of_its_own(
    variable: str, order: str | None, gpus: tuple[object, ...], expected: bool
) -> None:
    assert needs_driver(variable, order, gpus) == expected


def test_the_drivers_bytes_are_the_digits_of_the_uuid() -> None:
    assert find_by_bytes({"1a1a1a1a000000000000000000000001", "ff"}, THREE) == {THREE[1]}
    assert find_by_bytes({"01000000" + "0" * 24}, SPLIT) == {SPLIT[1]}


def test_the_variables_are_read() -> None:
    found = Settings({"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).visible_devices()
    assert (found.devices, found.order) == ("", "PCI_BUS_ID")
    assert Settings({}).visible_devices().devices is None
