"""Classes of what callbacks are given: of any type here, as they import callbacks; `callback_types.pyi` has them."""

from typing import Any

Trainer = StepResult = Continued = Any
