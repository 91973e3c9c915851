"""Reading what `torch.save` wrote, and never running any of it.

A pickle is a program: it names functions, and reading it calls them. torch.load(weights_only=True) calls only those
that rebuild tensors and refuses the rest, in terms that tell people how to switch that off. So a refused file is looked
through, without executing it, for what it would have called, and the message says that and what its owner can do.
"""

import contextlib
import pickle
import pickletools
import re
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import torch

from lockstep.errors import CheckpointError

LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""What files of `torch.save` begin with that are no zip archives (torch before 1.6)."""
UNREADABLE = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError, OSError),
    *(RuntimeError, TypeError, ValueError, pickle.UnpicklingError, struct.error, zipfile.BadZipFile),
)
"""What torch's readers raise on a damaged file: each byte may become any value, so nearly any error."""

_LEGACY_PARTS = 5
_SHOWN = 6
_MAX_UNPACKED_BYTES = 1 << 30
_MAX_UNPACKED_PICKLE_BYTES = 1 << 24
_MAX_COMPRESSION_RATIO = 20
_HARMLESS_GLOBALS = re.compile(
    r"torch\.\w+|torch\._utils\._rebuild\w+|torch\._tensor\._rebuild\w+|torch\.storage\.\w+|torch\.serialization\._get_layout"
    r"|torch\.nn\.parameter\.\w+|collections\.(OrderedDict|Counter)|_codecs\.encode|builtins\.(set|bytearray|complex)"
)
_DANGEROUS_GLOBALS = re.compile(
    r"(os|posix|nt|sys|subprocess|shutil|socket|importlib|runpy|ctypes|pty|code|webbrowser|types|pickle|operator)\..*"
    r"|builtins\.(eval|exec|compile|open|getattr|__import__|apply)"
)
_DEVICE_TENSOR_CLASSES = re.compile(r"torch\.(?!sparse\.)\w+\.(sparse\.)?\w+Tensor")
"""Tensor classes of one kind of device. Called, they take memory there, whatever `map_location` says."""
_SHARDED_TENSOR_CLASSES = re.compile(r"torch\.distributed\.(tensor|_tensor|_shard|device_mesh)\b.*")


def read_archive(path: Path) -> Any:
    """Read a zip archive of `torch.save`, its tensors mapped from the file where possible.

    Raises:
        CheckpointError: Not an archive of torch, damaged, or it holds more than weights.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except UNREADABLE as error:
        raise CheckpointError(f"{path} is damaged or truncated: {error}. Copy or download it again.") from error
    names = {entry.filename.split("/", 1)[-1] for entry in entries}
    if "data.pkl" not in names:
        raise CheckpointError(
            f"{path} is a zip archive, and not one of torch.save: it holds {', '.join(sorted(names)[:_SHOWN])}. "
            "Expected a checkpoint; unpack it if it holds one."
        )
    if "constants.pkl" in names:
        raise CheckpointError(
            f"{path} is a TorchScript program, which is code, and was not run. Its owner can write the weights alone: "
            "torch.save(torch.jit.load(FILE).state_dict(), 'weights.pt')."
        )
    _check_unpacked(path, [entry for entry in entries if entry.filename.endswith(".pkl")], _MAX_UNPACKED_PICKLE_BYTES)
    _check_unpacked(path, entries, _MAX_UNPACKED_BYTES)
    # Mapped, a tensor is the bytes in the file, which are not its values where the archive was compressed again.
    return _load(path, mmap=all(entry.compress_type == zipfile.ZIP_STORED for entry in entries))


def read_legacy(path: Path) -> Any:
    """Read a file of `torch.save` from before torch 1.6.

    Raises:
        CheckpointError: It is damaged, or holds more than weights.
    """
    return _load(path, mmap=False)


def refuse_pickle(path: Path, form: str) -> CheckpointError:
    """Return the error for a pickle that torch.save did not write, or not in a form that can be read safely."""
    return CheckpointError(_describe_refusal(path, form, named_globals(path)))


def named_globals(path: Path) -> set[str]:
    """Return what a pickle would import and call, without importing or calling anything."""
    found: set[str] = set()
    # A damaged pickle has no end; what it named until then is what counts.
    with contextlib.suppress(*UNREADABLE, tarfile.TarError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for stream in _pickles(path):
            _collect_globals(stream, found)
    return found


def is_tar(head: bytes) -> bool:
    """Say whether a file with these first 512 bytes is a tar archive, and not a compressed one."""
    return head[257:262] == b"ustar"


def _check_unpacked(path: Path, entries: Collection[zipfile.ZipInfo], limit: int) -> None:
    """Refuse what is made to fill the memory: more than `limit` bytes, and many times what the file holds of it."""
    packed, unpacked = sum(each.compress_size for each in entries), sum(each.file_size for each in entries)
    if unpacked > max(limit, _MAX_COMPRESSION_RATIO * packed):
        raise CheckpointError(
            f"{path} would take {unpacked:,} bytes when unpacked, from {packed:,}, so it was not read. If its owner "
            "can be trusted, unpack it and zip it again without compression (zip -0)."
        )


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(512)


def _load(path: Path, *, mmap: bool) -> Any:
    names = named_globals(path)
    if any(_SHARDED_TENSOR_CLASSES.fullmatch(name) for name in names):
        raise CheckpointError(
            f"{path} holds one rank's pieces of sharded tensors (FSDP, DTensor), not the whole weights. Write them "
            "with torch.distributed.checkpoint, or gather them first: get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True, cpu_offload=True))."
        )
    on_device = sorted(name for name in names if _DEVICE_TENSOR_CLASSES.fullmatch(name))
    if on_device:
        raise CheckpointError(
            f"{path} makes a {on_device[0]} while it is read, on a device that may be another worker's, so it was not "
            "read. Its owner can write the weights again with a torch of this decade."
        )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")  # it is read, or refused with our message
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except UNREADABLE as error:
        if any(not _HARMLESS_GLOBALS.fullmatch(name) for name in names):
            raise CheckpointError(_describe_refusal(path, "a file of torch.save", names)) from error
        if isinstance(error, pickle.UnpicklingError):  # torch's text tells how to run whatever it is
            reason = "what it holds is no pickle of tensors"
        else:
            reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path} is damaged or truncated ({reason}). Copy or download it again.") from error


def _describe_refusal(path: Path, form: str, names: Iterable[str]) -> str:
    needed = sorted(name for name in names if not _HARMLESS_GLOBALS.fullmatch(name))
    dangerous = [name for name in needed if _DANGEROUS_GLOBALS.fullmatch(name)]
    shown = [*dangerous, *(name for name in needed if name not in dangerous)]
    listed = ", ".join(shown[:_SHOWN]) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")
    holds = f"with {listed}" if shown else "in a form that only pickle reads"
    start = f"{path} is {form} {holds}: reading it could run any code, so it was not read."
    if dangerous:
        return f"{start} No weights need {dangerous[0]}: do not open this file with torch.load or pickle either."
    if any(re.match(r"__main__\.|torch\.nn\.modules\.", name) for name in shown):
        return (
            f"{start} It seems to be a whole model, not its weights. Its owner, where its code is, can write "
            "those alone: torch.save(model.state_dict(), 'weights.pt')."
        )
    return (
        f"{start} Its owner, who can trust it, can write the weights alone: content = torch.load(FILE, "
        "weights_only=False); torch.save(content['state_dict'], 'weights.pt'), with the key under which they are."
    )


def _pickles(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file's pickles, each as a stream at its beginning."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith(".pkl"):
                    with archive.open(name) as member:
                        yield member
    elif is_tar(_first_bytes(path)):
        with tarfile.open(path, "r:") as tar:
            inner = tar.extractfile("pickle")
            if inner is not None:
                yield inner
    else:
        with path.open("rb") as file:
            for _ in range(_LEGACY_PARTS):  # magic number, version, system, content, keys: one after the other
                yield file


def _collect_globals(stream: IO[bytes], found: set[str]) -> None:
    """Add to `found` what one pickle names."""
    texts: list[str] = []
    memo: dict[int, str | None] = {}
    text: str | None = None
    for opcode, argument, _ in pickletools.genops(stream):
        match opcode.name:
            case "GLOBAL" | "INST":
                found.add(_qualified(*str(argument).split(" ", 1)))
            case "STACK_GLOBAL":
                found.add(_qualified(*texts[-2:]) if len(texts) > 1 else "something unnamed")
            case "EXT1" | "EXT2" | "EXT4":
                found.add("a registered extension")
            case "MEMOIZE":
                memo[len(memo)] = text
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[int(argument or 0)] = text
        is_from_memo = opcode.name in {"GET", "BINGET", "LONG_BINGET"}
        text = memo.get(int(argument or 0)) if is_from_memo else argument if isinstance(argument, str) else None
        if text is not None:
            texts.append(text)


def _qualified(module: str, name: str = "?") -> str:
    # Python 2's name for it, which files of torch.save still use.
    return f"{'builtins' if module == '__builtin__' else module}.{name}"
