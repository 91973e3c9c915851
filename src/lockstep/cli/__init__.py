"""The command `lockstep`: one file per command, which parses, calls and prints, and decides nothing.

Invariants: bad input is one message on standard error and exit code 2, without a traceback unless `--debug` is given;
a failure of the user's own code is shown with its traceback and exit code 1; Ctrl-C is exit code 130.
"""
