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
from lockstep.checkpoint.header import Header, Place, checksum
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
class Contents:
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
class Findings:
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
    def is_whole(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems and not self.damaged

    def __str__(self) -> str:
        """Say it in one line."""
        if self.is_whole:
            held = f"{self.num_tensors} checksums and the digest" if self.has_checksums else "the digest"
            without = (
                "" if self.has_checksums else " (format 1 has no checksums: the optimizer's tensors are unchecked)"
            )
            return f"{self.path}: whole, {held} hold{'' if self.has_checksums else 's'}{without}"
        said = list(self.problems)
        if self.damaged:
            said.append(f"{describe_damaged(list(self.damaged))} not what was written")
        return f"{self.path}: DAMAGED, {'; '.join(said)}"


def show_checkpoint(path: Path) -> Contents:
    """Return what is in a checkpoint, without reading its tensors (local).

    Raises:
        CheckpointError: It cannot be read as one.
    """
    manifest = read_manifest(path)
    header, num_bytes = read_header(path)
    return Contents(path=path, num_bytes=num_bytes, manifest=manifest, groups=_group(header.places))


def is_whole(path: Path) -> bool:
    """Return whether a checkpoint's header is as it was written and the file as long as it says; reads no tensor."""
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


def verify_checkpoint(path: Path) -> Findings:
    """Compare every byte of a checkpoint with its checksums and its digest; one tensor in memory at a time (local).

    Raises:
        CheckpointError: There is no such file, it is no checkpoint of Lockstep, or one of a later format.
    """
    try:
        header, num_bytes = read_header(path)
    except CheckpointError as error:
        if not path.is_file():
            raise
        return _findings(path, (), (str(error),))
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
    return _findings(path, header.places, tuple(problems), tuple(damaged), has_checksums=bool(checksums))


def _findings(
    path: Path,
    places: Sequence[Place],
    problems: tuple[str, ...],
    damaged: tuple[str, ...] = (),
    *,
    has_checksums: bool = False,
) -> Findings:
    return Findings(path=path, problems=problems, damaged=damaged, num_tensors=len(places), has_checksums=has_checksums)


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

    def read(file: BinaryIO, place: Place) -> bytes:
        begin = header.num_bytes + place.begin
        file.seek(min(begin, file_bytes))
        data = file.read(min(place.num_bytes, max(0, file_bytes - begin)))  # not what a header may ask for
        if len(data) < place.num_bytes or (checksums and checksum(data) != checksums.get(place.name)):
            damaged.append(place.name)
        return data

    model, other = _split(header.places)
    with path.open("rb") as file:
        digest = digest_parts((place.name, place.dtype, place.shape, read(file, place)) for place in model)
        for place in other:
            read(file, place)
    return damaged, digest


def _split(places: Iterable[Place]) -> tuple[list[Place], list[Place]]:
    """Return the model's tensors and the others, each in the order of their names."""
    ordered = sorted(places, key=lambda place: place.name)
    model = [place for place in ordered if not place.name.startswith(OPTIMIZER_PREFIX)]
    return model, [place for place in ordered if place.name.startswith(OPTIMIZER_PREFIX)]


def _group(places: Iterable[Place]) -> tuple[TensorGroup, ...]:
    found: dict[tuple[bool, str], list[Place]] = {}
    for place in places:
        is_other = place.name.startswith(OPTIMIZER_PREFIX)
        name = place.name.rpartition("/")[2] if is_other else place.name.partition(".")[0]
        found.setdefault((is_other, name), []).append(place)
    return tuple(
        TensorGroup(
            name=name,
            is_model=not is_other,
            num_tensors=len(group),
            num_elements=sum(place.num_bytes // place.dtype.itemsize for place in group),
            num_bytes=sum(place.num_bytes for place in group),
            dtypes=tuple(sorted({str(place.dtype).removeprefix("torch.") for place in group})),
        )
        for (is_other, name), group in sorted(found.items())
    )
