"""Workers that train on an asynchronous device are killed; the others continue, with the bits of the undisturbed run.

The device computes on the CPU and queues its work all the same; Gloo carries its tensors. tests/gpu does it on CUDA.
"""

from pathlib import Path
from typing import Any

import pytest
from tests.support.mortal_training_on_device import train

import lockstep as ls

pytestmark = pytest.mark.usefixtures("warm_workers")


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    return ls.launch(train, "gloo", {}, workers=1, devices="cpu")[0]


def test_the_bits_are_those_of_the_undisturbed_run(undisturbed: Any) -> None:
    kills = {"0 update": 3, "2 metric": 1}
    assert ls.launch(train, "gloo", kills, workers=3, devices="cpu") == [undisturbed]


def test_a_new_worker_gets_the_state_from_the_device_of_another_one(undisturbed: Any, tmp_path: Path) -> None:
    elastic = ls.Elastic(respawn=1, spares=1)
    results = ls.launch(train, "gloo", {"1 loss": 3}, tmp_path / "joins", workers=2, devices="cpu", elastic=elastic)
    assert [digest for digest, _ in results] == [undisturbed[0]] * 2
