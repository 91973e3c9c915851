"""Which processes may share memory: those of one user under one kernel that see the same processes and sockets."""

import errno
import os
import sys
from pathlib import Path

_NAMESPACES = ("pid", "net", "user")
_MOST_CHARACTERS = 1000
_LONG_BYTES = 1 << 44
"""As long as the file of a group, which takes memory only where it is written."""


def host_identity() -> str:
    """Return a text that is equal for two processes exactly if they can share memory.

    It is made of the boot of the kernel, the namespaces and the user; host names and LOCAL_WORLD_SIZE mean something
    else. A process that cannot share memory with anyone returns a text that starts with `"alone"` and has the reason.
    """
    reason = _why_not()
    if reason:
        return f"alone, {reason}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    spaces = " ".join(str(Path(f"/proc/self/ns/{name}").readlink()) for name in _NAMESPACES)
    return f"boot {boot} {spaces} uid {os.geteuid()}"


def is_host_identity(text: str) -> bool:
    """Return whether `host_identity` may have returned this text, on some host."""
    return text.startswith(("boot ", "alone, ")) and text.isprintable() and len(text) <= _MOST_CHARACTERS


def _why_not() -> str:
    if sys.platform != "linux":
        return f"shared memory without names needs Linux, not {sys.platform}"
    try:
        descriptor = os.memfd_create("lockstep-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with os.fdopen(descriptor, "wb") as probe:
            probe.truncate(_LONG_BYTES)
        os.close(os.pidfd_open(os.getpid()))
        Path("/proc/self/ns/pid").readlink()
    except OSError as error:
        if error.errno == errno.EFBIG:
            return "ulimit -f limits the length of its files"
        return f"this kernel or container lacks a call: {error}"
    return ""
