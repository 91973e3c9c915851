"""The samples and the order of an epoch, and the cut of a step: pure functions of (seed, epoch, step)."""

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lockstep.shards import derive_seed, split_evenly

_POOL_BATCHES = 50
"""Of how many batches the samples are sorted by length together: more give less padding, fewer a more random order."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The order of each epoch: a function of (seed, epoch), the same on every worker.

    An order consists of *draws*. Sample i that comes for the k-th time in an epoch, counted from 0, is the draw
    `i + k * num_samples`: each time it is loaded in another random state.
    """

    num_samples: int
    batch_size: int
    seed: int
    shuffle: bool
    weights: Tensor | None = None
    """How often samples are drawn, in proportion; None for each once."""
    lengths: Tensor | None = None
    """By which samples are put into batches with others of similar length; None for any."""

    def order(self, epoch: int, *, each_once: bool = False) -> list[int]:
        """Return the draws of an epoch; without the weights if each sample is to come once."""
        if self.weights is not None and not each_once:
            draws = weighted_order(self.weights, seed=self.seed, epoch=epoch)
        else:
            draws = epoch_order(self.num_samples, seed=self.seed, epoch=epoch, shuffle=self.shuffle)
        if self.lengths is None:
            return draws
        return bucketed_order(draws, self.lengths, batch_size=self.batch_size, seed=self.seed, epoch=epoch)

    def __str__(self) -> str:
        """Return in words what the order depends on besides the seed: equal for equal orders."""
        order = "shuffled" if self.shuffle else "in order"
        if self.weights is not None:
            order = f"drawn by weights {_fingerprint(self.weights)}"
        return order if self.lengths is None else f"{order}, in batches of similar lengths {_fingerprint(self.lengths)}"


def epoch_order(num_samples: int, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    if not shuffle:
        return list(range(num_samples))
    generator = torch.Generator()
    generator.manual_seed(derive_seed("order", seed, epoch))
    return torch.randperm(num_samples, generator=generator).tolist()


def weighted_order(weights: Tensor, *, seed: int, epoch: int) -> list[int]:
    """Return the draws of one epoch, as many as there are samples, with replacement in proportion to their weights.

    A draw is the index of a sample, plus the number of samples for each time that it was drawn before.
    """
    generator = torch.Generator()
    generator.manual_seed(derive_seed("draws", seed, epoch))
    num_samples = len(weights)
    # Not torch.multinomial, which takes at most 2**24 weights.
    sums = weights.cumsum(0)
    places = torch.rand(num_samples, dtype=torch.float64, generator=generator) * sums[-1]
    # A product that is rounded up to the last sum lies behind all samples.
    samples = torch.searchsorted(sums, places, right=True).clamp_(max=int(weights.nonzero()[-1]))
    ordered, origins = samples.sort(stable=True)
    times = torch.empty_like(samples)
    times[origins] = torch.arange(num_samples) - torch.searchsorted(ordered, ordered)
    return (samples + times * num_samples).tolist()


def bucketed_order(draws: Sequence[int], lengths: Tensor, *, batch_size: int, seed: int, epoch: int) -> list[int]:
    """Return the draws of an epoch in another order, in which the samples of each batch have similar lengths.

    They are taken in pools of 50 batches. Each pool is sorted by length and cut into batches, and all batches come in a
    random order. The smaller last batch, if there is one, is taken from a random place of the last pool: at the end of
    it the longest samples would be the ones that `drop_last` leaves out.
    """
    generator = torch.Generator()
    generator.manual_seed(derive_seed("buckets", seed, epoch))
    sorted_pools = []
    for pool in torch.tensor(draws).split(_POOL_BATCHES * batch_size):
        by_length = lengths[pool % len(lengths)].argsort(stable=True)
        sorted_pools.append(pool[by_length])
    pool, rest = sorted_pools[-1], len(draws) % batch_size
    start = int(torch.randint(len(pool) - rest + 1, (), generator=generator))
    sorted_pools[-1] = torch.cat([pool[:start], pool[start + rest :]])
    batches = torch.cat(sorted_pools).reshape(-1, batch_size)
    shuffled = batches[torch.randperm(len(batches), generator=generator)]
    return [*shuffled.flatten().tolist(), *pool[start : start + rest].tolist()]


def step_slices(order: Sequence[int], step: int, *, batch_size: int, num_shards: int) -> list[Sequence[int]]:
    """Cut the global batch of `step` into one slice per shard; the last batch's slices are shorter, or empty."""
    batch = order[step * batch_size : (step + 1) * batch_size]
    return [batch[start:stop] for start, stop in split_evenly(len(batch), num_shards)]


def read_weights(weights: Any, dataset: Dataset[Any], *, shuffle: bool = True) -> Tensor:
    """Return the weights of the samples of a data set, float64 [samples] on the CPU."""
    if not shuffle:
        raise ValueError(
            "weights draw samples at random, and shuffle=False keeps the order of the data set: "
            "leave one of them out. (LS407)"
        )
    if isinstance(weights, str):
        if weights != "balanced":
            raise ValueError(f"weights is {weights!r}, expected 'balanced', or one number for each sample. (LS407)")
        weights = balanced_weights(_labels_of(dataset))
    numbers = _read_numbers("weight", weights, dataset)
    total = numbers.sum().item()
    if not 0 < total < float("inf"):
        raise ValueError(f"The weights add up to {total}, expected more than zero, and finite. (LS407)")
    return numbers


def read_lengths(lengths: Any, dataset: Dataset[Any], *, shuffle: bool = True) -> Tensor:
    """Return the lengths of the samples of a data set, float64 [samples] on the CPU."""
    if not shuffle:
        raise ValueError(
            "lengths puts samples of similar length into one batch, and shuffle=False keeps the order of the data set: "
            "leave one of them out. (LS407)"
        )
    return _read_numbers("length", lengths, dataset)


def balanced_weights(labels: Any) -> list[float]:
    """Return weights with which each class is drawn equally often.

        labels = [train_set[index][1] for index in range(len(train_set))]
        loader = ls.ShardedLoader(train_set, weights=ls.balanced_weights(labels), batch_size=64, num_shards=4)

    Args:
        labels: The class of each sample, in the order of the data set: numbers or texts.

    Returns:
        A weight for each sample: one divided by the number of samples of its class.

    Raises:
        ValueError: There are no labels, or a label is not one number or text.
    """
    found: list[Any] = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    found = [each.item() if isinstance(each, Tensor) and each.numel() == 1 else each for each in found]
    # A number that is not equal to itself, NaN, would be a class of its own.
    odd = next((n for n, each in enumerate(found) if isinstance(each, list | dict | Tensor) or each != each), None)  # noqa: PLR0124
    if odd is not None or not found:
        what = "There are no labels" if odd is None else f"The label of sample {odd} is {found[odd]!r}"
        raise ValueError(f"{what}. Balanced weights need one class for each sample: a number or a text. (LS407)")
    counts = Counter(found)
    return [1 / counts[each] for each in found]


def _labels_of(dataset: Dataset[Any]) -> list[Any]:
    """Return the classes of the samples of a data set that holds them: `targets`, `labels`, or the last tensor."""
    if isinstance(dataset, Subset):
        labels = _labels_of(dataset.dataset)
        return [labels[int(index)] for index in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        return [label for part in dataset.datasets for label in _labels_of(part)]
    found: Any = dataset.tensors[-1] if isinstance(dataset, TensorDataset) else getattr(dataset, "targets", None)
    if found is None:
        found = getattr(dataset, "labels", None)
    if isinstance(found, Tensor) and (found.ndim != 1 or found.is_floating_point()):
        what = f"holds {_shape(found)} of {found.dtype}"
    elif found is None or isinstance(found, str) or not hasattr(found, "__len__"):
        what = "has no targets or labels"
    else:
        return list(found.tolist() if hasattr(found, "tolist") else found)
    raise ValueError(
        f"The classes of the samples are not known: {type(dataset).__name__} {what}. Give the weights, which "
        "ls.balanced_weights(labels) makes of one class for each sample. (LS407)"
    )


def _read_numbers(name: str, values: Any, dataset: Dataset[Any]) -> Tensor:
    """Return numbers that are called `name`, one for each sample; not negative, and finite."""
    try:
        numbers = torch.as_tensor(values).detach().to("cpu", torch.float64, copy=True)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name}s is a {type(values).__name__} that cannot be read as numbers: {error}. Give a list, an array or a "
            "tensor with one number for each sample of the data set. (LS407)"
        ) from error
    num_samples = len(dataset)  # type: ignore[arg-type]
    if numbers.ndim != 1 or len(numbers) != num_samples:
        raise ValueError(
            f"{name}s has {_shape(numbers)}, and the data set has {num_samples} samples: "
            f"give one {name} for each. (LS407)"
        )
    wrong = (~(numbers >= 0) | numbers.isinf()).nonzero()
    if len(wrong):
        index = int(wrong[0])
        raise ValueError(
            f"The {name} of sample {index} is {numbers[index].item()}, expected zero or more, and finite. (LS407)"
        )
    return numbers


def _shape(numbers: Tensor) -> str:
    return f"{len(numbers)} numbers" if numbers.ndim == 1 else f"the shape {list(numbers.shape)}"


def _fingerprint(numbers: Tensor) -> str:
    return f"{zlib.crc32(numbers.numpy().tobytes()):08x}"
