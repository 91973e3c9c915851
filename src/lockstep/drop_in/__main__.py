"""`python -m lockstep.drop_in train.py ARGS`: become `python train.py ARGS`, with Lockstep's classes for torch's.

The process is replaced, so the script is `__main__` as ever: for pickles, for `mp.spawn`, for Lightning, which starts
the same command once per device.
"""

import os
import sys

from lockstep.launch.environment import command_of_script

_USAGE = "usage: python -m lockstep.drop_in SCRIPT ARGS, or -m lockstep.drop_in -m MODULE ARGS\n"


def main() -> None:
    if not sys.argv[1:]:
        sys.stderr.write(_USAGE)
        sys.exit(2)
    command = command_of_script(sys.orig_argv) or [sys.executable, *sys.argv[1:]]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *command[1:]])  # noqa: S606 - that is the point


if __name__ == "__main__":
    main()
