"""Opening the store through which the workers of a world connect, and explaining why it cannot be opened.

torch opens it, so that every `init_method` of torch works here too. But torch reports an unknown host and a worker that
never started as the same timeout, and where another program has the port, it waits without an end. So this module tries
to connect until a process listens at the address, and only then lets torch open the store, in a thread.
"""

import enum
import ipaddress
import math
import queue
import secrets
import socket
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import final
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed import Store, rendezvous

from lockstep.comm.bootstrap.handshake import WARNING_SECONDS
from lockstep.comm.bootstrap.identity import WorldVariables
from lockstep.errors import GroupError
from lockstep.processes.ending import start_thread_left_alone
from lockstep.processes.host import NO_LOOPBACK, has_loopback
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.torch_private.groups import RESERVED_PORT, greeting

_BACKLOG = 2048
"""As torch's own."""
_CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 60.0
"""How long a store may take to answer on a connection that it has accepted; torch, which looks up the name of each
address that it connects to, may take some of that."""
_FIRST_PAUSE_SECONDS = 0.01
_LAST_PAUSE_SECONDS = 0.25
"""Pauses between attempts to connect: short at first, because rank 0 usually starts at about the same time."""
_LEAST_SECONDS = 1.0
"""The shortest timeout that torch gets."""
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_GRACE_SECONDS = 3.0
"""How much longer than its timeout torch may take. A thread that returns from torch while the interpreter ends aborts
the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLocation:
    url: str
    """`init_method`, as torch takes it."""
    scheme: str
    """`"env"`, `"tcp"`, `"file"` or one that was registered with torch."""
    host: str
    """Host of the store; empty if it has none."""
    port: int
    """Its port; 0 if it has none."""
    is_hosted: bool
    """Whether the store lives in rank 0's process, and ends with it."""
    store: Store | None
    """The store itself, if the caller had one."""

    @property
    def torch_url(self) -> str:
        """The URL with host and port filled in: torch would read them from the environment, which may lack them."""
        if self.scheme != "env":
            return self.url
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}?{urlsplit(self.url).query}"

    @property
    def address(self) -> str:
        """Where the store is, for messages."""
        return f"{self.host}:{self.port}" if self.host else urlsplit(self.url).path


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedStore:
    """The store of a rendezvous, and the rank and world size that the rendezvous returned."""

    store: Store
    rank: int
    world_size: int


def find_store_location(init_method: str, store: Store | None, variables: WorldVariables) -> StoreLocation:
    """Return where the store is: `store` itself if given. The variables that `env://` needs must have been checked."""
    url = urlsplit(init_method)
    host, port, is_hosted = "", 0, False
    if store is None and url.scheme in {"env", "tcp"}:
        is_env = url.scheme == "env"
        host = (variables.master_addr if is_env else url.hostname) or ""
        port = int(variables.master_port or 0) if is_env else url.port or 0
        is_agents = variables.agent_store == str(True)
        if not is_env and variables.master_port is not None:
            is_agents = is_agents and str(port) == variables.master_port  # an address of the script's own
        is_hosted = not is_agents
        if not is_env and not (host and url.port is not None):
            # Torch would serve a port of its choice on rank 0, where no other rank looks for it.
            raise ValueError(
                f"init_method is {init_method!r}, expected a host and a port, as in 'tcp://127.0.0.1:29500'. (LS103)"
            )
    return StoreLocation(url=init_method, scheme=url.scheme, host=host, port=port, is_hosted=is_hosted, store=store)


def open_store(location: StoreLocation, rank: int, world_size: int, timeout: timedelta) -> OpenedStore | None:
    """Open the store (on every rank); None if this worker should serve it and another program has the port."""
    found = location.store
    if found is None and location.host:
        found = _connect(location, rank, timeout)
        if found is None:
            return None
    elif found is None:
        if location.scheme == "file" and not (directory := Path(location.address).parent).is_dir():
            # FileStore would wait for it without an end, and hold the interpreter's lock meanwhile.
            raise GroupError(
                f"The rendezvous {location.url} cannot be opened: there is no directory {directory}. (LS110)"
            )
        try:
            found, rank, world_size = next(iter(rendezvous(location.url, rank, world_size, timeout=timeout)))
        except dist.DistError as error:
            raise GroupError(
                f"The rendezvous {location.url} cannot be opened: {_first_line(error)}. (LS110)"
            ) from error
    return OpenedStore(store=found, rank=rank, world_size=world_size)


def connect_to_other(location: StoreLocation, timeout: timedelta) -> Store | None:
    """Return the store that another process serves at this address; None if that process is not a store."""
    # torch's client must not meet a program that does not answer, see torch_private/groups.py.
    end = time.monotonic() + min(timeout.total_seconds(), _LEAST_SECONDS)
    while (found := probe_store(location.host, location.port, timeout.total_seconds())) is not Probe.STORE:
        if found is Probe.SILENT or time.monotonic() >= end:
            return None
        time.sleep(_LAST_PAUSE_SECONDS)
    attempt = _Attempt(lambda: dist.TCPStore(location.host, location.port, is_master=False, timeout=timeout))
    try:
        return attempt.result(timeout.total_seconds())
    except dist.DistError:
        return None


def explain_port_in_use(location: StoreLocation, process: str) -> str:
    """Return the message that rank 0 cannot serve its port: `process` has it, or an unknown program if empty."""
    remedy = (
        "Set MASTER_PORT to a free port, or use ls.launch, which picks one."
        if location.scheme == "env"
        else "Put a free port into init_method."
    )
    if process:
        return (
            f"Port {location.port} is in use by {process}, a worker of another training; or of this training, and "
            f"two of its workers have rank 0. {remedy} (LS111)"
        )
    return (
        f"Port {location.port} is in use by another program on this host, so rank 0 cannot serve the rendezvous "
        f"there. {remedy} (LS111)"
    )


def _connect(location: StoreLocation, rank: int, timeout: timedelta) -> Store | None:
    start = time.monotonic()
    end = start + timeout.total_seconds()
    serves = rank == 0 and location.is_hosted
    if location.host in _LOOPBACK_NAMES and not has_loopback():
        raise GroupError(f"Rank {rank} cannot reach {location.address}. {NO_LOOPBACK} (LS110)")
    while True:
        refusal = _retry(_find_name, location, end) if serves else _await_store(location, rank, end)
        cause: dist.DistError | None = None
        if refusal is None:
            # No longer than an answer may take: no code joins that thread, and if it returns while the interpreter
            # ends, the process aborts.
            seconds = max(min(end - time.monotonic(), ANSWER_SECONDS), _LEAST_SECONDS)
            try:
                store = _have_torch_open(location, rank, seconds, math.inf if serves else ANSWER_SECONDS)
            except dist.DistError as error:
                if "EADDRINUSE" in str(error):
                    return None
                if "failed to listen" in str(error):
                    raise GroupError(
                        f"Rank 0 cannot serve port {location.port}: {_first_line(error)}. (LS111)"
                    ) from error
                store, cause = None, error
            if store is not None:
                store.set_timeout(timeout)
                return store
            refusal = _try_connect(location)
        # With time left, this was the store of a previous group that rank 0 has closed, unless it is silent.
        is_silent = cause is None and refusal is None
        if is_silent or time.monotonic() >= end:
            raise GroupError(_explain_unreachable(location, rank, time.monotonic() - start, refusal)) from cause
        time.sleep(_LAST_PAUSE_SECONDS)


def _have_torch_open(location: StoreLocation, rank: int, seconds: float, answer_seconds: float) -> Store | None:
    """Return the store; None if it did not open within `seconds`, or a program listens there and does not answer."""

    def open_with_torch() -> Store:
        if location.is_hosted:  # torch would listen everywhere, and use an agent's store at any address of tcp://
            uses_libuv = "use_libuv=0" not in location.url
            listener = listen_for_store(location.host, location.port) if rank == 0 and uses_libuv else None
            return dist.TCPStore(
                location.host,
                location.port,
                world_size=1,
                is_master=rank == 0,
                timeout=timedelta(seconds=seconds),
                multi_tenant=True,
                use_libuv=uses_libuv,
                master_listen_fd=None if listener is None else listener.detach(),
            )
        # A world of 1: with the real size, rank 0 would wait in torch for the others and not report which are missing.
        store: Store = next(iter(rendezvous(location.torch_url, rank, 1, timeout=timedelta(seconds=seconds))))[0]
        return store

    attempt = _Attempt(open_with_torch)
    end = time.monotonic() + seconds + _GRACE_SECONDS
    while True:
        left = end - time.monotonic()
        store = attempt.result(min(left, answer_seconds))
        if store is not None or left <= answer_seconds or _try_connect(location) is None:
            return store


def listen_for_store(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens on one address (local; on the rank that serves the store).

    torch's store listens on every interface of the host. Its messages carry no proof of who sends them, so whoever can
    reach the port can write to the store. Here the address is the one that all ranks connect to, if that is certain: a
    loopback name, or an address in numbers. A name may stand for another address on each host. None means to listen as
    torch does: the host is a name, the address is not this host's, as that of a Kubernetes service, or the port is
    taken, also by a store that torch uses again.
    """
    name = "127.0.0.1" if host == "localhost" else host
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return None
    if address.is_unspecified:
        return None
    listener = socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6)  # noqa: PLR2004 - IPv4
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with RESERVED_PORT.opened():
            listener.bind((str(address), port))
            listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        return None
    return listener


def _await_store(location: StoreLocation, rank: int, end: float) -> OSError | None:
    """Wait until a store answers; return the last error if none does until `end`."""
    start = time.monotonic()
    while True:
        refusal = _retry(_try_connect, location, end)
        if refusal is not None:
            return refusal
        seconds = min(max(end - time.monotonic(), _LEAST_SECONDS), ANSWER_SECONDS)
        found = probe_store(location.host, location.port, seconds)
        if found is Probe.STORE:
            return None
        if found is Probe.SILENT:
            raise GroupError(_explain_unreachable(location, rank, time.monotonic() - start, None))
        if time.monotonic() >= end:
            return ConnectionResetError("the connection was closed")
        time.sleep(_LAST_PAUSE_SECONDS)


@final
class Probe(enum.Enum):
    STORE = "a store answers"
    SILENT = "a program listens there, and is no store, or does not answer in time"
    CLOSED = "nobody listens, or the connection was closed: a store may be about to open or to end"


def probe_store(host: str, port: int, seconds: float) -> Probe:
    """Ask the program at an address whether it is a store of torch, before torch connects to it (local)."""
    asked, expected = greeting(secrets.randbits(32))
    end = time.monotonic() + seconds
    try:
        connection = socket.create_connection((host, port), min(_CONNECT_SECONDS, max(seconds, 0.01)))
    except OSError:
        return Probe.CLOSED
    answer = b""
    with connection:
        try:
            connection.sendall(asked)
            while len(answer) < len(expected):
                connection.settimeout(max(end - time.monotonic(), 0.01))
                piece = connection.recv(len(expected) - len(answer))
                if not piece:
                    return Probe.CLOSED
                answer += piece
        except TimeoutError:
            return Probe.SILENT
        except OSError:
            return Probe.CLOSED
    return Probe.STORE if answer == expected else Probe.SILENT


def _retry(attempt: Callable[[StoreLocation], OSError | None], location: StoreLocation, end: float) -> OSError | None:
    """Attempt it until it succeeds; return the last error if it does not until `end`. Warn once of a long wait."""
    pause, warns_at = _FIRST_PAUSE_SECONDS, time.monotonic() + WARNING_SECONDS
    while (refusal := attempt(location)) is not None and time.monotonic() < end:
        if time.monotonic() >= warns_at:
            warns_at = math.inf
            _warn_of_wait(location, end, refusal)
        time.sleep(min(pause, max(end - time.monotonic(), 0)))
        pause = min(2 * pause, _LAST_PAUSE_SECONDS)
    return refusal


def _warn_of_wait(location: StoreLocation, end: float, refusal: OSError) -> None:
    why = str(refusal)
    if isinstance(refusal, socket.gaierror):
        setting = "MASTER_ADDR" if location.scheme == "env" else "the host in init_method"
        why = f"the name {location.host!r} cannot be resolved; set {setting} to an address if it never will be"
    warnings.warn(
        f"No rendezvous at {location.address} for {WARNING_SECONDS:.0f} s: {why}. This worker will try "
        f"for {end - time.monotonic():.0f} s more. (LS110)",
        stacklevel=stacklevel_of_user(),
    )


def _find_name(location: StoreLocation) -> OSError | None:
    """Return why the host has no address; None if it has one."""
    try:
        socket.getaddrinfo(location.host, location.port)
    except OSError as error:
        return error
    return None


def _try_connect(location: StoreLocation) -> OSError | None:
    try:
        socket.create_connection((location.host, location.port), _CONNECT_SECONDS).close()
    except OSError as error:
        return error
    return None


def _explain_unreachable(location: StoreLocation, rank: int, waited: float, refusal: OSError | None) -> str:
    is_env = location.scheme == "env"
    host, port = ("MASTER_ADDR", "MASTER_PORT") if is_env else ("the host in init_method", "the port in init_method")
    found_none = f"Rank {rank} found no rendezvous at {location.address} in {waited:.3g} s:"
    if refusal is None:
        return (
            f"{found_none} a program listens there, but it does not answer as a rendezvous does. Set {port} to a port "
            "that is free on the host of rank 0. (LS110)"
        )
    if isinstance(refusal, socket.gaierror):
        return (
            f"{found_none} the name {location.host!r} cannot be resolved ({refusal.strerror}). Set {host} to the name "
            "or the address of the host of rank 0. (LS110)"
        )
    if not isinstance(refusal, ConnectionRefusedError):
        return f"{found_none} {refusal}. Check {host} and {port}, and that no firewall is in between. (LS110)"
    if not location.is_hosted:
        return f"{found_none} no process listens there. Look at the log of torchrun on the first host. (LS110)"
    if rank == 0:
        return (
            f"{found_none} rank 0 itself serves it, on host {socket.gethostname()!r}, so the address must be one of "
            f"that host. Set {host} to it, or start rank 0 on the host of that address. (LS110)"
        )
    own = f" {location.host} is each host's own name for itself." if location.host in _LOOPBACK_NAMES else ""
    return (
        f"{found_none} rank 0, which serves it, did not start in time. Look at its log; if it waits too, {host} or "
        f"{port} differs between the workers.{own} (LS110)"
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


@final
class _Attempt:
    """A call that may not return, made in a thread that is never joined."""

    def __init__(self, call: Callable[[], Store]) -> None:
        self._outcome: queue.SimpleQueue[Store | Exception] = queue.SimpleQueue()
        start_thread_left_alone(self._make, [call], name="lockstep-store")

    def result(self, seconds: float) -> Store | None:
        """Return what the call returned, or raise what it raised; None if it has not ended within `seconds`."""
        try:
            outcome = self._outcome.get(timeout=max(seconds, 0))
        except queue.Empty:
            return None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _make(self, call: Callable[[], Store]) -> None:
        try:
            self._outcome.put(call())
        except Exception as error:  # noqa: BLE001 - it is raised where the result is read
            self._outcome.put(error)
