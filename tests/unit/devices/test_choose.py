import pytest

from lockstep.devices import choose_devices
from lockstep.devices.choose import DeviceRequest
from lockstep.errors import DeviceError

CPU2 = ("cpu", "cpu")


@pytest.mark.parametrize(
    ("request_", "workers", "num_gpus", "max_workers", "expected"),
    [
        (None, None, 0, None, CPU2),
        ("auto", None, 0, 1, ("cpu",)),
        ("auto", 3, 0, None, ("cpu",) * 3),
        ("auto", None, 4, None, ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
        ("auto", None, 6, 4, ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
        ("auto:2", None, 6, None, ("cuda:0", "cuda:1")),
        ("auto", 2, 6, None, ("cuda:0", "cuda:1")),
        ("auto:3", None, 0, None, ("cpu",) * 3),
        ("cpu", None, 6, None, ("cpu",)),
        ("cpu", 2, 6, None, CPU2),
        ("cpu:2", None, 6, None, CPU2),
        ("cpu:2", 2, 6, None, CPU2),
        ([0, 2, 5], None, 6, None, ("cuda:0", "cuda:2", "cuda:5")),
        ([5, 0], 2, 6, None, ("cuda:5", "cuda:0")),
    ],
)
def test_request_becomes_placement(
    request_: DeviceRequest,
    workers: int | None,
    num_gpus: int,
    max_workers: int | None,
    expected: tuple[str, ...],
) -> None:
    chosen = choose_devices(request_, workers=workers, num_gpus=num_gpus, max_workers=max_workers)
    assert chosen == expected


@pytest.mark.parametrize(
    ("request_", "workers", "num_gpus", "said"),
    [
        ("auto", 0, 0, "1 or more"),
        ("cpu:0", None, 0, "at least one worker"),
        ("auto:-1", None, 2, "at least one worker"),
        ("gpu", None, 2, "names no devices"),
        ("cpu:2", 3, 0, "let one of them go"),
        ("auto:3", None, 2, '"cpu:3"'),
        ("auto", 3, 1, "3 workers need 3 GPUs"),
        ([0], None, 0, "no GPU can be seen"),
        ([2], None, 2, "GPUs 0 to 1"),
        ([-1], None, 2, "GPU -1"),
        ([1, 1], None, 2, "twice"),
        ([], None, 2, "empty list"),
        ([0, 1], 3, 2, "names 2 GPUs"),
        ([True], None, 2, "whole numbers"),
        (["0"], None, 2, "whole numbers"),
    ],
)
def test_request_that_cannot_be_met_is_explained(
    request_: DeviceRequest, workers: int | None, num_gpus: int, said: str
) -> None:
    with pytest.raises(DeviceError, match=said):
        choose_devices(request_, workers=workers, num_gpus=num_gpus)
