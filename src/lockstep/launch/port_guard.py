"""Letting only chosen connections reach a port on loopback, with the kernel's own filter.

A listening socket takes whoever connects. A filter (`SO_ATTACH_FILTER`, which needs no privilege) drops packets before
they reach it, by their content. Here it keeps the packets whose source port is one that this process holds, and which
no other process can send from therefore.
"""

import ctypes
import socket
import struct
import sys
from collections import deque
from typing import final

_SO_ATTACH_FILTER = 26
_LOAD_HALF, _JUMP_IF_EQUAL, _RETURN = 0x28, 0x15, 0x06
"""Instructions: load two bytes of the packet, compare, keep as many bytes as the operand says."""
_SOURCE_PORT = 0
"""Where in a TCP header the source port is."""
_WHOLE = 0xFFFFFFFF
_NUM_REMEMBERED = 128
"""The last packet of a handshake may come when the next connection is made already. A jump reaches 255 instructions."""


@final
class PortGuard:
    """The filter of one listening socket, whose descriptor this duplicates."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener.dup()
        self._address = listener.getsockname()
        self._ports: deque[int] = deque(maxlen=_NUM_REMEMBERED)

    def close_to_all(self) -> bool:
        """Drop every packet from now on; return False where there is no such filter."""
        if not sys.platform.startswith("linux"):
            return False
        try:
            self._attach()
        except OSError:  # a sandbox whose kernel lacks it
            return False
        return True

    def connect(self) -> socket.socket:
        connection = socket.socket()
        try:
            connection.bind((self._address[0], 0))
            self._ports.append(connection.getsockname()[1])
            if sys.platform.startswith("linux"):
                self._attach()
            connection.connect(self._address)
        except OSError:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        self._listener.close()

    def _attach(self) -> None:
        num_ports = len(self._ports)
        program = [
            (_LOAD_HALF, 0, 0, _SOURCE_PORT),
            *((_JUMP_IF_EQUAL, num_ports - place, 0, port) for place, port in enumerate(self._ports)),
            (_RETURN, 0, 0, 0),
            (_RETURN, 0, 0, _WHOLE),
        ]
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
        self._listener.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(program), ctypes.addressof(code))
        )
