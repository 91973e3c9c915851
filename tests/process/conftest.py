"""What tests of several processes share."""

from collections.abc import Iterator

import pytest
from tests.process.commands import lockstep_here
from tests.process.ranks import JoinGroup, RankPool, join_default_group
from tests.process.scenarios import ShmScenarios
from tests.process.warm import warm_workers

__all__ = ["lockstep_here", "pair", "shm_scenarios", "warm_workers", "worlds"]


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two ranks with a default group, until the file is done."""
    with RankPool(2, join_default_group) as pool:
        yield pool


@pytest.fixture(scope="module", params=[("gloo", 2), ("gloo", 3), ("shm", 3)], ids=str)
def worlds(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Ranks whose default group is one of torch's set-up, of each backend and number of workers in turn."""
    backend, world_size = request.param
    with RankPool(world_size, JoinGroup(backend)) as pool:
        yield pool


@pytest.fixture(scope="module")
def shm_scenarios() -> Iterator[ShmScenarios]:
    """Ranks that run scenarios on groups over shared memory, until the file is done."""
    scenarios = ShmScenarios()
    yield scenarios
    scenarios.close()
