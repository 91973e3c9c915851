"""What we rely on of the bytes that torch's TCPStore takes and sends."""

import socket

import pytest
from torch.distributed import TCPStore

from lockstep.torch_private.groups import greeting


@pytest.mark.parametrize("uses_libuv", [True, False])
def test_a_store_answers_the_greeting(uses_libuv: bool) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=uses_libuv)
    asked, expected = greeting(0x12345678)
    with socket.create_connection(("127.0.0.1", store.port), 30) as connection:
        connection.sendall(asked)
        assert connection.recv(len(expected)) == expected, "init_process_group finds no store where there is one"
