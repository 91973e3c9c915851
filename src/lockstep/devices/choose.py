"""Turn a request for devices into a placement: which device each worker gets, and why. Pure: the inventory is given.

[Note: busy] A GPU is busy if a process computes on it. It is also busy if more of its memory is in use than its known
processes and the driver explain: inside a container, processes outside of it cannot be seen. Processes that only draw,
as a desktop does, and this process itself do not make a GPU busy. Under WSL the desktop is Windows', whose processes
cannot be seen: there only more than half of the memory counts.

[Note: one instance per card] NCCL before 2.30 joins no two MIG instances of one card. So `auto` takes one of each card.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep.devices.inventory import Gpu, Inventory, describe_bytes, describe_holder, gpu_number, label, short_label
from lockstep.devices.request import (
    Auto,
    Cpu,
    DeviceRequest,
    GpuName,
    Named,
    Request,
    parse_request,
    with_workers,
)
from lockstep.errors import DeviceError, counted
from lockstep.settings import VISIBLE_VARIABLES

NUM_CPU_WORKERS = 2
"""How many workers `auto` starts where there is no GPU."""
_UNSEEN_BYTES = 2**30
"""The driver uses up to this much memory itself, or a twentieth of the GPU's; it belongs to no process."""
_NCCL_JOINS_INSTANCES = (2, 30)
"""The first version of NCCL that joins MIG instances of one card."""
_HIDES_ALL = frozenset({"", "-1"})
"""Values of CUDA_VISIBLE_DEVICES with which people hide every GPU on purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    name: str
    """Its name for torch in that worker: "cuda:0", because the worker sees no other card, or "cpu"."""
    visible: str
    """CUDA_VISIBLE_DEVICES of that worker, or the variable of another kind: the card's name in it; empty on the CPU."""
    label: str
    """Its name in messages: "GPU 2 (NVIDIA GeForce RTX 3090)" or "CPU"."""

    def variables(self) -> Mapping[str, str]:
        """Return the environment in which a worker sees this device and no other."""
        return _variables(self.name, self.visible)


CPU = Device(name="cpu", visible="", label="CPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One device per worker, in rank order."""

    devices: tuple[Device, ...]
    reason: str
    """One line: which devices these are, and why the others were not chosen."""
    hint: str = ""
    """Advice for the user, in one line; empty for none."""

    def variables_of_all(self) -> Mapping[str, str]:
        """Return the environment in which a worker sees the cards of all, in rank order: that of rank 1 as "cuda:1"."""
        return _variables(self.devices[0].name, ",".join(device.visible for device in self.devices if device.visible))

    def first(self, num_workers: int) -> "Placement":
        return replace(self, devices=self.devices[:num_workers])


def _variables(name: str, visible: str) -> Mapping[str, str]:
    variable = VISIBLE_VARIABLES.get(name.partition(":")[0])
    if variable is not None:
        return {variable: visible}
    # The order matters only where a card has no UUID and is named by its number, which is the one of nvidia-smi.
    return {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def choose_devices(
    request: DeviceRequest | Request,
    *,
    workers: int | None = None,
    inventory: Inventory,
    force: bool = False,
    max_workers: int | None = None,
) -> Placement:
    """Return which device each worker gets; `max_workers` limits only `auto` without a count."""
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise DeviceError(f"workers is {workers!r}, but a run needs a whole number of workers, 1 or more. (LS905)")
    wanted = with_workers(request if isinstance(request, Auto | Cpu | Named) else parse_request(request), workers)
    if isinstance(wanted, Cpu):
        return _on_cpu(wanted.count or 1, "")
    if isinstance(wanted, Named):
        return _choose_named(wanted, inventory, force=force)
    if inventory.is_faulty:
        raise DeviceError(
            f"auto looks for GPUs, but {inventory.problem}. Repair that, or use cpu:2 to train on the CPU. (LS904)"
        )
    why_none = _why_no_gpu(inventory)
    if why_none and wanted.min_free_bytes is None:
        return _on_cpu(wanted.count or min(NUM_CPU_WORKERS, max_workers or NUM_CPU_WORKERS), why_none)
    if why_none:
        raise DeviceError(
            f"device_ids asks for GPUs with {describe_bytes(wanted.min_free_bytes)} of free memory, but {why_none}. "
            "Use auto to train on the CPU in that case. (LS907)"
        )
    return _choose_free(wanted, inventory, force=force, max_workers=max_workers)


def find_occupants(gpu: Gpu, inventory: Inventory) -> str:
    """Return what makes a GPU busy ([Note: busy]): "held by alice, pid 123, python train.py"; empty if it is free."""
    holders = [holder for holder in gpu.holders if not holder.is_graphics and not holder.is_self]
    if holders:
        return "held by " + " and by ".join(describe_holder(holder, inventory) for holder in holders)
    unseen = find_unseen_bytes(gpu, inventory)
    return f"in use: {describe_bytes(unseen)} are held by a process that cannot be seen from here" if unseen else ""


def find_unseen_bytes(gpu: Gpu, inventory: Inventory) -> int:
    """Return how much of a GPU's memory is held by processes that cannot be seen ([Note: busy])."""
    total, free = gpu.memory_total_bytes, gpu.memory_free_bytes
    if total is None or free is None or any(holder.memory_bytes is None for holder in gpu.holders):
        return 0
    unseen = total - free - sum(holder.memory_bytes or 0 for holder in gpu.holders)
    usual = total // 2 if inventory.is_wsl else max(total // 20, _UNSEEN_BYTES)
    return unseen if unseen > usual else 0


def _on_cpu(num_workers: int, why: str) -> Placement:
    workers = counted(num_workers, "worker")
    return Placement(devices=(CPU,) * num_workers, reason=f"CPU, {workers}" + (f" ({why})" if why else ""))


def _why_no_gpu(inventory: Inventory) -> str:
    """Return why `auto` means the CPU on this machine; empty if it means GPUs, free or not."""
    if inventory.problem:
        return inventory.problem
    if not inventory.gpus:
        return "no GPU can be seen here"
    if inventory.cuda_visible_devices is not None and inventory.cuda_visible_devices.strip() in _HIDES_ALL:
        return f"{_hidden_by(inventory)} every GPU"
    return ""


def _choose_named(wanted: Named, inventory: Inventory, *, force: bool) -> Placement:
    groups = [[_find(name, inventory) for name in group] for group in wanted.groups]
    gpus = [gpu for group in groups for gpu in group]
    _check_twice(gpus, [name for group in wanted.groups for name in group])
    for gpu in gpus:
        if gpu.problem:
            raise DeviceError(f"device_ids asks for {label(gpu)}, which cannot be used: {gpu.problem}. (LS904)")
    if len(groups) > 1 and inventory.nccl_version < _NCCL_JOINS_INSTANCES and not force:
        for gpu, why in _first_of_each_card(gpus)[1].items():
            raise DeviceError(
                f"device_ids asks for {short_label(gpu)}, which {why}. Name instances of different cards, or, if the "
                "workers do not use NCCL, take these with --force (in Python force=True). (LS906)"
            )
    busy = [f"{short_label(gpu)} is {by}" for gpu in gpus if (by := find_occupants(gpu, inventory))]
    if busy and not force:
        raise DeviceError(
            f"device_ids asks for GPUs that are not free: {'; '.join(busy)}. Name others, use auto to get free ones, "
            "or take these with --force (in Python force=True). (LS903)"
        )
    return _place(groups, f"taken by force: {'; '.join(busy)}" if busy else "")


def _find(name: GpuName, inventory: Inventory) -> Gpu:
    if inventory.problem or not inventory.gpus:
        why = inventory.problem or "no GPU can be seen here"
        raise DeviceError(f'device_ids asks for GPU {name}, but {why}. Use "cpu:2" to train on the CPU. (LS902)')
    if isinstance(name, int) or ":" in name:
        found = [gpu for gpu in inventory.gpus if gpu_number(gpu) == str(name)]
    else:
        found = [gpu for gpu in inventory.gpus if (gpu.uuid or "").lower().startswith(name.lower())]
    if len(found) > 1:
        uuids = " and ".join(str(gpu.uuid) for gpu in found)
        raise DeviceError(f"device_ids has {name!r}, but {uuids} begin with it. Give more letters of the UUID. (LS901)")
    if not found:
        raise DeviceError(f"device_ids asks for GPU {name}, but {_what_is_here(name, inventory.gpus)}. (LS902)")
    if not found[0].is_visible:
        shown = ", ".join(short_label(gpu) for gpu in inventory.gpus if gpu.is_visible) or "none"
        raise DeviceError(
            f"device_ids asks for {short_label(found[0])}, which {_hidden_by(inventory)} from this process. Unset the "
            f"variable, or name a GPU that it shows: {shown}. (LS906)"
        )
    return found[0]


def _what_is_here(name: GpuName, gpus: Sequence[Gpu]) -> str:
    instances = [gpu_number(gpu) for gpu in gpus if gpu.index == name]
    if instances:
        return f"it is split by MIG. Name one of its instances: {', '.join(instances)}"
    numbers = ", ".join(gpu_number(gpu) for gpu in gpus)
    return f"the only ones here are {numbers}; `lockstep devices` lists them"


def _check_twice(gpus: Sequence[Gpu], names: Sequence[GpuName]) -> None:
    for number, times in Counter(gpu_number(gpu) for gpu in gpus).items():
        if times > 1:
            used = [str(name) for gpu, name in zip(gpus, names, strict=True) if gpu_number(gpu) == number]
            how = f" (as {' and as '.join(used)})" if len(set(used)) > 1 else ""
            raise DeviceError(f"device_ids names GPU {number} twice{how}; each worker needs a GPU of its own. (LS901)")


def _choose_free(wanted: Auto, inventory: Inventory, *, force: bool, max_workers: int | None) -> Placement:
    obstacles = [_find_obstacle(gpu, wanted, inventory, force=force) for gpu in inventory.gpus]
    takeable = [gpu for gpu, obstacle in zip(inventory.gpus, obstacles, strict=True) if not obstacle]
    takeable.sort(key=lambda gpu: (bool(find_occupants(gpu, inventory)), -(gpu.memory_free_bytes or 0)))
    if wanted.count != 1 and inventory.nccl_version < _NCCL_JOINS_INSTANCES:
        takeable, apart = _first_of_each_card(takeable)
        obstacles = [apart.get(gpu, why) for gpu, why in zip(inventory.gpus, obstacles, strict=True)]
    num_workers = wanted.count or min(len(takeable), max_workers or len(takeable))
    if not num_workers or num_workers > len(takeable):
        raise DeviceError(f"{_too_few(wanted, inventory, obstacles)} (LS903)")
    chosen = [gpu for gpu in inventory.gpus if gpu in takeable[:num_workers]]
    refused = [f"{short_label(gpu)} {why}" for gpu, why in zip(inventory.gpus, obstacles, strict=True) if why]
    shared = [f"{short_label(gpu)} is also {by}" for gpu in chosen if (by := find_occupants(gpu, inventory))]
    spare = [f"{short_label(gpu)} is free too" for gpu in takeable if gpu not in chosen]
    if spare and wanted.count is None:
        spare.append(f"at most {counted(num_workers, 'worker')} can have a shard, a new run more with more num_shards")
    return _place([[gpu] for gpu in chosen], "; ".join((*shared, *refused, *spare)))


def _first_of_each_card(gpus: Sequence[Gpu]) -> tuple[list[Gpu], dict[Gpu, str]]:
    """Return the first GPU of each card, and why each of the others is not taken. [Note: one instance per card]."""
    first: dict[int, Gpu] = {}
    for gpu in gpus:
        first.setdefault(gpu.index, gpu)
    others = {
        gpu: f"is on the card of {short_label(first[gpu.index])}, and NCCL before 2.30 does not join two instances of "
        "one card"
        for gpu in gpus
        if gpu is not first[gpu.index]
    }
    return list(first.values()), others


def _find_obstacle(gpu: Gpu, wanted: Auto, inventory: Inventory, *, force: bool) -> str:
    """Return why `auto` does not take a GPU, as in "is held by alice"; empty if it does."""
    if not gpu.is_visible:
        return f"is hidden by CUDA_VISIBLE_DEVICES={inventory.cuda_visible_devices}"
    if gpu.problem:
        return f"cannot be used: {gpu.problem}"
    if wanted.min_free_bytes is not None:
        if gpu.memory_free_bytes is None:
            return "does not report its free memory"
        if gpu.memory_free_bytes >= wanted.min_free_bytes:
            return ""
        by = find_occupants(gpu, inventory)
        return f"has {describe_bytes(gpu.memory_free_bytes)} of free memory" + (f" ({by})" if by else "")
    by = "" if force else find_occupants(gpu, inventory)
    return by and f"is {by}"


def _too_few(wanted: Auto, inventory: Inventory, obstacles: Sequence[str]) -> str:
    num_free = sum(not obstacle for obstacle in obstacles)
    size = "" if wanted.min_free_bytes is None else f" with {describe_bytes(wanted.min_free_bytes)} of free memory"
    expected = "auto needs a GPU"
    if wanted.count is not None:
        needs = "needs" if wanted.count == 1 else "need"
        expected = f"{counted(wanted.count, 'worker')} {needs} {counted(wanted.count, 'GPU')}"
    lines = [f"  {label(gpu)} {why or 'is free'}" for gpu, why in zip(inventory.gpus, obstacles, strict=True)]
    return "\n".join(
        [
            f"{expected}{size}, but of {len(obstacles)} here {num_free or 'none'} can be taken:",
            *lines,
            _advise(wanted, inventory, obstacles),
        ]
    )


def _advise(wanted: Auto, inventory: Inventory, obstacles: Sequence[str]) -> str:
    """Return what the user can do. Waiting and sharing help only if other processes use the missing GPUs."""
    num_free = sum(not obstacle for obstacle in obstacles)
    usable = [gpu for gpu in inventory.gpus if gpu.is_visible and not gpu.problem]
    num_held = sum(bool(find_occupants(gpu, inventory)) for gpu in usable)
    ways = [f"ask for at most {num_free}"] if num_free else []
    if num_held and (wanted.count or 1) <= len(usable):
        ways.append("wait")
        if wanted.min_free_bytes is None:
            ways.append("share one (auto@10GiB asks for free memory alone)")
            ways.append("take busy ones with --force (in Python force=True)")
    if wanted.min_free_bytes is not None and (wanted.count or 1) <= len(usable):
        ways.append("ask for less memory")
    if any(not gpu.is_visible for gpu in inventory.gpus):
        ways.append("unset CUDA_VISIBLE_DEVICES or name other GPUs in it")
    ways.append(f'use "cpu:{wanted.count or NUM_CPU_WORKERS}" to train on the CPU')
    advice = ", or ".join((", ".join(ways[:-1]), ways[-1])) if len(ways) > 1 else ways[0]
    return f"{advice[0].upper()}{advice[1:]}."


def _hidden_by(inventory: Inventory) -> str:
    return f"CUDA_VISIBLE_DEVICES={inventory.cuda_visible_devices or repr('')} hides"


def _place(groups: Sequence[Sequence[Gpu]], why: str) -> Placement:
    devices = tuple(
        Device(
            name=f"{group[0].kind}:0",
            visible=",".join(gpu.cuda_name for gpu in group),
            label=" and ".join(label(gpu) for gpu in group),
        )
        for group in groups
    )
    names = ", ".join("+".join(short_label(gpu) for gpu in group) for group in groups)
    unequal = _describe_kinds(gpu for group in groups for gpu in group)
    return Placement(devices=devices, reason=names + (f" ({why})" if why else ""), hint=unequal)


def _describe_kinds(gpus: Iterable[Gpu]) -> str:
    """Return a hint if GPUs are of several models or sizes, to the GiB: the driver keeps a little for itself."""
    kinds: dict[str, list[str]] = {}
    for gpu in gpus:
        size = "" if gpu.memory_total_bytes is None else f", {gpu.memory_total_bytes / 2**30:.0f} GiB"
        kinds.setdefault(f"{gpu.name}{size}", []).append(short_label(gpu))
    if len(kinds) < 2:  # noqa: PLR2004
        return ""
    parts = "; ".join(f"{', '.join(members)}: {kind}" for kind, members in kinds.items())
    return f'The cards are unequal ({parts}): balance="speed" moves shards to the faster ones and changes no result.'
