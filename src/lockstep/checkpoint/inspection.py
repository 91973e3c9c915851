"""Inspecting checkpoint files: what a file contains, and whether every byte is as it was written.

`verify_checkpoint` does not stop at the first error. It reads as much as it can of a file that is truncated or whose
header is damaged.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lockstep.checkpoint.file import (
    OPTIMIZER_PREFIX,
    belongs_to_digest,
    describe_damaged,
    digest_parts,
    manifest_of,
    read_header,
    read_verified_header,
)
from lockstep.checkpoint.header import Header, TensorInfo, checksum
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.step_files import MANIFEST_KEY
from lockstep.errors import CheckpointError, clause


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """A line of `lockstep checkpoint show`: tensors of one submodule, or one kind of optimizer state."""

    name: str
    """The first component of the parameters' names, or a key of the optimizer's state, such as `exp_avg` of Adam; or a
    network that the loss uses beside the model."""
    is_model: bool
    num_tensors: int
    num_elements: int
    num_bytes: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContents:
    path: Path
    num_bytes: int
    manifest: Manifest
    groups: tuple[TensorGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationResult:
    path: Path
    problems: tuple[str, ...]
    """What is wrong with the header, the length or the digest of the file, in words."""
    damaged: tuple[str, ...]
    """Tensors whose bytes are not as written, or are missing."""
    num_tensors: int

    @property
    def is_intact(self) -> bool:
        return not self.problems and not self.damaged

    def __str__(self) -> str:
        if self.is_intact:
            return f"{self.path}: intact, {self.num_tensors} checksums and the digest match"
        problems = list(self.problems)
        if self.damaged:
            problems.append(f"{describe_damaged(list(self.damaged))} not as written")
        return f"{self.path}: DAMAGED, {'; '.join(problems)}"


def show_checkpoint(path: Path) -> CheckpointContents:
    header, manifest = read_verified_header(path)
    return CheckpointContents(path=path, num_bytes=header.file_bytes, manifest=manifest, groups=_group(header.tensors))


def verify_checkpoint(path: Path) -> VerificationResult:
    """Compare every byte of a checkpoint with its checksums and its digest; reads one tensor at a time (local).

    CheckpointError only if there is no file, or an undamaged header is of another program or a later format.
    """
    try:
        header, num_bytes = read_header(path)
    except CheckpointError as error:
        if not path.is_file():
            raise
        return VerificationResult(path=path, problems=(str(error),), damaged=(), num_tensors=0)
    problems: list[str] = []
    if header.is_intact is False:
        problems.append("the header is not as written")
    if num_bytes != header.file_bytes:
        problems.append(f"it has {num_bytes:,} bytes, but its header says {header.file_bytes:,}")
    manifest = _manifest_or_problem(header, path, problems)
    checksums = manifest.checksums if manifest is not None else None
    damaged, digest = _read_tensors(path, header, num_bytes, checksums)
    if manifest is not None and digest != manifest.digest:
        problems.append("the parameters and buffers do not match the digest")
    num_tensors = len(header.tensors)
    return VerificationResult(path=path, problems=tuple(problems), damaged=tuple(damaged), num_tensors=num_tensors)


def _manifest_or_problem(header: Header, path: Path, problems: list[str]) -> Manifest | None:
    try:
        return manifest_of(header, path)
    except CheckpointError as error:
        is_foreign = MANIFEST_KEY not in header.metadata and header.is_intact is None
        if header.is_intact or is_foreign:  # not damage: the file has a later format, or another program wrote it
            raise
        if header.is_intact is None:
            problems.append(clause(error))
        return None


def _read_tensors(
    path: Path, header: Header, file_bytes: int, checksums: Mapping[str, str] | None
) -> tuple[list[str], str]:
    """Return the names of tensors that are truncated or do not match their checksum, and the digest.

    Without `checksums`, because the manifest is damaged, only truncated ones are found.
    """
    damaged: list[str] = []

    def read(file: BinaryIO, info: TensorInfo) -> bytes:
        begin = header.num_bytes + info.begin
        file.seek(min(begin, file_bytes))
        data = file.read(min(info.num_bytes, max(0, file_bytes - begin)))  # a damaged header may claim any size
        if len(data) < info.num_bytes or (checksums is not None and checksum(data) != checksums.get(info.name)):
            damaged.append(info.name)
        return data

    ordered = sorted(header.tensors, key=lambda info: info.name)
    digested = [info for info in ordered if belongs_to_digest(info.name)]
    with path.open("rb") as file:
        digest = digest_parts((info.name, info.dtype, info.shape, read(file, info)) for info in digested)
        for info in ordered:
            if not belongs_to_digest(info.name):
                read(file, info)
    return damaged, digest


def _group(infos: Iterable[TensorInfo]) -> tuple[TensorGroup, ...]:
    found: dict[tuple[bool, str], list[TensorInfo]] = {}
    for info in infos:
        is_other = info.name.startswith(OPTIMIZER_PREFIX)
        name = info.name.rpartition("/")[2] if is_other else info.name.partition(".")[0]
        if is_other and belongs_to_digest(info.name):
            name = "network " + info.name.split("/")[2]
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
