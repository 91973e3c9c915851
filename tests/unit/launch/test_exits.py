"""How workers ended, in words."""

import subprocess
import sys

import pytest

from lockstep.errors import WorkerFailure
from lockstep.launch import exits
from lockstep.launch.exits import (
    describe_exit,
    describe_failures,
    describe_waiting,
    exit_status,
    find_traceback,
    says_another_failed,
    users_part,
)

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
