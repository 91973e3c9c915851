"""Print the unit tests of what differs from the main branch, for `make check`; all of them where that is unknown.

A change of a package is tested by the folder of its name in tests/unit. A module beside the packages is imported by
most of them, and so are the helpers of tests: then all are printed, as where nothing differs. What another package
makes of a change is tested by `make unit`, and by `make test` before it is merged.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALL = "tests/unit"
ALWAYS = ("tests/test_architecture.py", "tests/unit/test_codes.py")
"""They look at all modules, in seconds."""
SHARED = ("src/", "tests/support/", "tests/conftest.py", "pyproject.toml", "constraints.txt")
"""What all tests may depend on, besides the packages."""
MAIN = ("origin/main", "main")


def choose_tests(changed: Iterable[str]) -> list[str]:
    """Return the tests to run by the paths that differ."""
    found: set[str] = set()
    for name in changed:
        parts = Path(name).parts
        if parts[:2] == ("tests", "unit"):
            found.add("/".join(parts[:3]))
        elif parts[:2] == ("src", "lockstep") and len(parts) > 3:
            found.add(f"{ALL}/{parts[2]}")
        elif name.startswith(SHARED):
            return [ALWAYS[0], ALL]
    found = {each for each in found if (ROOT / each).exists()} - set(ALWAYS)
    return [*ALWAYS, *sorted(found)]


def find_changed() -> list[str]:
    """Return the paths that differ from the main branch, new ones included."""
    base = next((found for name in MAIN if (found := git("merge-base", "HEAD", name))), [])
    return [*git("diff", "--name-only", *base), *git("ls-files", "--others", "--exclude-standard")] if base else []


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


if __name__ == "__main__":
    changed = find_changed()
    sys.stdout.write(" ".join(choose_tests(changed) if changed else [ALWAYS[0], ALL]))
