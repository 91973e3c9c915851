"""torch's deterministic switches, which hold for the whole process, as long as a trainer wants them."""

from typing import final

import torch

from lockstep.processes.reproducibility import set_deterministic
from lockstep.torch_private.compiler_import import is_inductor_deterministic, set_inductor_deterministic


@final
class DeterminismSwitches:
    """Sets the switches, and restores them.

    The environment variables that `set_deterministic` sets as well stay: what reads them has done so already.
    """

    def __init__(self, *, deterministic: bool) -> None:
        self._is_set = True
        self._debug_mode = torch.get_deterministic_debug_mode()
        self._fills_memory = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        self._cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
        self._compiler = is_inductor_deterministic()
        set_deterministic(deterministic)

    def restore(self) -> None:
        if not self._is_set:
            return
        self._is_set = False
        torch.set_deterministic_debug_mode(self._debug_mode)
        torch.utils.deterministic.fill_uninitialized_memory = self._fills_memory  # type: ignore[attr-defined]
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = self._cudnn
        set_inductor_deterministic(self._compiler)
