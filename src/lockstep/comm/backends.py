"""The backends that Lockstep adds to torch.distributed: "shm", and "checked", which `check=True` asks for."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from lockstep.comm.checked import CheckedProcessGroup, check_group
from lockstep.comm.exit_notice import report_uncaught_exceptions
from lockstep.comm.shm.group import ShmProcessGroup, make_shm_group
from lockstep.comm.shm.rendezvous import GroupMembers, NotShared
from lockstep.errors import PeerLostError


def register_backends() -> None:
    """Make torch.distributed know them; doing so again changes nothing (local)."""
    if not dist.is_available():
        return
    if not hasattr(dist.Backend, "SHM"):
        dist.Backend.register_backend("shm", _make_shm, extended_api=True, devices=["cpu"])
    if not hasattr(dist.Backend, "CHECKED"):
        dist.Backend.register_backend("checked", _make_checked, extended_api=True, devices=["cpu", "cuda"])


def _make_shm(options: Any, _: Any = None) -> ShmProcessGroup | CheckedProcessGroup:
    """Make the group that torch asks for (collective over its ranks)."""
    report_uncaught_exceptions()
    members = _read_members(options)
    found = make_shm_group(options.store, options.group_rank, options.group_size, options.timeout, members)
    if not isinstance(found, NotShared):
        return found
    if options.group_rank == 0:
        warnings.warn(
            f"The shm backend uses Gloo for this group, because {found.reason}. Calls are compared all the same.",
            stacklevel=2,
        )
    return check_group(options.store, options.group_rank, options.timeout, {"cpu": "gloo"}, members)


def _make_checked(options: Any, backends: Mapping[str, str] | None = None) -> CheckedProcessGroup:
    """Make the group that torch asks for (collective over its ranks).

    `backends` is what `init_process_group` gave as options: a backend for each device. A subgroup gets none, for
    `new_group` hands on the name of the default group's backend but not its options.
    """
    report_uncaught_exceptions()
    if backends is None:
        default: Any = dist.distributed_c10d._get_default_group()  # noqa: SLF001 - torch has no public name for it
        backends = default.backend_names
    return check_group(options.store, options.group_rank, options.timeout, backends, _read_members(options))


def _read_members(options: Any) -> GroupMembers:
    """Return who the ranks of the group are that torch asks for (local)."""
    names = tuple(options.global_ranks_in_group or range(options.group_size))  # torch lists none for the default group

    def find_lost() -> PeerLostError | None:
        default: object = dist.GroupMember.WORLD
        return default.find_lost(names) if isinstance(default, ShmProcessGroup | CheckedProcessGroup) else None

    return GroupMembers(names=names, find_lost=find_lost)
