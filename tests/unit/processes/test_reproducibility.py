import random
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.processes import reproducibility
from lockstep.processes.reproducibility import (
    keep_generator_states,
    keep_host_states,
    read_generator_states,
    reseed_generators,
    seed_generators,
    seed_host_generators,
    set_deterministic,
    set_generator_states,
    warn_of_late_workspace,
)


@pytest.fixture(autouse=True)
def _switches_restored() -> Iterator[None]:
    yield
    set_deterministic(True)


def test_every_generator_is_seeded() -> None:
    def draw() -> tuple[float, ...]:
        return torch.rand(()).item(), random.random(), float(np.random.rand())  # noqa: NPY002

    seed_generators(2**62 + 5)
    first = draw()
    seed_generators(2**62 + 5)
    assert draw() == first
    seed_generators(6)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def draw_from_each() -> list[float]:
    """Draw single normal numbers as well: Python and NumPy make two, and keep the second for the next call."""
    numpys = np.random.normal(), np.random.rand()  # noqa: NPY002
    return [random.gauss(0, 1), random.random(), *map(float, numpys), torch.rand(()).item()]


@pytest.mark.parametrize("num_draws", [0, 1, 2, 400])
@pytest.mark.parametrize("draws_between", [True, False])
@pytest.mark.parametrize("generator", [np.random.MT19937, np.random.PCG64])
def test_kept_states_are_put_back(num_draws: int, draws_between: bool, generator: type) -> None:
    numpys: Any = np.random
    before = numpys.get_bit_generator()
    numpys.set_bit_generator(generator(3))
    try:
        seed_generators(5)
        for _ in range(num_draws):
            draw_from_each()
        states: list[list[Callable[[], object]]] = [keep_host_states()]
        expected = [draw_from_each() for _ in range(700)]
        for restore in states[0]:
            restore()
        states.append(keep_host_states())
        if generator is np.random.MT19937:
            seed_host_generators(9)
            other = [draw_from_each() for _ in range(3 if draws_between else 0)]
            states.append(keep_host_states())
            following = draw_from_each()
        for restore in states[1]:
            restore()
        assert [draw_from_each() for _ in range(700)] == expected
        if generator is np.random.MT19937:
            for restore in states[2]:
                restore()
            assert draw_from_each() == following
            seed_generators(9)
            assert [draw_from_each() for _ in other] == other
    finally:
        numpys.set_bit_generator(before)


@pytest.mark.parametrize("deterministic", [True, False])
def test_switches_follow(deterministic: bool) -> None:
    set_deterministic(deterministic)
    assert torch.are_deterministic_algorithms_enabled() is deterministic
    assert torch.backends.cudnn.deterministic is deterministic
    assert torch.backends.cudnn.benchmark is not deterministic


def test_a_workspace_that_is_set_too_late_for_cublas_is_warned_of() -> None:
    def multiply() -> None:  # in torch's words
        raise RuntimeError("... you must set an environment variable ...: CUBLAS_WORKSPACE_CONFIG=:4096:8 or ...")

    with pytest.warns(UserWarning, match=r"before CUBLAS_WORKSPACE_CONFIG was set.*CONFIG=:4096:8"):
        warn_of_late_workspace(multiply)


def test_a_workspace_that_is_set_in_time_is_not_warned_of() -> None:
    warn_of_late_workspace(lambda: None)


def test_another_error_of_the_first_product_is_raised() -> None:
    def multiply() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        warn_of_late_workspace(multiply)


class Accelerator:
    """What `torch.cuda` is: a module with the state of the present device."""

    def __init__(self, name: str, state: str, *, is_initialized: bool) -> None:
        self.__name__ = name
        self.state = state
        self.is_initialized = lambda: is_initialized

    def get_rng_state(self) -> str:
        return self.state

    def set_rng_state(self, state: str) -> None:
        self.state = state


def test_a_device_that_only_one_of_two_workers_has_initialized_keeps_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    # A worker that joined compared two lists by their places, and raised a ValueError of zip().
    members = (Accelerator("a", "theirs", is_initialized=False), Accelerator("b", "theirs", is_initialized=True))
    monkeypatch.setattr(reproducibility, "_ACCELERATORS", members)
    states = read_generator_states()
    for is_initialized, expected in [(True, ["own", "theirs"]), (False, ["own", "own"])]:
        joiners = tuple(Accelerator(name, "own", is_initialized=is_initialized) for name in "ab")
        monkeypatch.setattr(reproducibility, "_ACCELERATORS", joiners)
        set_generator_states(states)
        assert [each.state for each in joiners] == expected


SEEDING_WHILE_A_THREAD_KEEPS_STATES = """
import faulthandler, gc, os, threading, time, torch
from lockstep.processes.reproducibility import read_generator_states, seed_host_generators, state_of_generator

faulthandler.dump_traceback_later(20, exit=True)  # from a thread of its own, which needs no lock of the interpreter
gc.set_threshold(1)

class Garbage:
    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(0.001)  # another thread runs

def keep():
    while True:
        Garbage()  # and the next object that is made, that of the state, is one too many
        state_of_generator(torch.default_generator)

threading.Thread(target=keep, daemon=True).start()
for _ in range(40):
    for seed in range(50):
        seed_host_generators(seed)
    read_generator_states()
os._exit(0)
"""


def test_a_thread_that_keeps_states_and_one_that_seeds_do_not_wait_for_each_other() -> None:
    # A collection began while `get_state` held the lock of torch's generator: a worker whose batches a thread of the
    # user's had fetched ahead stood still for ever, with the interpreter's lock, in the step after a loss.
    command = [sys.executable, "-c", SEEDING_WHILE_A_THREAD_KEEPS_STATES]
    found = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert found.returncode == 0, found.stderr


def test_the_generators_of_a_plug_ins_device_are_seeded_kept_and_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [torch.tensor([1]), torch.tensor([2])]

    def seed_all(seed: int) -> None:
        states[:] = [torch.tensor([seed])] * 2

    npu = types.ModuleType("torch.npu")
    vars(npu).update(
        manual_seed_all=seed_all,
        device_count=lambda: 2,
        get_rng_state=lambda number=0: states[number].clone(),
        set_rng_state=lambda state, number=0: states.__setitem__(number, state),
    )
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: types.SimpleNamespace(type="npu"))
    calls, sent = keep_generator_states(), read_generator_states()
    reseed_generators(7)
    assert [int(each) for each in states] == [7, 7]
    for call in calls:
        call()
    assert [int(each) for each in states] == [1, 2]
    reseed_generators(7)
    set_generator_states(sent)
    assert int(states[0]) == 1
