"""What is replaced: torch's classes and functions, and ours for each of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn import parallel
from torch.utils import data as torch_data

from lockstep.comm import init_process_group
from lockstep.data import DistributedSampler
from lockstep.parallel import DataParallel, DistributedDataParallel, SyncBatchNorm, data_parallel


@dataclass(frozen=True, slots=True)
class ReplacedClass:
    """A class of torch, and the subclass of it that takes its place."""

    torchs: type[Any]
    ours: type[Any]


CLASSES = (
    ReplacedClass(parallel.DistributedDataParallel, DistributedDataParallel),
    ReplacedClass(parallel.DataParallel, DataParallel),
    ReplacedClass(torch_data.DistributedSampler, DistributedSampler),
    ReplacedClass(nn.SyncBatchNorm, SyncBatchNorm),
)
_FUNCTIONS: Mapping[Any, Any] = MappingProxyType(
    {dist.init_process_group: init_process_group, parallel.data_parallel: data_parallel}
)
OURS_FOR_TORCHS: Mapping[Any, Any] = MappingProxyType({**{each.torchs: each.ours for each in CLASSES}, **_FUNCTIONS})
"""Everything that is replaced, by torch's own."""
