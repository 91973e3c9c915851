"""Noticing that a shell has taken the condition of `auto:3>=20GiB` for a redirection."""

import os
import re
from pathlib import Path

from lockstep.errors import UsageError

_CONDITION = re.compile(r"=\s*(\d+(?:\.\d+)?\s*(?:gib|gb|mib|mb))", re.IGNORECASE)


def check_not_redirected(descriptor: int = 1) -> None:
    """Refuse to write to a file such as `=20GiB`, which a shell makes of `auto:3>=20GiB` without quotes."""
    try:
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115 - the link's own text
    except OSError:  # not Linux
        return
    if (found := _CONDITION.fullmatch(target.name)) is not None:
        raise UsageError(
            f"Standard output is the file {target.name}: the shell has read `>{target.name}` as a redirection, so the "
            f"condition on free memory is lost. Write it as @{found[1]}, for example device_ids=auto:3@{found[1]}, and "
            f"delete the file {target}. (LS820)"
        )
