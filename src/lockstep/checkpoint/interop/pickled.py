"""Reading files of `torch.save` without running code from them.

A pickle is a program: it names functions ("globals"), and unpickling calls them. torch.load(weights_only=True) calls
only functions that rebuild tensors and refuses others; its error message says how to switch this protection off. Here
the opcodes of a refused file are scanned without executing them. Our message names the functions that unpickling would
call, and what the author of the file can do.
"""

import contextlib
import pickle
import pickletools
import re
import struct
import warnings
import zipfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import torch

from lockstep.errors import CheckpointError

LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""First bytes of files of `torch.save` before torch 1.6, which are not zip archives and are not read."""
UNREADABLE = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError, OSError),
    *(RuntimeError, TypeError, ValueError, pickle.UnpicklingError, struct.error, zipfile.BadZipFile),
)
"""What torch's readers raise for a damaged file: nearly any error, because any byte may be wrong."""

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
_UNKNOWN_GLOBAL = re.compile(r"Unsupported global: GLOBAL (\S+)")
_NESTED = "torch._utils._rebuild_nested_tensor"
_DEVICE_TENSOR_CLASSES = re.compile(r"torch\.(?!sparse\.)\w+\.(sparse\.)?\w+Tensor")
"""Tensor classes of one device type. Calling them allocates memory on that device, whatever `map_location` says."""
_SHARDED_TENSOR_CLASSES = re.compile(r"torch\.distributed\.(tensor|_tensor|_shard|device_mesh)\b.*")


def read_archive(path: Path) -> Any:
    """Read a zip archive of `torch.save`, its tensors with mmap if possible."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except UNREADABLE as error:
        raise CheckpointError(f"{path} is damaged or truncated: {error}. Copy or download it again. (LS722)") from error
    names = {entry.filename.split("/", 1)[-1] for entry in entries}
    if "data.pkl" not in names:
        raise CheckpointError(
            f"{path} is a zip archive, but torch.save did not write it: it holds {', '.join(sorted(names)[:_SHOWN])}. "
            "Expected a checkpoint. If the archive contains one, unpack it. (LS720)"
        )
    if "constants.pkl" in names:
        raise CheckpointError(
            f"{path} is a TorchScript program, which contains code, so it was not loaded. Its author can save the "
            "weights alone: torch.save(torch.jit.load(FILE).state_dict(), 'weights.pt'). (LS721)"
        )
    _check_unpacked(path, [entry for entry in entries if entry.filename.endswith(".pkl")], _MAX_UNPACKED_PICKLE_BYTES)
    _check_unpacked(path, entries, _MAX_UNPACKED_BYTES)
    # With mmap a tensor is the raw bytes in the file, which are not its values if the archive is compressed.
    return _load(path, mmap=all(entry.compress_type == zipfile.ZIP_STORED for entry in entries))


def refuse_pickle(path: Path, form: str) -> CheckpointError:
    """Return the error for a pickle that torch.save did not write, or that cannot be read safely."""
    return CheckpointError(f"{_describe_refusal(path, form, named_globals(path))} (LS721)")


def named_globals(path: Path) -> set[str]:
    """Return the globals that a pickle would import, without importing or calling anything."""
    found: set[str] = set()
    # Scanning a damaged pickle raises. The globals found before that are returned.
    with contextlib.suppress(*UNREADABLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for stream in _pickles(path):
            _collect_globals(stream, found)
    return found


def _check_unpacked(path: Path, entries: Collection[zipfile.ZipInfo], limit: int) -> None:
    """Refuse a decompression bomb: more than `limit` bytes, and many times the compressed size."""
    packed, unpacked = sum(each.compress_size for each in entries), sum(each.file_size for each in entries)
    if unpacked > max(limit, _MAX_COMPRESSION_RATIO * packed):
        raise CheckpointError(
            f"{path} has {packed:,} compressed bytes and would take {unpacked:,} bytes when unpacked, so it was not "
            "read. If it comes from a safe source, unpack it and zip it again without compression (zip -0). (LS728)"
        )


def _load(path: Path, *, mmap: bool) -> Any:
    names = named_globals(path)
    if any(_SHARDED_TENSOR_CLASSES.fullmatch(name) for name in names):
        raise CheckpointError(
            f"{path} holds only one rank's part of sharded tensors (FSDP, DTensor), not the full weights. Save them "
            "with torch.distributed.checkpoint, or gather them first: get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True, cpu_offload=True)). (LS723)"
        )
    on_device = sorted(name for name in names if _DEVICE_TENSOR_CLASSES.fullmatch(name))
    if on_device:
        raise CheckpointError(
            f"{path} creates a {on_device[0]} while it is read, on a device that may belong to another worker, so it "
            "was not read. Its author can save the weights again with a current version of torch. (LS724)"
        )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")  # it is read, or our error is raised
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except UNREADABLE as error:
        if any(not _HARMLESS_GLOBALS.fullmatch(name) for name in names):
            described = _describe_refusal(path, "a file of torch.save", names)
            raise CheckpointError(f"{described} (LS721)") from error
        if (unknown := _UNKNOWN_GLOBAL.search(str(error))) is not None and unknown[1] in names:
            kind = "a nested tensor" if unknown[1] == _NESTED else f"what {unknown[1]} makes"
            raise CheckpointError(
                f"{path} holds {kind}, which torch {torch.__version__} does not read safely. Save plain dense tensors. "
                "(LS724)"
            ) from error
        if isinstance(error, pickle.UnpicklingError):  # torch's message would say how to load it without protection
            reason = "its content is not a pickle of tensors"
        else:
            reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{path} is damaged or truncated ({reason}). Copy or download it again. (LS722)"
        ) from error


def _describe_refusal(path: Path, form: str, names: Iterable[str]) -> str:
    needed = sorted(name for name in names if not _HARMLESS_GLOBALS.fullmatch(name))
    dangerous = [name for name in needed if _DANGEROUS_GLOBALS.fullmatch(name)]
    shown = [*dangerous, *(name for name in needed if name not in dangerous)]
    listed = ", ".join(shown[:_SHOWN]) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")
    holds = f"with {listed}" if shown else "in a form that only pickle can read"
    start = f"{path} is {form} {holds}: reading it could run any code, so it was not read."
    if dangerous:
        return f"{start} Weights never need {dangerous[0]}: do not open this file with torch.load or pickle."
    if any(re.match(r"__main__\.|torch\.nn\.modules\.", name) for name in shown):
        return (
            f"{start} It seems to be a whole model, not its weights. Its author, who has the model's code, can save "
            "the weights alone: torch.save(model.state_dict(), 'weights.pt')."
        )
    return (
        f"{start} Its author can save the weights alone: content = torch.load(FILE, weights_only=False); "
        "torch.save(content['state_dict'], 'weights.pt'), with the key of the weights."
    )


def _pickles(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file's pickles, each as a stream at its beginning."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith(".pkl"):
                    with archive.open(name) as member:
                        yield member
    else:
        with path.open("rb") as file:
            yield file


def _collect_globals(stream: IO[bytes], found: set[str]) -> None:
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
    # `__builtin__` is the name of Python 2, which files of torch.save still use.
    return f"{'builtins' if module == '__builtin__' else module}.{name}"
