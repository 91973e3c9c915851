"""The environment of a script's worker: torchrun's variables, and which GPUs it sees. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.devices import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunSettings:
    """The values of torchrun's variables for one worker."""

    rank: int
    world_size: int
    """How many there are, all on this host."""
    port: int
    """Port of the rendezvous, on loopback."""
    is_served: bool
    """Whether the launcher serves the rendezvous; if not, rank 0 does."""
    run_id: str
    """A unique name of this launch."""
    own_card_only: bool
    """Whether the worker sees its own GPU alone, as number 0."""
    num_restarts: int = 0
    max_restarts: int = 0


def world_variables(settings: TorchrunSettings) -> dict[str, str]:
    """Return the variables that torchrun sets."""
    rank, world_size = str(settings.rank), str(settings.world_size)
    return {
        "RANK": rank,
        "LOCAL_RANK": "0" if settings.own_card_only else rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(settings.port),
        "TORCHELASTIC_RUN_ID": settings.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(settings.num_restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(settings.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": str(settings.is_served),
    }


def device_variables(placement: Placement, rank: int, *, own_card_only: bool) -> Mapping[str, str]:
    """Return the variables that show a worker all cards of the launch, in rank order, or only its own."""
    return placement.devices[rank].variables() if own_card_only else placement.variables_of_all()


def share_cores(num_cores: int, num_workers: int) -> int:
    """Return how many threads each worker gets by default."""
    return max(num_cores // num_workers, 1)
