"""What a checkpoint says of its run, read without torch and without checking anything: for lists of many runs."""

import json
import struct
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError

MANIFEST_KEY = "lockstep"
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 256 << 20


def peek_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint as JSON values; nothing is compared with checksums (local)."""
    try:
        with path.open("rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if length > _MAX_HEADER_BYTES:
                raise ValueError("it is no safetensors file")  # noqa: TRY301 - one handler for all errors
            manifest = json.loads(json.loads(file.read(length))["__metadata__"][MANIFEST_KEY])
    except (OSError, ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint of Lockstep: {error}. (LS702)") from error
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{path} cannot be read as a checkpoint of Lockstep: its manifest is damaged. (LS702)")
    return manifest
