"""Threads in which replicas run, kept between forwards.

Each forward borrows a crew, one thread for each replica but the first, which runs in the caller's thread. Forwards that
run at the same time have crews of their own: replicas may wait for each other, so all of a forward must run at once.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch


@dataclass(frozen=True, slots=True)
class CallerState:
    """What torch keeps per thread, and a replica must have as its caller."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    """Device types for which autocast is on, and to what."""
    autocast_cache: bool

    @staticmethod
    def of_this_thread() -> "CallerState":
        """Return the calling thread's."""
        accelerator = torch.accelerator.current_accelerator()
        kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
        return CallerState(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)),
            autocast_cache=torch.is_autocast_cache_enabled(),
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Hold it in the calling thread."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(mode=self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache))
            yield


@final
class ReplicaThreads:
    """Runs one call per replica, all at the same time. Threads end when this object is gone, at the latest at exit.

    Safe to use from several threads. A copy of it, or one that was pickled, begins without threads.
    """

    def __init__(self) -> None:
        self._idle: list[_Crew] = []

    def run(self, calls: Sequence[Callable[[], Any]], devices: Sequence[torch.device]) -> list[Any]:
        """Return what the calls returned, the first run in this thread, each with its device as the current one.

        Raises:
            Exception: What a call raised, the first in time if there are several, with a note that names the replica.
        """
        crew = self._borrow(len(calls) - 1)
        turn = _Turn(devices)
        others = [crew.submit(partial(turn.run_beside, number, calls[number])) for number in range(1, len(calls))]
        turn.run(0, calls[0])
        for other in others:
            other.result()
        # After an interrupt this line is not reached: a crew that may still be busy is not lent again.
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


@final
class _Turn:
    """One call per replica, and what came of them."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._state = CallerState.of_this_thread()
        self._streams = [
            None if device.type == "cpu" else torch.accelerator.current_stream(device) for device in devices
        ]
        self._results: dict[int, Any] = {}
        self._failures: list[tuple[int, Exception]] = []

    def run(self, number: int, call: Callable[[], Any]) -> None:
        """Run a replica's call in this thread."""
        try:
            with self._on_device(number):
                self._results[number] = call()
        except Exception as error:  # noqa: BLE001  whatever it is, `results` raises it
            self._failures.append((number, error))

    def run_beside(self, number: int, call: Callable[[], Any]) -> None:
        """Run a replica's call in a thread that must first be made like the caller's."""
        with self._state.applied():
            self.run(number, call)

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
