"""A process group around one of torch's that compares the calls of all ranks before it makes them.

Gloo and NCCL compare nothing: ranks that call different collectives get sums of unrelated tensors, hang or abort. This
group compares the calls first, as the shm backend does: over shared memory where the ranks are on one host, else over a
Gloo group of its own. Either a call waits for all ranks to make it, and nothing is exchanged if they differ; or, by
default on one host, ranks compare without waiting. [`shm/comparison.py`]

Messages between two ranks (`send`, `recv`) are not compared. An error of the backend that comes from the loss of a rank
names that rank.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from lockstep.comm.capabilities import GroupCapabilities
from lockstep.comm.collectives import Collective, add_collectives, refuse_one_output_twice
from lockstep.comm.gloo import GlooComparer, GlooSockets
from lockstep.comm.hosts import Checking, known_hosts
from lockstep.comm.lost_ranks import ABORT_SECONDS, DeviceWatch
from lockstep.comm.open_calls import OPEN_GROUPS, CallEvents, CallsUnderWay, InterruptibleWaits, describe_destroyed
from lockstep.comm.shm.arguments import read_allocation
from lockstep.comm.shm.comparison import SharedMemoryComparer
from lockstep.errors import CollectiveMismatchError, GroupError, PeerLostError
from lockstep.processes.ending import start_thread_left_alone
from lockstep.processes.forking import finalize_here
from lockstep.processes.user_line import find_user_line
from lockstep.settings import read_settings
from lockstep.torch_private.compiler import keep_compiler_out_of_methods
from lockstep.torch_private.groups import backend_of, register_backend, set_default_backend

Result = TypeVar("Result")
_CHECK_TIMEOUT: Final = timedelta(seconds=0.2)
"""How often a wait checks whether the call will end."""


Comparer = SharedMemoryComparer | GlooComparer
"""How the ranks of a group compare their calls: over shared memory, or over a Gloo group between hosts."""


@final
@keep_compiler_out_of_methods
@add_collectives
class CheckedProcessGroup(ProcessGroup):
    """Torch's backends for some devices, with calls that are compared first.

    Every collective has the name, the arguments and the meaning that `torch.distributed.ProcessGroup` gives it.
    """

    def __init__(
        self,
        inner: ProcessGroup,
        comparer: Comparer,
        checking: Checking,
        backends: Mapping[str, str],
        global_ranks: Sequence[int],
        sockets: GlooSockets | None = None,
    ) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # torch's stub lacks this form
        self._inner: Any = inner
        self._global_ranks = global_ranks
        self._comparer = comparer
        self._peers = peers = comparer.peers
        self.checking = checking
        self._broken: GroupError | None = None
        self._abort_thread: threading.Thread | None = None
        self._sockets = sockets
        self._under_way = CallsUnderWay()
        self._waits = InterruptibleWaits()
        self._events = CallEvents(global_ranks)
        self.backend_names = dict(backends)
        for device, name in backends.items():
            place = torch.device(device)
            backend = backend_of(inner, place)
            register_backend(self, place, type_of_backend(name), backend)
        set_default_backend(self, type_of_backend(next(iter(backends.values()))))
        self._has_device = not {"gloo"}.issuperset(backends.values())
        self._device_watch = DeviceWatch(peers, inner.abort, read_settings().stall_seconds())
        self._close = finalize_here(self, _close, comparer, inner, self._device_watch)

    def make_call(self, collective: Collective, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Work:
        """Compare one call of the table's, then make it (collective)."""
        call = collective.read(arguments, keywords)
        refuse_one_output_twice(call)
        number = self._events.take_number()
        if not self.checking.compares:
            return self._forward(collective.methods[0], call.arguments)
        description = collective.describe(call, self._global_ranks)
        event = self._events.begin(number, description, call.outputs)
        return self._compare_then(
            self._comparer.begin_call, description, lambda: self._forward(collective.methods[0], call.arguments, event)
        )

    def compare_calls(self, call: bytes) -> None:
        self._events.take_number()
        self._compare_then(self._comparer.compare_calls, call, lambda: None)

    def _get_sequence_number_for_group(self) -> int:
        """Return how many calls were made; the name is torch's."""
        return self._events.num_calls

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Return when every rank has reached it; with Gloo rank 0 names the ranks that have not (collective)."""
        self._require_inner().monitored_barrier(timeout, wait_all_ranks)

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        return self._forward("send", (tensors, dst, tag))

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        return self._forward("recv", (tensors, src, tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        return self._forward("recv_anysource", (tensors, tag))

    def allocate_tensor(
        self, size: int | Sequence[int], *, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> Tensor:
        """Return a tensor of zeros in ordinary memory; a shm group returns one in its own memory (local)."""
        return torch.zeros(read_allocation(size, dtype, device), dtype=dtype, device="cpu")

    @property
    def capabilities(self) -> GroupCapabilities:
        hosts = known_hosts(self)
        return GroupCapabilities(
            is_host_local=hosts is not None and hosts.is_one_host,
            compares_calls=self.checking.compares,
            reports_exits=True,
        )

    def __repr__(self) -> str:
        """Return what torch's errors show."""
        return super().__repr__() if self._close.alive else describe_destroyed(self)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "checked"

    def set_timeout(self, timeout: timedelta) -> None:
        self._require_inner().set_timeout(timeout)
        self._peers.set_timeout(timeout)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def report_failure(self, error: BaseException) -> None:
        self._peers.report_failure(error)

    def raise_if_broken(self) -> None:
        self._require_inner()
        self._peers.raise_if_broken()

    def send_exit_notice(self) -> None:
        self._peers.send_exit_notice()

    def find_lost(self, peers: Sequence[int]) -> PeerLostError | None:
        return self._peers.find_lost(peers) if self._close.alive else None

    def end_calls(self, error: GroupError) -> None:
        if self._broken is None:
            self._broken = error
        self._peers.end_calls(error)
        self._waits.end(error)
        if self._sockets is not None:
            self._sockets.shut_down()
        inner = self._inner
        if self._has_device and inner is not None and self._abort_thread is None:
            self._abort_thread = start_thread_left_alone(inner.abort, name="lockstep-abort")  # may take a while

    def shutdown(self) -> None:
        """Leave the group; torch calls it on destroy (local). GroupError: an ended call may still write."""
        if self._close.alive:
            self._peers.send_exit_notice()
            if self._broken is not None and self._sockets is not None:
                self._sockets.wait_until_closed()
                self._under_way.wait_for_end(self._inner)
        self._waits.end(GroupError("This process group was destroyed; make a new one to go on. (LS204)"))
        if self._abort_thread is not None:  # a device must not be in an old call when the next group is made
            self._abort_thread.join(ABORT_SECONDS)
        self._close()
        self._inner = None

    def _compare_then(self, compare: Callable[[bytes], None], call: bytes, action: Callable[[], Result]) -> Result:
        self._require_inner()
        try:
            compare(call)
            return action()
        except CollectiveMismatchError:
            if self.checking is not Checking.WAIT:
                self._abort()
            raise
        except (KeyboardInterrupt, SystemExit) as error:
            # The other ranks may be in a call that this rank has not made, and its next call would be another one.
            self._broken = GroupError(f"{call.decode()} was ended on this rank by {type(error).__name__}. (LS213)")
            self._peers.report_failure(error)
            raise

    def _forward(self, name: str, arguments: Sequence[Any], event: int | None = None) -> Work:
        is_message = name in {"send", "recv", "recv_anysource"}
        if is_message:
            OPEN_GROUPS.count_message()
        try:
            work = getattr(self._require_inner(), name)(*arguments)
        except GroupError:
            raise
        except RuntimeError as error:
            explained = self._peers.explain_error(error)
            if explained is None:
                raise
            raise explained from error
        if self._has_device:
            line = find_user_line()
            self._device_watch.add(work, f"{name}{f' at {line}' if line else ''}")
            after_wait = None if event is None else partial(self._events.end, event)
            return ExplainedWork(work, self._peers.explain_error, after_wait=after_wait, is_on_cpu=False)
        if is_message:
            wait = self._waits.wait if OPEN_GROUPS.are_replaced else None
            return ExplainedWork(work, self._peers.explain_error, wait_for_message=wait)
        self._under_way.add(work)

        def end() -> None:
            self._under_way.forget_completed()
            if event is not None:
                self._events.end(event)

        return ExplainedWork(work, self._peers.explain_error, self._check, end)

    def _check(self) -> None:
        try:
            self._comparer.check()
        except GroupError:
            self._abort()
            raise

    def _abort(self) -> None:
        """End the backend's calls: other ranks do not make them, and destroying the group would wait for their end."""
        self._inner.abort()

    def _require_inner(self) -> Any:
        if self._broken is not None:
            raise self._broken.with_traceback(None)  # the old one would keep frames and their tensors alive
        if self._inner is None:
            raise GroupError("This process group was destroyed; make a new one to go on. (LS204)")
        return self._inner


def type_of_backend(name: str) -> ProcessGroup.BackendType:
    return dist.Backend.backend_type_map.get(name, ProcessGroup.BackendType.CUSTOM)


def _close(comparer: Comparer, inner: ProcessGroup, device_watch: DeviceWatch) -> None:
    device_watch.close()
    comparer.close()
    inner.shutdown()


@final
@keep_compiler_out_of_methods
class ExplainedWork(Work):
    """A call that runs in a backend of torch.

    Gloo reports a lost rank as "Connection reset by peer". `explain` returns the error for a lost rank if that is
    the cause. `check`, called from time to time during a wait, raises if the call will not end. `wait_for_message`
    makes the waits of a message that must be ended from outside.
    """

    def __init__(
        self,
        inner: Work,
        explain: Callable[[RuntimeError], GroupError | None],
        check: Callable[[], None] | None = None,
        after_wait: Callable[[], None] | None = None,
        wait_for_message: Callable[[Work], bool] | None = None,
        *,
        is_on_cpu: bool = True,
    ) -> None:
        super().__init__()
        self._is_on_cpu = is_on_cpu
        self._wait_for_message = wait_for_message
        self._after_wait = after_wait
        self._inner: Any = inner
        self._explain = explain
        self._check = check

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        try:
            return self._wait(timeout)
        finally:
            if self._after_wait is not None:
                self._after_wait()

    def _wait(self, timeout: timedelta) -> bool:
        while self._check is not None and not timeout:
            began = time.monotonic()
            try:
                done: bool = self._inner.wait(_CHECK_TIMEOUT)
            except RuntimeError as error:
                is_timeout = time.monotonic() - began > _CHECK_TIMEOUT.total_seconds() / 2
                if not is_timeout:
                    raise (self._explain(error) or error) from error
                if self._inner.is_completed():
                    break  # since the limit of this wait: below it returns, or raises its own error
                self._check()
            else:
                return done
        try:
            # Without a timeout where there is none: messages of Gloo take zero for a limit.
            if self._wait_for_message is not None and not timeout:
                done = self._wait_for_message(self._inner)
            else:
                done = self._inner.wait(timeout) if timeout else self._inner.wait()
        except GroupError:
            raise
        except RuntimeError as error:
            explained = self._explain(error)
            if explained is None:
                raise
            raise explained from error
        return done

    def is_completed(self) -> bool:
        """Return whether it is done, with or without an error."""
        done: bool = self._inner.is_completed()
        return done

    def is_success(self) -> bool:
        succeeded: bool = self._inner.is_success()
        return succeeded

    def exception(self) -> Any:
        return self._inner.exception()

    def result(self) -> Any:
        return self._inner.result()

    def synchronize(self) -> None:
        """Wait until it is done; on a GPU the current stream waits."""
        self._inner.synchronize()

    def block_current_stream(self) -> None:
        self._inner.block_current_stream()

    def source_rank(self) -> int:
        rank: int = self._inner._source_rank()  # noqa: SLF001 - torch's own name for it
        return rank

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Any:
        """Return a future of the tensors; on the CPU its errors are those of `wait`."""
        future = self._inner.get_future()
        return future.then(self._deliver) if self._is_on_cpu else future

    def _deliver(self, future: Any) -> Any:
        try:
            return future.value()
        except RuntimeError as error:
            explained = self._explain(error)
            if explained is None:
                raise
            raise explained from error
