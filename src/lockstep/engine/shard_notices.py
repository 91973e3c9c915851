"""What shards mean for code that looks at a whole batch: found in the first step, by the worker of shard 0.

Two things have the same bits on any number of workers, and are still not what they are in a plain loop. A buffer that a
forward writes by rows, a memory bank or a queue, keeps the rows of shard 0 alone ([Note: buffers of shard 0]). A loss
that compares the samples of a batch with each other, as a contrastive loss does, sees those of one shard.

The first shows in the buffer: as many rows as the shard has samples are others, or all have moved by so many. The
second shows in the graph of the loss: a product of activations with activations that has a row and a column for each
sample, or adds over the samples. Parameters, also such as are computed from others, are no activations.
"""

import itertools
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.data import ShardedBatch
from lockstep.engine.losses import SliceLoss
from lockstep.errors import LossError
from lockstep.held_objects import Walk
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.torch_private.autograd import saved_by
from lockstep.torch_private.modules import tree_leaves

_NUM_VIEWS = 4
_NUM_NODES = 1 << 15
_NUM_LOADED = 6
"""So many samples are loaded again where a slice cannot be cut."""
_TOLERANCE = 0.6
"""The power of a dtype's precision that is rounding: 7e-5 of the loss for float32, 0.05 for bfloat16."""
_LAYERS = ("Addmm", "Mm", "Bmm", "Baddbmm", "Convolution", "Embedding", "Lstm", "MkldnnRnn", "ThnnFused", "CudnnRnn")
"""How the names of nodes begin that make activations."""
_SHAPES_ONLY = ("Expand", "Clone", "Alias", "Slice", "Div", "View", "ReshapeAlias", "UnsafeView")
"""Likewise of those between `x[:, None]` and what it is combined with."""


def buffers_of_users(networks: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the buffers of networks by name, but those of torch's own modules, such as BatchNorm's."""
    return {
        name: buffer
        for prefix, network in networks.items()
        for path, module in network.named_modules(prefix=prefix)
        if not str(getattr(type(module), "__module__", "")).startswith("torch.")
        for name, buffer in module.named_buffers(prefix=path, recurse=False)
    }


def warn_of_row_writes(
    before: Mapping[str, Tensor], now: Mapping[str, Tensor], num_samples: int, num_shards: int
) -> None:
    for name, buffer in now.items():
        if name in before and is_written_by_rows(before[name], buffer, num_samples):
            _warn(
                f"The forward writes the buffer {name} by rows, and of a step's {num_shards} shards it keeps what "
                f"shard 0 has written: the rows of {num_samples} samples, not of the whole batch. To have all rows, "
                "write them between two steps, or take fewer shards."
            )
            return


def warn_of_compared_samples(model: nn.Module, function: Any, loss: Tensor, num_samples: int, num_shards: int) -> bool:
    """Warn of a loss that compares samples with each other, before its backward; return whether it does (local)."""
    held = [each.value for each in Walk([("", model), ("", function)])]
    modules = [each for each in held if isinstance(each, nn.Module)]
    constants = {
        tuple(each.shape)
        for each in itertools.chain(held, *((*module.parameters(), *module.buffers()) for module in modules))
        if isinstance(each, Tensor)
    }
    compares = has_compared_samples(loss, num_samples, constants)
    if compares:
        _warn(
            f"The loss compares the samples of a slice with each other, and each of the {num_shards} shards of a step "
            f"has its own alone, {num_samples} in shard 0: a contrastive loss has the negatives of its shard, not of "
            "the whole batch. To have more, take fewer shards, or a queue of earlier samples."
        )
    return compares


def warn_of_pair(result: Any) -> None:
    """Warn of a loss that is returned as a pair of mean and weight: that of a metric is sum and weight (local)."""
    given = result.get("loss") if isinstance(result, Mapping) else result
    if type(given) is tuple:
        warnings.warn(
            "The loss function returned a pair. Of a loss it is the mean and its weight, of a metric the sum and its "
            "weight, so one is easily taken for the other. Return ls.Mean(total, weight), which is the same for both: "
            "here ls.Mean(loss * weight, weight), or the sum that the mean was made of. Pairs are still read as "
            "before. (LS507)",
            FutureWarning,
            stacklevel=stacklevel_of_user(),
        )


class SampleData(NamedTuple):
    """Some samples, collated, and how many they are."""

    data: Any
    num_samples: int


def split_samples(data: Any, num_samples: int, first: int) -> tuple[SampleData, ...]:
    """Return the first samples of a slice, and the others; nothing where no dimension says which are whose."""
    leaves = [each for each in tree_leaves(data) if isinstance(each, Tensor) and each.ndim]
    if num_samples < 2 or not leaves or any(len(each) != num_samples for each in leaves):  # noqa: PLR2004 - parts
        return ()

    def cut(value: Any, where: slice) -> Any:
        if isinstance(value, Tensor):
            return value[where] if value.ndim else value
        if isinstance(value, Mapping):
            return {key: cut(each, where) for key, each in value.items()}
        if not isinstance(value, list | tuple):
            return value
        if len(value) == num_samples and not any(isinstance(each, Tensor) and each.ndim for each in value):
            return value[where]  # texts, say
        items = [cut(each, where) for each in value]
        is_named = isinstance(value, tuple) and type(value) is not tuple
        return type(value)(*items) if is_named else type(value)(items)

    parts = slice(first), slice(first, None)
    return tuple(map(SampleData, (cut(data, part) for part in parts), (first, num_samples - first)))


def uses_batch_statistics(module: nn.Module) -> bool:
    """Whether a normalization has statistics of the batch in evaluation mode too."""
    is_batchnorm = isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
    return is_batchnorm and module.running_mean is None


def find_no_mean(
    data: SampleData, batch: ShardedBatch, compute: Callable[[Any, int], SliceLoss], compare: Callable[..., str]
) -> str:
    """Return how the loss of a slice is no mean over its samples, by cutting it, or else by loading some again."""
    num_samples, load_again = data.num_samples, batch.load_again
    # The halves of some slices are alike by chance; a single sample is not all code made for.
    firsts = [*dict.fromkeys((num_samples // 2, 1))]
    whole, problem, is_cut = compute(*data), "", False
    for cut in [split_samples(*data, first) for first in firsts]:
        with suppress(Exception):
            problem, is_cut = problem or (compare(whole, [cut]) if cut else ""), bool(cut)
    if load_again is None or (is_cut and not problem):
        return problem

    def load(places: Sequence[int]) -> SampleData:
        return SampleData(load_again(places, 0), len(places))

    if problem:  # or was it cut along another dimension, or a count of all its samples came with the parts?
        with suppress(Exception):
            cuts = [(load(range(first)), load(range(first, num_samples))) for first in firsts]
            problem = compare(whole, cuts) and problem
        return problem
    places = [*range(min(max(num_samples, 2), _NUM_LOADED, batch.num_samples))]
    if len(places) == 1:
        return ""
    whole = compute(*load(places))
    # All samples in both parts, so that none is padded to another length.
    firsts = [*dict.fromkeys((len(places) // 2, 1))]
    parts = [(load(places + 3 * places[:first]), load(places + 3 * places[first:])) for first in firsts]
    problem = compare(whole, parts, "with the first of its samples four times, and the last, it is")
    turned = load(places[::-1])  # of a collate function that draws, another loss
    return problem if problem and not compare(whole, [(turned, turned)]) else ""


def problem_of_mean(
    whole: SliceLoss,
    splits: Sequence[Sequence[SliceLoss]],
    dtypes: Iterable[torch.dtype],
    *,
    has_total: bool = False,
    of_parts: str = "of its parts",
) -> str:
    """Return how the loss of a slice is not the mean of those of its parts, but for rounding in `dtypes`; else "".

    `has_total`: the loss was returned as total and weight. Rounding is measured against the largest loss: that of all
    samples may be a small difference, as a critic's is.
    """
    found = whole.loss.detach().item()
    losses = [[each.loss.detach().item() for each in parts] for parts in splits]
    largest = max(map(abs, [found, *itertools.chain.from_iterable(losses)]))
    precision = max(torch.finfo(each).eps for each in (whole.loss.dtype, *dtypes) if each.is_floating_point)
    for values, parts in zip(losses, splits, strict=True):
        weights = [float(each.weight) for each in parts]
        mean = sum(map(operator.mul, values, weights)) / (sum(weights) or math.nan)
        # A number that came with the batch: each part's total was divided by that of the whole slice.
        if has_total and weights[0] and set(weights) == {float(whole.weight)}:
            mean = sum(values)
        if abs(found - mean) > precision**_TOLERANCE * largest + precision:  # not where there is no number
            return (
                f"of a slice it is {found:.6g}, and {of_parts} {values[0]:.6g} and {values[1]:.6g}, whose mean is "
                f"{mean:.6g} (weights {weights[0]:g} and {weights[1]:g}, without dropout)"
            )
    return ""


def no_mean(problem: str) -> LossError:
    return LossError(
        f"The loss is not a mean over samples: {problem}. The gradient of a step would depend on num_shards. Of a sum "
        "return the mean; of a mean over tokens, over targets that are not ignored, or with class weights, "
        "ls.Mean(total, weight): the sum, and what the mean divides it by. If the loss is to be another function of a "
        "shard's samples, such as a root, a ratio, or what batch statistics or pairs of samples give, say so with "
        "exact_mean=False, in a config exact_mean: false. (LS533)"
    )


def is_written_by_rows(before: Tensor, after: Tensor, num_samples: int) -> bool:
    """Whether so many rows or columns are others, or all have moved by so many."""
    if (
        before.shape != after.shape
        or not before.ndim
        or before.layout is not torch.strided
        or torch.equal(before, after)
    ):
        return False
    for dim in {0, before.ndim - 1}:
        size = before.shape[dim]
        is_other = (before != after).movedim(dim, 0).reshape(size, -1).any(1)
        for count in range(num_samples, min(size, _NUM_VIEWS * num_samples + 1), num_samples):
            # One after another where there is one number for each row: of counts of classes any may be others.
            is_run = int((is_other != is_other.roll(1)).sum()) == 2  # noqa: PLR2004 - it begins and ends
            if int(is_other.sum()) == count and (before.ndim > 1 or is_run):
                return True
            old, new = (each.movedim(dim, 0) for each in (before, after))
            if torch.equal(new[count:], old[:-count]) or torch.equal(new[:-count], old[count:]):
                return True
    return False


def has_compared_samples(loss: Tensor, num_samples: int, constants: set[tuple[int, ...]]) -> bool:
    """Whether a graph has a product of activations over pairs of samples; `constants` are shapes of what is no data."""
    rows = {num_samples * number for number in range(1, _NUM_VIEWS + 1)} if num_samples > 1 else set()
    return any(_compares(node, rows, constants) for node in _nodes(loss.grad_fn))


def _compares(node: Any, rows: set[int], constants: set[tuple[int, ...]]) -> bool:
    factors, shapes = _factors_of_pairs(node, rows)
    if None in factors:  # it may be data, or the weights of a layer that is not trained
        without = [shape for each, shape in zip(factors, shapes, strict=True) if each is None] if shapes else constants
        if any(shape in constants or shape[::-1] in constants for shape in without if rows & set(shape)):
            return False
    return bool(factors) and all(map(_is_activation, factors))


def _factors_of_pairs(node: Any, rows: set[int]) -> tuple[Sequence[Any], Sequence[tuple[int, ...]]]:
    """Return what a node combines, and the shapes where it knows them; nothing if not over pairs of so many rows."""
    kind, inputs = type(node).__name__, [each for each, _ in node.next_functions]
    if kind == "MmBackward0":
        one, other = shapes = [tuple(saved_by(node, f"{name}_sym_sizes")) for name in ("self", "mat2")]
        is_by_samples = one[0] in rows and other[1] in rows
        is_over_samples = one[1] in rows and one[0] == other[1]
        return (inputs, shapes) if is_by_samples or is_over_samples else ((), ())
    if kind == "ViewBackward0" and inputs and type(inputs[0]).__name__ == "BmmBackward0":  # einsum
        one, *sizes = saved_by(node, "self_sym_sizes")
        is_of_rows = one == 1 and rows >= set(sizes)
        return ([each for each, _ in inputs[0].next_functions] if is_of_rows else ()), ()
    if kind in {"CdistBackward0", "EuclideanDistBackward0", "PdistBackward0"}:
        shapes = [tuple(saved_by(node, name).shape) for name in (("self",) if kind[0] == "P" else ("x1", "x2"))]
        return (inputs, shapes) if rows >= {math.prod(shape[:-1]) for shape in shapes} else ((), ())
    is_pair = None not in inputs and sorted(map(_new_dim, inputs)) == [0, 1]  # x[:, None] - x[None]
    return (inputs if is_pair else ()), ()


def _is_activation(node: Any) -> bool:
    """Whether an operand was computed from data by a layer; what has no gradient counts as data."""
    return node is None or any(
        type(each).__name__.startswith("Embedding")
        or (type(each).__name__.startswith(_LAYERS) and any(one is None for one, _ in each.next_functions))
        for each in _nodes(node)
    )


def _new_dim(node: Any) -> int:
    """Return which dimension `x[None]` or `x[:, None]` has added, if that is the last thing done to x; -1 if not."""
    while node is not None and type(node).__name__.startswith(_SHAPES_ONLY):
        node = node.next_functions[0][0] if node.next_functions else None
    return int(saved_by(node, "dim")) if type(node).__name__ == "UnsqueezeBackward0" else -1


def _nodes(root: Any) -> Iterator[Any]:
    seen, waiting = {root, None}, [root] if root is not None else []
    for node in waiting:
        yield node
        if len(seen) < _NUM_NODES:
            new = {each: None for each, _ in node.next_functions if each not in seen}
            seen.update(new)
            waiting.extend(new)


def _warn(text: str) -> None:
    warnings.warn(f"{text} It is the same on any number of workers. (LS532)", stacklevel=stacklevel_of_user())
