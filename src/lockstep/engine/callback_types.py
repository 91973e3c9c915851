"""The classes of what callbacks are given, for annotations.

Type checkers and editors read `callback_types.pyi`, which has them. They import callbacks themselves, so here, in what
the program imports, each is anything.
"""

from typing import Any

Trainer = StepResult = Continued = Any
