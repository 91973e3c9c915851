"""Writing a checkpoint atomically, reading it back with every byte checked, and the digest of a model.

safetensors' `save_file` is not used: it copies every tensor, computes no checksums while it writes, and does not call
fsync. safetensors' reader is not used either: its tensors are backed by an mmap of the file. An optimizer's state would
stay in that mapping for the rest of the run, and a truncated file or a lost mount would kill the process with SIGBUS.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from lockstep.checkpoint.atomic_write import atomic_write
from lockstep.checkpoint.header import (
    EMPTY_CHECKSUM,
    Header,
    TensorInfo,
    assign_offsets,
    checksum,
    decode_header,
    encode_header,
    header_length,
)
from lockstep.checkpoint.manifest import NETWORKS_PREFIX, Checkpoint, Manifest
from lockstep.checkpoint.step_files import MANIFEST_KEY, checkpoints_at
from lockstep.errors import CheckpointError, LaterFormatError
from lockstep.torch_private.modules import byte_view

Pause = Callable[[], None]
"""Called after each piece of work of a save; sleeps if necessary."""
Part = tuple[str, torch.dtype, Sequence[int], bytes | memoryview]
"""A tensor's name, dtype, shape and bytes."""
OPTIMIZER_PREFIX = "optimizer/"
"""Prefix of the names of all tensors that are not parameters or buffers of the model."""

_CHUNK_BYTES = 1 << 20
"""Bytes for which a checksum is computed before they are written: few enough to stay in the CPU cache in between."""
_DIGEST_CHUNK_BYTES = 1 << 22
_PAUSE_PER_CPU_SECOND = 1.0
_MIN_WORK_SECONDS = 0.02
"""No pause before this much CPU time was used: after each one a thread of low priority has to wait for a core."""
_MAX_PAUSE_SECONDS = 0.5


def no_pause() -> None:
    """Do not sleep."""


@final
class Throttle:
    """Throttling of a save in the background, so that it slows the training down as little as possible.

    Copying, hashing and writing a state moves each of its bytes through memory several times, as an optimizer step
    does. Training and save share the memory bandwidth even if each has a core of its own, so a low priority alone does
    not help. The saving thread therefore sleeps after each piece of work, as long as the work took.
    """

    def __init__(self) -> None:
        self._is_disabled = threading.Event()
        self._cpu_seconds = 0.0

    def pause(self) -> None:
        """Sleep in proportion to the CPU time used since the last pause, unless throttling is disabled."""
        cpu_seconds = time.thread_time()
        used_seconds = cpu_seconds - self._cpu_seconds
        if used_seconds < _MIN_WORK_SECONDS:
            return
        self._cpu_seconds = cpu_seconds
        if threading.main_thread().is_alive():  # else the program has ended, and the interpreter waits for the save
            self._is_disabled.wait(min(_PAUSE_PER_CPU_SECOND * used_seconds, _MAX_PAUSE_SECONDS))

    def disable(self) -> None:
        """End the current pause, and do not sleep any more, because the training waits for the save."""
        self._is_disabled.set()


def save_checkpoint(path: Path, checkpoint: Checkpoint, pause: Pause = no_pause) -> None:
    """Write `checkpoint` to `path` atomically (local; call it on one rank).

    Only tensors that are not contiguous or not on the CPU are copied, one at a time.
    """
    for name in checkpoint.model:
        if name.startswith(OPTIMIZER_PREFIX):
            raise CheckpointError(
                f"The model has a tensor named {name!r}. Names that begin with {OPTIMIZER_PREFIX!r} are reserved for "
                "the optimizer's tensors. Rename the module. (LS704)"
            )
    tensors = {**checkpoint.model, **checkpoint.optimizer}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_meta:
            kind = "on the meta device" if tensor.is_meta else str(tensor.layout)
            raise CheckpointError(
                f"The tensor {name!r} is {kind}. A checkpoint can hold only dense tensors that have values. (LS704)"
            )
    try:
        infos = assign_offsets({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
        placeholder = _encode(infos, checkpoint.manifest, dict.fromkeys(tensors, EMPTY_CHECKSUM))
        with atomic_write(path) as descriptor:
            checksums = {
                info.name: _write_tensor(descriptor, tensors[info.name], len(placeholder) + info.begin, pause)
                for info in infos
            }
            header = _encode(infos, checkpoint.manifest, checksums)
            assert len(header) == len(placeholder)
            _write(descriptor, memoryview(header), 0)
    except CheckpointError as error:
        raise CheckpointError(f"The checkpoint {path} could not be written: {error}. (LS703)") from error
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint {path} could not be written: {error}. Earlier checkpoints are intact. Free disk space, "
            "then continue the run with --resume. (LS703)"
        ) from error


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint to the CPU; no code in it is executed (local)."""
    header, manifest = read_verified_header(path)
    model: dict[str, Tensor] = {}
    optimizer: dict[str, Tensor] = {}
    damaged: list[str] = []
    try:
        with path.open("rb", buffering=0) as file:
            for info in header.tensors:
                tensor = _read_tensor(file, info, header.num_bytes + info.begin)
                name = info.name
                if checksum(raw_bytes(tensor)) != manifest.checksums.get(name):
                    damaged.append(name)
                (optimizer if name.startswith(OPTIMIZER_PREFIX) else model)[name] = tensor
    except (OSError, RuntimeError) as error:  # RuntimeError: out of memory
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {error}. (LS702)") from error
    if damaged:
        raise CheckpointError(
            f"{path} is damaged: {describe_damaged(damaged)} not as written. Use an earlier checkpoint or a backup "
            "copy. `lockstep checkpoint verify` lists everything that is damaged. (LS702)"
        )
    return Checkpoint(model=model, optimizer=optimizer, manifest=manifest)


def read_manifest(path: Path) -> Manifest:
    """Read a checkpoint's manifest; checks the header's checksum and the file's length, not the tensors (local)."""
    return read_verified_header(path)[1]


def read_verified_manifest(path: Path) -> Manifest:
    """Compare every byte of a checkpoint with its checksums and return the manifest; reads 1 MiB at a time (local).

    CheckpointError if it is damaged; LaterFormatError, a subclass, if it cannot be checked.
    """
    header, manifest = read_verified_header(path)
    try:
        with path.open("rb", buffering=0) as file:
            damaged = [
                info.name
                for info in header.tensors
                if _checksum_in_file(file, info, header.num_bytes + info.begin) != manifest.checksums.get(info.name)
            ]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {error}. (LS702)") from error
    if damaged:
        raise CheckpointError(f"{path} is damaged: {describe_damaged(damaged)} not as written. (LS702)")
    return manifest


def find_newest_intact(folder: Path, on_damaged: Callable[[CheckpointError], None]) -> tuple[Path, Manifest]:
    """Return the intact checkpoint of a run after the most steps; reads every byte of the files it tries.

    `on_damaged` is called with the error of each damaged one before it; one of a later format raises LaterFormatError.
    """
    found = checkpoints_at(folder)
    for path in found:
        try:
            return path, read_verified_manifest(path)
        except LaterFormatError:
            raise
        except CheckpointError as error:
            if path == found[-1]:
                raise
            on_damaged(error)
    raise AssertionError("unreachable: the last checkpoint is returned, or its error raised")


def read_verified_header(path: Path) -> tuple[Header, Manifest]:
    """Read a file's header and manifest; checks the header's checksum and the length of the file (local)."""
    header, file_bytes = read_header(path)
    if header.is_intact is False:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: its header is damaged. (LS702)")
    manifest = manifest_of(header, path)
    if header.file_bytes != file_bytes:
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint: it has {file_bytes:,} bytes, but its header says "
            f"{header.file_bytes:,}. (LS702)"
        )
    return header, manifest


def read_header(path: Path) -> tuple[Header, int]:
    """Return a file's header and the length of the file in bytes (local)."""
    try:
        if path.exists() and not path.is_file():  # opening a named pipe would block
            raise CheckpointError("it is not a regular file")  # noqa: TRY301 - one handler for all errors
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            start = file.read(8)
            header = start + file.read(header_length(start, file_bytes) - len(start))
        return decode_header(header), file_bytes
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {error}. (LS702)") from error


def manifest_of(header: Header, path: Path) -> Manifest:
    text = header.metadata.get(MANIFEST_KEY)
    if text is None:
        raise CheckpointError(
            f"{path} is a safetensors file without a Lockstep manifest, so no run can resume from it. To load the "
            "weights alone, use ls.load_weights. (LS706)"
        )
    try:
        manifest = Manifest.from_json(text)
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from error
    if header.is_intact is None:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: the checksum of its header is missing. (LS702)")
    return manifest


def describe_damaged(names: list[str]) -> str:
    """Return a subject and verb for a message: the first three names of damaged tensors, and "is" or "are"."""
    shown = ", ".join(repr(name) for name in names[:3])
    if len(names) > 3:  # noqa: PLR2004 - as many as are shown
        return f"tensors {shown} and {len(names) - 3} more are"
    return f"tensors {shown} are" if len(names) > 1 else f"tensor {shown} is"


def state_digest(tensors: Mapping[str, Tensor], pause: Pause = no_pause) -> str:
    """Return the SHA-256 of the names, dtypes, shapes and bytes of tensors, sorted by name, as 64 hexadecimal digits.

    Equal digests mean equal bits: -0.0 and 0.0 give different digests, and so do NaNs with different bits.
    """
    parts = ((name, tensors[name].dtype, tensors[name].shape, raw_bytes(tensors[name])) for name in sorted(tensors))
    return digest_parts(parts, pause)


def with_digest(checkpoint: Checkpoint, pause: Pause = no_pause) -> Checkpoint:
    """Return a checkpoint with its digest in the manifest: of the model, and of networks that the loss uses."""
    others = {name: each for name, each in checkpoint.optimizer.items() if belongs_to_digest(name)}
    digest = state_digest({**checkpoint.model, **others}, pause)
    return replace(checkpoint, manifest=replace(checkpoint.manifest, digest=digest))


def belongs_to_digest(name: str) -> bool:
    return not name.startswith(OPTIMIZER_PREFIX) or name.startswith(f"{NETWORKS_PREFIX}/")


def digest_parts(parts: Iterable[Part], pause: Pause = no_pause) -> str:
    """Return the digest that `state_digest` returns, from tensors that come one at a time, sorted by name."""
    digest = hashlib.sha256()
    for name, dtype, shape, data in parts:
        digest.update(f"{name}|{dtype}|{list(shape)}|".encode())
        for begin in range(0, len(data), _DIGEST_CHUNK_BYTES):
            digest.update(data[begin : begin + _DIGEST_CHUNK_BYTES])
            pause()
    return digest.hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in row-major order, without a copy if the tensor is contiguous and on the CPU."""
    return byte_view(tensor).numpy().data


def _encode(infos: tuple[TensorInfo, ...], manifest: Manifest, checksums: Mapping[str, str]) -> bytes:
    complete = replace(manifest, checksums=checksums)
    return encode_header(infos, {"format": "pt", MANIFEST_KEY: complete.to_json()})


def _write_tensor(descriptor: int, tensor: Tensor, offset: int, pause: Pause) -> str:
    data = raw_bytes(tensor)
    found = EMPTY_CHECKSUM
    for begin in range(0, len(data), _CHUNK_BYTES):
        chunk = data[begin : begin + _CHUNK_BYTES]
        found = checksum(chunk, found)
        _write(descriptor, chunk, offset + begin)
        pause()
    return found


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _checksum_in_file(file: FileIO, info: TensorInfo, offset: int) -> str:
    found = EMPTY_CHECKSUM
    file.seek(offset)
    left = info.num_bytes
    while chunk := file.read(min(left, _CHUNK_BYTES)):
        found = checksum(memoryview(chunk), found)
        left -= len(chunk)
    return found


def _read_tensor(file: FileIO, info: TensorInfo, offset: int) -> Tensor:
    tensor = torch.empty(info.shape, dtype=info.dtype)
    data = raw_bytes(tensor)
    file.seek(offset)
    while data:
        count = file.readinto(data)
        if not count:
            raise OSError("it was truncated while it was read")
        data = data[count:]
    return tensor
