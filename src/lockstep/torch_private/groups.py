"""Process groups: which there are, their stores and backends, options of backends; how a TCPStore is greeted."""

import functools
import inspect
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, final

import torch
from torch.distributed import (
    Backend,
    BackendConfig,
    GroupMember,
    PrefixStore,
    ProcessGroup,
    Store,
    TCPStore,
    distributed_c10d,
)

_VALIDATE, _PING = 0, 13
_MAGIC = 0x3C85F7CE
"""The first bytes that a client of torch's TCPStore sends."""

AnyFuture: type = torch._C.Future
"""The class of every future, `torch.futures.Future` and what `then` of a future from C++ returns alike."""


@final
class ReservedPort:
    """A port that this process' launcher holds, and a TCPStore of this process may listen at."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def hold(self, descriptor: int) -> None:
        """Take over the launcher's socket, and let each TCPStore that listens use its port (local)."""
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        make = TCPStore.__init__

        def make_where_nobody_is(self_: TCPStore, *args: Any, **kwargs: Any) -> None:
            is_master = kwargs.get("is_master", args[3] if len(args) > 3 else False)  # noqa: PLR2004 - its place
            with self.opened() if is_master else nullcontext():
                make(self_, *args, **kwargs)

        TCPStore.__init__ = make_where_nobody_is  # type: ignore[assignment,method-assign]

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let a socket of this process be bound to the port within the block, if there is one."""
        if self._socket is None:
            yield
            return
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            yield
        finally:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)

    def let_go(self) -> None:
        """Close the socket: a forked child has no part in it (local)."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


RESERVED_PORT: Final = ReservedPort()


def list_groups() -> list[ProcessGroup]:
    """Return the groups of this process that torch made and has not destroyed, the default group first (local).

    torch's tests replace the object that is asked, so it is looked up in each call.
    """
    return list(distributed_c10d._world.pg_map)


def store_of(group: ProcessGroup) -> Store | None:
    """Return the store that the ranks of a group share, with keys of their own; None if torch did not make it."""
    known = distributed_c10d._world.pg_map.get(group)
    return None if known is None else known[1]


def default_group() -> ProcessGroup:
    """Return the default group itself, where `dist.group.WORLD` is typed as possibly absent (local)."""
    return distributed_c10d._get_default_group()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    ranks: Sequence[int]
    backend: str
    name: str
    """The name that torch gives it: a number, which counts the groups of this process, unless only its members call."""
    make: Callable[..., Any]
    """Makes it, without arguments as asked. With a backend and its options: of that one, under the name that was asked
    for. Returns what torch's function returns."""


def intercept_group_making(intercept: Callable[[GroupRequest], Any]) -> None:
    """Call `intercept` wherever torch makes a group; it returns what `make` of the request returns.

    A group that only its members make is named by its ranks, and one that is made again, after the first was destroyed,
    has the same name. So it gets a part of the store of its own: what the first has left there is not its.
    """
    original = distributed_c10d._new_process_group_helper
    signature = inspect.signature(original)
    times_made: Counter[str] = Counter()

    @functools.wraps(original)
    def make_group(*arguments: Any, **keywords: Any) -> Any:
        bound = signature.bind(*arguments, **keywords)
        asked = bound.arguments["backend"]
        name = str(bound.arguments["group_name"])
        if not bound.arguments["global_ranks_in_group"]:
            times_made.clear()  # the default group, whose store is another one each time
        elif not name.isdecimal():
            if times_made[name]:
                place = f"made again/{times_made[name]}"
                bound.arguments["store"] = PrefixStore(place, bound.arguments["store"])
            times_made[name] += 1

        def make(backend: str | None = None, options: Any = None) -> Any:
            if backend is None:
                return original(*bound.args, **bound.kwargs)
            bound.arguments.update(backend=Backend(backend), backend_options=options)
            made, store = original(*bound.args, **bound.kwargs)
            if isinstance(made, ProcessGroup):
                distributed_c10d._world.pg_map[made] = (asked, store)
                distributed_c10d._world.pg_backend_config[made] = str(BackendConfig(Backend(asked)))
            return made, store

        ranks = tuple(bound.arguments["global_ranks_in_group"])
        try:
            return intercept(GroupRequest(ranks=ranks, backend=str(asked), name=name, make=make))
        except BaseException:
            if not ranks:
                # Torch has counted it. The next default group would have another name here, and another place in its
                # store, than on a rank that had given up earlier, and the two would wait for each other.
                distributed_c10d._world.group_count = 0
            raise

    distributed_c10d._new_process_group_helper = make_group


def leave_recording_to(backend: str) -> None:
    """Let torch's flight recorder attach nothing to groups of a backend (local).

    From torch 2.15 on the recorder's hook is attached to each group whose backend does not record by itself, and asks
    the group's C++ part for its name, which a group written in Python does not have.
    """
    recording: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(backend)


def intercept_timeouts(set_timeout: Callable[[ProcessGroup, timedelta], bool]) -> None:
    """Call `set_timeout` where the timeout of a group is changed; torch changes it if that returns False.

    Torch's function does not change those of groups written in Python. From torch 2.14 on `set_timeout` is public, and
    the private function is a deprecated name of it.
    """
    original = getattr(distributed_c10d, "set_timeout", distributed_c10d._set_pg_timeout)

    @functools.wraps(original)
    def set_pg_timeout(timeout: timedelta, group: ProcessGroup | None = None) -> None:
        target = GroupMember.WORLD if group is None else group
        if not (isinstance(target, ProcessGroup) and set_timeout(target, timeout)):
            original(timeout, group)

    distributed_c10d._set_pg_timeout = set_pg_timeout
    for module in (distributed_c10d, torch.distributed):
        if hasattr(module, "set_timeout"):
            vars(module)["set_timeout"] = set_pg_timeout


def default_timeout(backend: str) -> timedelta:
    """Return how long a backend's calls wait if `init_process_group` is given no timeout."""
    return distributed_c10d._get_default_timeout(Backend(backend))


def device_types(group: ProcessGroup) -> list[torch.device]:
    return group._device_types


def backend_of(group: ProcessGroup, device: torch.device) -> Any:
    return group._get_backend(device)


def name_group(group: Any, name: str) -> None:
    group._set_group_name(name)


def describe_group(group: Any, description: str) -> None:
    group._set_group_desc(description)


def register_backend(group: ProcessGroup, device: torch.device, kind: ProcessGroup.BackendType, backend: Any) -> None:
    group._register_backend(device, kind, backend)


def set_default_backend(group: ProcessGroup, kind: ProcessGroup.BackendType) -> None:
    """Let the backend of a kind, once registered, be what a group goes by where no tensor says: its name, for one."""
    group._set_default_backend(kind)


def gloo_announcements(store: Store, size: int) -> list[bytes]:
    """Return what the ranks of a Gloo backend have put into its store, for each network interface: their addresses."""
    found: list[bytes] = []
    while store.check(keys := [f"{len(found)}/{rank}" for rank in range(size)]):
        found.append(b"".join(store.get(key) for key in keys))
    return found


def gloo_options(*, devices: Sequence[Any], timeout: timedelta, num_threads: int) -> Any:
    """Return options of Gloo, for which torch has no public name; `devices` are of `ProcessGroupGloo.create_device`."""
    options: Any = distributed_c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stub
    options._devices = list(devices)
    options._timeout = timeout
    options._threads = num_threads
    return options


def gloo_num_threads() -> int:
    num_threads: int = distributed_c10d.ProcessGroupGloo._Options()._threads  # type: ignore[attr-defined]
    return num_threads


def make_backend(name: str, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a backend for accelerators, by its name in torch (collective, with some backends).

    A RuntimeError says that this torch lacks it, or that there is no device for it.
    """
    maker: Any = getattr(distributed_c10d, f"ProcessGroup{name.upper()}", None)
    if maker is not None:
        options = maker.Options()
        set_timeout(options, timeout)
        return maker(store, rank, size, options)
    plugin = Backend._plugins.get(name.upper())
    if plugin is None:
        raise RuntimeError(f"This torch has no backend {name!r}.")
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    request = distributed_c10d._DistributedBackendOptions()
    request.store, request.group_rank, request.group_size, request.timeout = store, rank, size, timeout
    return plugin.creator_fn(request, None)


def set_timeout(options: Any, timeout: timedelta) -> None:
    options._timeout = timeout


def root_mesh(mesh: Any) -> Any:
    """Return the device mesh that a mesh was cut from; a mesh that was not, itself."""
    return mesh._get_root_mesh()


def count_calls(group: ProcessGroup | None) -> int:
    """Return how many collectives this process has made on a group; -1 for a group that does not count them."""
    if group is None:
        return -1
    counted: Any = group  # the method is not in torch's stub
    try:
        return int(counted._get_sequence_number_for_group())
    except RuntimeError:
        return -1


def abort_device_backends(group: ProcessGroup) -> None:
    """End the collectives of a group that devices are in, on this process; that of the CPU is left alone (local)."""
    for device in device_types(group):
        if device.type != "cpu":
            group._get_backend(device).abort()


def greeting(number: int) -> tuple[bytes, bytes]:
    """Return what to send to a store of this host's byte order, and its answer, which has `number` (32 bits).

    torch's own client cannot be asked whether there is a store: where the program at a port says nothing, it waits in
    C++, prints the frames of C++ when its time is up, and aborts the process if the interpreter ends meanwhile.
    """
    asked = struct.pack("=BI", _VALIDATE, _MAGIC) + struct.pack("=BI", _PING, number)
    return asked, struct.pack("=I", number)
