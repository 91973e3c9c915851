"""Where rank 0 listens when it serves the rendezvous: no wider than the others need it.

torch's store listens on every interface of the host. Its messages carry no proof of who sends them, so whoever can
reach the port can write to the store.
"""

import ipaddress
import socket

_BACKLOG = 2048
"""As torch's own."""


def listen_for_store(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens on one address (local; on the rank that serves the store).

    The address is the one that all ranks connect to, if that is certain: a loopback name, or an address in numbers. A
    name may stand for another address on each host. None means to listen as torch does: the host is a name, the address
    is not this host's, as that of a Kubernetes service, or the port is taken, also by a store that torch uses again.
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
        listener.bind((str(address), port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        return None
    return listener
