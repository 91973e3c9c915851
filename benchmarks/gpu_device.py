"""One GPU, or the CPU in its place, so that every script for the GPU can be tried on a machine without one.

All calls of `torch.cuda` that have no counterpart on the CPU are here; there they do nothing.
"""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pynvml
import torch
import torch.cuda._sanitizer

IS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if IS_CUDA else torch.device("cpu")
CYCLES_PER_MILLISECOND = 1_980_000
"""Of an H100 at its highest clock; on a slower card a delay is a little longer."""
MIB = 1 << 20

Stream = torch.cuda.Stream | None
"""None on the CPU."""


def name() -> str:
    return torch.cuda.get_device_name(DEVICE) if IS_CUDA else "CPU, a dry run"


def synchronize() -> None:
    if IS_CUDA:
        torch.cuda.synchronize(DEVICE)


def delay(milliseconds: float) -> None:
    """Keep the current stream busy."""
    if IS_CUDA:
        torch.cuda._sleep(round(milliseconds * CYCLES_PER_MILLISECOND))  # noqa: SLF001 - torch has no public name for it


def new_stream() -> Stream:
    return torch.cuda.Stream(DEVICE) if IS_CUDA else None


def current_stream() -> Stream:
    return torch.cuda.current_stream(DEVICE) if IS_CUDA else None


def on_stream(stream: Stream) -> AbstractContextManager[object]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def order(first: Stream, then: Stream) -> None:
    """Let what `then` is given from now on wait for what `first` was given so far."""
    if first is not None and then is not None:
        then.wait_stream(first)


def keep_for(tensor: torch.Tensor, stream: Stream) -> None:
    """Tell the allocator that `stream` uses a tensor of another one."""
    if stream is not None:
        tensor.record_stream(stream)


@contextlib.contextmanager
def warnings_of_waits() -> Iterator[None]:
    """Have each operator that waits for the device warn."""
    if IS_CUDA:
        torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        if IS_CUDA:
            torch.cuda.set_sync_debug_mode("default")


def enable_sanitizer() -> None:
    """Turn torch's CUDA sanitizer on, for the rest of the process."""
    if IS_CUDA:
        torch.cuda._sanitizer.enable_cuda_sanitizer()  # noqa: SLF001 - so the documentation of torch calls it


def activities() -> list[torch.profiler.ProfilerActivity]:
    kinds = torch.profiler.ProfilerActivity
    return [kinds.CPU, kinds.CUDA] if IS_CUDA else [kinds.CPU]


def limit_memory(share: float) -> None:
    """Let this process have a share of the card's memory and no more."""
    if IS_CUDA:
        torch.cuda.set_per_process_memory_fraction(share, DEVICE)


def empty_cache() -> None:
    if IS_CUDA:
        torch.cuda.empty_cache()


def reset_peak() -> None:
    if IS_CUDA:
        torch.cuda.reset_peak_memory_stats(DEVICE)


def peak_bytes() -> int:
    """Return the most that tensors have held since `reset_peak`."""
    return torch.cuda.max_memory_allocated(DEVICE) if IS_CUDA else 0


def card_bytes() -> int:
    """Return how much of the card all processes hold; makes no CUDA context."""
    if not IS_CUDA:
        return 0
    pynvml.nvmlInit()
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)
    finally:
        pynvml.nvmlShutdown()
