"""Plain attributes of modules that a forward changes: each worker runs other shards, so they would differ."""

import warnings

from torch import nn

_PLAIN = (bool, int, float, str)


def warn_of_counters(before: dict[str, object], after: dict[str, object]) -> None:
    """Warn of plain attributes of modules that a shard's forward has changed; both are by full name."""
    changed = [name for name, value in after.items() if name in before and before[name] != value]
    if changed:
        more = f" and {len(changed) - 1} more attributes" if len(changed) > 1 else ""
        warnings.warn(
            f"The forward of a shard has changed {changed[0]}{more} of the model, and each worker runs other shards. "
            "If what the model computes depends on it, its weights will depend on the number of workers: keep such "
            "state in a buffer (register_buffer), of which every shard of a step sees the same.",
            stacklevel=6,
        )


def plain_attributes(model: nn.Module) -> dict[str, object]:
    """Return the numbers and texts that modules keep in plain attributes, by full name."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in _PLAIN
    }
