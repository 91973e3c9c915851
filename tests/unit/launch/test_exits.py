"""How workers ended, in words."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.errors import WorkerFailure
from lockstep.launch import exits
from lockstep.launch.exits import (
    KillerNames,
    OomKills,
    describe_exit,
    describe_failures,
    describe_waiting,
    exit_status,
    find_traceback,
    name_killer,
    read_oom_kills,
    says_another_failed,
    users_part,
)
from lockstep.launch.supervision import patience_after

CHAINED = "try:\n  1 / 0\nexcept ZeroDivisionError as error:\n  raise ValueError('two\\nlines') from error"
IN_HANDLER = "try:\n  1 / 0\nexcept ZeroDivisionError:\n  {}['key']"
GROUP = "raise ExceptionGroup('several', [ValueError(1), ExceptionGroup('more', [KeyError(2)])])"


@pytest.mark.parametrize("code", ["1 / 0", CHAINED, IN_HANDLER, GROUP, "def f(:", "if True:\npass"])
def test_a_traceback_is_found_as_python_writes_it(code: str) -> None:
    noise = "import traceback\ntry:\n  {}[0]\nexcept KeyError:\n  traceback.print_exc()\n"
    run = [sys.executable, "-I", "-S", "-c"]
    written = subprocess.run([*run, code], capture_output=True, text=True, check=False).stderr
    earlier = subprocess.run([*run, noise], capture_output=True, text=True, check=False).stderr
    assert earlier.startswith("Traceback")
    assert find_traceback(written) == written
    assert find_traceback(f"{earlier}a log line\n{written}after it") == f"{written}after it"


TORCHS = """loading
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in <module>
[rank1]:     step()
[rank1]: lockstep.errors.PeerLostError: Rank 0 has left the group.
[rank1]: Every rank must make the same calls.
The script of rank 0 has ended after 5 backwards.
"""


def test_torch_puts_the_rank_before_each_line_of_a_traceback() -> None:
    # Nothing of it was recognized: not the place, not the error, and what was written after it passed for the error.
    found = find_traceback(TORCHS)
    assert found.splitlines()[0] == "Traceback (most recent call last):"
    assert found.splitlines()[-1] == "Every rank must make the same calls."
    assert says_another_failed(found)
    later = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nKeyError: 1\n'
    assert find_traceback(TORCHS + later) == later
    assert not says_another_failed(later)
    assert not says_another_failed("")
    for text in ("", "loading\nusage: x [-h]\nx: error: the following arguments are required: lr\n"):
        assert find_traceback(text) == ""


def test_an_end_is_described_with_code_or_signal() -> None:
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-11) == "killed by SIGSEGV"
    assert describe_exit(-11, place="a.py:1 in f") == "killed by SIGSEGV at a.py:1 in f"
    assert describe_exit(-9) == "killed by SIGKILL, by another process or by the kernel because memory ran out"
    assert describe_exit(-9, killer="by the kernel") == "killed by SIGKILL, by the kernel"
    assert describe_exit(-40) == "killed by signal 40"
    assert [exit_status(code) for code in (0, 3, -9, -15)] == [0, 3, 137, 143]


def test_the_first_failure_is_described_in_full_and_the_others_in_a_line() -> None:
    first, *others = (
        WorkerFailure(rank=rank, reason=reason, traceback=traceback, error=None)
        for rank, reason, traceback in ((2, "one", "Trace\n"), (0, "one", "Other"), (1, "two\nlines", ""))
    )
    assert describe_failures([first]) == "Worker 2 failed first: one (LS601)\n\nTraceback of worker 2:\nTrace"
    message = describe_failures([first, *others])
    assert "Failed in the same way: worker 0." in message
    assert message.endswith("Failed after it, probably because of it: worker 1 (two).")


def test_scripts_that_end_with_one_exit_code_but_other_errors_did_not_fail_in_the_same_way() -> None:
    frames = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    step()\n'
    own, consequence = "ValueError: no batch", "lockstep.errors.PeerLostError: Rank 1 failed.\nSee its log."
    first, *others = (
        WorkerFailure(rank=rank, reason="ended with exit code 1", traceback=frames + error, error=None)
        for rank, error in ((1, own), (0, consequence), (2, own))
    )
    text = describe_failures([first, *others])
    assert "Failed in the same way: worker 2." in text
    assert text.endswith("worker 0 (ended with exit code 1, lockstep.errors.PeerLostError: Rank 1 failed.).")


OURS = """Traceback (most recent call last):
  File "/site/lockstep/engine/step.py", line 3, in step
    loss = self.loss()
           ^^^^^^^^^^^
  File "/home/user/mine.py", line 7, in loss
    return outputs[3]
  File "/site/torch/tensor.py", line 1, in __getitem__
    raise
IndexError: 3

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/site/lockstep/engine/step.py", line 9, in step
    raise
LossError: no
"""


def test_a_traceback_begins_with_the_users_first_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "LIBRARIES", ("/site/",))
    short = users_part(OURS)
    assert short.startswith('Traceback (most recent call last):\n  File "/home/user/mine.py", line 7, in loss\n')
    assert "tensor.py" in short
    assert "line 3, in step" not in short
    assert "line 9, in step" in short  # the last frame of one without a frame of the user's
    monkeypatch.setattr(exits, "LIBRARIES", ("/other/",))
    assert users_part(OURS) == OURS.rstrip("\n")


def test_what_the_users_line_has_called_is_left_out_where_our_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exits, "LIBRARIES", ("/site/",))
    lines = OURS.split("\n\n", maxsplit=1)[0].replace("IndexError: 3", "lockstep.errors.LossError: Do that. (LS516)")
    assert users_part(lines).splitlines()[1:] == [
        *lines.splitlines()[4:6],
        "lockstep.errors.LossError: Do that. (LS516)",
    ]


def test_of_a_traceback_without_the_users_frames_the_last_one_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "LIBRARIES", ("/site/", "/home/user"))
    trace = OURS.split("\n\n", maxsplit=1)[0]
    short = users_part(trace)
    assert short.splitlines() == [trace.splitlines()[0], *trace.splitlines()[-3:]]


def test_of_a_traceback_that_was_printed_only_place_and_error_are_repeated() -> None:
    trace = 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n    f()\nKeyError: 1\n'
    failure = WorkerFailure(rank=1, reason="ended with exit code 1", traceback=trace, error=None)
    assert describe_failures([failure], is_shown=True) == (
        'Worker 1 failed first: ended with exit code 1 (LS601)\n  File "a.py", line 3, in <module>\nKeyError: 1\n'
        "Its traceback is above."
    )


def test_what_is_printed_while_others_end_is_one_line_that_is_not_too_long() -> None:
    found = describe_waiting(f"Worker 1 failed first: ValueError: {'x' * 10_000_000}\nmore (LS601)\n\nTraceback ...")
    assert found.endswith("xxx. The other workers are being stopped. (LS601)")
    assert len(found) < 1000


def test_a_text_that_is_far_too_long_is_shown_from_both_ends() -> None:
    # An exception of 10 MB was printed three times.
    long = f"ValueError: {'x' * 10_000_000} the end"
    failures = [WorkerFailure(rank=rank, reason=f"{long}{rank}", traceback=long, error=None) for rank in (0, 1)]
    message = describe_failures(failures)
    assert message.startswith("Worker 0 failed first: ValueError: xxx")
    assert "xxx the end0 (LS601)\n\nTraceback of worker 0:\nValueError: xxx" in message
    assert len(message) < 30_000


# -- How long the launcher waits for an earlier failure than those that it has seen ------------------------------------


def failed(exit_code: int | None, *, is_consequence: bool = False) -> Any:
    return SimpleNamespace(exit_code=exit_code, is_consequence=lambda: is_consequence)


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([failed(-9)], 0.05),  # it waited half a second, although nothing that another worker does kills this one
        ([failed(None, is_consequence=True), failed(-9)], 0.05),
        ([failed(1)], 0.3),
        ([failed(-11)], 0.3),  # a reader of memory that another one has cut off
        ([failed(None, is_consequence=True)], 5.0),
        ([failed(None, is_consequence=True), failed(1)], 0.3),
    ],
)
def test_a_kill_is_the_cause_and_an_error_about_another_worker_is_not(workers: list[Any], expected: float) -> None:
    assert patience_after(workers, is_sure=False) == expected


def test_one_that_exits_without_a_traceback_is_waited_for_only_where_another_may_have_failed() -> None:
    assert patience_after([failed(3)], is_sure=True) == 0.05
    assert patience_after([failed(None, is_consequence=True)], is_sure=True) == 5.0


# -- Who sent a SIGKILL, from recorded files of the kernel -------------------------------------------------------------


V2 = {
    "proc/self/cgroup": "0::/user.slice/job.scope\n",
    "proc/vmstat": "nr_free_pages 12\noom_kill 7\nnuma_hit 3\n",
    "sys/fs/cgroup/user.slice/job.scope/memory.events": "low 0\nhigh 0\nmax 31\noom 2\noom_kill 2\noom_group_kill 0\n",
}
V1 = {
    "proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/4716a9\n0::/\n",
    "proc/vmstat": "oom_kill 7\n",
    "sys/fs/cgroup/memory/docker/4716a9/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
}
CONTAINER = {
    "proc/self/cgroup": "4:memory:/process/4716a9\n0::/\n",
    "proc/vmstat": "oom_kill 0\n",
    "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
}


def record(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "group", "host"), [(V2, 2, 7), (V1, 5, 7), (CONTAINER, 1, 0), ({"proc/vmstat": "x 1\n"}, None, None)]
)
def test_counters_are_read(tmp_path: Path, files: dict[str, str], group: int | None, host: int | None) -> None:
    assert read_oom_kills(record(tmp_path, files)) == OomKills(group=group, host=host)


def test_a_system_without_counters_tells_nothing(tmp_path: Path) -> None:
    assert read_oom_kills(tmp_path) == OomKills(group=None, host=None)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((2, 7), (3, 8), "by the kernel's out-of-memory killer: the memory limit of this control group"),
        ((2, 7), (2, 8), "probably by the kernel's out-of-memory killer, which killed processes on this host"),
        ((None, 7), (None, 8), "probably by the kernel's"),
        ((2, 7), (2, 7), "by another process: the kernel's out-of-memory killer has killed nothing meanwhile"),
        ((2, None), (2, None), "by another process or by the kernel because memory ran out"),
    ],
)
def test_the_killer_is_named(
    before: tuple[int | None, int | None], after: tuple[int | None, int | None], expected: str
) -> None:
    readings = [OomKills(group=group, host=host) for group, host in (before, after)]
    assert name_killer(*readings).startswith(expected)


def test_workers_that_are_killed_together_have_one_killer(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of a whole control group that reached its limit, only the first was said to be ended by the kernel.
    kills, now = [0], [0.0]
    monkeypatch.setattr(exits, "read_oom_kills", lambda: OomKills(group=kills[0], host=None))
    monkeypatch.setattr(exits, "time", SimpleNamespace(monotonic=lambda: now[0]))
    names = KillerNames()
    now[0], kills[0] = 60.0, 2
    assert names.name().startswith("by the kernel's")
    now[0] = 60.1
    assert names.name().startswith("by the kernel's")
    now[0] = 120.0
    assert not names.name().startswith("by the kernel's")
