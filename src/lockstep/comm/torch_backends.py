"""Torch's backends within a group: made for it, their calls watched, and ended when a rank is lost.

Gloo reports a lost rank as "Connection reset by peer", and NCCL does not report it at all. So the errors of their calls
name the rank that was lost where that is the cause, and a thread watches the calls of devices. [`lost_ranks.py`]
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Store, Work

from lockstep.comm.gloo import GlooComparer, GlooSockets, connect_gloo, gloo_connected_in_time
from lockstep.comm.hosts import GroupMembers
from lockstep.comm.lost_ranks import ABORT_SECONDS, DeviceWatch
from lockstep.comm.open_calls import OPEN_GROUPS, CallsUnderWay, InterruptibleWaits, is_users_call, log_not_waited_for
from lockstep.comm.shm.peers import Peers
from lockstep.comm.stored_values import Deadline
from lockstep.errors import GroupError
from lockstep.processes.ending import start_thread_left_alone
from lockstep.processes.user_line import find_user_line
from lockstep.torch_private.compiler import keep_compiler_out_of_methods
from lockstep.torch_private.groups import gloo_options, make_backend, register_backend, set_default_backend

_LOOPBACK: Final = "127.0.0.1"
_CHECK_TIMEOUT: Final = timedelta(seconds=0.2)
"""How often a wait checks whether the call will end."""
GroupPeers = Peers | GlooComparer
"""What is known of the other ranks of a group, and what they are told: in shared memory, or between hosts."""
Explain = Callable[[RuntimeError], GroupError | None]
"""Returns the error for the lost rank that is the cause of an error, if one is."""


@final
class TorchBackends:
    """One for each type of device of `names`; beside shared memory also Gloo for sparse CPU tensors."""

    def __init__(
        self, store: Store, rank: int, timeout: timedelta, names: Mapping[str, str], peers: GroupPeers
    ) -> None:
        self.names = names
        self.all: ProcessGroup | None = None
        """A group of torch's own of all of them, once `connect` has made them."""
        self.check: Callable[[], None] = peers.raise_if_broken
        """Raises if a call that a rank waits for will not end."""
        self.watch = DeviceWatch(peers, self.abort)
        self._store = store
        self._rank = rank
        self._size = len(peers.global_ranks)
        self.timeout = timeout
        self._peers = peers
        self._made: dict[str, Any] = {}
        self._sockets: list[GlooSockets] = []
        self.is_closed = False
        self._told: set[str] = set()
        self.is_ended = False
        """Whether calls that this rank has begun were ended, or may not be made by others."""
        self.has_device = not {"gloo"}.issuperset(names.values())
        """Whether a wait for a call of theirs may only queue a wait on a device."""
        self._abort_thread: threading.Thread | None = None
        self._under_way = CallsUnderWay()
        self._waits = InterruptibleWaits()

    # -- Making them ---------------------------------------------------------------------------------------------

    def connect(self, deadline: Deadline) -> None:
        """Make all of them now (collective); where a rank is lost, that is the error."""
        self.all = ProcessGroup(self._store, self._rank, self._size)
        made: dict[str, Any] = {}
        with ExitStack() as until_made:
            if "gloo" in self.names.values():
                members = GroupMembers(global_ranks=self._peers.global_ranks, find_lost=self._peers.find_any_lost)
                until_made.enter_context(gloo_connected_in_time(self._store, self._rank, members, deadline))
            for device, name in self.names.items():
                if name not in made:
                    made[name] = self._make_gloo(name) if name == "gloo" else self._make(name)
                self._made[device] = made[name]
                register_backend(self.all, torch.device(device), type_of_backend(name), made[name])
        set_default_backend(self.all, type_of_backend(next(iter(self.names.values()))))

    def on(self, device: torch.device) -> Any:
        """Return the backend of a device beside shared memory; it is made when it is first used (collective then)."""
        kind = device.type
        if kind not in self._made:
            self._made[kind] = self._make_gloo("gloo", _LOOPBACK) if kind == "cpu" else self._make_for(kind)
        return self._made[kind]

    def _make_for(self, device_type: str) -> Any:
        try:
            name = self.names.get(device_type) or dist.get_default_backend_for_device(device_type)
            if name != "gloo":
                return self._make(name)
        except (RuntimeError, ValueError) as error:
            raise GroupError(
                f"The shm backend carries CPU tensors, and this torch has no backend for {device_type} tensors "
                f"({str(error).partition(chr(10))[0]}). Move the tensor to the CPU, or make the group with a backend "
                "for its device. (LS212)"
            ) from error
        return self._make_gloo(f"gloo/{device_type}", _LOOPBACK)

    def _make(self, name: str) -> Any:
        place = PrefixStore(f"inner/{name}", self._store)
        return make_backend(name, place, self._rank, self._size, self.timeout)

    def _make_gloo(self, place: str, host: str = "") -> Any:
        """Make one; the loopback as `host`, for ranks of one host, works without a network or a name that resolves."""
        gloo: Any = ProcessGroupGloo  # its options are not in torch's stub
        options: Any = self.timeout
        if host:
            devices = [gloo.create_device(hostname=host, lazy_init=True)]
            options = gloo_options(devices=devices, timeout=self.timeout, num_threads=1)
        store = PrefixStore(f"inner/{place}", self._store)
        made, sockets = connect_gloo(
            store, self._size, lambda: gloo(store, self._rank, self._size, options), self._peers.find_any_lost
        )
        self._sockets.append(sockets)
        return made

    # -- Their calls ---------------------------------------------------------------------------------------------

    def call(  # which call it is, and how it is waited for
        self,
        backend: Any,
        method: str,
        arguments: Sequence[Any],
        *,
        name: str,
        is_on_device: bool,
        on_end: Callable[[], None] | None = None,
        finish: Callable[[], None] | None = None,
    ) -> Work:
        """Make a call, of that `name` in messages.

        `on_end` is called after a wait for it, unless it is a message; `finish` when one has succeeded.
        """
        explain = self._peers.explain_error
        with Explained(explain):
            work: Work = getattr(backend, method)(*arguments)
        if is_on_device:
            line = find_user_line()
            self.watch.add(work, f"{name}{f' at {line}' if line else ''}")
            return ExplainedWork(work, explain, after_wait=on_end, is_on_cpu=False, finish=finish)
        if method in {"send", "recv", "recv_anysource"}:
            wait = self._waits.wait if OPEN_GROUPS.are_replaced else None
            return ExplainedWork(work, explain, wait_for_message=wait)
        self._under_way.add(work)

        def end() -> None:
            self._under_way.forget_completed()
            if on_end is not None:
                on_end()

        waited_for = name if is_users_call() else ""
        return ExplainedWork(work, explain, self._check_or_abort, end, finish=finish, name=waited_for, told=self._tell)

    def _tell(self, call: str) -> None:
        if call not in self._told:
            self._told.add(call)
            log_not_waited_for(call)

    def _check_or_abort(self) -> None:
        try:
            self.check()
        except GroupError:
            self.abort()
            raise

    def abort(self) -> None:
        """End their calls: other ranks do not make them, and destroying the group would wait for their end."""
        for backend in self._made.values():
            backend.abort()

    # -- Their end -----------------------------------------------------------------------------------------------

    def end_calls(self, error: GroupError) -> None:
        """Let the calls that are under way raise, and those that wait (any thread)."""
        self.is_ended = True
        self._waits.end(error)
        for sockets in self._sockets:
            sockets.shut_down()
        has_device = any(kind != "cpu" for kind in [*self._made]) if self.all is None else self.has_device
        if has_device and self._abort_thread is None:
            self._abort_thread = start_thread_left_alone(self.abort, name="lockstep-abort")  # NCCL's takes a while

    def wait_for_ended(self) -> None:
        """Return when calls that were ended can write into no tensor any more; GroupError if one still may."""
        if self.is_ended:
            for sockets in self._sockets:
                sockets.wait_until_closed()
            self._under_way.wait_for_end([*self._made.values()])

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout
        for backend in self._made.values():
            backend.set_timeout(timeout)

    def close(self) -> None:
        self.is_closed = True
        self._waits.end(GroupError("This process group was destroyed; make a new one to go on. (LS204)"))
        if self._abort_thread is not None:  # a device must not be in an old call when the next group is made
            self._abort_thread.join(ABORT_SECONDS)
        for backend in self._made.values():
            backend.shutdown()
        self._made.clear()
        self.all = None


def type_of_backend(name: str) -> ProcessGroup.BackendType:
    return dist.Backend.backend_type_map.get(name, ProcessGroup.BackendType.CUSTOM)


@final
class Explained:
    """A block in which an error of a backend becomes the error for the lost rank that is its cause, if one is."""

    __slots__ = ("_explain",)

    def __init__(self, explain: Explain) -> None:
        self._explain = explain

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, GroupError):
            explained = self._explain(error)
            if explained is not None:
                raise explained from error


@final
@keep_compiler_out_of_methods
class ExplainedWork(Work):
    """A call that runs in a backend of torch.

    `check`, called from time to time during a wait, raises if the call will not end. `wait_for_message`
    makes the waits of a message that must be ended from outside.
    """

    def __init__(
        self,
        inner: Work,
        explain: Explain,
        check: Callable[[], None] | None = None,
        after_wait: Callable[[], None] | None = None,
        wait_for_message: Callable[[Work], bool] | None = None,
        *,
        is_on_cpu: bool = True,
        finish: Callable[[], None] | None = None,
        name: str = "",
        told: Callable[[str], None] = log_not_waited_for,
    ) -> None:
        """With a `name`, `told` is called with what it is if nobody waits for it."""
        super().__init__()
        self._name = name
        self._told = told
        self._finish = finish
        self._is_on_cpu = is_on_cpu
        self._wait_for_message = wait_for_message
        self._after_wait = after_wait
        self._inner: Any = inner
        self._explain = explain
        self._check = check

    def __del__(self) -> None:
        if self._name and not sys.is_finalizing():
            line = find_user_line()
            self._told(f"{self._name}{f', which was dropped at {line}' if line else ''}")

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._name = ""
        try:
            done = self._wait(timeout)
            self._finish_once()
            return done
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
        with Explained(self._explain):
            # Without a timeout where there is none: messages of Gloo take zero for a limit.
            if self._wait_for_message is not None and not timeout:
                return self._wait_for_message(self._inner)
            return bool(self._inner.wait(timeout) if timeout else self._inner.wait())

    def is_completed(self) -> bool:
        """Return whether it is done, with or without an error."""
        done: bool = self._inner.is_completed()
        self._name = "" if done else self._name
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
        self._name = ""
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
        self._name = ""
        future = self._inner.get_future()
        return future.then(self._deliver) if self._is_on_cpu else future

    def _deliver(self, future: Any) -> Any:
        with Explained(self._explain):
            found = future.value()
        self._finish_once()
        return found

    def _finish_once(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
