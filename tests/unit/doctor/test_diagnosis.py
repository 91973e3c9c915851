"""Who is waited for, and why, from what is known of each worker."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest

from lockstep.doctor.activity import Activity
from lockstep.doctor.diagnosis import LoadingProcess, WorkerState, diagnose
from lockstep.doctor.system import (
    Neighbour,
    ProcessFacts,
    describe_neighbours,
    find_neighbours,
    watch_processes,
)

SLEEPING = ProcessFacts(state="sleeping", memory_bytes=2**30, swapped_bytes=0, cpu_seconds=1.0, call="futex", catches=0)
COMPUTING = Activity(
    step=7,
    doing="computes shard 1",
    since_ns=0,
    awaited=frozenset(),
    call="",
    call_number=None,
    last_calls={0: 40},
    line="",
    is_loading=False,
    has_ended=False,
)
CALL = "all_reduce(sum, float32 [4])"


def worker(rank: int, activity: Activity = COMPUTING, *, seconds: float = 60.0, **changed: Any) -> WorkerState:
    facts = changed.pop("facts", SLEEPING)
    line = changed.pop("line", f"train.py:{rank + 10}")
    return WorkerState(rank=rank, pid=100 + rank, activity=activity, seconds=seconds, facts=facts, line=line, **changed)


def waiting(*ranks: int) -> Activity:
    return replace(COMPUTING, doing=f"waits for rank {ranks[0]} in {CALL}", awaited=frozenset(ranks), call=CALL)


def in_call(number: int) -> Activity:
    return replace(COMPUTING, doing=f"is in {CALL}", call=CALL, call_number=number, last_calls={0: number})


@pytest.mark.parametrize("activity", [in_call(41), waiting(1)], ids=["torch's call", "ours"])
def test_a_rank_of_another_host_is_waited_for(activity: Activity) -> None:
    found = diagnose([worker(0, activity)], elsewhere=[1])
    assert (found.ranks, found.is_elsewhere, found.is_certain) == ((1,), True, True)
    assert "wait for rank 1, which is on another host" in found.text
    assert f"Rank 0: {activity.doing}" in found.text
    several = diagnose([worker(0, activity)], elsewhere=range(1, 16))
    assert "wait for one of the ranks 1, 2, 3, 4, 5, 6, 7, 8, ..., which are" in several.text


def test_a_busy_rank_of_this_host_is_named_before_those_of_others() -> None:
    found = diagnose([worker(0, in_call(41)), worker(1)], elsewhere=[2, 3])
    assert (found.ranks, found.is_elsewhere) == ((1,), False)


@pytest.mark.parametrize(
    ("facts", "cpu_share", "said"),
    [
        (replace(SLEEPING, state="stopped"), 0.0, ["is stopped", "kill -CONT 101"]),
        (replace(SLEEPING, state="stopped by a debugger"), 0.0, ["by a debugger"]),
        (replace(SLEEPING, state="running", call=""), 0.99, ["99% of a core", "train.py:11", "loop"]),
        (replace(SLEEPING, state="running", call=""), 0.2, ["20% of a core", "train.py:11", "loop"]),
        (SLEEPING, 0.0, ["waits for a lock or another thread", "train.py:11"]),
        (replace(SLEEPING, call="read of its input"), 0.0, ["waits for input at train.py:11", "input()"]),
        (replace(SLEEPING, call="sleep"), 0.0, ["in the system call sleep", "train.py:11"]),
        (replace(SLEEPING, state="in disk sleep", call="read of /data/a"), 0.0, ["read of /data/a", "does not answer"]),
        (replace(SLEEPING, swapped_bytes=2**29), 0.0, ["0.5 GiB of it are swapped out"]),
    ],
)
def test_the_awaited_worker_is_named_with_what_it_does(facts: ProcessFacts, cpu_share: float, said: list[str]) -> None:
    found = diagnose([worker(0, waiting(1)), worker(1, facts=facts, cpu_share=cpu_share), worker(2, waiting(1))])
    assert (found.kind, found.ranks) == ("stalled", (1,))
    assert "Rank 1 (process 101)" in found.text
    assert f"Ranks 0, 2: waits for rank 1 in {CALL}" in found.text
    for part in said:
        assert part in f"{found.text} {found.advice}"


def test_a_rank_that_waits_for_any_waits_for_those_that_do_not() -> None:
    anybody = replace(
        COMPUTING, doing="waits for any rank in the startup of the process group", awaited=frozenset({-1})
    )
    found = diagnose([worker(0, anybody), worker(1), worker(2, anybody)])
    assert (found.ranks, found.is_certain) == ((1,), True)
    # It said that all were in the same call, when no script had made one.
    assert diagnose([worker(0, anybody), worker(1, anybody)]).text.startswith("All ranks wait for each other, and")


def test_with_a_group_of_torchs_the_rank_that_has_reduced_less_is_awaited() -> None:
    reducing = replace(COMPUTING, doing="waits for bucket 1 of the gradients", reducing=7, last_reduced=7)
    found = diagnose([worker(0, reducing), worker(1, replace(COMPUTING, last_reduced=6))])
    assert (found.ranks, found.is_certain) == ((1,), True)
    together = diagnose([worker(0, reducing), worker(1, reducing)])
    assert "All ranks are in the same call" in together.text


@pytest.mark.parametrize(
    ("facts", "activity", "expected"),
    [
        (replace(SLEEPING, state="running"), COMPUTING, False),  # nobody waits for it: it may compute for long
        (replace(SLEEPING, call="sleep"), COMPUTING, True),
        (replace(SLEEPING, call="poll"), replace(COMPUTING, is_inside=False), False),  # a script that serves, say
        (replace(SLEEPING, call="read of its input"), replace(COMPUTING, is_inside=False), True),
        (replace(SLEEPING, state="stopped"), replace(COMPUTING, is_inside=False), True),
    ],
)
def test_a_worker_alone_stands_still_for_certain_where_no_healthy_one_does(
    facts: ProcessFacts, activity: Activity, expected: bool
) -> None:
    found = diagnose([worker(0, activity, facts=facts)])
    assert (found.kind, found.is_certain) == ("stalled", expected)


def test_the_end_of_a_chain_of_waits_is_the_cause() -> None:
    assert diagnose([worker(0, waiting(1)), worker(1, waiting(2)), worker(2)]).ranks == (2,)


def test_without_a_recorded_wait_the_rank_that_has_not_begun_the_call_is_awaited() -> None:
    found = diagnose([worker(0, in_call(41)), worker(1), worker(2, in_call(41))])
    assert found.ranks == (1,)
    assert "train.py:11" in found.text


def test_a_worker_in_its_data_set_is_named_with_the_loading_process() -> None:
    loading = replace(COMPUTING, doing="waits for its data loader, for step 7 of epoch 0", is_loading=True)
    child = LoadingProcess(pid=500, facts=replace(SLEEPING, call="sleep"), line="data.py:9 in __getitem__")
    found = diagnose([worker(0, waiting(1)), worker(1, loading, loading=(child,), is_loading=True)])
    assert "whose process 500 is at data.py:9 in __getitem__ (sleeping, in sleep)" in found.text
    stopped = replace(child, facts=replace(SLEEPING, state="stopped"))
    found = diagnose([worker(0, waiting(1)), worker(1, loading, loading=(stopped,), is_loading=True)])
    assert "kill -CONT 500" in found.advice


def test_ranks_that_wait_for_each_other_are_shown_side_by_side() -> None:
    found = diagnose([worker(0, waiting(1)), worker(1, waiting(0))])
    assert (found.kind, found.ranks) == ("stalled", ())
    assert f"rank 0 is in {CALL} at train.py:10; rank 1 is in {CALL} at train.py:11" in found.text


def test_workers_that_do_something_are_running() -> None:
    found = diagnose([worker(0, waiting(1), seconds=1), worker(1, seconds=2)])
    assert (found.kind, found.ranks) == ("running", ())
    assert "step 7" in found.text


@pytest.mark.parametrize(("longest", "is_certain"), [(0.0, False), (4.0, False), (0.01, True)])
def test_a_shard_that_takes_far_longer_than_any_before_is_no_long_shard(longest: float, *, is_certain: bool) -> None:
    # All ranks in a loop, or with the GIL held: nobody waits for anybody, and each of them computes.
    busy = replace(SLEEPING, state="running", call="")
    activity = replace(COMPUTING, longest_shard=longest)
    found = diagnose([worker(rank, activity, facts=busy, cpu_share=1.0) for rank in range(2)])
    assert (found.kind, found.is_certain) == ("stalled", is_certain)


def test_a_stopped_worker_is_told_of_at_once() -> None:
    found = diagnose([worker(0, seconds=1), worker(1, seconds=1, facts=replace(SLEEPING, state="stopped"))])
    assert (found.kind, found.ranks) == ("stalled", (1,))


def test_a_worker_that_was_killed_is_named() -> None:
    found = diagnose([worker(0), worker(1, facts=None, how_ended="killed by SIGKILL, by the kernel")])
    assert (found.kind, found.ranks) == ("failed", (1,))
    assert "Rank 1 (process 101) was killed by SIGKILL, by the kernel." in found.text


def test_a_job_that_ended_well_has_ended() -> None:
    over = replace(COMPUTING, doing="has ended", has_ended=True)
    found = diagnose([worker(rank, over, facts=None, how_ended="ended with exit code 0") for rank in range(2)])
    assert (found.kind, found.ranks) == ("ended", ())


def test_a_job_of_which_all_was_killed_says_what_the_last_step_was() -> None:
    found = diagnose([worker(rank, facts=None) for rank in range(2)])
    assert found.kind == "failed"
    assert "killed together" in found.text
    assert "step was 7" in found.text


def test_a_worker_of_another_host_does_not_count_as_gone() -> None:
    found = diagnose([worker(0, waiting(1)), worker(1, facts=None, is_here=False)])
    assert (found.kind, found.ranks) == ("stalled", (1,))
    assert "on another host" in found.text


def test_a_recording_without_workers_is_told_of() -> None:
    assert diagnose([]).kind == "empty"


# -- Other processes on the machine ------------------------------------------------------------------------------------


def test_a_busy_process_is_found_with_its_user_and_those_of_the_job_are_not() -> None:
    spinning = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(spinning, stdout=subprocess.PIPE) as busy:
        assert busy.stdout is not None
        busy.stdout.readline()
        try:
            watched = watch_processes()
            time.sleep(0.5)
            found = find_neighbours(watched, set())
            time.sleep(0.5)
            of_job = find_neighbours(watched, {os.getpid()})  # which has started it
        finally:
            busy.kill()
    [neighbour] = [each for each in found if each.pid == busy.pid]
    assert neighbour.program.startswith("python")
    assert neighbour.user
    assert busy.pid not in [each.pid for each in of_job]


def test_little_is_not_mentioned_and_much_names_the_busiest() -> None:
    def neighbours(*cores: float) -> list[Neighbour]:
        return [Neighbour(pid=7 + n, user="ana", program="solver", cores=each) for n, each in enumerate(cores)]

    assert describe_neighbours(neighbours(0.2, 0.1), 8) == ""
    assert describe_neighbours(neighbours(2.0, 0.5), 8) == (
        "Other processes on this machine use 2.5 of its 8 cores: solver (process 7 of ana) 2.0, solver (process 8 of "
        "ana) 0.5."
    )
    assert describe_neighbours(neighbours(2, 1, 1, 1), 8).endswith("solver (process 9 of ana) 1.0, and 1 more.")
