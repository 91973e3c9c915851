"""A worker's rank and the world size, from the arguments of `init_process_group` or else the environment."""

from collections.abc import Mapping
from dataclasses import fields

from lockstep.errors import GroupError, counted
from lockstep.settings import WorldVariables

_HIGHEST_PORT = 65535


def find_rank_and_size(
    variables: WorldVariables, init_method: str | None, rank: int, world_size: int, *, has_store: bool
) -> tuple[int, int]:
    """Return rank and world size; for `env://`, what is -1 is taken from the environment. Pure."""
    if has_store or not (init_method or "env://").startswith("env://"):
        if world_size < 0 or rank < 0:
            raise GroupError(
                f"rank is {rank} and world_size is {world_size}, but {init_method or 'a store'} provides neither: "
                "give both. (LS101)"
            )
    else:
        _check_environment(variables, rank, world_size)
        rank = rank if rank >= 0 else int(variables.rank or "")
        world_size = world_size if world_size >= 0 else int(variables.world_size or "")
    if not 0 <= rank < world_size:
        raise GroupError(
            f"Rank {rank} is outside a world of {counted(world_size, 'worker')}: ranks are 0 to {world_size - 1}. "
            "Check that the number of workers counts processes, not hosts. (LS102)"
        )
    return rank, world_size


def _check_environment(variables: WorldVariables, rank: int, world_size: int) -> None:
    given: Mapping[str, bool] = {"rank": rank >= 0, "world_size": world_size >= 0}
    values = {field.name: getattr(variables, field.name) for field in fields(variables)}
    needed = [name for name in ("rank", "world_size", "master_addr", "master_port") if not given.get(name)]
    missing = [name.upper() for name in needed if not values[name]]
    for name in needed:
        if values[name] and name != "master_addr" and not values[name].isdecimal():
            expected = "a number from 0 to WORLD_SIZE - 1" if name == "rank" else "a whole number"
            source = "" if variables.launcher == "the environment" else f", set by {variables.launcher}"
            raise GroupError(
                f"{name.upper()} is {values[name]!r} in the environment{source}, expected {expected}. (LS102)"
            )
    if missing:
        raise GroupError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set in the environment, so this "
            f"worker has no rank in a world. {variables.remedy} (LS101)"
        )
    if not 0 < int(values["master_port"]) <= _HIGHEST_PORT:
        raise GroupError(
            f"MASTER_PORT is {values['master_port']} in the environment, expected 1 to {_HIGHEST_PORT}. (LS102)"
        )
