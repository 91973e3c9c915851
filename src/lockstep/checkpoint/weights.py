"""Loading a model's weights out of a checkpoint, without the rest of the run."""

from pathlib import Path

from torch import nn

from lockstep.checkpoint.file import load_checkpoint
from lockstep.errors import CheckpointError


def load_weights(path: str | Path, model: nn.Module) -> None:
    """Copy the parameters and buffers in the checkpoint at `path` into `model`, wherever it lies (local).

    Raises:
        CheckpointError: The file cannot be read, or its names or shapes are not the model's; lists the differences.
    """
    tensors = load_checkpoint(Path(path)).model
    try:
        model.load_state_dict(dict(tensors))
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit the model. {error}") from error
