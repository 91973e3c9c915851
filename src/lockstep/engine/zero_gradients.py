"""Gradients of zero for the parameters of a shard that has nothing to learn from.

In a plain loop samples of weight zero are in the batch like others: the parameters that they use have a gradient, of
zeros if nothing else uses them, and an optimizer with weight decay or momentum updates these. The shard's own mean is
often one of nothing, 0 / 0, whose backward gives NaN. So it is replaced by a sum of zeros over the same parameters.
"""

from torch import Tensor


def zero_over_parameters(loss: Tensor) -> Tensor | None:
    """Return a zero whose backward gives zeros to the parameters that a loss depends on, if it has some (local)."""
    zeros = [leaf.sum() * 0.0 for leaf in _find_leaves(loss)]
    if not zeros:
        return None
    first, *others = (zero.to(dtype=loss.dtype, device=loss.device) for zero in zeros)
    return sum(others, start=first)


def _find_leaves(loss: Tensor) -> list[Tensor]:
    """Return the leaves of a graph that require a gradient, in the order in which they are found."""
    found: list[Tensor] = []
    seen = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of AccumulateGrad
        if isinstance(leaf, Tensor):
            found.append(leaf)
        waiting.extend(following for following, _ in node.next_functions)
    return found
