"""Threads in which replicas run, kept between forwards.

Each forward borrows a crew, one thread for each lane but the first, which runs in the caller's thread. Forwards that
run at the same time have crews of their own: replicas may wait for each other, so all lanes of a forward must run at
once.

    devices    cpu  gpu0  cpu      take_turns=True: replicas of one device share a lane, one after the other
    lane 0     0          2        in the caller's thread
    lane 1          1              in a thread of the crew

[Note: turns] A device has one random generator. A checkpoint notes its state when a replica's forward begins and
computes again from there; if another replica draws meanwhile, dropout computes a gradient that is not that of the
forward. So replicas of one device take turns wherever a gradient may be wanted. It also makes what they draw
repeatable, and costs little: operations have threads of their own.
"""

import contextvars
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch

from lockstep.torch_private import default_device_of_thread


@dataclass(frozen=True, slots=True)
class CallerState:
    """What torch keeps per thread, and a replica must have as its caller."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    """Device types for which autocast is on, and to what."""
    autocast_cache: bool
    num_threads: int
    """How many threads an operation on the CPU may use; a kept thread does not hear when it is changed."""
    default_device: torch.device | None
    """As given to `with torch.device(...)` or `torch.set_default_device`: without a number it is the replica's own."""

    @staticmethod
    def of_this_thread() -> "CallerState":
        """Return the calling thread's.

        Hooks for saved tensors are left out: a checkpoint around DataParallel counts the tensors in the order in which
        they are saved, which threads would make another one each time.
        """
        accelerator = torch.accelerator.current_accelerator()
        kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
        return CallerState(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)),
            autocast_cache=torch.is_autocast_cache_enabled(),
            num_threads=torch.get_num_threads(),
            default_device=default_device_of_thread(),
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Hold it in the calling thread."""
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        with ExitStack() as stack:
            if self.default_device is not None:
                stack.enter_context(self.default_device)
            stack.enter_context(torch.inference_mode(mode=self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache))
            yield


@final
class ReplicaThreads:
    """Runs one call per replica. Threads end when this object is gone, at the latest at exit.

    Safe to use from several threads. A copy of it, or one that was pickled, begins without threads.
    """

    def __init__(self) -> None:
        self._idle: list[_Crew] = []

    def run(
        self, calls: Sequence[Callable[[], Any]], devices: Sequence[torch.device], *, take_turns: bool
    ) -> list[Any]:
        """Return what the calls returned, the first run in this thread, each with its device as the current one.

        Args:
            calls: One per replica.
            devices: Likewise.
            take_turns: Whether those on one device run one after the other, else all run at the same time;
                [Note: turns].

        Raises:
            BaseException: What a call raised, the first in time if there are several, with a note that names the
                replica.
        """
        mine, *others = _lanes(devices, take_turns=take_turns)
        crew = self._borrow(len(others))
        turn = _Turn(calls, devices)
        contexts = [contextvars.copy_context() for _ in others]  # a context is entered by one thread at a time
        running = [
            crew.submit(partial(context.run, turn.run_beside, lane))
            for context, lane in zip(contexts, others, strict=True)
        ]
        turn.run(mine)
        for other in running:
            other.result()  # which raises nothing: what was raised is in `turn`
        # After an interrupt of this thread this line is not reached: a crew that may still be busy is not lent again.
        self._idle.append(crew)
        return turn.results()

    def _borrow(self, num_threads: int) -> "_Crew":
        with suppress(IndexError):  # another thread may take the last one first
            while self._idle:
                crew = self._idle.pop()
                if crew.serves(num_threads):
                    return crew
        return _Crew(num_threads)

    def __deepcopy__(self, _memo: dict[int, Any]) -> "ReplicaThreads":
        """Return one without threads."""
        return ReplicaThreads()

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplicaThreads, ()


@final
class _Crew:
    """Threads for one forward at a time; each starts when it is first needed."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._process = os.getpid()
        # Its threads end when the executor is collected, and are joined at exit.
        self._executor = ThreadPoolExecutor(max(num_threads, 1), thread_name_prefix="replica")

    def serves(self, num_threads: int) -> bool:
        """Whether it has enough threads, and in this process: a fork takes none along."""
        return self._num_threads >= num_threads and self._process == os.getpid()

    def submit(self, call: Callable[[], None]) -> "Future[None]":
        """Run a call in a thread of its own."""
        return self._executor.submit(call)


def _lanes(devices: Sequence[torch.device], *, take_turns: bool) -> list[list[int]]:
    """Return the numbers of the replicas that run in each thread, that of replica 0 first."""
    if not take_turns:
        return [[number] for number in range(len(devices))]
    lanes: dict[torch.device, list[int]] = {}
    for number, device in enumerate(devices):
        lanes.setdefault(device, []).append(number)
    return list(lanes.values())


@final
class _Turn:
    """One call per replica, and what came of them."""

    def __init__(self, calls: Sequence[Callable[[], Any]], devices: Sequence[torch.device]) -> None:
        self._calls = calls
        self._devices = devices
        self._state = CallerState.of_this_thread()
        self._streams = [
            None if device.type == "cpu" else torch.accelerator.current_stream(device) for device in devices
        ]
        self._results: dict[int, Any] = {}
        self._failures: list[tuple[int, BaseException]] = []

    def run(self, lane: Sequence[int], caught: type[BaseException] = Exception) -> None:
        """Run the calls of some replicas in this thread, one after the other, until one raises.

        Args:
            lane: Numbers of the replicas.
            caught: What `results` raises; anything else leaves here, and at once.
        """
        for number in lane:
            try:
                with self._on_device(number):
                    self._results[number] = self._calls[number]()
            except caught as error:
                self._failures.append((number, error))
                return

    def run_beside(self, lane: Sequence[int]) -> None:
        """Run the calls of some replicas in a thread that must first be made like the caller's."""
        with self._state.applied():
            self.run(lane, BaseException)  # a future that held an interrupt would keep itself, and its thread, alive

    def results(self) -> list[Any]:
        """Return what the calls returned, or raise the first failure."""
        if not self._failures:
            return [self._results[number] for number in range(len(self._devices))]
        (number, error), *later = self._failures
        error.add_note(f"Raised in replica {number} of {len(self._devices)}, on {self._devices[number]}.")
        for other, consequence in later:
            error.add_note(f"After that, replica {other} raised {type(consequence).__name__}: {consequence}")
        # The traceback leads here: without this, the error would refer to itself and keep all memory of the forward.
        self._failures.clear()
        del later
        try:
            raise error
        finally:
            del error

    @contextmanager
    def _on_device(self, number: int) -> Iterator[None]:
        stream = self._streams[number]
        if stream is None:
            yield
            return
        with torch.accelerator.device_index(self._devices[number].index), stream:
            yield
