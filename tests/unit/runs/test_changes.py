"""What differs in a config, and what that does to the run."""

from typing import Any

import pytest

from lockstep.errors import CheckpointError, ConfigError
from lockstep.runs.changes import check_changes, check_names, find_changes

SAVED: dict[str, Any] = {
    "epochs": 12,
    "batch_size": 128,
    "weights": None,
    "max_grad_norm": None,
    "num_shards": 4,
    "precision": "float32",
    "scheduler": None,
    "optimizer_args": {"lr": 0.1, "betas": [0.9, 0.99]},
}


def changes(is_mid_epoch: bool = False, **values: Any) -> list[Any]:
    return find_changes(SAVED, {**SAVED, **values}, is_mid_epoch=is_mid_epoch)


def test_each_difference_is_one_line_with_the_place_of_its_value() -> None:
    found = changes(epochs=20, optimizer_args={"lr": 0.2, "betas": [0.9, 0.99], "eps": 1e-5})
    assert [str(change) for change in found] == [
        "epochs was 12 and is now 20",
        "optimizer_args.lr was 0.1 and is now 0.2",
        "optimizer_args.eps was not set and is now 1e-05",
    ]
    assert [change.needs_allow for change in found] == [False, True, True]


def test_a_key_that_only_one_version_knows_is_no_difference() -> None:
    assert find_changes({"gone": 1, **SAVED}, {**SAVED, "new": 2}, is_mid_epoch=False) == []


def test_harmless_changes_need_no_allow() -> None:
    check_changes(changes(epochs=20), ())
    check_changes(find_changes({"exact_mean": True}, {"exact_mean": False}, is_mid_epoch=True), ())


def test_to_keep_fewer_checkpoints_says_what_that_removes() -> None:
    # A run begun with keep=50 on the command line lost all but two when it was resumed without.
    (fewer,) = find_changes({"keep": 50}, {"keep": 2}, is_mid_epoch=False)
    assert str(fewer) == "keep was 50 and is now 2, so the next save removes older checkpoints from their directory"
    (more,) = find_changes({"keep": 2}, {"keep": None}, is_mid_epoch=False)
    assert str(more) == "keep was 2 and is now None"


def test_where_the_run_lies_is_no_difference() -> None:
    assert find_changes({"run_dir": "runs/a"}, {"run_dir": None}, is_mid_epoch=False) == []


def test_the_error_names_the_options_that_allow_it() -> None:
    found = changes(epochs=3, max_grad_norm=1.0, optimizer_args={"lr": 0.2, "betas": [0.9, 0.99]})
    with pytest.raises(CheckpointError, match=r"give --allow max_grad_norm --allow optimizer_args.lr;"):
        check_changes(found, ())
    with pytest.raises(CheckpointError, match=r"another config: optimizer_args.lr was 0.1 and is now 0.2. This"):
        check_changes(found, ["max_grad_norm"])


@pytest.mark.parametrize("allowed", [["optimizer_args"], ["optimizer_args.lr"], ["all"]])
def test_leave_is_given_by_name_or_by_one_above_or_to_all(allowed: list[str]) -> None:
    check_changes(changes(optimizer_args={"lr": 0.2, "betas": [0.9, 0.99]}), allowed)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_shards": 2}, "num_shards was 4 and is now 2, but the order in which gradients are added"),
        ({"precision": "float16"}, "gradient scaler"),
        ({"scheduler": "mine:Decay"}, "the scheduler's state"),
        ({"batch_size": 64, "is_mid_epoch": True}, "used twice"),
        ({"weights": "balanced", "is_mid_epoch": True}, "used twice"),
    ],
)
def test_what_cannot_be_allowed_says_so(values: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=f"cannot continue with this one: .*{said}"):
        check_changes(changes(**values), ["all"])


def test_the_batch_size_may_change_between_two_epochs() -> None:
    check_changes(changes(batch_size=64), ["batch_size"])


def test_a_rate_that_a_scheduler_sets_cannot_be_changed() -> None:
    args = {"lr": 0.2, "betas": [0.9, 0.99]}
    for scheduled in ({"scheduler": "mine:Decay"}, {"warmup": 0.1}):  # after a warm-up alone the rate is constant
        saved = {**SAVED, **scheduled}
        found = find_changes(saved, {**saved, "optimizer_args": args}, is_mid_epoch=False)
        with pytest.raises(CheckpointError, match="it is set by the scheduler"):
            check_changes(found, ["all"])
    for key, value in (("epochs", 20), ("batch_size", 64), ("drop_last", True)):
        saved = {**SAVED, "scheduler": "cosine", "drop_last": False}
        with pytest.raises(CheckpointError, match="cosine schedule depends on the steps of the whole run"):
            check_changes(find_changes(saved, {**saved, key: value}, is_mid_epoch=False), ["all"])


def test_an_unknown_key_is_an_error_with_the_nearest_key() -> None:
    check_names(["all", "batch_size", "optimizer_args.lr"], SAVED)
    with pytest.raises(ConfigError, match=r"--allow batchsize does not name a config key. Did you mean 'batch_size'?"):
        check_names(["batchsize"], SAVED)
