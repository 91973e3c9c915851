"""The audit log of a run: what it holds, and what shows that it was altered."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.audit_facts import FACTS, condense
from lockstep.errors import UsageError
from lockstep.events import RunStarted, StepAudited, StepFinished
from lockstep.runs.audit import Replay, describe_replay
from lockstep.runs.audit_log import AuditLog, chain_of_line, compare_logs, describe_log, read_log

CONFIG = {"num_shards": 2, "accumulate": 1, "optimizer_args": {"lr": 0.1}, "keep": 2}


def started(fingerprint: str = "torch") -> RunStarted:
    return RunStarted(
        world_size=2,
        device="cpu",
        num_shards=2,
        num_parameters=3,
        num_train_samples=8,
        num_test_samples=0,
        first_epoch=0,
        num_epochs=1,
        num_steps=4,
        fingerprint=fingerprint,
    )


def audited(step: int, **other: float) -> StepAudited:
    facts = {name: condense([step, other.get(name, 0.0)], 4) for name in FACTS}
    return StepAudited(
        epoch=0, step=step - 1, global_step=step, update="", workers=2, facts={**facts, "options": "0"}, places={}
    )


def write(run_dir: Path, *events: RunStarted | StepAudited, config: dict[str, object] = CONFIG) -> list[str]:
    run_dir.mkdir(exist_ok=True)
    log = AuditLog(run_dir, config)
    for event in events:
        log.record(event)
    return (run_dir / "audit.jsonl").read_text().splitlines()


def four_steps(run_dir: Path) -> list[str]:
    return write(run_dir, started(), *map(audited, range(1, 5)))


def put(run_dir: Path, lines: list[str]) -> None:
    (run_dir / "audit.jsonl").write_text("".join(f"{line}\n" for line in lines))


def test_a_log_that_nobody_has_altered_is_intact(tmp_path: Path) -> None:
    assert len(four_steps(tmp_path)) == 5
    AuditLog(tmp_path, CONFIG).record(StepFinished(epoch=0, step=0, global_step=1, loss=1.0))  # is in the metrics
    found = read_log(tmp_path)
    assert (found.problem, found.num_lines, found.first_step, found.last_step) == ("", 5, 1, 4)
    assert found.steps[3, ""]["samples"] == audited(3).facts["samples"]


def test_a_step_takes_no_more_than_300_bytes(tmp_path: Path) -> None:
    marks = {"samples": 12, "loss": 12, "state": 18, "gradient": 18}
    facts = {name: condense(range(100), number) for name, number in marks.items()}
    event = StepAudited(
        epoch=99, step=9999, global_step=999999, update="", workers=64, facts={**facts, "options": "f" * 8}, places={}
    )
    assert len(write(tmp_path, event)[0]) < 300


@pytest.mark.parametrize("number", range(5))
def test_a_line_that_was_altered_or_removed_is_named(tmp_path: Path, number: int) -> None:
    lines = four_steps(tmp_path)
    altered = lines[number].replace("workers", "w0rkers")
    put(tmp_path, [*lines[:number], altered, *lines[number + 1 :]])
    assert read_log(tmp_path).problem.startswith(f"Line {number + 1} ")
    if number < 4:
        put(tmp_path, [*lines[:number], *lines[number + 1 :]])
        assert read_log(tmp_path).problem.startswith(f"Line {number + 1} ")


def test_a_line_whose_hash_was_made_anew_shows_in_the_next_one(tmp_path: Path) -> None:
    lines = four_steps(tmp_path)
    values = {**json.loads(lines[2]), "workers": 3}
    del values["chain"]
    body = json.dumps(values, separators=(",", ":"))
    chain = chain_of_line(json.loads(lines[1])["chain"], body)
    put(tmp_path, [*lines[:2], f'{body[:-1]},"chain":"{chain}"}}', *lines[3:]])
    assert read_log(tmp_path).problem.startswith("Line 4 ")


def test_a_half_line_is_removed_by_the_next_writer(tmp_path: Path) -> None:
    lines = four_steps(tmp_path)
    with (tmp_path / "audit.jsonl").open("a") as file:
        file.write(lines[-1][:40])
    assert (read_log(tmp_path).problem, read_log(tmp_path).num_lines) == ("", 5)
    log = AuditLog(tmp_path, CONFIG)
    assert log.take_over() == {("", 1), ("", 2), ("", 3), ("", 4)}
    log.record(audited(5))
    assert (read_log(tmp_path).problem, read_log(tmp_path).last_step) == ("", 5)


def test_steps_that_a_resumed_run_takes_again_must_be_equal(tmp_path: Path) -> None:
    four_steps(tmp_path)
    write(tmp_path, started(), audited(3), audited(4), audited(5))
    found = read_log(tmp_path)
    assert (found.problem, found.last_step, found.num_lines) == ("", 5, 9)
    write(tmp_path, started(), audited(4, loss=1.0))
    assert read_log(tmp_path).problem == "Line 11 is of step 4, which was taken before, with another loss."


def test_steps_with_another_config_begin_anew(tmp_path: Path) -> None:
    four_steps(tmp_path)
    write(tmp_path, started(), audited(4, loss=1.0), audited(5), config={**CONFIG, "optimizer_args": {"lr": 0.2}})
    found = read_log(tmp_path)
    assert (found.problem, found.first_step, found.last_step) == ("", 4, 5)
    write(tmp_path, started(), audited(6), config={**CONFIG, "optimizer_args": {"lr": 0.2}, "keep": 3})
    assert read_log(tmp_path).first_step == 4  # another `keep` changes no result


def test_a_config_counts_that_a_step_was_taken_with(tmp_path: Path) -> None:
    four_steps(tmp_path)
    write(tmp_path, started(), config={**CONFIG, "max_steps": 2})  # nothing was left to do
    found = read_log(tmp_path)
    assert (found.config, found.first_step, found.last_step) == (CONFIG, 1, 4)


def test_a_training_that_ends_before_its_log_is_not_confirmed(tmp_path: Path) -> None:
    four_steps(tmp_path)
    replay = Replay(read_log(tmp_path), last=4)
    for step in (1, 2, 3):
        replay.record(audited(step))
    assert not replay.is_confirmed
    said = describe_replay(replay.log, replay, tmp_path)
    assert said == "confirmed 3 updates, then the training ENDED, and the log has steps up to 4 (LS824)"
    replay.record(audited(4))
    assert replay.is_confirmed


@pytest.mark.parametrize("is_large", [False, True])
def test_of_a_large_model_the_cause_may_be_elsewhere(tmp_path: Path, *, is_large: bool) -> None:
    four_steps(tmp_path)
    replay = Replay(read_log(tmp_path), last=4)
    for step, name in ((1, "a"), (2, "b"), (3, "a")):
        places = {"state": [name if is_large else "all"]}
        replay.record(replace(audited(step, loss=float(step == 3)), places=places))
    said = describe_replay(replay.log, replay, tmp_path)
    assert "NOT EQUAL at step 3" in said
    assert ("it may have begun elsewhere, some steps before" in said) == is_large


def test_a_step_that_is_missing_is_named(tmp_path: Path) -> None:
    write(tmp_path, started(), audited(1), audited(3))
    assert read_log(tmp_path).problem == "Line 3 is of step 3, and no line is of step 2."


def test_two_runs_part_where_the_first_fact_differs(tmp_path: Path) -> None:
    four_steps(tmp_path / "one")
    lines = [audited(1), audited(2), audited(3, samples=1.0, loss=2.0), audited(4)]
    write(tmp_path / "other", started("another torch"), *lines, config={**CONFIG, "optimizer_args": {"lr": 0.2}})
    changes, num_shared, difference = compare_logs(read_log(tmp_path / "one"), read_log(tmp_path / "other"))
    assert num_shared == 4
    assert changes == [
        "optimizer_args.lr was 0.1 and is now 0.2",
        "the conditions were torch and are now another torch",
    ]
    assert difference is not None
    assert (difference.global_step, difference.fact, difference.where) == (3, "samples", ("shard 1",))


@pytest.mark.parametrize(
    "line", ["[" * 100_000, '{"kind":"begin","config":5,"fingerprint":1}', '{"step":[1]}', "", "null"]
)
def test_a_line_of_anything_is_a_problem_and_no_error(tmp_path: Path, line: str) -> None:
    lines = four_steps(tmp_path)
    put(tmp_path, [*lines[:2], line, *lines[2:]])
    assert read_log(tmp_path).problem.startswith("Line 3 ")


def test_an_altered_end_of_a_line_is_named(tmp_path: Path) -> None:
    text = "\n".join(four_steps(tmp_path))
    (tmp_path / "audit.jsonl").write_text(text.replace("\n", "\v", 1) + "\n")
    assert read_log(tmp_path).problem.startswith("Line 1 ")


def test_a_run_without_a_log_is_told_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="audit=true"):
        read_log(tmp_path)


def test_a_run_says_in_a_line_whether_its_log_is_intact(tmp_path: Path) -> None:
    assert describe_log(tmp_path) == ""
    lines = four_steps(tmp_path)
    assert describe_log(tmp_path) == "up to step 4, intact"
    put(tmp_path, lines[:3] + lines[4:])
    assert describe_log(tmp_path).startswith("up to step 4, NOT INTACT: Line 4 ")
