"""What a script's ranks did, as values in: which findings come out, and which do not."""

from typing import Any

import pytest

from lockstep.doctor.scripts import Level
from lockstep.doctor.scripts.observed import ObservedRun, judge_runs


def epoch(number: int, samples: range, *, trains: bool = True, weights: int = 0, divisor: float = 0.0) -> list[Any]:
    """Return the events of a pass with batches of four samples."""
    found: list[Any] = []
    parts = [list(samples[start : start + 4]) for start in range(0, len(samples), 4)]
    for place, contents in enumerate(parts):
        found.append(
            {"kind": "batch", "number": number, "loading": number, "contents": contents, "state": 0}
            | {"indices": [str(each % 100) for each in contents], "line": "a.py:1"}
        )
        if trains:
            over = divisor or len(contents)
            found.append({"kind": "backward", "line": "a.py:2", "divisors": [over], "summed": ""})
            found.append(
                {"kind": "step", "optimizer": 0, "weights": place + (weights if place else 0), "line": "a.py:3"}
                | {"lr": [0.1], "norm": 1.0, "state": 1}
            )
    return [*found, {"kind": "pass_end", "number": number, "is_cut": False}]


def write(path: str) -> dict[str, Any]:
    return {"kind": "file", "path": path, "how": "write", "existed": False, "kept": "", "line": "a.py:4", "at": 0.0}


def codes(ranks: list[list[Any]], alone: list[Any] | None = None) -> set[str]:
    runs = {2: ObservedRun(ranks=ranks), 1: ObservedRun(ranks=[alone or epoch(1, range(64))])}
    return {each.text[-6:-1] for each in judge_runs(runs)} - {"LS546"}


FIRST, SECOND = epoch(1, range(32)), epoch(1, range(32, 64))


@pytest.mark.parametrize(
    ("ranks", "alone", "expected"),
    [
        ([FIRST, SECOND], None, set()),
        ([FIRST, FIRST], None, {"LS542"}),
        ([epoch(1, range(20)), epoch(1, range(20, 40))], None, {"LS542"}),
        ([FIRST, epoch(1, range(32, 64), weights=7)], None, {"LS540"}),
        ([FIRST, epoch(1, range(32, 64), divisor=9.0)], None, {"LS541"}),
        ([[*FIRST, write("/a/log.txt")], [*SECOND, write("/a/log.txt")]], None, {"LS545"}),
        ([[*FIRST, write("/a/log-0.txt")], [*SECOND, write("/a/log-1.txt")]], None, set()),
        ([[*FIRST, write("/a/1200/x")], [*SECOND, write("/a/1207/x")]], None, {"LS545"}),
        (
            [[*FIRST, *epoch(2, range(100, 108), trains=False)], [*SECOND, *epoch(2, range(107, 115), trains=False)]],
            [*epoch(1, range(64)), *epoch(2, range(100, 115), trains=False)],
            {"LS544"},
        ),
        (
            [[*FIRST, *epoch(2, range(100, 108), trains=False)], [*SECOND, *epoch(2, range(108, 115), trains=False)]],
            [*epoch(1, range(64)), *epoch(2, range(100, 115), trains=False)],
            set(),
        ),
        (  # what the sampler leaves over, on every rank, after a second epoch of training
            [
                [*rank, *epoch(2, range(32)), *epoch(3, part, trains=False), *epoch(4, range(114, 115), trains=False)]
                for rank, part in ((FIRST, range(100, 107)), (SECOND, range(107, 114)))
            ],
            [*epoch(1, range(64)), *epoch(2, range(64)), *epoch(3, range(100, 115), trains=False)],
            set(),
        ),
    ],
)
def test_ranks_are_compared(ranks: list[list[Any]], alone: list[Any] | None, expected: set[str]) -> None:
    assert codes(ranks, alone) == expected


def test_stages_of_one_model_are_not_compared() -> None:
    stage = [{**each, "weights": 9} if each["kind"] == "step" else each for each in FIRST]
    assert codes([FIRST, stage]) == set()


def test_a_backward_without_a_forward_of_the_wrapper_is_told_of() -> None:
    wrapped, forward = {"kind": "wrapped", "has_norms": False, "draws_noise": False}, {"kind": "forward", "state": 0}
    assert codes([[wrapped, *FIRST], [wrapped, *SECOND]]) == {"LS540"}
    called = [[wrapped, *(part for each in rank for part in (each, forward))] for rank in (FIRST, SECOND)]
    assert codes(called) == set()


@pytest.mark.parametrize(("shift", "again", "expected"), [(100, 0, {"LS542"}), (0, 0, set()), (100, 200, set())])
def test_samples_that_are_others_on_another_rank_are_told_of(shift: int, again: int, expected: set[str]) -> None:
    first = [*FIRST, *epoch(2, range(again, again + 32)), *epoch(3, range(32, 64))]
    second = [*SECOND, *epoch(2, range(32, 64)), *epoch(3, range(shift, shift + 32))]
    assert codes([first, second]) == expected


@pytest.mark.parametrize(("state", "level"), [(0, Level.NOTE), (1, Level.MISTAKE)])
def test_masks_of_dropout_that_are_the_same_on_all_ranks_are_a_note(state: int, level: Level) -> None:
    text = "All ranks draw the same random numbers in each step, from torch's generator, ... (LS315)"
    said = {"kind": "said", "at": 0.0, "line": "a.py:5", "error": "", "text": text}
    wrapped, forward = (
        {"kind": "wrapped", "has_norms": False, "draws_noise": False},
        {"kind": "forward", "state": state},
    )
    ranks = [[wrapped, said, *(part for each in rank for part in (each, forward))] for rank in (FIRST, SECOND)]
    assert [each.level for each in judge_runs({2: ObservedRun(ranks=ranks)})] == [level]


def test_ranks_that_end_at_other_steps_are_told_of_unless_they_join() -> None:
    ranks = [FIRST, epoch(1, range(32, 60))]
    texts = [each.text for each in judge_runs({2: ObservedRun(ranks=ranks)})]
    assert any("different numbers of steps" in each for each in texts)
    joined = [[{"kind": "join"}, *each] for each in ranks]
    assert not judge_runs({2: ObservedRun(ranks=joined)})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("All ranks draw the same. (LS315)", {"LS315"}),
        ("Rank 1 trained on 3, by the first dimension of the inputs. (LS314)", set()),  # boxes: the batches are even
        ("An option is deprecated. (LS325)", set()),
    ],
)
def test_what_the_wrapper_says_is_a_finding(text: str, expected: set[str]) -> None:
    said = {"kind": "said", "at": 0.0, "line": "a.py:5", "error": "", "text": text}
    assert codes([[*FIRST, said], SECOND]) == expected
