"""Slices of data sets that only index tensors: whole slices at once, and without a random state.

torch's `TensorDataset`, itself or in a `Subset`, draws nothing, nor does `default_collate`. So seeding changes nothing,
and a slice is what indexing each tensor with all indices gives, bit for bit. Anything else, subclasses included, is
asked sample by sample.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset


def read_columns(dataset: Dataset[object], indices: Sequence[int]) -> list[Tensor] | None:
    """Return what `default_collate` makes of these samples, or None where they must be asked for one by one."""
    while type(dataset) is Subset:
        if not _are_within(indices, len(dataset.indices)):
            return None
        chosen = [dataset.indices[index] for index in indices]
        if not all(type(index) is int for index in chosen):
            return None
        dataset, indices = dataset.dataset, chosen
    if type(dataset) is not TensorDataset or not all(map(_is_plain, dataset.tensors)):
        return None
    if not _are_within(indices, min(map(len, dataset.tensors))):
        return None  # the data set's own error, or what a negative index means to it
    rows = torch.tensor(indices, dtype=torch.int64, device="cpu")
    return [tensor.index_select(0, rows) for tensor in dataset.tensors]


def _are_within(indices: Sequence[int], length: int) -> bool:
    return bool(indices) and min(indices) >= 0 and max(indices) < length


def _is_plain(tensor: Tensor) -> bool:
    """Whether indexing all rows at once gives what stacking single rows gives: the same strides and no graph."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.dim() > 0
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
