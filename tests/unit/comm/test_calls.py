"""What is compared between ranks, and what they are told when it differs."""

import pytest
import torch

from lockstep.comm.calls import LONGEST_CALL, describe_call, explain_mismatch
from lockstep.comm.shm.file_layout import PAGE
from lockstep.errors import CollectiveMismatchError

ONE = ((torch.float32, torch.Size([2, 3])),)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (describe_call("all_reduce", ONE, "sum"), b"all_reduce(sum, float32 [2, 3])"),
        (describe_call("all_gather", ONE), b"all_gather(float32 [2, 3])"),
        (describe_call("barrier", ()), b"barrier()"),
        (
            describe_call("broadcast", ((torch.bool, torch.Size([])),), "from rank 1"),
            b"broadcast(from rank 1, bool [])",
        ),
        (describe_call("all_reduce_coalesced", ONE * 2), b"all_reduce_coalesced(float32 [2, 3], float32 [2, 3])"),
    ],
)
def test_a_call_is_described_in_one_line(call: bytes, text: bytes) -> None:
    assert call == text


def test_a_long_call_is_cut_and_still_compared_whole() -> None:
    many = ONE * 200
    last_differs = (*many[:-1], (torch.float32, torch.Size([2, 4])))
    calls = {describe_call("all_reduce_coalesced", tensors) for tensors in (many, last_differs)}
    assert len(calls) == 2
    for call in calls:
        assert len(call) <= LONGEST_CALL
        assert b"200 tensors, digest " in call
        assert call.endswith(b")")
    longest = describe_call("operation" * 5, many, "detail" * 100)
    assert len(longest) <= LONGEST_CALL


def test_the_longest_call_fits_its_page() -> None:
    assert 12 + LONGEST_CALL <= PAGE


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ({0: b"a()", 1: b"b()"}, "rank 0 calls a(); rank 1 calls b()."),
        ({0: b"a()", 1: b"b()", 2: b"a()"}, "ranks 0 and 2 call a(); rank 1 calls b()."),
        ({3: b"b()", 2: b"b()", 1: b"b()", 0: b"a()"}, "rank 0 calls a(); ranks 1, 2 and 3 call b()."),
        ({0: b"a()", 1: b"b()", 2: b"c()"}, "rank 0 calls a(); rank 1 calls b(); rank 2 calls c()."),
        ({0: b"\xff", 1: b"b()"}, "rank 0 calls \ufffd; rank 1 calls b()."),
    ],
)
def test_a_mismatch_names_every_call_and_who_makes_it(calls: dict[int, bytes], said: str) -> None:
    error = explain_mismatch(calls)
    assert isinstance(error, CollectiveMismatchError)
    assert f"do not make the same call: {said}" in str(error)
    assert "Every rank must make the same calls in the same order" in str(error)
