"""Groups of Gloo: connecting them in time, closing their connections, and comparing calls with one between hosts."""

import math
import os
import queue
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from lockstep.comm.calls import pack_text, require_equal_texts, unpack_text
from lockstep.comm.hosts import FindLost, GroupMembers, find_none_lost, read_all, store_loss_explained, wait_for_members
from lockstep.comm.lost_ranks import EXIT_SECONDS, exchange_processes, says_connection_ended
from lockstep.comm.open_calls import OPEN_GROUPS
from lockstep.comm.stored_values import Deadline
from lockstep.errors import CollectiveMismatchError, GroupError, PeerLostError, describe_exception
from lockstep.processes.ending import let_native_threads_release, start_thread_left_alone
from lockstep.processes.forking import call_in_children, keep_for_ever
from lockstep.processes.user_line import find_user_line
from lockstep.torch_private.groups import gloo_announcements

_DESCRIPTORS: Final = "/proc/self/fd"
_CLOSE_SECONDS: Final = 20.0
"""How long Gloo's thread may take to close a connection that was shut down: milliseconds, unless it gets no time."""
_POLL_SECONDS: Final = 0.001
_MOMENT_SECONDS: Final = 0.02
"""How long Gloo's thread may take before a wait that times out closes the rest."""
_SHORTEST: Final = timedelta(milliseconds=1)
_UNUSED_TAG: Final = 0x4C6F636B
"""For a message that nobody sends."""
_NEGLIGIBLE_SECONDS: Final = 1.0
_NEGLIGIBLE_SHARE: Final = 0.05
"""How much of the limit the steps before may use without the ranks being connected twice."""
_LEAST_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.1
"""How often a rank that is being connected looks whether another one was lost."""
_END_SECONDS: Final = 2.0
"""How long connecting may go on after a rank was lost, and how long after its end a loss is looked for: the kernel
closes the connections of a process before it reports its end, and a rank that is connected already may have left."""
_END_LOOK_SECONDS: Final = 0.02
_IPV4: Final = struct.Struct("=H2s4s")
_IPV6: Final = struct.Struct("=H2s4s16s")


@final
class GlooSockets:
    """The connections of one group, found by what its ranks have `announced` in the store; they can be shut down.

    A call of Gloo ends when a connection that it needs ends. If a rank is killed, only the ranks that are connected to
    it in this call notice. The others wait until one of these closes its connections, which Gloo does not do as long as
    anything refers to a call that has failed; `abort` of torch's group does not do it either. So we shut the sockets
    down, which ends the calls of all threads here and on the other ranks.

    [Note: whose socket] Gloo does not tell which sockets are its own. But every rank has put the address where it
    listens into the group's store, and every connection has one of these addresses at one end. The address is the
    group's alone. Sockets are looked for when they are to be shut down, so connections that were made later are found
    too. A descriptor is duplicated before it is looked at: another thread may close it and open another file under its
    number.

    [Note: a connection that Gloo does not close] Gloo's thread closes a connection when it reads its end. If the next
    message is for a receive that was given up (its call has failed, for another connection has ended), the thread
    leaves the message where it is, and looks again and again: it never comes to the end. But a wait that times out
    closes all connections of the group. So where one is still open after a moment, we wait a millisecond for a message
    that nobody sends.

    [Note: a connection that a child holds] A forked child has a copy of each descriptor, and a connection ends when the
    last copy is closed. So where a rank was killed just when it had forked, the others waited as long as the child ran.
    A child therefore closes its copies at once. Their numbers stay taken: Gloo, which does not run in a child, may
    still hold them. It must not be destroyed there: its destructor waits for a thread that is not there.
    """

    def __init__(self, backend: Any, announced: Sequence[bytes]) -> None:
        self._backend = backend
        self._announced = announced
        self._shut_down: set[str] = set()
        call_in_children(self._close_in_child)

    def _close_in_child(self) -> None:
        """See [Note: a connection that a child holds]."""
        keep_for_ever(self._backend)
        with open(os.devnull, "r+b", buffering=0) as nothing:  # noqa: PTH123 - a descriptor is all that is needed
            for number, connection in _open_sockets():
                with connection, suppress(OSError):
                    if self._is_own(connection):
                        os.dup2(nothing.fileno(), number, inheritable=False)
        self._announced = ()

    def shut_down(self) -> int:
        """End all connections (local, any thread); return how many there were, none in a forked child."""
        count = 0
        for _, connection in _open_sockets():
            with connection, suppress(OSError):  # the other end may have closed it meanwhile
                if self._is_own(connection):
                    self._shut_down.add(f"socket:[{os.fstat(connection.fileno()).st_ino}]")
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
        return count

    def wait_until_closed(self) -> None:
        """Return when Gloo has closed what was shut down: from then on nothing is received."""
        began = time.monotonic()
        has_timed_out = False
        while not self._shut_down.isdisjoint(target for _, target in _descriptors()):
            waited = time.monotonic() - began
            if waited > _MOMENT_SECONDS and not has_timed_out:
                has_timed_out = True
                self._close_by_timeout()
            if waited > _CLOSE_SECONDS:
                raise GroupError(
                    "Connections of the workers before are still open, so a message of theirs may still be received. "
                    "This run cannot continue with other workers. Resume it from a checkpoint. (LS602)"
                )
            time.sleep(_POLL_SECONDS)

    def _close_by_timeout(self) -> None:
        """See [Note: a connection that Gloo does not close]."""
        number = len(self._announced)  # Gloo has connections of each rank over each interface; a tag stands for one
        for interface in range(number):
            for peer in range(self._backend.size()):
                if peer != self._backend.rank():
                    with suppress(RuntimeError):  # this connection is closed, or the wait has timed out
                        tag = _UNUSED_TAG - _UNUSED_TAG % number + interface
                        self._backend.recv([torch.empty(1)], peer, tag).wait(_SHORTEST)

    def _is_own(self, connection: socket.socket) -> bool:
        if connection.type != socket.SOCK_STREAM or connection.family not in {socket.AF_INET, socket.AF_INET6}:
            return False
        ends = connection.getpeername(), connection.getsockname()  # the first fails for a socket that listens
        return any(pack_address(connection.family, end) in each for end in ends for each in self._announced)


def pack_address(family: int, address: tuple[object, ...]) -> bytes:
    """Return the beginning of an address as the kernel has it, and Gloo sends it: `struct sockaddr_in` or `_in6`."""
    host, port = str(address[0]).partition("%")[0], struct.pack("!H", address[1])
    packed = socket.inet_pton(family, host)
    return _IPV4.pack(family, port, packed) if family == socket.AF_INET else _IPV6.pack(family, port, bytes(4), packed)


def _open_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield the number of every socket of this process, and a duplicate of it."""
    for number, target in _descriptors():
        if target.startswith("socket:"):
            with suppress(OSError):  # closed meanwhile
                yield number, socket.socket(fileno=os.dup(number))


def _descriptors() -> Iterator[tuple[int, str]]:
    """Yield the descriptors of this process and what each refers to; none where there is no /proc."""
    try:
        names = os.listdir(_DESCRIPTORS)  # noqa: PTH208 - names are all that is needed
    except OSError:
        return
    for name in names:
        with suppress(OSError):  # closed meanwhile
            yield int(name), os.readlink(f"{_DESCRIPTORS}/{name}")  # noqa: PTH115 - as above


@contextmanager
def gloo_connected_in_time(store: Store, rank: int, members: GroupMembers, deadline: Deadline) -> Iterator[None]:
    """Connect the ranks by Gloo before `deadline`, if much of the time is used, until the block ends (collective).

    Gloo has one timeout, for connecting and for every later message, so it cannot be given what is left: messages would
    time out early ever after. It may take the whole limit once more. Where much of the limit is used already, ranks are
    therefore connected twice, first with what is left: the second connection is between ranks that have just answered.
    """
    negligible = max(_NEGLIGIBLE_SECONDS, _NEGLIGIBLE_SHARE * deadline.limit.total_seconds())
    is_late = deadline.used_seconds > negligible
    world_size = len(members.global_ranks)
    if world_size == 1 or not _is_any_late(store, rank, members, deadline, is_late=is_late):
        yield
        return
    try:
        # Held until the group is made: a rank that is done early would cut the connections of the others.
        place = PrefixStore("gloo/in_time", store)
        limit = deadline.left(_LEAST_SECONDS)
        connection = _connect(
            world_size, lambda: dist.ProcessGroupGloo(place, rank, world_size, limit), members.find_lost
        )
    except GroupError:
        raise
    except RuntimeError as error:
        raise GroupError(
            f"Gloo could not connect rank {members.global_ranks[rank]} to the other workers within the "
            f"{deadline.limit.total_seconds():g} s that the set-up may take. All had reached the rendezvous, so one "
            "was lost since, or is stuck, or a firewall is in between; look at the logs of the others. Gloo said: "
            f"{str(error).splitlines()[0]} (LS113)"
        ) from error
    try:
        yield
    finally:
        del connection


def connect_gloo(
    store: Store, size: int, make: Callable[[], Any], find_lost: FindLost = find_none_lost
) -> tuple[Any, GlooSockets]:
    """Make a Gloo backend on `store`, which is for it alone (collective over its ranks); return its connections too."""
    backend = _connect(size, make, find_lost)
    return backend, GlooSockets(backend, gloo_announcements(store, size))


def _connect(size: int, make: Callable[[], Any], find_lost: FindLost) -> Any:
    """Return what `make` makes, unless a rank is lost meanwhile, or the launcher announces that one was."""
    # Gloo waits for the connection of a lost rank until its timeout, and nothing ends that wait.
    return _ConnectionAttempt(make).result(find_lost) if size > 1 else make()


@final
class _ConnectionAttempt:
    """The making of a backend, in a thread that is left alone if the group is given up."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._make = make

    def result(self, find_lost: FindLost) -> Any:
        """Return what was made, or raise what making it raised, or that the group was given up or a rank is lost."""
        start_thread_left_alone(self._run, name="lockstep-gloo")
        let_native_threads_release()
        OPEN_GROUPS.add(self)
        failure: RuntimeError | None = None
        lost: GroupError | None = None
        until = math.inf
        while time.monotonic() < until and not (lost is not None and failure is not None):
            try:
                made, error = self._outcome.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                lost = lost or find_lost()
                if lost is not None:
                    until = min(until, time.monotonic() + _END_SECONDS)
                continue
            if error is None:
                return made
            if isinstance(error, GroupError) or not isinstance(error, RuntimeError):
                raise error
            failure, until = error, time.monotonic() + _END_SECONDS
        raise (lost or failure or GroupError("The ranks could not be connected. (LS113)")) from failure

    def end_calls(self, error: GroupError) -> None:
        """Give the group up (local, any thread)."""
        self._outcome.put((None, error))

    def _run(self) -> None:
        try:
            self._outcome.put((self._make(), None))
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is read
            self._outcome.put((None, error))


def _is_any_late(store: Store, rank: int, members: GroupMembers, deadline: Deadline, *, is_late: bool) -> bool:
    """Return whether any rank has waited long; each has its own deadline, and all must do the same (collective)."""
    keys = [f"gloo/is_late/{peer}" for peer in range(len(members.global_ranks))]
    with store_loss_explained():
        store.set(keys[rank], str(is_late))
        wait_for_members(store, keys, members, deadline.with_at_least(_LEAST_SECONDS))
        return str(True).encode() in read_all(store, keys)


@final
class GlooComparer:
    """The calls of ranks on several hosts, all of which wait for each other in every call, and what is known of them.

    `store` is theirs alone. What `Peers` of shared memory does too has its names.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        timeout: timedelta,
        global_ranks: Sequence[int],
        *,
        compares: bool = True,
    ) -> None:
        """Unless it `compares`, others do, or nobody."""
        self._store = store
        self.global_ranks = global_ranks
        self.rank = rank
        self._global_rank = global_ranks[rank]
        self.made_at = ""
        self.broken: GroupError | None = None
        self._ends = exchange_processes(PrefixStore("compare/processes", store), rank, len(global_ranks))
        self._gloo: Any = None
        self._sockets: GlooSockets | None = None
        if compares:
            place = PrefixStore("compare/gloo", store)
            self._gloo, self._sockets = connect_gloo(
                place,
                len(global_ranks),
                lambda: dist.ProcessGroupGloo(place, rank, len(global_ranks), timeout),
                self.find_any_lost,
            )

    @property
    def peers(self) -> "GlooComparer":
        """What is known of the other ranks."""
        return self

    def compare_calls(self, call: bytes) -> None:
        self.raise_if_broken()
        try:
            require_equal_texts(call, self._exchange, find_user_line, self.global_ranks, self.made_at)
        except CollectiveMismatchError:
            raise
        except RuntimeError as error:
            raise self._explain_lost(call, error) from error

    def begin_call(self, call: bytes) -> None:
        """Compare a call as `compare_calls` does: between hosts there is no cheaper way (collective)."""
        self.compare_calls(call)

    def check(self) -> None:
        self.raise_if_broken()

    def set_timeout(self, timeout: timedelta) -> None:
        if self._gloo is not None:
            self._gloo.set_timeout(timeout)

    def report_failure(self, error: BaseException) -> None:
        """Store the exception; the store outlives this rank unless this rank holds it (local)."""
        rank, text = self._global_rank, f"Rank {self._global_rank} failed: {describe_exception(error)} (LS203)"
        if isinstance(error, PeerLostError) and error.rank in self.global_ranks:
            rank, text = error.rank, str(error)
        try:
            self._store.set("failure_reason", f"{rank} {text}")
        except RuntimeError:  # the store is lost, and no rank can read it
            return

    def find_lost(self, peers: Sequence[int]) -> PeerLostError | None:
        """Return the error for one of `peers` whose process has ended; those of other hosts are not watched (local)."""
        return self._explain_ended(self._ends.find_ended(peers))

    def explain_error(self, error: RuntimeError) -> GroupError | None:
        """Wait a moment first: the kernel closes the connections of a process before it reports its end (local)."""
        if not says_connection_ended(error):
            return None if self.broken is None else self.broken.with_traceback(None)
        deadline = time.monotonic() + EXIT_SECONDS
        while self.broken is None and time.monotonic() < deadline:
            lost = self.find_any_failed() or self._explain_ended(self._ends.find_ended(seconds=_END_LOOK_SECONDS))
            if lost is not None:
                return lost
        if self.broken is not None:
            return self.broken.with_traceback(None)
        return PeerLostError(f"The connection to another rank has ended, which was lost or has exited: {error} (LS203)")

    def _explain_ended(self, peer: int | None) -> PeerLostError | None:
        if peer is None:
            return None
        lost, pid = self.global_ranks[peer], self._ends.pids[peer]
        stored = self.find_any_failed()
        if stored is not None and stored.rank == lost:
            return stored
        return PeerLostError(
            f"Rank {lost} (process {pid}) is lost: its process has ended, but rank {self._global_rank} still needs it. "
            "If it was killed or has crashed, look at its log, and in the system log for a lack of memory. (LS203)",
            rank=lost,
        )

    def end_calls(self, error: GroupError) -> None:
        if self.broken is None:
            self.broken = error
        if self._sockets is not None:
            self._sockets.shut_down()

    def find_any_failed(self) -> PeerLostError | None:
        try:
            stored = self._store.get("failure_reason").decode() if self._store.check(["failure_reason"]) else ""
        except RuntimeError:  # the rank that holds the store is lost too
            stored = ""
        rank, _, text = stored.partition(" ")
        return PeerLostError(text, rank=int(rank)) if stored else None

    def find_any_lost(self) -> PeerLostError | None:
        """Return the error for a rank that has stored why it failed, or whose process has ended, or None (local)."""
        return self.find_any_failed() or self._explain_ended(self._ends.find_ended())

    def mark_broken(self, error: PeerLostError) -> None:
        """Let `raise_if_broken` raise `error`; the rank that failed has stored it for the others (local)."""
        self.broken = error

    def raise_if_broken(self) -> None:
        if self.broken is not None:
            raise self.broken.with_traceback(None)

    def send_exit_notice(self) -> None:
        """Store the exception that is being handled, as in a `finally`, if there is one (local)."""
        error = sys.exc_info()[1]
        if error is not None:
            self.report_failure(error)

    def close(self) -> None:
        self._gloo = None

    def _exchange(self, text: bytes) -> list[bytes]:
        mine = pack_text(text)
        pages = [torch.empty_like(mine) for _ in self.global_ranks]
        self._gloo.allgather([pages], [mine]).wait()
        return [unpack_text(page) for page in pages]

    def _explain_lost(self, call: bytes, error: RuntimeError) -> GroupError:
        return (
            self.explain_error(error)
            or self.find_any_failed()
            or PeerLostError(f"A rank was lost, or did not reach {call.decode()}: {error} (LS203)")
        )
