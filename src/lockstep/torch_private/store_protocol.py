"""The first bytes that a client of torch's TCPStore sends, and what the store answers.

torch's own client cannot be asked whether there is a store: where the program at a port says nothing, it waits in C++,
prints the frames of C++ when its time is up, and aborts the process if the interpreter ends meanwhile.
"""

import struct

_VALIDATE, _PING = 0, 13
_MAGIC = 0x3C85F7CE


def greeting(number: int) -> tuple[bytes, bytes]:
    """Return what to send to a store of this host's byte order, and its answer, which has `number` (32 bits)."""
    asked = struct.pack("=BI", _VALIDATE, _MAGIC) + struct.pack("=BI", _PING, number)
    return asked, struct.pack("=I", number)
