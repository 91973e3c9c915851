"""Waiting until a descriptor can be read or written. select() would take no descriptor above 1023."""

import selectors


def wait_to_read(*descriptors: int, seconds: float | None = None) -> set[int]:
    """Wait until one has something to read, or has ended; return which. After so many seconds, none."""
    return _wait(descriptors, selectors.EVENT_READ, seconds)


def wait_to_write(descriptor: int) -> None:
    """Wait until something can be written."""
    _wait((descriptor,), selectors.EVENT_WRITE, None)


def _wait(descriptors: tuple[int, ...], event: int, seconds: float | None) -> set[int]:
    # poll(), which unlike epoll() needs no descriptor of its own.
    with selectors.PollSelector() as selector:
        for descriptor in descriptors:
            selector.register(descriptor, event)
        return {key.fd for key, _ in selector.select(seconds)}
