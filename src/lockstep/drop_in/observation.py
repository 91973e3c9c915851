"""What each rank of an unchanged script does, as lines of JSON in a folder, for `lockstep verify SCRIPT`.

A rank appends to `rank-N.jsonl`, its loading processes too. `doctor/scripts/observed.py` says what the events are, and
judges them. What an operating system may do in any way is done in another way on each rank: ranks with odd numbers get
the files of a folder in reverse order, and ranks go on a second apart once they have their group.

Files of the user's that the script is about to change are copied before, so that the command can put them back. Only
what Python and torch.save open is seen, not what libraries in C open themselves.
"""

import atexit
import fcntl
import functools
import hashlib
import json
import math
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from types import FunctionType
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler, get_worker_info

from lockstep.held_objects import names_in_code
from lockstep.parallel.comparison.draws import read_states
from lockstep.parallel.comparison.optimizers import listen_to_steps
from lockstep.processes.user_line import LIBRARIES, find_user_line
from lockstep.reduce.tensor_bits import sum_of_bits
from lockstep.torch_private.autograd import saved_by
from lockstep.torch_private.compiler_import import disable_compiler
from lockstep.torch_private.loaders import LoaderIterator, samplers_of, watch_loading
from lockstep.torch_private.modules import AnyBatchNorm, TorchsSyncBatchNorm, byte_view, tree_leaves

_PASSES: Final = 4
"""The script is ended at the step after so many full passes."""
_SECONDS_APART: Final = 1.1
_DEEPEST: Final = 16
_MOST_DIVISORS: Final = 8
_MOST_NODES: Final = 64
_MEANS: Final = frozenset({"MeanBackward0", "MseLossBackward0", "BinaryCrossEntropyBackward0", "SmoothL1LossBackward0"})
_REDUCTION_MEAN: Final = 1
_NOISE: Final = re.compile(r"(rand|randn|randint|normal)(_like)?")
_TRIMS: Final = "gather_for_metrics"
"""Accelerate's function which leaves out what its loaders have added to the last batch."""
_WRITES: Final = os.O_WRONLY | os.O_TRUNC


@final
class RankLog:
    def __init__(self, folder: Path, rank: int, limit: int) -> None:
        self.folder, self.rank, self.limit = folder, rank, limit
        self._file = (folder / f"rank-{rank}.jsonl").open("a", buffering=1)

    def add(self, kind: str, **values: Any) -> None:
        # One write, so that a loading process' lines and ours do not mix.
        self._file.write(json.dumps({"kind": kind, "at": round(time.monotonic(), 3), **values}) + "\n")


def observe(folder: Path, rank: int, limit: int) -> None:
    """Write down what this process does from now on; let each pass over a loader end after `limit` batches (local)."""
    log = RankLog(folder, rank, limit)
    _watch_messages(log)
    _watch_files(FileLog(log))
    _reverse_folders(rank)
    loading = LoadingLog(log)
    watch_loading(loading.begin, loading.given, loading.ended, loading.fetch)
    if get_worker_info() is None:
        steps = StepLog(log)
        listen_to_steps(steps)
        atexit.register(steps.end)
        _watch_calls(log)


def _watch(owner: Any, name: str, look: Callable[..., None]) -> None:
    """Let `look` be called with what a function is called with, before it."""

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            look(*args, **kwargs)
            return function(*args, **kwargs)

        return call

    _replace(owner, name, make)


def _replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    function = getattr(owner, name)
    setattr(owner, name, functools.wraps(function)(make(function)))


# -- What is loaded ----------------------------------------------------------------------------------------------------


@final
class LoadingLog:
    def __init__(self, log: RankLog) -> None:
        self._log = log
        self._num_iterators = self._num_passes = 0
        self._passes: weakref.WeakKeyDictionary[LoaderIterator, tuple[int, int, int]] = weakref.WeakKeyDictionary()
        self._fetched: set[int] = set()

    def begin(self) -> int:
        self._num_iterators += 1
        return self._num_iterators

    def given(self, iterator: LoaderIterator, batch: Any, drawn: Any) -> bool:
        number, loading, count = self._passes.get(iterator, (0, self._num_iterators, 0))
        if number == 0:
            self._num_passes += 1
            number = self._num_passes
        count += 1
        self._passes[iterator] = number, loading, count
        # With another sampler a number may be of another sample on each rank, which has a part of the data.
        is_shared = any(
            isinstance(each, DistributedSampler) and getattr(each, "num_replicas", 1) > 1
            for each in samplers_of(iterator)
        )
        self._log.add(
            "batch",
            number=number,
            loading=loading,
            contents=list(_row_numbers(batch)),
            indices=list(map(str, drawn)) if is_shared and isinstance(drawn, list) else [],
            line=find_user_line(),
            state=_states()["torch"],
        )
        if count < self._log.limit:
            return False
        self._end(iterator, is_cut=True)
        return True

    def ended(self, iterator: LoaderIterator) -> None:
        self._end(iterator, is_cut=False)

    def _end(self, iterator: LoaderIterator, *, is_cut: bool) -> None:
        number, *_ = self._passes.pop(iterator, (0, 0, 0))
        if number:
            self._log.add("pass_end", number=number, is_cut=is_cut)

    def fetch(self, load: Callable[..., Any], fetcher: Any, wanted: Any) -> Any:
        before = _states()
        loaded = load(fetcher, wanted)
        after, info = _states(), get_worker_info()
        drawn = {name: number for name, number in before.items() if after[name] != number}
        if drawn:
            worker = -1 if info is None else info.id
            self._log.add("draw", loading=self._num_iterators, worker=worker, states=drawn)
        return loaded


def _states() -> dict[str, int]:
    return {name: hash(state) for name, state in read_states()}


def _row_numbers(batch: Any) -> Iterator[int]:
    leaves = [each for each in tree_leaves(batch) if isinstance(each, Tensor) and each.dim() > 0]
    count = len(leaves[0]) if leaves else 0
    rows = [0] * count
    for leaf in leaves:
        if len(leaf) == count and leaf.layout is torch.strided:
            width = leaf.element_size() * (leaf.numel() // max(count, 1))
            held = byte_view(leaf).numpy().tobytes()
            rows = [zlib.crc32(held[place * width : (place + 1) * width], row) for place, row in enumerate(rows)]
    yield from rows


# -- Steps -------------------------------------------------------------------------------------------------------------


@final
class StepLog:
    def __init__(self, log: RankLog) -> None:
        self._log = log
        self._depth = self._num_steps = 0
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._last: weakref.ref[Optimizer] | None = None

    def before_step(self, optimizer: Optimizer) -> None:
        self._depth += 1
        if self._depth > 1:  # within the step of an optimizer that holds another
            return
        self._last = weakref.ref(optimizer)
        gradients = [each.grad for each in _parameters(optimizer) if each.grad is not None]
        plain = [each.to_dense() if each.layout is not torch.strided else each for each in gradients]
        norm = math.sqrt(sum(each.double().square().sum().item() for each in plain))
        rates = [float(group.get("lr", 0.0)) for group in optimizer.param_groups]
        self._add("step", optimizer, lr=rates, norm=norm if math.isfinite(norm) else None)

    def after_step(self, optimizer: Optimizer) -> None:  # noqa: ARG002 - of the protocol
        self._depth -= 1
        if self._depth:
            return
        self._num_steps += 1
        if self._num_steps >= self._log.limit * _PASSES:
            self._log.add("stopped")
            raise SystemExit(0)

    def end(self) -> None:
        optimizer = self._last() if self._last is not None else None
        if optimizer is not None:
            self._add("weights", optimizer)

    def _add(self, kind: str, optimizer: Optimizer, **values: Any) -> None:
        number = self._numbers.setdefault(optimizer, len(self._numbers))
        weights = int(sum_of_bits([each.detach() for each in _parameters(optimizer)]))
        line = find_user_line()
        self._log.add(kind, optimizer=number, weights=weights, line=line, state=_states()["torch"], **values)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    held = [each for group in optimizer.param_groups for each in group["params"]]
    return [each for each in held if type(each) in (Tensor, nn.Parameter)]


def _divisors(node: Any, scale: float = 1.0, depth: int = 0) -> Iterator[float]:
    """Yield by what the terms of a loss are divided."""
    if node is None or depth > _DEEPEST:
        return
    name = node.name()
    following = [each for each, _ in node.next_functions if each is not None]
    if name == "NllLossBackward0" and saved_by(node, "reduction") == _REDUCTION_MEAN:
        yield scale * float(saved_by(node, "total_weight"))
    elif name == "MeanBackward0":
        yield scale * math.prod(saved_by(node, "self_sym_sizes"))
    elif name in _MEANS and saved_by(node, "reduction") == _REDUCTION_MEAN:
        yield scale * saved_by(node, "self").numel()
    elif name in {"DivBackward0", "MulBackward0"} and len(following) == 1:
        held = [saved_by(node, each) for each in ("other", "self")]
        factor = next((float(each) for each in held if each is not None and each.numel() == 1), math.nan)
        if math.isfinite(factor) and factor:
            yield from _divisors(following[0], scale * factor if name == "DivBackward0" else scale / factor, depth + 1)
    elif name == "SumBackward0":
        yield scale
    elif name in {"AddBackward0", "SubBackward0", "NegBackward0", "ToCopyBackward0", "SqueezeBackward0"}:
        for each in following:
            yield from _divisors(each, scale, depth + 1)


# -- Calls -------------------------------------------------------------------------------------------------------------


def _is_users(depth: int) -> bool:
    return not sys._getframe(depth + 1).f_code.co_filename.startswith(LIBRARIES)  # noqa: SLF001 - Python's name


def _watch_calls(log: RankLog) -> None:  # noqa: C901 - one function for each call that is watched
    summed: dict[Any, str] = {}  # by the nodes of autograd that have made them

    def backward(tensors: Any, *_: Any, **__: Any) -> None:
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        found: list[float] = []
        with suppress(Exception):  # the walk is over torch's own nodes, which change from release to release
            found = [each for root in roots for each in _divisors(root.grad_fn)][:_MOST_DIVISORS]
        line = next((summed[node] for node in _last_nodes(roots) if node in summed), "")
        summed.clear()
        log.add("backward", line=find_user_line(), divisors=found, summed=line)

    def all_reduce(tensor: Tensor, *_: Any, **__: Any) -> None:
        caller = sys._getframe(2).f_code.co_filename  # noqa: SLF001 - Python's name
        if tensor.grad_fn is not None and not caller.startswith(LIBRARIES):
            summed[tensor.grad_fn] = find_user_line()

    def gather(*_: Any, **__: Any) -> None:
        if any(frame.f_code.co_name == _TRIMS for frame, _ in traceback.walk_stack(None)):
            log.add("trimmed")

    @disable_compiler
    def forward(*_: Any, **__: Any) -> None:
        if torch.is_grad_enabled():
            log.add("forward", state=_states()["torch"])

    def wrap(_wrapper: Any, module: nn.Module, *_: Any, **__: Any) -> None:
        layers = [each for each in module.modules() if isinstance(each, AnyBatchNorm)]
        has_norms = not all(isinstance(each, TorchsSyncBatchNorm) for each in layers)
        log.add("wrapped", has_norms=has_norms, draws_noise=_draws_noise(module))

    _watch(torch.autograd, "backward", backward)
    _watch(dist, "all_reduce", all_reduce)
    for owner in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        _watch(owner, "start_processes", lambda *_, **__: log.add("spawned"))
    for name in ("all_gather", "all_gather_into_tensor"):
        _watch(dist, name, gather)
    _watch(nn.parallel.DistributedDataParallel, "__init__", wrap)
    _watch(nn.parallel.DistributedDataParallel, "_pre_forward", forward)
    _watch(nn.parallel.DistributedDataParallel, "join", lambda *_, **__: log.add("join"))
    _replace(dist, "init_process_group", lambda begin: lambda *args, **kwargs: _come_later(log, begin(*args, **kwargs)))


def _last_nodes(roots: Sequence[Tensor]) -> list[Any]:
    """Return the last operations that have made a loss."""
    found: list[Any] = [each.grad_fn for each in roots]
    for node in found:
        if node is not None and len(found) < _MOST_NODES:
            found += [each for each, _ in node.next_functions]
    return found


def _draws_noise(module: nn.Module) -> bool:
    """Whether the code of the user's layers names a function that draws noise; dropout is none."""
    members = [member for kind in set(map(type, module.modules())) for member in vars(kind).values()]
    code = [member.__code__ for member in members if isinstance(member, FunctionType)]
    names = chain.from_iterable(names_in_code(each) for each in code if not each.co_filename.startswith(LIBRARIES))
    return any(map(_NOISE.fullmatch, names))


def _come_later(log: RankLog, begun: Any) -> Any:
    time.sleep(_SECONDS_APART * log.rank)
    return begun


# -- Messages and files ------------------------------------------------------------------------------------------------


def _watch_messages(log: RankLog) -> None:
    warn, hook = warnings.warn, sys.excepthook

    @functools.wraps(warn)
    def warn_and_log(message: Any, category: Any = None, stacklevel: int = 1, *args: Any, **kwargs: Any) -> None:
        if "(LS" in str(message):
            log.add("said", text=str(message), line=find_user_line(), error="")
        warn(message, category, stacklevel + 1, *args, **kwargs)

    def log_exception(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        line, here = "", trace
        while here is not None:
            file = here.tb_frame.f_code.co_filename
            line = line if file.startswith(LIBRARIES) else f"{file}:{here.tb_lineno}"
            here = here.tb_next
        log.add("said", text=str(error), line=line, error=kind.__name__)
        hook(kind, error, trace)

    warnings.warn, sys.excepthook = warn_and_log, log_exception


@final
class FileLog:
    """Which files of the user's this process opens for writing, renames or removes; each is copied before."""

    def __init__(self, log: RankLog) -> None:
        self._log = log
        self._seen: set[tuple[str, str]] = set()
        self._busy = threading.local()
        self._here = os.getcwd()  # noqa: PTH109 - a text
        self._left_out = tuple(
            os.path.join(os.path.realpath(each), "")  # noqa: PTH118 - texts, which are faster
            for each in (tempfile.gettempdir(), "/dev", "/proc", "/sys", sys.prefix, os.path.expanduser("~/.cache"))  # noqa: PTH111
        )

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if getattr(self._busy, "now", False):
            return
        if event == "open":
            path, mode, flags = args
            if not isinstance(path, str | os.PathLike):
                return
            if (mode and set(mode) & set("wax")) or (flags or 0) & _WRITES:
                self.note(path, "write")
            elif (flags or 0) & os.O_RDWR:  # of an array that all ranks map, or a lock
                self.note(path, "update")
        elif event in {"os.remove", "os.rmdir", "os.mkdir"}:
            self.note(_within(args[0], args[-1]), event.removeprefix("os."))
        elif event == "os.rename":
            self.note(_within(args[0], args[2]), "remove")
            self.note(_within(args[1], args[3]), "write")

    def note(self, path: Any, how: str) -> None:
        if isinstance(path, bytes) or "__pycache__" in str(path):
            return
        full = os.path.abspath(os.path.join(self._here, os.fspath(path)))  # noqa: PTH100, PTH118
        if (full, how) in self._seen:
            return
        is_left_out = f"{full}{os.sep}".startswith(self._left_out) and not full.startswith(self._here + os.sep)
        if is_left_out or full.endswith(".lock"):
            return
        self._seen.add((full, how))
        self._busy.now = True
        try:
            exists, kept = os.path.lexists(full), ""
            if how in {"write", "update", "remove"} and os.path.isfile(full):  # noqa: PTH113
                kept = self._keep(full)
            self._log.add("file", path=full, how=how, existed=exists, kept=kept, line=find_user_line())
        finally:
            self._busy.now = False

    def _keep(self, path: str) -> str:
        kept = self._log.folder / "kept" / hashlib.sha256(path.encode()).hexdigest()
        kept.parent.mkdir(exist_ok=True)
        with Path(f"{kept}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                shutil.copy2(path, kept)
        return str(kept)


def _within(path: Any, folder: Any) -> Any:
    if isinstance(folder, int) and folder >= 0 and isinstance(path, str):
        with suppress(OSError):
            return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)  # noqa: PTH115, PTH118
    return path


def _watch_files(files: FileLog) -> None:
    def save(_value: Any, file: Any, *_: Any, **__: Any) -> None:
        if isinstance(file, str | os.PathLike):
            files.note(file, "write")

    sys.addaudithook(files)
    _watch(torch, "save", save)


def _reverse_folders(rank: int) -> None:
    if rank % 2 == 0:
        return
    _replace(os, "listdir", lambda function: lambda *args: function(*args)[::-1])
    _replace(os, "scandir", lambda function: lambda *args: ReversedScan(function(*args)))


@final
class ReversedScan(ExitStack):
    """What `os.scandir` gives, in reverse order."""

    def __init__(self, scan: Any) -> None:
        super().__init__()
        with scan:
            self._entries = iter(list(scan)[::-1])

    def __iter__(self) -> "ReversedScan":
        return self

    def __next__(self) -> Any:
        return next(self._entries)
