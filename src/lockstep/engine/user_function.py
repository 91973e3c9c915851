"""Calling the loss function, or a metric, for one slice."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from torch import nn

from lockstep.data.keyed import OwnGenerators
from lockstep.errors import LossError
from lockstep.torch_private.compiler import is_compiler_error

_PLACE = "place"
_REMEDIES = {
    "No working C++ compiler": (
        "torch.compile writes C++ for the CPU, and this machine has no C++ compiler that works. Install g++ (Debian, "
        "Ubuntu: apt install g++), name one in the environment variable CXX, or leave compile out."
    ),
    "Expected more than 1 value per channel": (
        "A normalization over the batch got a slice with one value per channel, which has no variance. Slices are "
        "smallest in the last batch of an epoch: leave it out with ShardedLoader(..., drop_last=True), in a config "
        "drop_last: true; or choose a batch_size, or fewer shards, with which every slice has two samples or more; or "
        "use GroupNorm."
    ),
    "does not have a deterministic implementation": (
        "An operation has no deterministic form, and the trainer has switched to deterministic operators. Replace the "
        "operation, or make the Trainer with deterministic=False (in a config: deterministic: false); then the weights "
        "may have other bits in each run."
    ),
    "backward through the graph a second time": (
        "The loss that the loss function returned has been through backward already. Return the loss and leave "
        "backward, zero_grad and optimizer.step to Trainer.step; with retain_graph=True the gradient would count "
        "twice."
    ),
}
"""What to do, by a part of torch's message, where that does not help in a trainer."""
HINTS = {
    "is out of bounds.": (
        "A class number is negative, or not below the number of scores that the model returns. Let the model return a "
        "score for each class, and count classes from 0."
    ),
    "expected target dtype to be Long": (
        "Class numbers are whole numbers of 64 bits: target.long(). Targets that are no classes need another loss, "
        "such as mse_loss."
    ),
    "Expected target size": (
        "Classes are the second dimension of the scores: of scores [batch, length, classes] give "
        "scores.transpose(1, 2), or flatten both: scores.flatten(0, 1), targets.flatten()."
    ),
    "index -100 is out of bounds": (
        "Targets of -100 do not count: leave them out, as in class_weights[targets[targets != -100]].sum()."
    ),
    "multi-target not supported": (
        "cross_entropy takes class numbers of shape [N], without a last dimension of one: target.squeeze(1)."
    ),
    "Expected floating point type for target with class probabilities": (
        "The target has the shape of the scores, so that it is taken for probabilities, which are floating-point "
        "numbers. Of one-hot targets give target.argmax(1), of others target.float()."
    ),
    "can't be cast to the desired output type Long": (
        "This loss takes floating-point targets: target.float(), also where they are only 0 and 1."
    ),
    "mat1 and mat2 must have the same dtype": (
        "The input has another dtype than the weights. Let the data set return float32: torch.as_tensor(values, "
        "dtype=torch.float32). NumPy's numbers are float64 unless they are told not to be."
    ),
    "type (float) should be the same": (
        "The input has another dtype than the weights. Let the data set return float32; of pictures in bytes "
        "image.float() / 255."
    ),
}
"""What is wrong with the data or the model, by a part of torch's message."""
_CANNOT_COMPILE = (
    "torch.compile cannot make one graph of the model's forward. Leave compile out to see whether the forward works "
    "without it. If it does, change what the error below names, or leave compile out and compile the parts that can be "
    "compiled: model.encoder.compile(dynamic=False, fullgraph=True)."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlace:
    """Which shard of which step a loss function computes: `def loss(model, batch, place)`.

        def loss(model: nn.Module, batch: tuple[Tensor, Tensor], place: ls.StepPlace) -> Tensor:
            strength = min(1.0, place.global_step / 1000)
            return strength * loss_fn(model, batch)

    It takes the place of a counter, which would count the shards that this worker runs and so depend on the number of
    workers. All numbers count from 0.
    """

    epoch: int
    """The epoch."""
    step: int
    """The step in the epoch."""
    global_step: int
    """How many steps of the run were taken before, those of earlier epochs included."""
    shard: int
    """The shard. What depends on it depends on `num_shards`, not on the number of workers."""
    num_shards: int
    """How many shards the run has."""


@final
class UserFunction:
    def __init__(self, function: Callable[..., Any], generators: OwnGenerators) -> None:
        self.generators = generators
        self.takes_place = _takes_place(function)
        self.function = function

    def __call__(
        self, model: nn.Module, data: Any, place: StepPlace | None = None, *, begin_again: Callable[[], Any]
    ) -> Any:
        """Return what the function returns; the global generators must have been seeded for the slice.

        Where the call has made a generator, which drew from a seed of its own, it is made once more: `begin_again` puts
        back what the first has changed, seeds the global generators and returns the data.
        """
        for is_first in (True, False):
            self.generators.seed_as_global()
            with EXPLAINED_ERRORS:
                found = self.function(model, data) if place is None else self.function(model, data, place=place)
            if not is_first or not self.generators.has_made():
                break
            data = begin_again()
        return found


@final
class ExplainedErrors:
    """A class, because it is entered twice for each shard: a generator takes three times as long."""

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if not isinstance(error, Exception):
            return
        remedy = _find_remedy(error)
        if remedy is None:
            hint = find_part(HINTS, error)
            if hint is not None and isinstance(error, RuntimeError | IndexError):
                error.add_note(f"{hint} (LS530)")
            return
        first_line = str(error).replace("raised:\n", "raised: ").splitlines()[0]
        raise LossError(f"{remedy} The error of torch: {first_line} (LS530)") from error


EXPLAINED_ERRORS: Final = ExplainedErrors()


def _takes_place(function: Callable[..., Any]) -> bool:
    try:
        parameter = inspect.signature(function).parameters.get(_PLACE)
    except (TypeError, ValueError):  # a built-in without a signature
        return False
    return parameter is not None and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY


def _find_remedy(error: Exception) -> str | None:
    is_compilers = is_compiler_error(error)
    if not (is_compilers or isinstance(error, RuntimeError | ValueError)):
        return None
    found = find_part(_REMEDIES, error)
    return _CANNOT_COMPILE if found is None and is_compilers else found


def find_part(texts: Mapping[str, str], error: Exception) -> str | None:
    return next((text for part, text in texts.items() if part in str(error)), None)
