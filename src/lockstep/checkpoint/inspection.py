"""Looking into checkpoint files: what is in one, and whether it is what was written.

Nothing here stops at the first thing that is wrong: a file that was cut off, or whose header is damaged, is looked at
as far as it goes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lockstep.checkpoint.digest import digest_parts
from lockstep.checkpoint.file import (
    MANIFEST_KEY,
    OPTIMIZER_PREFIX,
    describe_damaged,
    manifest_of,
    read_header,
    read_manifest,
)
from lockstep.checkpoint.header import Header, TensorInfo, checksum
from lockstep.checkpoint.manifest import Manifest
from lockstep.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """Tensors of a file that belong together."""

    name: str
    """A part of the model by its first name, or what the optimizer keeps for every parameter, as in Adam `exp_avg`."""
    is_model: bool
    """Whether they are parameters and buffers."""
    num_tensors: int
    """How many."""
    num_elements: int
    """Their elements."""
    num_bytes: int
    """Their bytes."""
    dtypes: tuple[str, ...]
    """Kinds of elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContents:
    """What is in a checkpoint file."""

    path: Path
    """The file."""
    num_bytes: int
    """Its length."""
    manifest: Manifest
    """What it says."""
    groups: tuple[TensorGroup, ...]
    """Its tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationResult:
    """Whether a checkpoint file is what was written."""

    path: Path
    """The file."""
    problems: tuple[str, ...]
    """What is wrong with the file as a whole, in words."""
    damaged: tuple[str, ...]
    """Tensors that are not what was written, or not there."""
    num_tensors: int
    """Tensors that the header tells of."""
    has_checksums: bool
    """Whether there are checksums per tensor: there are from format 2 on."""

    @property
    def is_intact(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems and not self.damaged

    def __str__(self) -> str:
        """Say it in one line."""
        if self.is_intact:
            held = f"{self.num_tensors} checksums and the digest" if self.has_checksums else "the digest"
            without = (
                "" if self.has_checksums else " (format 1 has no checksums: the optimizer's tensors are unchecked)"
            )
            return f"{self.path}: whole, {held} hold{'' if self.has_checksums else 's'}{without}"
        said = list(self.problems)
        if self.damaged:
            said.append(f"{describe_damaged(list(self.damaged))} not what was written")
        return f"{self.path}: DAMAGED, {'; '.join(said)}"


def show_checkpoint(path: Path) -> CheckpointContents:
    """Return what is in a checkpoint, without reading its tensors (local).

    Raises:
        CheckpointError: It cannot be read as one.
    """
    manifest = read_manifest(path)
    header, num_bytes = read_header(path)
    return CheckpointContents(path=path, num_bytes=num_bytes, manifest=manifest, groups=_group(header.tensors))


def verify_checkpoint(path: Path) -> VerificationResult:
    """Compare every byte of a checkpoint with its checksums and its digest; one tensor in memory at a time (local).

    Raises:
        CheckpointError: There is no such file, it is no checkpoint of Lockstep, or one of a later format.
    """
    try:
        header, num_bytes = read_header(path)
    except CheckpointError as error:
        if not path.is_file():
            raise
        return _result(path, (), (str(error),))
    problems: list[str] = []
    if header.is_intact is False:
        problems.append("the header is not what was written")
    if num_bytes != header.file_bytes:
        problems.append(f"it has {num_bytes:,} bytes, expected {header.file_bytes:,}")
    manifest = _manifest_or_problem(header, path, problems)
    checksums = manifest.checksums if manifest is not None else {}
    damaged, digest = _read_tensors(path, header, num_bytes, checksums)
    if manifest is not None and digest != manifest.digest:
        problems.append("the digest of parameters and buffers is another")
    return _result(path, header.tensors, tuple(problems), tuple(damaged), has_checksums=bool(checksums))


def _result(
    path: Path,
    infos: Sequence[TensorInfo],
    problems: tuple[str, ...],
    damaged: tuple[str, ...] = (),
    *,
    has_checksums: bool = False,
) -> VerificationResult:
    return VerificationResult(
        path=path, problems=problems, damaged=damaged, num_tensors=len(infos), has_checksums=has_checksums
    )


def _manifest_or_problem(header: Header, path: Path, problems: list[str]) -> Manifest | None:
    try:
        return manifest_of(header, path)
    except CheckpointError as error:
        is_foreign = MANIFEST_KEY not in header.metadata and header.is_intact is None
        if header.is_intact or is_foreign:  # then it is not damage: a later format, or somebody else's file
            raise
        if header.is_intact is None:
            problems.append(str(error).removesuffix("."))
        return None


def _read_tensors(path: Path, header: Header, file_bytes: int, checksums: Mapping[str, str]) -> tuple[list[str], str]:
    """Return the names of tensors that are cut off or have another checksum, and the digest of the model's."""
    damaged: list[str] = []

    def read(file: BinaryIO, info: TensorInfo) -> bytes:
        begin = header.num_bytes + info.begin
        file.seek(min(begin, file_bytes))
        data = file.read(min(info.num_bytes, max(0, file_bytes - begin)))  # not what a header may ask for
        if len(data) < info.num_bytes or (checksums and checksum(data) != checksums.get(info.name)):
            damaged.append(info.name)
        return data

    model, other = _split(header.tensors)
    with path.open("rb") as file:
        digest = digest_parts((info.name, info.dtype, info.shape, read(file, info)) for info in model)
        for info in other:
            read(file, info)
    return damaged, digest


def _split(infos: Iterable[TensorInfo]) -> tuple[list[TensorInfo], list[TensorInfo]]:
    """Return the model's tensors and the others, each in the order of their names."""
    ordered = sorted(infos, key=lambda info: info.name)
    model = [info for info in ordered if not info.name.startswith(OPTIMIZER_PREFIX)]
    return model, [info for info in ordered if info.name.startswith(OPTIMIZER_PREFIX)]


def _group(infos: Iterable[TensorInfo]) -> tuple[TensorGroup, ...]:
    found: dict[tuple[bool, str], list[TensorInfo]] = {}
    for info in infos:
        is_other = info.name.startswith(OPTIMIZER_PREFIX)
        name = info.name.rpartition("/")[2] if is_other else info.name.partition(".")[0]
        found.setdefault((is_other, name), []).append(info)
    return tuple(
        TensorGroup(
            name=name,
            is_model=not is_other,
            num_tensors=len(group),
            num_elements=sum(info.num_bytes // info.dtype.itemsize for info in group),
            num_bytes=sum(info.num_bytes for info in group),
            dtypes=tuple(sorted({str(info.dtype).removeprefix("torch.") for info in group})),
        )
        for (is_other, name), group in sorted(found.items())
    )
