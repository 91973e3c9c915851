"""What every test relies on."""

import signal

# A shell's background job begins with SIGINT and SIGQUIT ignored, one under nohup with SIGHUP too, and hands that on to
# whatever it starts. Tests of Ctrl-C and of a closed terminal are about processes that were started from a terminal.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
