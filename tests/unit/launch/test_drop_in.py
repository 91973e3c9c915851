import os

import pytest

from lockstep.launch.environment import STARTUP_FOLDER, command_of_script, has_drop_in, with_drop_in, without_drop_in


@pytest.mark.parametrize("given", [None, "", "/a", f"/a{os.pathsep}/b", f"/a{os.pathsep}"])
def test_the_folder_comes_first_and_goes_without_a_trace(given: str | None) -> None:
    changed = with_drop_in(given)
    assert changed.split(os.pathsep)[0] == STARTUP_FOLDER
    assert has_drop_in(changed)
    assert not has_drop_in(given)
    assert with_drop_in(changed) == changed
    assert without_drop_in(changed) == (given or None)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python -m lockstep.drop_in train.py --lr 1", "python train.py --lr 1"),
        ("python -u -W error -m lockstep.drop_in train.py", "python -u -W error train.py"),
        ("python -um lockstep.drop_in train.py", "python -u train.py"),
        ("python -mlockstep.drop_in train.py", "python train.py"),
        ("python -m lockstep.drop_in -m package.train -m x", "python -m package.train -m x"),
        ("python -m coverage run -m lockstep.drop_in train.py", "python -m coverage run train.py"),
        ("python train.py --model lockstep.drop_in", None),
        ("python train.py --m lockstep.drop_in", None),
        ("python", None),
    ],
)
def test_the_script_gets_a_command_of_its_own(command: str, expected: str | None) -> None:
    assert command_of_script(command.split()) == (None if expected is None else expected.split())
