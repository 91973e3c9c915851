"""What CUDA_VISIBLE_DEVICES means, read as CUDA reads it. Pure.

The variable has either UUIDs (or their beginnings) or numbers. CUDA stops at the first entry that it cannot read or
that does not exist, and shows no GPU if an entry appears twice. Numbers count in CUDA's own order. That is the fastest
card first unless CUDA_DEVICE_ORDER=PCI_BUS_ID, so it may differ from the order of nvidia-smi, and only the driver has
it (`driver.py`).
"""

import re
from collections.abc import Collection, Sequence

from lockstep.devices.inventory import Gpu

_UUID_KINDS = ("GPU-", "MIG-")
_NUMBER = re.compile(r"[+-]?\d+", re.ASCII)


def needs_driver(variable: str, order: str | None, gpus: Sequence[Gpu]) -> bool:
    """Return whether only the driver can tell which GPUs the variable shows.

    That is so for numbers in CUDA's own order, and where the name of a GPU means the first of its MIG instances.
    `order` is CUDA_DEVICE_ORDER.
    """
    if any(gpu.instance is not None for gpu in gpus):
        return variable.startswith("GPU-") or bool(_read_numbers(variable))
    return bool(_read_numbers(variable)) and order != "PCI_BUS_ID" and len(gpus) > 1


def find_visible(variable: str, gpus: Sequence[Gpu]) -> frozenset[Gpu]:
    """Return the GPUs that the variable shows, if its numbers are those of nvidia-smi."""
    if variable.startswith(_UUID_KINDS):
        return _find_by_uuid(variable, gpus)
    numbers = _read_numbers(variable)
    known = {gpu.index for gpu in gpus}
    shown = set(_until(numbers, known))
    return frozenset(gpu for gpu in gpus if gpu.index in shown)


def find_by_bytes(uuids: Collection[str], gpus: Sequence[Gpu]) -> frozenset[Gpu]:
    """Return the GPUs with these UUIDs, which the driver returned as hexadecimal digits of their bytes."""
    return frozenset(gpu for gpu in gpus if gpu.uuid is not None and uuid_digits(gpu.uuid) in uuids)


def _find_by_uuid(variable: str, gpus: Sequence[Gpu]) -> frozenset[Gpu]:
    kind = variable[: len(_UUID_KINDS[0])]
    shown: list[Gpu] = []
    for entry in variable.split(","):
        found = [gpu for gpu in gpus if (gpu.uuid or "").startswith(entry)]
        if not entry.startswith(kind) or len(found) != 1:
            break
        shown.append(found[0])
    return frozenset(shown if len(set(shown)) == len(shown) else ())


def _read_numbers(variable: str) -> list[int]:
    numbers: list[int] = []
    for entry in variable.split(","):
        match = _NUMBER.match(entry.strip())  # CUDA reads "1st" as 1
        if match is None or int(match[0]) < 0:
            break
        if int(match[0]) in numbers:
            return []
        numbers.append(int(match[0]))
    return numbers


def _until(numbers: Sequence[int], known: Collection[int]) -> list[int]:
    end = next((index for index, number in enumerate(numbers) if number not in known), len(numbers))
    return list(numbers[:end])


def uuid_digits(uuid: str) -> str:
    """Return the hexadecimal digits of a UUID, without "GPU-" or "MIG-"."""
    kind = next((kind for kind in _UUID_KINDS if uuid.startswith(kind)), "")
    return uuid.removeprefix(kind).replace("-", "").lower()
