"""Whether this host can reach itself: in a new network namespace its loopback interface is down."""

import socket

NO_LOOPBACK = (
    "The loopback interface of this network namespace is down, or has no address of IPv4, so processes here cannot "
    "connect to 127.0.0.1. Run `ip link set lo up`, or `ip address add 127.0.0.1/8 dev lo`, in it, or start the "
    "container with a network."
)
"""What to say where it cannot."""


def has_loopback_address() -> bool:
    """Return whether this host has the address 127.0.0.1; one with IPv6 alone may not (local)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError:
            return False
    return True


def has_loopback() -> bool:
    """Return whether there is a route to 127.0.0.1 (local; nothing is sent)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("127.0.0.1", 9))
        except OSError:
            return False
    return True
