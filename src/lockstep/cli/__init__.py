"""The command `lockstep`. Each command has one file, which parses arguments, calls the library and prints the result.

Invariants: bad input gives one message on standard error and exit code 2, with a traceback only under `--debug`. A
failure of the user's own code gives its traceback and exit code 1. Ctrl-C gives exit code 130.
"""
