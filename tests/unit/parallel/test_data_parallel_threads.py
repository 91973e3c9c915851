"""The threads of replicas: like their caller's, kept, ended, and honest about what went wrong."""

import copy
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.parallel.data_parallel import DataParallel, data_parallel

TWO = ["cpu", "cpu"]
THREADS_SECONDS = 20


@pytest.fixture(autouse=True, scope="module")
def _one_core_per_replica():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # else threads of replicas and threads within operations wait for each other
    yield
    torch.set_num_threads(before)


class Call(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def seen_by_replicas(look: Callable[[], Any]) -> list[Any]:
    """Return what `look` returns in each of three replicas."""
    seen: dict[int, Any] = {}
    data_parallel(Call(lambda x: seen.update({int(x): look()})), torch.arange(3), ["cpu"] * 3)
    return [seen[number] for number in range(3)]


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + THREADS_SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_replicas_have_the_callers_grad_mode() -> None:
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            assert seen_by_replicas(torch.is_grad_enabled) == [mode is torch.enable_grad] * 3
    with torch.inference_mode():
        assert seen_by_replicas(torch.is_inference_mode_enabled) == [True] * 3
        assert seen_by_replicas(lambda: torch.ones(1).is_inference()) == [True] * 3
    assert seen_by_replicas(torch.is_inference_mode_enabled) == [False] * 3


def test_replicas_have_the_callers_autocast() -> None:
    def look() -> tuple[Any, ...]:
        on = torch.is_autocast_enabled("cpu")
        return on, torch.get_autocast_dtype("cpu") if on else None, torch.is_autocast_cache_enabled()

    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
            assert seen_by_replicas(look) == [(True, dtype, False)] * 3
    assert seen_by_replicas(look) == [(False, None, True)] * 3


def test_outputs_and_gradients_under_autocast() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parallel = DataParallel(copy.deepcopy(plain), TWO)
    x = torch.randn(4, 4)
    for module in (plain, parallel):
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = module(x)
            assert output.dtype == torch.bfloat16
            output.float().sum().backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(0.1)
    for one, other in zip(parallel.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0.05, atol=0.05)


def test_without_grad_mode_outputs_have_no_graph() -> None:
    parallel = DataParallel(nn.Linear(4, 4), TWO)
    with torch.no_grad():
        assert not parallel(torch.randn(4, 4)).requires_grad


def test_dropout_in_replicas_of_one_device() -> None:
    parallel = DataParallel(nn.Dropout(0.5), ["cpu"] * 4)
    dropped = parallel(torch.ones(4000))
    assert set(dropped.tolist()) == {0.0, 2.0}
    assert abs(dropped.mean() - 1) < 0.2


def test_threads_are_kept_from_forward_to_forward() -> None:
    seen: list[int] = []
    together = threading.Barrier(3)

    def note(_x: Tensor) -> None:
        together.wait(THREADS_SECONDS)
        seen.append(threading.get_ident())

    parallel = DataParallel(Call(note), ["cpu"] * 3)
    for _ in range(5):
        parallel(torch.zeros(3))
    assert len(seen) == 15
    assert len(set(seen)) == 3


def test_replicas_of_forwards_that_overlap_all_run_at_once() -> None:
    """Each forward's replicas wait for each other, in two threads at once: threads that are shared would be too few."""
    rounds = {0: threading.Barrier(2), 1: threading.Barrier(2)}
    both = threading.Barrier(2)
    parallel = DataParallel(Call(lambda x: (rounds[int(x[0])].wait(THREADS_SECONDS), None)[1]), TWO)

    def work(number: int) -> None:
        for _ in range(20):
            both.wait(THREADS_SECONDS)
            parallel(torch.full((2,), number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not both.broken
    assert not any(barrier.broken for barrier in rounds.values())


def test_threads_end_with_the_object() -> None:
    before = set(threading.enumerate())
    parallel = DataParallel(nn.Linear(2, 2), ["cpu"] * 4)
    parallel(torch.zeros(8, 2))
    threads = set(threading.enumerate()) - before
    assert threads
    del parallel
    wait_for(lambda: not any(thread.is_alive() for thread in threads))


def test_a_thousand_objects_leave_no_thread() -> None:
    before = threading.active_count()
    layer = nn.Linear(2, 2)
    x = torch.zeros(4, 2)
    most = 0
    for _ in range(1000):
        DataParallel(layer, TWO)(x)
        most = max(most, threading.active_count())
    gc.collect()
    wait_for(lambda: threading.active_count() <= before)
    assert most < before + 100


def test_a_forked_child_starts_threads_of_its_own() -> None:
    parallel = DataParallel(nn.Linear(1, 1), TWO)
    x = torch.zeros(2, 1)
    with torch.no_grad():
        expected = parallel(x)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(parallel(x), expected) else 1)
    until = time.monotonic() + THREADS_SECONDS
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, 9)
        time.sleep(0.01)
    assert ended == (child, 0)


class OwnError(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code


@pytest.mark.parametrize("number", range(3))
def test_an_exception_is_the_replicas_own(number: int) -> None:
    def fail(x: Tensor) -> Tensor:
        if int(x) == number:
            raise OwnError(17, "broken")
        return x

    parallel = DataParallel(Call(fail), ["cpu"] * 3)
    with pytest.raises(OwnError) as caught:
        parallel(torch.arange(3))
    assert caught.value.code == 17
    assert caught.value.__notes__ == [f"Raised in replica {number} of 3, on cpu."]
    assert caught.traceback[-1].name == "fail"
    assert parallel(torch.full((3,), 5)).tolist() == [5, 5, 5]


def test_the_first_exception_in_time_is_the_cause() -> None:
    failed = threading.Event()

    def fail(x: Tensor) -> Tensor:
        if int(x) == 1:
            try:
                raise KeyError("first")
            finally:
                failed.set()
        failed.wait(THREADS_SECONDS)
        time.sleep(0.05)
        raise ValueError("later")

    with pytest.raises(KeyError, match="first") as caught:
        data_parallel(Call(fail), torch.arange(2), TWO)
    assert caught.value.__notes__[1:] == ["After that, replica 0 raised ValueError: later"]


def test_an_exception_keeps_nothing_alive_once_it_is_handled() -> None:
    seen: list[weakref.ref[Tensor]] = []

    def fail(x: Tensor) -> Tensor:
        large = x + 1
        seen.append(weakref.ref(large))
        raise OwnError(1, "out of memory")

    parallel = DataParallel(Call(fail), TWO)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(OwnError):
            parallel(torch.zeros(2))
        assert len(seen) == 2
        wait_for(lambda: not any(ref() is not None for ref in seen))
    finally:
        gc.enable()


def test_an_interrupt_reaches_the_caller_and_the_next_forward_has_threads_of_its_own() -> None:
    release = threading.Event()

    def interrupt(x: Tensor) -> Tensor:
        if int(x) == 0:
            raise KeyboardInterrupt
        if int(x) == 1:
            release.wait(THREADS_SECONDS)
        return x

    parallel = DataParallel(Call(interrupt), TWO)
    with pytest.raises(KeyboardInterrupt):
        parallel(torch.arange(2))
    assert parallel(torch.arange(2, 4)).tolist() == [2, 3]
    assert not release.is_set()
    release.set()
