"""Ranks that are processes, and the test that starts them, exchanges messages with them and kills them.

All ranks run one function: `function(rank, *arguments)`. Ranks are forked from a server that has
imported torch already, so one costs 10 ms and not 2 s. Nothing waits for luck: both sides speak over a pipe, and give
up with an error after `PATIENCE` seconds.

`call_on_ranks` is for tests of what ranks compute together, and of no deaths: `ls.launch` on such ranks. A `RankPool`
runs one function after another on the same ranks, and starts new ones after a failure.
"""

import ctypes
import faulthandler
import gc
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context, set_start_method
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import cloudpickle
import psutil
import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.comm.bootstrap.process_group import choose_backend
from lockstep.comm.shm import native
from lockstep.comm.shm.phases import DONE, Exchange, PreparedCall
from lockstep.comm.shm.programs import CALL, COPY, END, PHASE, REDUCE

PATIENCE = 100.0
"""Seconds after which a silent rank is an error of the test."""
CPU = torch.device("cpu")
_CALL_SECONDS = 150.0
"""How long a call may take."""
_LATER_SECONDS = 10.0
"""How long the other ranks may take after one has failed."""
SERVER = get_context("forkserver")
# What is loaded by the server need not be loaded by each rank. The first forward of a wrapper loads the compiler.
SERVER.set_forkserver_preload(
    ["pytest", "psutil", "lockstep", "torch.distributed", "torch._dynamo", "lockstep.launch.worker", __name__]
)
gc.freeze()  # in the server: what it has imported has no part in the garbage collections of ranks


@final
class Rank:
    """One rank, as its own process sees it."""

    def __init__(self, number: int, size: int, folder: str, line: Connection) -> None:
        self.number = number
        self.size = size
        self._folder = folder
        self._line = line

    def join(self, timeout_seconds: float = 3 * PATIENCE) -> Any:
        """Make the default group (collective). A rank that waits for its timeout is an error of the test."""
        timeout = timedelta(seconds=timeout_seconds)
        dist.init_process_group("shm", store=self.store(), rank=self.number, world_size=self.size, timeout=timeout)
        return dist.group.WORLD

    def store(self) -> dist.Store:
        """Return a store that the ranks share, and that no rank holds."""
        return dist.FileStore(f"{self._folder}/store", self.size)

    def say(self, value: Any = None) -> None:
        self._line.send(("said", value))

    def hear(self) -> Any:
        """Return the next message of the test."""
        assert self._line.poll(PATIENCE), "the test sends nothing"
        return self._line.recv()

    def wait_for_work(self) -> Any:
        """Return the next message of the test, however long that takes; when the test has ended, this rank ends."""
        try:
            return self._line.recv()
        except EOFError:
            os._exit(0)

    def has_mail(self) -> bool:
        return self._line.poll(0)

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Run a function and send the test what came of it."""
        torch.set_num_threads(1)
        try:
            self._line.send(("returned", function(self, *arguments)))
        except BaseException:  # noqa: BLE001 - the test reports it
            self._line.send(("raised", traceback.format_exc()))


@final
class Ranks:
    """Some ranks that run one function, as the test sees them; all are killed at the end of the `with` block."""

    def __init__(self, folder: Path, size: int, function: Callable[..., Any], *arguments: Any) -> None:
        self._store = tempfile.mkdtemp(dir=folder)
        self._lines: list[Connection] = []
        self._processes = []
        for number in range(size):
            ours, theirs = SERVER.Pipe()
            rank = Rank(number, size, self._store, theirs)
            process = SERVER.Process(target=rank.run, args=(function, arguments))
            process.start()
            theirs.close()
            self._lines.append(ours)
            self._processes.append(process)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for line in self._lines:
            line.close()

    def pid(self, rank: int) -> int:
        pid = self._processes[rank].pid
        assert pid is not None
        return pid

    def hear(self, rank: int, within: float = PATIENCE) -> Any:
        """Return what a rank says next."""
        kind, value = self._receive(rank, within)
        assert kind == "said", f"rank {rank} {kind}: {value}"
        return value

    def hear_all(self, within: float) -> list[Any]:
        """Return what every rank says next.

        Raises:
            RanksFailedError: A rank has raised or ended, or is silent. It tells of all ranks that did so by then, or
                soon after: a rank that is gone is often the reason of what others raise.
        """
        said: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + within
        while len(said) + len(failures) < len(self._lines):
            left = {line: rank for rank, line in enumerate(self._lines) if rank not in said and rank not in failures}
            ready = wait(list(left), max(deadline - time.monotonic(), 0.0))
            if not ready:
                failures.update({rank: f"rank {rank} is not done" for rank in left.values()})
            for line in ready:
                rank = left[line]
                try:
                    said[rank] = self.hear(rank)
                except AssertionError as error:
                    failures[rank] = str(error)
                    deadline = min(deadline, time.monotonic() + _LATER_SECONDS)
        if failures:
            raise RanksFailedError("\n".join(failures.values()))
        return [said[rank] for rank in range(len(self._lines))]

    def say(self, rank: int, value: Any = None) -> None:
        self._lines[rank].send(value)

    def result(self, rank: int, within: float = PATIENCE) -> Any:
        """Return what the function returned on a rank; messages before are passed over."""
        while True:
            kind, value = self._receive(rank, within)
            if kind != "said":
                assert kind == "returned", f"rank {rank} {kind}: {value}"
                return value

    def results(self, within: float = PATIENCE) -> list[Any]:
        return [self.result(rank, within) for rank in range(len(self._lines))]

    def send_signal(self, rank: int, number: signal.Signals) -> float:
        """Send a signal, and return when."""
        moment = time.monotonic()
        os.kill(self.pid(rank), number)
        return moment

    def wait_until(self, rank: int, status: str) -> None:
        """Return when the main thread of a rank is "sleeping" or "stopped"."""
        deadline = time.monotonic() + PATIENCE
        while psutil.Process(self.pid(rank)).status() != status:
            assert time.monotonic() < deadline, f"rank {rank} is not {status}"
            time.sleep(0.001)

    def _receive(self, rank: int, within: float = PATIENCE) -> tuple[str, Any]:
        line = self._lines[rank]
        assert line.poll(within), f"rank {rank} says nothing"
        try:
            kind, value = line.recv()
        except EOFError:
            self._processes[rank].join(PATIENCE)  # its pipe is closed before it has ended
            raise AssertionError(f"rank {rank} ended with {self._processes[rank].exitcode}") from None
        return kind, value


class RanksFailedError(AssertionError):
    """A function failed on some rank of a pool."""


@final
class RankPool:
    """Ranks that run functions, one after the other; new ones are started after one that failed.

    Args:
        size: Number of ranks.
        set_up: Run on each rank when it starts; functions are given what it returns.
        call_seconds: How long a function may take.
    """

    def __init__(self, size: int, set_up: Callable[[Rank], Any], call_seconds: float = _CALL_SECONDS) -> None:
        self.size = size
        self._set_up = set_up
        self._call_seconds = call_seconds
        self._folder = tempfile.TemporaryDirectory()
        self._ranks: Ranks | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop()
        self._folder.cleanup()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run `function(what set_up returned, *arguments)` on every rank; return what each returned.

        Raises:
            RanksFailedError: A rank raised, died or is not done in time.
        """
        if self._ranks is None:
            packed = cloudpickle.dumps((self._set_up, self._call_seconds))
            self._ranks = Ranks(Path(self._folder.name), self.size, _serve, packed)
        packed = cloudpickle.dumps((function, arguments))
        for rank in range(self.size):
            self._ranks.say(rank, packed)
        try:
            answers = [cloudpickle.loads(said) for said in self._ranks.hear_all(self._call_seconds)]
        except RanksFailedError:
            self._stop()
            raise
        if not all(has_group for _, has_group in answers):
            self._stop()  # the function has destroyed the default group
        return [value for value, _ in answers]

    def _stop(self) -> None:
        if self._ranks is not None:
            self._ranks.__exit__(None, None, None)
            self._ranks = None


def _serve(rank: Rank, packed: bytes) -> None:
    set_up, call_seconds = cloudpickle.loads(packed)
    given = set_up(rank)
    while True:
        function, arguments = cloudpickle.loads(rank.wait_for_work())
        faulthandler.dump_traceback_later(call_seconds - 5, exit=True)
        value = function(given, *arguments)
        faulthandler.cancel_dump_traceback_later()
        rank.say(cloudpickle.dumps((value, dist.is_initialized())))


def join_default_group(rank: Rank) -> ls.Run:
    """Make the default group and return what a function that is launched is given; for a `RankPool`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Or loading processes would be started by the server too: they would be its children, and end at once for it.
    set_start_method("fork", force=True)
    ls.init_process_group(choose_backend(CPU), store=rank.store(), rank=rank.number, world_size=rank.size)
    ls.seed_generators(0)
    return ls.Run(rank=rank.number, world_size=rank.size, local_rank=rank.number, device=CPU)


@final
class JoinGroup:
    """Makes a default group of one backend, by torch's own set-up or by ours; for a `RankPool`."""

    def __init__(self, backend: str, make_group: Callable[..., object] = dist.init_process_group) -> None:
        self._backend = backend
        self._make_group = make_group

    def __call__(self, rank: Rank) -> ls.Run:
        run = join_default_group(rank)
        store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
        ls.destroy_process_group()
        self._make_group(self._backend, store=store, rank=run.rank, world_size=run.world_size)
        return run


def call_on_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function(run, *arguments)` on ranks that have a default group; return what each returned, as `ls.launch`.

    They are on the CPU with a thread each, and what they are sent and return goes by value.
    """
    packed = cloudpickle.dumps((function, arguments))
    with tempfile.TemporaryDirectory() as folder, Ranks(Path(folder), size, _call, packed) as ranks:
        answers = [cloudpickle.loads(ranks.hear(rank, _CALL_SECONDS)) for rank in range(size)]
        for rank in range(size):  # together: one that leaves while another communicates is a lost one
            ranks.say(rank, "leave")
        ranks.results()
    return answers


def _call(rank: Rank, packed: bytes) -> None:
    function, arguments = cloudpickle.loads(packed)
    run = join_default_group(rank)
    rank.say(cloudpickle.dumps(function(run, *arguments)))
    rank.hear()
    ls.destroy_process_group()


def wait_until(is_so: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    """Return when something is so; an error of the test where it is not in time."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)


def names_in(folder: str) -> list[str]:
    return sorted(entry.name for entry in Path(folder).iterdir())


@final
class Posts:
    """What this process tells other ranks: that it has come to the end of a phase, or has filled or emptied a slot.

    Counts it; stops at one if told.
    """

    def __init__(self) -> None:
        self._count = 0
        self._last: tuple[int, Callable[[], None]] | None = None
        library: Any = native.load()
        self._raise, library.lockstep_raise = library.lockstep_raise, self._count_and_raise
        self._run, library.lockstep_run = library.lockstep_run, self._run_by_phases

    def count_of(self, call: Callable[[], Any]) -> int:
        """Make a call and return how often it tells the others something."""
        self._count = 0
        call()
        return self._count

    def stop_before(self, number: int, tell: Callable[[], None]) -> None:
        """From now on: before number `number` of those to come, call `tell` and stand still for ever."""
        self._count = 0
        self._last = (number, tell)

    def _count_and_raise(self, address: int) -> None:
        self._count_one()
        self._raise(address)

    def _run_by_phases(self, address: int) -> int:
        """Run a program up to each end of a phase, and that by itself."""
        call = PreparedCall.from_address(address)
        exchange = Exchange.from_address(call.exchange_address)
        while (at := _next_phase(call.program_address, call.at)) is not None:
            if not exchange.has_arrived:
                code = self._run_until(at, call)
                if code != DONE:
                    return code
                self._count_one()
            code = self._run_until(at + 1, call)
            if code != DONE:
                return code
        return int(self._run(address))

    def _run_until(self, at: int, call: PreparedCall) -> int:
        word = ctypes.c_int64.from_address(call.program_address + 8 * at)
        kept, word.value = word.value, END
        try:
            return int(self._run(ctypes.addressof(call)))
        finally:
            word.value = kept

    def _count_one(self) -> None:
        self._count += 1
        if self._last is not None and self._count == self._last[0]:
            self._last[1]()
            threading.Event().wait()


def _next_phase(program: int, at: int) -> int | None:
    """Return which word of a program, from `at` on, ends a phase."""
    while (word := ctypes.c_int64.from_address(program + 8 * at).value) not in {CALL, PHASE}:
        if word == END:
            return None
        length = ctypes.c_int64.from_address(program + 8 * (at + 1)).value
        at += {COPY: 4, REDUCE: length}.get(word, 1)
    return at


def mixed_calls(rank: Rank, group: Any, step: int) -> None:
    """Make one call of many kinds (collective), and check every number of every result."""
    size, number = rank.size, rank.number
    length = (10, 50_000, 300_000)[step % 3]
    total = size * (size + 1) // 2 + size * step

    def mine() -> torch.Tensor:
        return torch.full((length,), float(number + 1 + step))

    summed = mine()
    dist.all_reduce(summed)
    assert torch.equal(summed, torch.full((length,), float(total)))
    owned: torch.Tensor = group.allocate_tensor(length, dtype=torch.float32, device=CPU)
    owned.copy_(mine())
    work: Any = dist.all_reduce(owned, async_op=True)
    work.wait()
    assert torch.equal(owned, torch.full((length,), float(total)))
    gathered = [torch.empty(length) for _ in range(size)]
    dist.all_gather(gathered, mine())
    assert [float(part.sum()) for part in gathered] == [length * float(peer + 1 + step) for peer in range(size)]
    root = step % size
    sent = mine()
    dist.broadcast(sent, root)
    assert torch.equal(sent, torch.full((length,), float(root + 1 + step)))
    exchanged, scattered = torch.empty(size), torch.empty(1)
    dist.all_to_all_single(exchanged, torch.arange(size, dtype=torch.float32) + size * number)
    assert exchanged.tolist() == [float(peer * size + number) for peer in range(size)]
    dist.reduce_scatter_single(scattered, torch.arange(size, dtype=torch.float32) * (number + 1))
    assert scattered.item() == number * size * (size + 1) / 2
    passed = torch.empty(length)
    outgoing: Any = dist.isend(mine(), (number + 1) % size)
    dist.recv(passed, (number - 1) % size)
    outgoing.wait()
    assert torch.equal(passed, torch.full((length,), float((number - 1) % size + 1 + step)))
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": number, "step": step})
    assert objects == [{"rank": peer, "step": step} for peer in range(size)]
    dist.barrier()
