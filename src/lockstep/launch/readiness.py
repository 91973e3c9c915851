"""Waiting until a descriptor can be read or written. Not with select(), which supports no descriptor above 1023."""

import selectors


def wait_to_read(*descriptors: int, seconds: float | None = None) -> set[int]:
    """Wait until a descriptor can be read or is at its end, and return those that are; none after `seconds`."""
    return _wait(descriptors, selectors.EVENT_READ, seconds)


def wait_to_write(descriptor: int) -> None:
    _wait((descriptor,), selectors.EVENT_WRITE, None)


def _wait(descriptors: tuple[int, ...], event: int, seconds: float | None) -> set[int]:
    # poll(), because epoll() needs a file descriptor itself.
    with selectors.PollSelector() as selector:
        for descriptor in descriptors:
            selector.register(descriptor, event)
        return {key.fd for key, _ in selector.select(seconds)}
