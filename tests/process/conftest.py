"""What tests of several processes share."""

from collections.abc import Iterator

import pytest
from tests.process.scenarios import ShmScenarios
from tests.process.warm import warm_workers

__all__ = ["shm_scenarios", "warm_workers"]


@pytest.fixture(scope="module")
def shm_scenarios() -> Iterator[ShmScenarios]:
    """Ranks that run scenarios on groups over shared memory, until the file is done."""
    scenarios = ShmScenarios()
    yield scenarios
    scenarios.close()
