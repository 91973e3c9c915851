"""What torch.distributed.checkpoint writes into `.metadata` beside its public classes."""

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormatEncoding  # noqa: N811 - a class

__all__ = ["MemoryFormatEncoding", "StorageInfo", "get_layout"]
# StorageInfo says in which file and where in it a piece lies. Both are pickled by the names that torch gives them.

get_layout = torch.serialization._get_layout
"""What a pickled `torch.layout` calls: the layout by its name."""
