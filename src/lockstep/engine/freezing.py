"""A callback that keeps parameters as they are for the first epochs of a run."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, final

from torch import nn

from lockstep.engine.callbacks import Callback


@final
class Freeze(Callback):
    """Freezes parameters until an epoch begins, and trains them from then on.

    The optimizer is made over all parameters as ever: those that are frozen have no gradient, and it leaves them out.
    Whether a parameter is frozen follows from the place in the data, so there is no state to save.

    Args:
        names: A pattern of parameter names, or several: `"backbone.*"`. `*` stands for anything.
        until_epoch: The first epoch, counted from 0, in which they are trained.

    Raises:
        ValueError: In `on_start`: no parameter that is to be trained has such a name, or every one.
    """

    def __init__(self, names: str | Sequence[str], *, until_epoch: int) -> None:
        if isinstance(until_epoch, bool) or not isinstance(until_epoch, int) or until_epoch < 1:
            raise ValueError(f"until_epoch is {until_epoch!r}, expected a whole number of epochs, 1 or more. (LS526)")
        self.names = [names] if isinstance(names, str) else list(names)
        self.until_epoch = until_epoch
        self._frozen: list[nn.Parameter] | None = None

    def on_start(self, trainer: Any) -> None:
        """Freeze the parameters, if the run is not there yet."""
        if self._frozen is None:
            self._frozen = self._find(trainer.model)
        self._set(trainer.cursor.epoch)

    def on_epoch(self, trainer: Any, epoch: int) -> None:
        """Train them from the next epoch on, if it is the one."""
        del epoch
        self._set(trainer.cursor.epoch)

    def _set(self, epoch: int) -> None:
        for parameter in self._frozen or ():
            parameter.requires_grad_(epoch >= self.until_epoch)

    def _find(self, model: nn.Module) -> list[nn.Parameter]:
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        for pattern in self.names:
            if not any(fnmatchcase(name, pattern) for name in trained):
                raise ValueError(
                    f"Freeze is to freeze {pattern!r}, but no trained parameter has such a name. Their names "
                    f"begin with {', '.join(dict.fromkeys(name.partition('.')[0] for name in trained))}. (LS526)"
                )
        found = [each for name, each in trained.items() if any(fnmatchcase(name, pattern) for pattern in self.names)]
        if len(found) == len(trained):
            raise ValueError(
                f"Freeze is to freeze {', '.join(self.names)}: every parameter. Nothing would be trained. (LS526)"
            )
        return found
