"""Threads that run replicas, reused between forwards.

Each forward uses a thread pool of its own: replicas may wait for each other, so all threads of a forward must run at
the same time. The first thread of a forward is the caller's.

    devices             cpu  gpu0  cpu      one_at_a_time=True: replicas of one device share a thread
    caller's thread     0          2        replicas 0 and 2, one after the other
    thread of the pool       1              replica 1

[Note: one replica at a time] A device has one random generator. Activation checkpointing stores the generator's state
when a replica's forward begins, and recomputes the forward from that state. If another replica drew random numbers
meanwhile, dropout would recompute another mask, and the gradient would be wrong. So the replicas of one device run one
after the other if gradients are enabled or a module is training. This also makes their random numbers reproducible. It
costs little, because torch's operators use several threads each.
"""

import contextvars
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, final

import torch

from lockstep.processes.forking import this_process
from lockstep.torch_private.modules import default_device_of_thread


def _capture_state() -> Callable[[], AbstractContextManager[None]]:
    """Return what applies torch's thread-local state, which is the caller's in a replica's thread too.

    Saved-tensor hooks are left out: activation checkpointing around DataParallel numbers tensors in the order in which
    they are saved, and this order would differ between runs of several threads.
    """
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
    keeps_casts = torch.is_autocast_cache_enabled()
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    num_threads = torch.get_num_threads()
    # From `with torch.device(...)` or `torch.set_default_device`; "cuda" without an index is the replica's device.
    default_device = default_device_of_thread()

    @contextmanager
    def applied() -> Iterator[None]:
        if torch.get_num_threads() != num_threads:  # a change in the caller's thread does not affect existing threads
            torch.set_num_threads(num_threads)
        with ExitStack() as stack:
            if default_device is not None:
                stack.enter_context(default_device)
            stack.enter_context(torch.inference_mode(mode=inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype in autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=keeps_casts))
            yield

    return applied


@final
class ReplicaThreads:
    """Thread-safe; threads end with this object, or at exit. A deep copy or an unpickled object starts without any."""

    def __init__(self) -> None:
        self._idle: list[_ThreadPool] = []

    def run(
        self, calls: Sequence[Callable[[], Any]], devices: Sequence[torch.device], *, one_at_a_time: bool
    ) -> list[Any]:
        """Run the calls, each with its device as the current one, and return their results.

        The first call runs in this thread. `one_at_a_time` is per device; [Note: one replica at a time].
        Of several exceptions the first in time is raised, with a note that names the replica.
        """
        mine, *others = _threads_of_replicas(devices, one_at_a_time=one_at_a_time)
        pool = self._take_idle_pool(len(others))
        forward = _ForwardCalls(calls, devices)
        contexts = [contextvars.copy_context() for _ in others]  # a context is entered by one thread at a time
        running = [
            pool.submit(partial(context.run, forward.run_in_thread, numbers))
            for context, numbers in zip(contexts, others, strict=True)
        ]
        forward.run(mine)
        for other in running:
            other.result()  # raises nothing: exceptions are stored in `forward`
        # A KeyboardInterrupt in this thread skips this line, so that a pool that may still be busy is not reused.
        self._idle.append(pool)
        return forward.results()

    def _take_idle_pool(self, num_threads: int) -> "_ThreadPool":
        with suppress(IndexError):  # another thread may take the last one first
            while self._idle:
                pool = self._idle.pop()
                if pool.is_usable(num_threads):
                    return pool
        return _ThreadPool(num_threads)

    def __deepcopy__(self, _memo: dict[int, Any]) -> "ReplicaThreads":
        return ReplicaThreads()

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplicaThreads, ()


@final
class _ThreadPool:
    """Threads for one forward at a time; each starts when it is first needed."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._process = this_process()
        # Its threads end when the executor is collected, and are joined at exit.
        self._executor = ThreadPoolExecutor(max(num_threads, 1), thread_name_prefix="replica")

    def is_usable(self, num_threads: int) -> bool:
        """Whether the pool has enough threads in this process; threads do not survive a fork."""
        return self._num_threads >= num_threads and self._process == this_process()

    def submit(self, call: Callable[[], None]) -> "Future[None]":
        return self._executor.submit(call)


def _threads_of_replicas(devices: Sequence[torch.device], *, one_at_a_time: bool) -> list[list[int]]:
    """Return, for each thread, the numbers of its replicas; the thread of replica 0 comes first."""
    if not one_at_a_time:
        return [[number] for number in range(len(devices))]
    threads: dict[torch.device, list[int]] = {}
    for number, device in enumerate(devices):
        threads.setdefault(device, []).append(number)
    return list(threads.values())


@final
class _ForwardCalls:
    def __init__(self, calls: Sequence[Callable[[], Any]], devices: Sequence[torch.device]) -> None:
        self._calls = calls
        self._devices = devices
        self._in_callers_state = _capture_state()
        self._streams = [
            None if device.type == "cpu" else torch.accelerator.current_stream(device) for device in devices
        ]
        self._results: dict[int, Any] = {}
        self._failures: list[tuple[int, BaseException]] = []

    def run(self, numbers: Sequence[int], caught: type[BaseException] = Exception) -> None:
        for number in numbers:
            try:
                with self._on_device(number):
                    self._results[number] = self._calls[number]()
            except caught as error:
                self._failures.append((number, error))
                return

    def run_in_thread(self, numbers: Sequence[int]) -> None:
        """Run the calls of some replicas in a thread of the pool, with the caller's thread-local state."""
        with self._in_callers_state():
            self.run(numbers, BaseException)  # a Future with a KeyboardInterrupt would keep its thread alive

    def results(self) -> list[Any]:
        if not self._failures:
            return [self._results[number] for number in range(len(self._devices))]
        (number, error), *later = self._failures
        error.add_note(f"Raised in replica {number} of {len(self._devices)}, on {self._devices[number]}.")
        for other, consequence in later:
            error.add_note(f"After that, replica {other} raised {type(consequence).__name__}: {consequence}")
        # The traceback references this frame. Break the cycle, or the error would keep the forward's memory alive.
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
