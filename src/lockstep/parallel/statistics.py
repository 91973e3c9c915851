"""What `_get_ddp_logging_data` returns: torch's names, for programs that read them."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm import World
from lockstep.reduce import Reducer
from lockstep.settings import read_launch_facts

_TORCH_TYPE_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}


def describe_wrapper(
    module: nn.Module, world: World, reducer: Reducer | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return torch's logging data.

    Args:
        module: The module that is wrapped.
        world: Its workers.
        reducer: Its reducer.
        options: What only the wrapper knows, by torch's names.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    sizes = _joined(
        sum(slot.parameter.nbytes for slot in bucket.slots) for bucket in (reducer.buckets if reducer else ())
    )
    return {
        "module_name": type(module).__name__,
        "world_size": world.world_size,
        "rank": world.rank,
        "backend_name": dist.get_backend(world.group),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(parameter.nbytes for parameter in parameters),
        "dtypes": _joined(sorted({_TORCH_TYPE_NAMES.get(each.dtype, str(each.dtype)) for each in parameters})),
        "bucket_sizes": sizes,
        "rebuilt_bucket_sizes": sizes,
        "has_sync_bn": int(any(isinstance(each, nn.SyncBatchNorm) for each in module.modules())),
        "iteration": reducer.num_reductions if reducer else 0,
        **read_launch_facts(),
        **{name: int(value) if isinstance(value, bool) else value for name, value in options.items()},
    }


def _joined(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
