"""What user code may do, and once made a run depend on the number of its workers: the same on one and on three."""

import warnings

import pytest
import torch
from tests.process.odd_cases import CASES, Answer

import lockstep as ls

pytestmark = pytest.mark.usefixtures("warm_workers")


def run_all(_run: ls.Run | None = None) -> dict[str, Answer]:
    return {name: try_case(name) for name in CASES}


def try_case(name: str) -> Answer:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps that are skipped
        try:
            return CASES[name]()
        except Exception as error:  # noqa: BLE001 - one case is not to hide the others
            return [repr(error)]


@pytest.fixture(scope="module")
def answers() -> tuple[dict[str, Answer], list[dict[str, Answer]]]:
    return run_all(), ls.launch(run_all, devices="cpu:3")


@pytest.mark.parametrize("name", CASES)
def test_one_and_three_workers_do_the_same(
    answers: tuple[dict[str, Answer], list[dict[str, Answer]]], name: str
) -> None:
    alone, workers = answers
    assert len(str(alone[name])) > 2 * 64, alone[name]  # digests, and not an error of the case's own
    for answer in workers:
        assert answer[name] == alone[name]
