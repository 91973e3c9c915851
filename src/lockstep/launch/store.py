"""The rendezvous of one host: a store on a loopback port that the kernel picks, so that launches never share a port."""

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from lockstep.launch.forwarding import Forwarding
from lockstep.launch.output import print_message
from lockstep.launch.port_guard import PortGuard
from lockstep.launch.tcp_owner import kernel_address, read_sockets
from lockstep.processes.host import NO_LOOPBACK, has_loopback, has_loopback_address

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
"""The network interface that Gloo uses."""
_BACKLOG = 128
_NUM_ATTEMPTS = 20
"""How often to open the store anew, if others connect to its port before it is guarded."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The address at which the workers of a launch find their store."""

    port: int
    is_served: bool
    """Whether the launcher serves the store; if not, rank 0 does."""
    was_found: threading.Event = field(default_factory=threading.Event)
    """Set when the first worker connects to the store that the launcher serves."""


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a loopback port that the kernel picks, for a store that workers may open themselves.

    The launcher holds a socket that is bound but does not listen. The kernel gives the port to no program that asks for
    any free port, but to a store, which asks for this one and sets SO_REUSEADDR.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Without such an address, as with IPv6 alone, no store can be opened; groups over channels need none.
        reserved.bind((LOOPBACK if has_loopback_address() else "", 0))
        yield reserved.getsockname()[1]


@contextmanager
def open_rendezvous(num_workers: int) -> Iterator[Rendezvous]:
    """Keep the rendezvous of a script's workers open within the block.

    The launcher serves it from the first connection of its own user on; connections of other users are closed at once.
    So a launch whose workers never connect does not import torch, which takes a second and 150 MB.

    A single worker serves its store itself. If its script starts processes of its own (`torch.multiprocessing.spawn`),
    it makes a rendezvous for them, and with TORCHELASTIC_USE_AGENT_STORE they would expect that a launcher serves it.
    """
    if not has_loopback():
        print_message(f"lockstep: warning: {NO_LOOPBACK} Groups of shared memory work without it.")
    if num_workers == 1 or not has_loopback_address():
        with reserved_port() as port:
            yield Rendezvous(port, is_served=False)
        return
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen(_BACKLOG)
        over, over_writer = os.pipe()
        rendezvous = Rendezvous(listener.getsockname()[1], is_served=True)
        arguments = (listener, over, rendezvous.was_found)
        serving = threading.Thread(target=_serve_when_asked, args=arguments, name="rendezvous")
        serving.start()
        try:
            yield rendezvous
        finally:
            os.close(over_writer)
            serving.join()
            os.close(over)


def _serve_when_asked(listener: socket.socket, over: int, was_found: threading.Event) -> None:
    """Pass connections of this user on to a store, until `over` is closed at its other end."""
    with GuardedStore() as store:

        def connect() -> socket.socket:
            was_found.set()
            try:
                return store.connect()
            except OSError as error:
                print_message(f"error: The rendezvous of this launch cannot be served: {error}")
                raise

        Forwarding(listener, over, connect, _report_stranger).run()


def _report_stranger(name: str) -> None:
    print_message(
        f"lockstep: warning: the user {name} has connected to the rendezvous of this launch, and was not let in."
    )


@final
class GuardedStore:
    """A TCPStore that only this process can connect to; it is opened at the first connection."""

    def __init__(self) -> None:
        self._store: TCPStore | None = None
        self._guard: PortGuard | None = None

    def __enter__(self) -> "GuardedStore":
        return self

    def __exit__(self, *_: object) -> None:
        self._store = None
        if self._guard is not None:
            self._guard.close()

    def connect(self) -> socket.socket:
        """Return a connection to the store; `OSError` if others connected each time before its port was guarded."""
        if self._guard is None:
            self._guard = self._open()
        return self._guard.connect()

    def _open(self) -> PortGuard:
        # torch's store makes a connection to itself, so its port can be guarded only after that. If another one was
        # made in between, this store is not used: it would be seen among the connections, or by a key that it has set.
        from torch.distributed import TCPStore

        for _ in range(_NUM_ATTEMPTS):
            with socket.socket() as listener:
                listener.bind((LOOPBACK, 0))
                listener.listen(_BACKLOG)
                address: tuple[str, int] = listener.getsockname()
                guard = PortGuard(listener)
                host, port = address
                descriptor = listener.detach()
                self._store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
            if not guard.close_to_all() or (self._store.num_keys() == 0 and _count_connections(address) == 1):
                return guard
            guard.close()
            self._store = None
        raise OSError(
            f"Other processes connected {_NUM_ATTEMPTS} times to the store before its port was guarded. (LS111)"
        )


def _count_connections(address: tuple[str, int]) -> int:
    """Return how many connections to a port there are or were a moment ago, as its end of them or as the other."""
    port = kernel_address(address)
    ends = [each for each in read_sockets() if port in {each.local, each.remote} and not each.is_listening]
    return len({frozenset((each.local, each.remote)) for each in ends})
