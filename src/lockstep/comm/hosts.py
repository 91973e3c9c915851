"""Which ranks of a group are on which host: found once, when the group is made, and held in one value.

The shm rendezvous, the choice of Gloo's network interface and subgroups use that value. `init_process_group` finds it
for the default group in the startup handshake; a group that torch makes by itself finds it in its own set-up.
"""

import errno
import functools
import json
import logging
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, Final, cast, final

from torch.distributed import DistNetworkError, DistStoreError, ProcessGroup, Store

from lockstep.comm.bootstrap.channel_store import launch_store
from lockstep.comm.shm import native
from lockstep.comm.stored_values import Deadline, changed_value, read_texts
from lockstep.errors import GroupError
from lockstep.processes.host import boot_id, open_process

_LOGGER = logging.getLogger("lockstep")
_FIRST_PAUSE_SECONDS = 0.0005
_LAST_PAUSE_SECONDS = 0.05
"""How often a rank that waits for others checks whether they have connected or are lost: often at first."""
_WARNING_SECONDS = 10.0
"""After how long a rank that waits logs for which others."""
_NAMESPACES = ("pid", "net", "user")
_LIBRARY = " library "
_MOST_CHARACTERS = 1000
_LONG_BYTES = 1 << 44
"""As long as the file of a group, which takes memory only where it is written."""


FindLost = Callable[[], GroupError | None]
"""Returns the error for a rank that is known to be lost, or None."""


def find_none_lost() -> None:
    """Return None: no rank is known to be lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMembers:
    global_ranks: Sequence[int]
    find_lost: FindLost = find_none_lost


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHosts:
    """The hosts of a group's ranks, the same value on every rank."""

    identities: tuple[str, ...]
    """What `host_identity` returned on each rank."""
    host_names: tuple[str, ...]
    """The name of each rank's host, for people."""

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host, hosts in the order of their first ranks."""
        found: dict[str, list[int]] = {}
        for rank in range(len(self.identities)):
            found.setdefault(self._key(rank), []).append(rank)
        return tuple(map(tuple, found.values()))

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks are on one host, within one container."""
        return len(self.hosts) == 1

    def local_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks on the host of `rank`, itself among them."""
        return next(ranks for ranks in self.hosts if rank in ranks)

    def of_ranks(self, ranks: Sequence[int]) -> "GroupHosts":
        """Return the hosts of a group of some of these ranks, in its order."""
        return GroupHosts(
            identities=tuple(self.identities[rank] for rank in ranks),
            host_names=tuple(self.host_names[rank] for rank in ranks),
        )

    @property
    def share_inside(self) -> bool:
        """Whether there are several hosts, each of which can share memory inside, and one has something to share."""
        hosts = self.hosts
        can_share = all(not self.of_ranks(ranks).why_not_shared(ranks) for ranks in hosts)
        return 1 < len(hosts) < len(self.identities) and can_share

    def why_not_shared(self, global_ranks: Sequence[int]) -> str:
        """Return why the ranks cannot share memory; empty if they can."""
        for rank, identity in enumerate(self.identities):
            if identity.startswith("alone"):
                return f"rank {global_ranks[rank]} cannot share memory ({identity.removeprefix('alone, ')})"
            if identity != self.identities[0]:
                both = f"ranks {global_ranks[0]} and {global_ranks[rank]}"
                if self._key(rank) == self._key(0):
                    return f"{both} have versions of lockstep whose shm.c differs"
                return f"{both} are not on one host, or not in one container, or not of one user"
        return ""

    def _key(self, rank: int) -> str:
        identity = self.identities[rank]
        is_alone = identity.startswith("alone")
        return f"{identity} {self.host_names[rank]}" if is_alone else identity.partition(_LIBRARY)[0]


def find_hosts(store: Store, rank: int, members: GroupMembers, deadline: Deadline) -> GroupHosts:
    """Publish which host this rank is on, and return those of all (collective)."""
    keys = [f"host/{peer}" for peer in range(len(members.global_ranks))]
    with store_loss_explained():
        store.set(keys[rank], host_record())
        wait_for_members(store, keys, members, deadline)
    return read_hosts(store, keys, rank)


def host_record() -> str:
    """Return which host this process is on, for `read_hosts` (local)."""
    return json.dumps([host_identity(), socket.gethostname()])


def read_hosts(store: Store, keys: Sequence[str], rank: int) -> GroupHosts:
    """Return what every rank has stored of its host, under these keys in rank order (local)."""
    with store_loss_explained():
        stored = read_all(store, keys)
    found = [read_texts(key, raw, 2) for key, raw in zip(keys, stored, strict=True)]
    for peer, (key, raw) in enumerate(zip(keys, stored, strict=True)):
        # Another host would let the ranks leave shared memory, and send gradients where a stranger may read them.
        if (
            not is_host_identity(found[peer][0])
            or not found[peer][1].isprintable()
            or (peer == rank and raw != host_record().encode())
        ):
            raise changed_value(key, raw)
    return GroupHosts(identities=tuple(identity for identity, _ in found), host_names=tuple(name for _, name in found))


def host_identity() -> str:
    """Return a text that is equal for two processes exactly if they can share memory.

    They can if they are of one user under one kernel, see the same processes and sockets, and have libraries of one
    source; host names and LOCAL_WORLD_SIZE mean something else. A process that cannot share memory with anyone returns
    a text that starts with `"alone"` and has the reason.
    """
    reason = why_alone()
    if reason:
        return f"alone, {reason}"
    spaces = " ".join(str(Path(f"/proc/self/ns/{name}").readlink()) for name in _NAMESPACES)
    source = native.load().lockstep_shm_source().decode("ascii")
    return f"boot {boot_id()} {spaces} uid {os.geteuid()} gid {os.getegid()}{_LIBRARY}{source}"


def is_host_identity(text: str) -> bool:
    """Return whether `host_identity` may have returned this text, on some host."""
    return text.startswith(("boot ", "alone, ")) and text.isprintable() and len(text) <= _MOST_CHARACTERS


def why_alone() -> str:
    """Return why this process can share memory with no other one, as a clause; empty if it can."""
    if sys.platform != "linux":
        return f"shared memory without names needs Linux, not {sys.platform}"
    try:
        descriptor = os.memfd_create("lockstep-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with os.fdopen(descriptor, "wb") as probe:
            probe.truncate(_LONG_BYTES)
            path = Path(f"/proc/self/fd/{probe.fileno()}")
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))  # as the other ranks open the file of a group
            if path.lstat().st_uid != os.geteuid() or not _may_open_files_of_others():
                return "its kernel or container lets processes of one user not open each other's files in /proc"
        os.close(open_process(os.getpid()))
        Path("/proc/self/ns/pid").readlink()
    except OSError as error:
        if error.errno == errno.EFBIG:
            return "ulimit -f limits the length of its files"
        return f"this kernel or container lacks a call: {error}"
    return native.why_not()


def _may_open_files_of_others() -> bool:
    """Whether a process of this user may open what another one has open; tried on the parent, where it is one."""
    parent = Path(f"/proc/{os.getppid()}")
    try:
        if parent.stat().st_uid == os.geteuid():
            os.listdir(parent / "fd")  # noqa: PTH208 - names are all that is needed
    except PermissionError:
        return False
    except OSError:  # it has ended, or is outside of this container
        return True
    return True


@functools.cache
def say_not_shared(reason: str) -> None:
    """Log why this process's groups use Gloo, once: the groups of later generations of workers do so too (local)."""
    _LOGGER.warning("Gloo carries CPU tensors in place of shared memory, because %s. (LS116)", reason)


@functools.cache
def say_shared_inside(num_hosts: int) -> None:
    """Log how this process's groups carry tensors over several hosts, once (local)."""
    _LOGGER.warning(
        "Sums of CPU tensors use shared memory within each of %d hosts, and Gloo between them; all other calls use "
        "Gloo. (LS116)",
        num_hosts,
    )


@contextmanager
def store_loss_explained() -> Iterator[None]:
    """Raise GroupError where the store is lost while a group is being made."""
    try:
        yield
    except DistNetworkError as error:
        raise GroupError(
            "The store is gone: the process that holds it, rank 0 as a rule, ended while the group was being made. "
            f"Look at its log. torch said: {str(error).splitlines()[0]} (LS112)"
        ) from error


@final
class MembersWait:
    """A wait for other ranks, while a group is made: who is lost ends it, and who does not come is named."""

    def __init__(self, members: GroupMembers, deadline: Deadline) -> None:
        self._members = members
        self._deadline = deadline
        self._started = time.monotonic()
        self._has_warned = False

    def look(self, find_missing: Callable[[], Sequence[int]]) -> None:
        """Raise if this wait will not end; after a while log which ranks are missing."""
        is_over = self._deadline.is_over
        lost = self._members.find_lost()
        if lost is not None:
            raise lost
        if is_over or (time.monotonic() - self._started > _WARNING_SECONDS and not self._has_warned):
            self._has_warned = True
            missing, everyone = find_missing(), self._members.global_ranks
            if missing and is_over:
                raise GroupError(
                    f"{_name_ranks(missing).capitalize()} of {len(everyone)} did not connect to make the group within "
                    f"{self._deadline.limit.total_seconds():g} s. Every rank of the group must make it; look at the "
                    "logs of those. (LS109)"
                )
            if missing:
                _LOGGER.warning(
                    "Waiting for %s to make a group of ranks %s. Every rank of the group must make it. (LS109)",
                    _name_ranks(missing),
                    ", ".join(map(str, everyone)),
                )


def wait_for_members(store: Store, keys: Sequence[str], members: GroupMembers, deadline: Deadline) -> None:
    """Wait until every rank has set its key; with fewer keys, the first ranks."""
    pause = _FIRST_PAUSE_SECONDS
    wait = MembersWait(members, deadline)
    of_launch = launch_store(store) is not None

    def find_missing() -> list[int]:
        return [name for name, key in zip(members.global_ranks, keys, strict=False) if not store.check([key])]

    # A launcher answers a wait at once. Else not `store.wait` with a short timeout: torch prints a warning at its end.
    while not (_wait(store, keys) if of_launch else store.check(list(keys))):
        wait.look(find_missing)
        if of_launch:
            continue
        time.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE_SECONDS)


def read_all(store: Store, keys: Sequence[str]) -> list[bytes]:
    if cast("Any", store).has_extended_api():  # torch's type hints lack it
        return store.multi_get(list(keys))  # in one message
    return [store.get(key) for key in keys]


def _wait(store: Store, keys: Sequence[str]) -> bool:
    """Wait for a short time until all keys are set; return whether they are."""
    try:
        store.wait(list(keys), timedelta(seconds=_LAST_PAUSE_SECONDS))
    except DistStoreError:
        return False
    return True


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# -- What is known of a group ------------------------------------------------------------------------------------------


class Checking(Enum):
    """What a group of torch's backends does about the calls of its ranks; each does what those before it do."""

    OFF = "nothing: it is torch's own group"
    EXPLAIN = "name lost ranks in errors"
    PUBLISH = "compare each call with those of ranks that have made it already"
    WAIT = "let each call wait for all ranks to make it; the group stays usable after a mismatch"

    @property
    def compares(self) -> bool:
        return self in {Checking.PUBLISH, Checking.WAIT}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSetUp:
    """What `init_process_group` has found out about the group that torch makes for it."""

    hosts: GroupHosts | None
    """Where its ranks are; None for a worker that is alone."""
    deadline: Deadline
    checking: Checking = Checking.OFF
    """Of calls in torch's backends."""
    subgroups: Checking = Checking.OFF
    """The same for groups of Gloo that `new_group` makes beside shared memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBackends:
    """What a group is asked to be made of."""

    names: Mapping[str, str]
    """The backend for each type of device; "shm", or one of torch's."""
    checking: Checking = Checking.OFF
    """Of calls in torch's backends."""
    subgroups: Checking = Checking.OFF
    """Of groups of Gloo that `new_group` makes beside shared memory."""

    @property
    def of_torch(self) -> Mapping[str, str]:
        return {device: name for device, name in self.names.items() if name != "shm"}


_SET_UP: Final = ContextVar[GroupSetUp | None]("the set-up under way in this thread", default=None)
_HOSTS: Final = weakref.WeakKeyDictionary[ProcessGroup, GroupHosts]()
"""Hosts of the groups that torch made for this process: those of its C++ classes take no attributes."""


@contextmanager
def setting_up(set_up: GroupSetUp) -> Iterator[None]:
    """Pass what is known to the backends that torch makes within."""
    before = _SET_UP.set(set_up)
    try:
        yield
    finally:
        _SET_UP.reset(before)


def current_set_up() -> GroupSetUp | None:
    """Return what is known of the group that is being made in this thread; None if torch makes it by itself (local)."""
    return _SET_UP.get()


def remember_hosts(group: ProcessGroup, hosts: GroupHosts) -> None:
    _HOSTS[group] = hosts


def known_hosts(group: ProcessGroup) -> GroupHosts | None:
    return _HOSTS.get(group)
