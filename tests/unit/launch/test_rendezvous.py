"""The store of a launch that cannot be opened."""

import socket

import pytest
import torch.distributed as dist

from lockstep.launch.rendezvous import LOOPBACK, open_rendezvous


def test_a_store_that_cannot_be_opened_is_told_and_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # torch's error is a RuntimeError. It ended the thread, and workers waited for an answer without a message.
    def fail(*_: object, **__: object) -> None:
        raise dist.DistNetworkError("The server socket has failed.")

    monkeypatch.setattr(dist, "TCPStore", fail)
    with open_rendezvous(2) as rendezvous:
        for _ in range(2):
            with socket.create_connection((LOOPBACK, rendezvous.port), timeout=20) as connection:
                assert connection.recv(1) == b""
    told = "torch could not open the store: The server socket has failed. (LS111)"
    told = f"error: The rendezvous of this launch cannot be served: {told}"
    assert capfd.readouterr().err.splitlines() == [told] * 2
