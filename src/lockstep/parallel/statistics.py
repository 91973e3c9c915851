"""The values of `_get_ddp_logging_data`, under torch's names, for programs that read them."""

from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import SyncBatchNorm

from lockstep.comm import World
from lockstep.parallel.averaging import AveragingOptions
from lockstep.reduce import Reducer
from lockstep.settings import read_settings
from lockstep.torch_private.groups import gloo_num_threads

_NUM_ALWAYS_SAMPLED = 10
_TORCH_TYPE_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
_DURATIONS = (
    "forward_compute_time",
    "backward_compute_time",
    "backward_comm_time",
    "backward_compute_comm_overlap_time",
)


@final
class Statistics:
    """The times of sampled steps and the last error; torch's wrapper calls this its `logger`."""

    def __init__(self) -> None:
        self.sample_rate = 100
        """After the first ten, every so many steps are sampled."""
        self.joins_uneven_inputs = False
        """Whether a `join` was entered."""
        self._sampled: dict[str, int] = {"iteration": 0}
        self._sums = dict.fromkeys(_DURATIONS, 0)
        self._num_sampled = 0
        self._error = ""

    def sample(self, reducer: Reducer) -> None:
        """Note the times of the step before, if it is one to be sampled; called when a forward begins."""
        number, times = reducer.num_reductions, reducer.times
        is_whole = times.messages_end > times.backward_end >= times.backward_start > times.forward_start > 0
        if not is_whole or (number > _NUM_ALWAYS_SAMPLED and number % self.sample_rate != 0):
            return
        durations = {
            "forward_compute_time": times.backward_start - times.forward_start,
            "backward_compute_time": times.backward_end - times.backward_start,
            "backward_comm_time": times.messages_end - times.messages_start,
            "backward_compute_comm_overlap_time": max(times.backward_end - times.messages_start, 0),
        }
        self._num_sampled += 1
        for name, duration in durations.items():
            self._sums[name] += duration
        self._sampled = {
            "iteration": number,
            **durations,
            **{f"avg_{name}": total // self._num_sampled for name, total in self._sums.items()},
            "forward_compute_time_start": times.forward_start,
            "backward_compute_time_start": times.backward_start,
            "backward_comm_time_start": times.messages_start,
            "backward_compute_time_end": times.backward_end,
            "backward_comm_time_end": times.messages_end,
        }

    def set_error_and_log(self, text: str) -> None:
        """Keep an error that the wrapper raises."""
        self._error = text

    def values(self) -> dict[str, Any]:
        """Return the times of sampled steps, and the last error."""
        error = {"has_error": 1, "error": self._error} if self._error else {}
        joins = {"join_uneven_inputs": 1} if self.joins_uneven_inputs else {}
        return {**self._sampled, **joins, **error}


def list_options(wrapper: Any) -> dict[str, Any]:
    """Return the arguments of a wrapper that torch's logging data have."""
    names = ("find_unused_parameters", "gradient_as_bucket_view", "is_multi_device_module")
    return {
        "device_ids": ", ".join(map(str, wrapper.device_ids or ())),
        "output_device": -1 if wrapper.output_device is None else wrapper.output_device,
        "broadcast_buffers": wrapper.forward_sync_buffers,
        "bucket_cap_bytes": wrapper.bucket_bytes_cap,
        **{name: getattr(wrapper, name) for name in names},
        **({"static_graph": True} if wrapper.static_graph else {}),
    }


def describe_shared_arguments(wrapper: Any, *, sends_at_start: bool, given: AveragingOptions) -> list[str]:
    """Return the arguments of a wrapper that must be the same on all ranks, each with its value."""
    names = ("find_unused_parameters", "static_graph", "skip_all_reduce_unused_params")
    precision = wrapper.mixed_precision
    arguments = {
        **{name: getattr(wrapper, name) for name in names},
        "broadcast_buffers": sends_at_start,
        "forward_sync_buffers": wrapper.forward_sync_buffers,
        "bucket_cap_mb": [round(size / (1 << 20), 3) for size in wrapper.bucket_bytes_cap_list]
        or round(wrapper.bucket_bytes_cap / (1 << 20), 3),
        **{name: getattr(precision, name, None) for name in ("param_dtype", "reduce_dtype", "buffer_dtype")},
        "nonfinite": given.nonfinite,
        "on_skip": given.on_skip,
        "compare": given.compares_replicas,
    }
    return [f"{name}={value!r}" for name, value in arguments.items()]


def describe_wrapper(
    module: nn.Module, world: World, reducer: Reducer | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return torch's logging data, without times; `options` are the wrapper's arguments, by torch's names."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    buckets = [bucket.slots for bucket in (reducer.buckets if reducer else ())]
    index = {id(parameter): number for number, parameter in enumerate(parameters)}
    members = [[index.get(id(slot.parameter), -1) for slot in slots] for slots in buckets]
    sizes = _joined(sum(slot.parameter.nbytes for slot in slots) for slots in buckets)
    backend = dist.get_backend(world.group)
    facts = {
        "module_name": type(module).__name__,
        "world_size": world.world_size,
        "rank": world.rank,
        "backend_name": backend,
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(parameter.nbytes for parameter in parameters),
        "dtypes": _joined(sorted({_TORCH_TYPE_NAMES.get(each.dtype, str(each.dtype)) for each in parameters})),
        "bucket_sizes": sizes,
        "has_sync_bn": int(any(isinstance(each, SyncBatchNorm) for each in module.modules())),
        **read_settings().launch_facts(),
        **{name: int(value) if isinstance(value, bool) else value for name, value in options.items()},
    }
    if backend == "gloo":
        facts["gloo_num_threads"] = gloo_num_threads()
    if reducer is not None:
        facts["num_buckets_reduced"] = reducer.schedule.num_buckets_sent
        unused = [bucket.slots[index].parameter.nbytes for bucket in reducer.buckets for index in bucket.absent]
        if unused or options.get("find_unused_parameters"):
            facts["unused_parameter_size"] = sum(unused)
        if reducer.is_in_order:
            facts["has_rebuilt_buckets"] = 1
            facts["rebuilt_bucket_sizes"] = sizes
            facts["rebuilt_per_bucket_param_indices"] = " ".join(str(number) for group in members for number in group)
            facts["prev_iteration_grad_ready_order_indices"] = _joined(number for group in members for number in group)
    return facts


def _joined(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
