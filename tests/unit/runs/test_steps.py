"""Steps of a run: how their losses are read, and what is said where those of two runs differ."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.fitting import fit_to_the_end, importable
from torch import Tensor

from lockstep.data import Cursor
from lockstep.engine.fingerprint import take_fingerprint
from lockstep.engine.step_table import StepOutcome, StepResult
from lockstep.events import Event, StepFinished
from lockstep.runs.config import parse_config
from lockstep.runs.fit import EpochSums, StepLosses
from lockstep.runs.verify import ShortRun, find_deviating_rank, find_difference, run_steps


class Log:
    """A device on which steps are launched, and a recorder: what happens in which order."""

    def __init__(self, *, is_late: bool) -> None:
        self.events: list[str] = []
        self.sums = EpochSums()
        self.losses = StepLosses(self.sums, self, is_late=is_late)

    def step(self, number: int, outcome: StepOutcome) -> None:
        self.events.append(f"launch {number}")
        result = StepResult(cursor=Cursor(0, number - 1), should_stop=False, read=partial(self._read, number, outcome))
        self.losses.add(result, number)

    def _read(self, number: int, outcome: StepOutcome) -> StepOutcome:
        if self.events[-1] != f"read {number}":
            self.events.append(f"read {number}")
        return outcome

    def record(self, event: Event) -> None:
        assert isinstance(event, StepFinished)
        self.events.append(f"row {event.global_step}")


GOOD = StepOutcome(loss=0.5, weight=4.0, is_skipped=False)
SKIPPED = StepOutcome(loss=math.nan, weight=4.0, is_skipped=True)


@pytest.mark.parametrize("is_late", [False, True])
def test_the_sums_leave_out_what_was_skipped(is_late: bool) -> None:
    log = Log(is_late=is_late)
    for number, outcome in enumerate([GOOD, SKIPPED, GOOD], start=1):
        log.step(number, outcome)
    log.losses.record_last()
    log.losses.record_last()
    assert (log.sums.loss, log.sums.weight) == (4.0, 8.0)
    assert [event for event in log.events if event.startswith("row")] == ["row 1", "row 2", "row 3"]


def test_a_loss_is_read_when_the_next_step_is_launched_where_reading_waits() -> None:
    log = Log(is_late=True)
    for number in (1, 2):
        log.step(number, GOOD)
    assert log.events == ["launch 1", "launch 2", "read 1", "row 1"]
    log.losses.record_last()
    assert log.events[4:] == ["read 2", "row 2"]


def test_on_the_cpu_it_is_read_at_once() -> None:
    log = Log(is_late=False)
    log.step(1, GOOD)
    assert log.events == ["launch 1", "read 1", "row 1"]


# -- What `lockstep verify` says of two states -------------------------------------------------------------------------


FIRST = {"a": torch.zeros(2), "b": torch.ones(3)}


def said(found: dict[str, Tensor]) -> str:
    return str(find_difference(FIRST, found, 4))


def test_a_difference_is_named_with_its_size() -> None:
    assert find_difference(FIRST, {name: tensor.clone() for name, tensor in FIRST.items()}, 4) is None
    assert said({**FIRST, "b": torch.tensor([1.0, 1.5, 1.0])}) == (
        "the first difference is after step 4, in b: by up to 0.5, where values are up to 1"
    )


def test_names_and_shapes_may_depend_on_the_number_of_workers() -> None:
    # A buffer that is called after the number of workers ended the command with a KeyError.
    assert "in c (and 1 more): it exists in this run only" in said({"a": FIRST["a"], "c": FIRST["b"]})
    assert "in b: it exists in the first run only" in said({"a": FIRST["a"]})
    assert "in b: it is float32 [2], and float32 [3] in the first run" in said({**FIRST, "b": torch.ones(2)})


def test_the_rank_that_is_the_first_to_differ_is_found() -> None:
    fingerprint = take_fingerprint(torch.device("cpu"), num_shards=1, seed=0)
    runs = [ShortRun(digests=tuple(each), fingerprint=fingerprint, difference=None) for each in ("abc", "abx", "axx")]
    assert find_deviating_rank(runs) == 2
    assert find_deviating_rank(runs[:1] * 3) is None


MODULE = """
import torch
import lockstep as ls

def read(part):
    yield from torch.randn(20, 3, generator=torch.Generator().manual_seed(part))

def data():
    return ls.Stream(range(2), read=read, transform=lambda inputs: (inputs, inputs.sum(0, keepdim=True)))
"""
VALUES: dict[str, Any] = {"model": "torch.nn:Linear", "model_args": {"in_features": 3, "out_features": 1}}
VALUES |= {"data": "verified:data", "loss": "torch.nn.functional:mse_loss", "batch_size": 8, "num_shards": 2}
VALUES |= {"scheduler": "cosine", "max_steps": 4}


def test_the_steps_are_those_of_the_run(tmp_path: Path) -> None:
    # Of a stream max_steps alone says how many steps the schedule has; without it the config was refused.
    with importable("verified", MODULE, tmp_path):
        trained = fit_to_the_end(tmp_path / "run", VALUES)
        config = parse_config(VALUES, "config")
        found = run_steps(config, torch.device("cpu"), 4, tmp_path, is_first=True)
    assert found.digests[3] == trained.digest
    assert len(set(found.digests)) == 4
