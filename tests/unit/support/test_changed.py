"""Which unit tests `make check` chooses."""

import pytest
from tests.changed import ALL, ALWAYS, choose_tests


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (["src/lockstep/engine/update.py", "src/lockstep/comm/shm/work.py"], [f"{ALL}/comm", f"{ALL}/engine"]),
        (["tests/unit/data/test_order.py", "src/lockstep/data/order.py"], [f"{ALL}/data"]),
        (["tests/unit/test_settings.py"], [f"{ALL}/test_settings.py"]),
        (["tests/unit/engine/removed/test_of_old.py", "src/lockstep/removed/old.py"], [f"{ALL}/engine"]),
        (["docs/config.md", "src/lockstep/explanations/LS322.md", "tests/process/test_run.py"], []),
    ],
)
def test_a_package_is_tested_by_the_folder_of_its_name(changed: list[str], expected: list[str]) -> None:
    assert choose_tests(changed) == [*ALWAYS, *expected]


@pytest.mark.parametrize("name", ["src/lockstep/errors.py", "tests/support/turns.py", "pyproject.toml"])
def test_what_all_depend_on_is_tested_by_all(name: str) -> None:
    assert choose_tests(["src/lockstep/engine/update.py", name]) == [ALWAYS[0], ALL]
