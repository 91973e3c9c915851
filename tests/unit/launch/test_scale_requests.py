"""Which worker `lockstep scale --release` means."""

import pytest

from lockstep.devices import Device
from lockstep.devices.choose import CPU
from lockstep.launch.scaling import named_parts

WHOLE = Device(name="cuda:0", visible="GPU-5b2c-1", label="GPU 0 (NVIDIA RTX 3090)")
PART = Device(name="cuda:0", visible="MIG-5b2c-3", label="GPU 0:1 (NVIDIA A100 and more)")
PAIR = Device(name="cuda:0", visible="GPU-aa,GPU-bb", label="GPU 2 (NVIDIA H100) and GPU 13 (NVIDIA H100)")


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("GPU0", WHOLE, {"0"}),
        ("gpu:0", WHOLE, {"0"}),
        (" 0 ", WHOLE, {"0"}),
        ("0", PART, set()),  # it let go of the workers on all instances of the card
        ("0:1", PART, {"0:1"}),
        ("GPU 0:1", PART, {"0:1"}),
        ("0:10", PART, set()),
        ("1", PART, set()),
        ("13", PAIR, {"13"}),  # only the first card of a worker had a number
        ("1", PAIR, set()),
        ("GPU-b", PAIR, {"GPU-bb"}),
        ("GPU-", PAIR, {"GPU-aa", "GPU-bb"}),
        ("MIG-5B2C", PART, {"MIG-5b2c-3"}),
        ("", WHOLE, set()),  # every UUID begins with nothing
        ("g", WHOLE, set()),
        ("0", CPU, set()),
    ],
)
def test_a_card_is_named_as_in_device_ids(name: str, device: Device, expected: set[str]) -> None:
    assert named_parts(name, device) == expected
