"""The memory of a group: one anonymous file, mapped where it is needed.

The file has no name (`memfd_create`): the kernel frees it when the last process that has it open exits or is killed.
It is sealed, so no process can shrink it while another one uses it.

Mappings are never closed explicitly: a tensor references its mapping, and the last one that is collected unmaps it. So
a bucket may outlive its group. Its pages are freed with it, even if other processes still have the file.

[Note: forked children] A forked child has its parent's tensors, and what it writes into them must stay its own, as with
all memory. So in a child each allocation is mapped anew, at its address, as a private copy of the file's pages. The
kernel copies a page when the child first writes into it; until then the child sees what the parent writes there. So a
child that does not write, such as a data-loading process, needs no memory. A child that must read what a tensor held at
the fork needs a clone that was made before it.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import sys
import threading
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Final, final

import torch
from torch import Tensor

from lockstep.comm.shm.file_layout import PAGE, FileLayout
from lockstep.errors import GroupError
from lockstep.processes.forking import call_in_children, finalize_here

_SEALS: Final = 0x0001 | 0x0002 | 0x0004  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW of <linux/fcntl.h>
_PUNCH_HOLE: Final = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE of <linux/falloc.h>
_MAP_FIXED: Final = 0x10  # of <linux/mman.h>
_FILE: Final = Path("/memfd:lockstep (deleted)")
"""What a descriptor of a group's file leads to."""
_NUM_PEER_MAPPINGS: Final = 256
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

Mapping = ctypes.Array[ctypes.c_char]
"""A part of the file, for tensors to be made of; Python's own mmap would hold a descriptor for each."""

if sys.platform == "linux":
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
    _libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    _libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def create_file(layout: FileLayout) -> int:
    """Make the file of a group, all zeros, and return its descriptor; only this user can open it."""
    descriptor = os.memfd_create("lockstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, layout.total_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_file(path: Path, layout: FileLayout) -> int:
    """Open another process's file of a group, by its place in /proc; PermissionError if it is none of this user's."""
    is_ours = path.readlink() == _FILE and path.stat().st_uid == os.geteuid()
    if not is_ours or path.stat().st_size != layout.total_bytes:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


@final
class File:
    """A descriptor, open as long as anything needs it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False


@final
class Allocations:
    """The allocations of all groups of this process."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[int, File, int]] = {}

    def add(self, mapping: Mapping, file: File, offset: int) -> None:
        """Register an allocation; its pages are freed when its mapping is collected."""
        address = ctypes.addressof(mapping)
        self._found[address] = (len(mapping), file, offset)
        finalize_here(mapping, self._release, address).atexit = False

    def make_private(self) -> None:
        """Map every allocation privately, in a child just forked. [Note: forked children]."""
        found, self._found = self._found, {}
        for address, (length, file, offset) in found.items():
            _map_pages(address, length, mmap.MAP_PRIVATE | _MAP_FIXED, file.descriptor, offset)

    def _release(self, address: int) -> None:
        """Free pages; not in a forked child, which has a copy of every tensor, but the pages are its parent's."""
        length, file, offset = self._found.pop(address)
        _libc.fallocate(file.descriptor, _PUNCH_HOLE, offset, length)


_ALLOCATIONS: Final = Allocations()
"""One per process, as a process forks as a whole; tensors outlive their groups."""
if sys.platform == "linux":
    call_in_children(_ALLOCATIONS.make_private)


@final
class Memory:
    """The mappings that one rank has of its group's file."""

    def __init__(self, descriptor: int, layout: FileLayout, rank: int) -> None:
        self.layout = layout
        self.descriptor = descriptor
        self._file: File | None = File(descriptor)
        self._rank = rank
        self._control = _map(descriptor, layout.control_bytes)
        self.address = ctypes.addressof(self._control)
        self._heap_lock = threading.RLock()  # while a thread holds it, a tensor may be collected in that thread
        self._heap_used = 0
        self._heap_free: dict[int, list[int]] = {}
        self._heap: dict[int, tuple[int, int]] = {}
        self._peer_mappings: OrderedDict[tuple[int, int], Mapping] = OrderedDict()

    def map_channel(self, source: int, target: int) -> Mapping:
        layout = self.layout
        return _map(self.descriptor, layout.channel_bytes, layout.channel(source, target))

    @torch.inference_mode(False)
    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return flat zeros in this rank's heap, where peers can map them; a view keeps the pages alive too."""
        if self._file is None:
            raise GroupError("This group's memory was freed; make a new group to continue. (LS204)")
        length = max(-(-num_elements * dtype.itemsize // PAGE), 1) * PAGE
        offset = self._take_heap(length)
        start = self.layout.heap(self._rank) + offset
        mapping = _map(self.descriptor, length, start)
        address = ctypes.addressof(mapping)
        self._heap[address] = (offset, length)
        # The last finalizer is called first: the pages are freed before the offset, and the offset before the address.
        # None in a forked child: a thread that it does not have may hold the lock.
        finalize_here(mapping, _forget, weakref.ref(self), address).atexit = False
        _ALLOCATIONS.add(mapping, self._file, start)
        return torch.frombuffer(mapping, dtype=dtype, count=max(num_elements, 1))[:num_elements]

    def locate(self, flat: Tensor) -> int:
        """Return where in this rank's heap a contiguous tensor begins, or -1 if it does not lie there."""
        if not self._heap:
            return -1
        base = flat.untyped_storage().data_ptr()
        found = self._heap.get(base)
        return -1 if found is None else found[0] + flat.data_ptr() - base

    def peer_address(self, rank: int, location: int, num_bytes: int) -> int:
        """Return where this process sees a tensor of another rank's heap, until the next calls of this."""
        start = location // PAGE * PAGE
        length = -(-(location + num_bytes - start) // PAGE) * PAGE
        key = (self.layout.heap(rank) + start, length)
        mapping = self._peer_mappings.pop(key, None)
        if mapping is None:
            mapping = _map(self.descriptor, length, key[0])
            if len(self._peer_mappings) >= _NUM_PEER_MAPPINGS:
                self._peer_mappings.popitem(last=False)
        self._peer_mappings[key] = mapping
        return ctypes.addressof(mapping) + location - start

    def close(self) -> None:
        """Drop the descriptor and the mappings; allocated tensors stay usable."""
        self._file = None
        self.descriptor = -1
        self._peer_mappings.clear()

    def forget(self, address: int) -> None:
        """Free the offset of an allocation for reuse."""
        with self._heap_lock:
            offset, length = self._heap.pop(address)
            self._heap_free.setdefault(length, []).append(offset)

    def _take_heap(self, length: int) -> int:
        """Return a free offset in this rank's heap: one that was used for the same length, or a new one."""
        with self._heap_lock:
            free = self._heap_free.get(length)
            if free:
                return free.pop()
            offset = self._heap_used
            if self.layout.heap(self._rank) + offset + length > self.layout.heap(self._rank + 1):
                raise GroupError(
                    f"This group cannot allocate {length} bytes more: its tensors of other lengths have used up its "
                    "addresses. Keep its tensors instead of allocating new ones, or make a new group. (LS211)"
                )
            self._heap_used += length
            return offset


def _forget(memory: "weakref.ref[Memory]", address: int) -> None:
    target = memory()
    if target is not None:
        target.forget(address)


@torch.inference_mode(False)
def tensor_at(address: int, dtype: torch.dtype, count: int) -> Tensor:
    """View memory, which the caller keeps, as a flat tensor."""
    return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)


def write_text(address: int, text: bytes, most: int) -> None:
    """Write the length of a text and then the text, of which so many bytes are kept at most."""
    cut = text[:most]
    ctypes.memmove(address, struct.pack("<i", len(cut)) + cut, 4 + len(cut))


def read_text(address: int, most: int) -> bytes:
    """Return what `write_text` has written, no more than so many bytes whatever the length there is."""
    (length,) = struct.unpack("<i", ctypes.string_at(address, 4))
    return ctypes.string_at(address + 4, min(max(length, 0), most))


def _map(descriptor: int, length: int, offset: int = 0) -> Mapping:
    address = _map_pages(None, length, mmap.MAP_SHARED, descriptor, offset)
    mapping = (ctypes.c_char * length).from_address(address)
    weakref.finalize(mapping, _libc.munmap, address, length).atexit = False
    return mapping


def _map_pages(address: int | None, length: int, flags: int, descriptor: int, offset: int) -> int:
    found: int = _libc.mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset)
    if found == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {length} bytes of shared memory: {os.strerror(number)}")
    return found
