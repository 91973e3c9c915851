"""The threads of replicas: like their caller's, kept, ended, and honest about what went wrong."""

import contextvars
import copy
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.unit.parallel.replicas.replicated import CPU, TWO, parallel
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lockstep.parallel.replicas.data_parallel import DataParallel
from lockstep.parallel.replicas.threads import ReplicaThreads, _threads_of_replicas

THREADS_SECONDS = 20


def seen_by_replicas(look: Callable[[], Any]) -> list[Any]:
    """Return what `look` returns in each of three replicas that run at once, as on three devices."""
    return ReplicaThreads().run([look] * 3, [CPU] * 3, one_at_a_time=False)


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
    model = DataParallel(copy.deepcopy(plain), TWO)
    x = torch.randn(4, 4)
    for module in (plain, model):
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = module(x)
            assert output.dtype == torch.bfloat16
            output.float().sum().backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(0.1)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0.05, atol=0.05)


def test_replicas_have_the_innermost_of_their_callers_default_devices() -> None:
    # A thread has its own: a replica made its tensors on the CPU, whatever the caller had said; then on the outermost.
    with torch.device("cpu"), torch.device("meta"):
        assert seen_by_replicas(lambda: torch.zeros(1).device.type) == ["meta"] * 3
    assert seen_by_replicas(lambda: torch.zeros(1).device.type) == ["cpu"] * 3


def test_replicas_have_the_callers_context_variables() -> None:
    name = contextvars.ContextVar("name", default="nobody")
    token = name.set("the caller")
    assert seen_by_replicas(name.get) == ["the caller"] * 3
    name.reset(token)
    assert seen_by_replicas(name.get) == ["nobody"] * 3


def test_replicas_in_kept_threads_have_the_callers_number_of_threads() -> None:
    # A thread takes this number over when it begins, and did not hear when it was changed afterwards.
    threads, all_run = ReplicaThreads(), threading.Barrier(3)

    def look() -> int:
        all_run.wait(THREADS_SECONDS)  # so each has a thread, which is kept
        return torch.get_num_threads()

    for number in (2, 1):
        torch.set_num_threads(number)
        assert threads.run([look] * 3, [CPU] * 3, one_at_a_time=False) == [number] * 3


def dropped_twice(x: Tensor) -> Tensor:
    once = functional.dropout(x * 1.0, 0.1)
    time.sleep(0.001)  # other replicas, if they run now, draw in between
    return functional.dropout(once, 0.5)


def test_dropout_in_replicas_of_one_device_repeats() -> None:
    # They drew at the same time once, in an order that no seed could bring back.
    x = torch.ones(4000)
    torch.manual_seed(0)
    expected = torch.cat([dropped_twice(part) for part in x.chunk(4)])
    torch.manual_seed(0)
    assert torch.equal(parallel(dropped_twice, 4)(x), expected)


@pytest.mark.parametrize("is_training", [True, False])
def test_a_checkpoint_in_a_replica_draws_again_what_its_forward_drew(is_training: bool) -> None:
    # While replicas drew from one generator at the same time, gradients were silently those of another forward.
    x = torch.ones(8, 500, requires_grad=True)
    output = parallel(lambda x: checkpoint(dropped_twice, x, use_reentrant=False)).train(is_training)(x)
    output.sum().backward()
    assert torch.equal(x.grad, output)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("has_gradients", [True, False])
def test_replicas_of_one_device_run_one_at_a_time_unless_they_evaluate(is_training: bool, has_gradients: bool) -> None:
    num_threads = 1 if is_training or has_gradients else 3
    seen: list[int] = []
    together = threading.Barrier(num_threads)

    def note(_x: Tensor) -> None:
        together.wait(THREADS_SECONDS)
        seen.append(threading.get_ident())

    model = parallel(note, 3).eval()
    model.module.add_module("dropout", nn.Dropout().train(is_training))  # a part may train, and the whole not
    with torch.set_grad_enabled(has_gradients):
        model(torch.zeros(3))
    assert len(set(seen)) == num_threads


def test_devices_run_at_once_and_replicas_of_one_device_one_at_a_time() -> None:
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    assert _threads_of_replicas([first, second, CPU, first], one_at_a_time=True) == [[0, 3], [1], [2]]
    assert _threads_of_replicas([CPU, CPU], one_at_a_time=False) == [[0], [1]]


@torch.no_grad()
def test_threads_are_kept_from_forward_to_forward() -> None:
    seen: list[int] = []
    together = threading.Barrier(3)

    def note(_x: Tensor) -> None:
        together.wait(THREADS_SECONDS)
        seen.append(threading.get_ident())

    model = parallel(note, 3).eval()
    for _ in range(5):
        model(torch.zeros(3))
    assert len(seen) == 15
    assert len(set(seen)) == 3


def test_replicas_of_forwards_that_overlap_all_run_at_once() -> None:
    """Each forward's replicas wait for each other, in two threads at once: threads that are shared would be too few."""
    rounds = {0: threading.Barrier(2), 1: threading.Barrier(2)}
    both = threading.Barrier(2)
    model = parallel(lambda x: (rounds[int(x[0])].wait(THREADS_SECONDS), None)[1]).eval()

    @torch.no_grad()
    def work(number: int) -> None:
        for _ in range(20):
            both.wait(THREADS_SECONDS)
            model(torch.full((2,), number))

    with ThreadPoolExecutor() as pool:
        list(pool.map(work, range(2)))
    assert not both.broken
    assert not any(barrier.broken for barrier in rounds.values())


@torch.no_grad()
def test_many_objects_leave_no_thread() -> None:
    before = threading.active_count()
    layer = nn.Linear(2, 2).eval()
    x = torch.zeros(4, 2)
    most = 0
    for _ in range(200):
        DataParallel(layer, TWO).eval()(x)
        most = max(most, threading.active_count())
    gc.collect()
    wait_for(lambda: threading.active_count() <= before)
    assert most < before + 50


def test_a_forked_child_starts_threads_of_its_own() -> None:
    model = DataParallel(nn.Linear(1, 1), TWO).eval()
    x = torch.zeros(2, 1)
    with torch.no_grad():
        expected = model(x)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(model(x), expected) else 1)
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


@pytest.mark.parametrize("has_gradients", [True, False], ids=["in turn", "at once"])
@pytest.mark.parametrize("number", range(3))
def test_an_exception_is_the_replicas_own(number: int, has_gradients: bool) -> None:
    begun: list[int] = []

    def fail(x: Tensor) -> Tensor:
        begun.append(int(x))
        if int(x) == number:
            raise OwnError(17, "broken")
        return x

    model = parallel(fail, 3).eval()
    with torch.set_grad_enabled(has_gradients):
        with pytest.raises(OwnError) as caught:
            model(torch.arange(3))
        assert sorted(begun) == [*range(number + 1 if has_gradients else 3)]
        assert caught.value.code == 17
        assert caught.value.__notes__ == [f"Raised in replica {number} of 3, on cpu."]
        assert caught.traceback[-1].name == "fail"
        assert model(torch.full((3,), 5)).tolist() == [5, 5, 5]


@torch.no_grad()
def test_the_first_exception_in_time_is_the_cause() -> None:
    failed = threading.Event()

    def fail(x: Tensor) -> Tensor:
        if int(x) == 1:
            try:
                raise KeyError("first")
            finally:
                failed.set()
        failed.wait(THREADS_SECONDS)
        time.sleep(0.5)  # until the other's exception is taken
        raise ValueError("later")

    with pytest.raises(KeyError, match="first") as caught:
        parallel(fail).eval()(torch.arange(2))
    assert caught.value.__notes__[1:] == ["After that, replica 0 raised ValueError: later"]


@pytest.mark.parametrize("has_gradients", [True, False], ids=["in turn", "at once"])
@pytest.mark.parametrize("error", [OwnError(1, "out of memory"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.usefixtures("no_garbage_collection")
def test_an_exception_keeps_nothing_alive_once_it_is_handled(error: BaseException, has_gradients: bool) -> None:
    # An interrupt in a replica beside the caller's left a cycle, with all memory of the forward and the threads in it.
    seen: list[weakref.ref[Tensor]] = []

    def fail(x: Tensor) -> Tensor:
        large = x + 1
        seen.append(weakref.ref(large))
        if int(x) == 1:
            raise type(error)(*error.args)
        return x

    model = parallel(fail).eval()
    before = threading.active_count()
    with torch.set_grad_enabled(has_gradients):
        for _ in range(5):
            with pytest.raises(type(error)):
                model(torch.arange(2))
    assert len(seen) == 10
    wait_for(lambda: not any(ref() is not None for ref in seen))
    assert threading.active_count() <= before + 1


@torch.no_grad()
def test_an_interrupt_reaches_the_caller_and_the_next_forward_has_threads_of_its_own() -> None:
    release = threading.Event()

    def interrupt(x: Tensor) -> Tensor:
        if int(x) == 0:
            raise KeyboardInterrupt
        if int(x) == 1:
            release.wait(THREADS_SECONDS)
        return x

    model = parallel(interrupt).eval()
    with pytest.raises(KeyboardInterrupt):
        model(torch.arange(2))
    assert model(torch.arange(2, 4)).tolist() == [2, 3]
    assert not release.is_set()
    release.set()
