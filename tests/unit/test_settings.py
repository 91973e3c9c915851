"""Variables, read from mappings."""

import pytest

from lockstep.errors import UsageError
from lockstep.settings import read_check, worker_environment


@pytest.mark.parametrize("text", ["1", "true", "Yes", "ON", " on "])
def test_calls_are_compared_when_asked_for(text: str) -> None:
    assert read_check({"LOCKSTEP_CHECK": text})


@pytest.mark.parametrize("text", ["0", "false", "No", "OFF", "", " "])
def test_calls_are_not_compared_when_refused(text: str) -> None:
    # "false" and "no" once switched it on.
    assert not read_check({"LOCKSTEP_CHECK": text})
    assert not read_check({})


def test_an_unknown_word_for_checking_is_told() -> None:
    with pytest.raises(UsageError, match="LOCKSTEP_CHECK is 'maybe', expected 1, true, yes or on"):
        read_check({"LOCKSTEP_CHECK": "maybe"})


def test_all_workers_hash_text_alike() -> None:
    # A vocabulary made from a set had another order in every process.
    assert worker_environment({}, {}, seed=2**32 + 7)["PYTHONHASHSEED"] == "7"
    assert worker_environment({}, {"PYTHONHASHSEED": "random"})["PYTHONHASHSEED"] == "random"
