"""What torch's `DistributedDataParallel` offers besides a forward and a reduction, under torch's names.

Other programs use these: Join and accelerate the public ones, Lightning and torch's own tests the private ones. They
need only the attributes of `TorchNames`, which the wrapper sets.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join
from torch.nn import parallel as torch_parallel

from lockstep.comm import World
from lockstep.parallel.arguments import warn_of_ignored
from lockstep.parallel.comparison import ComparisonOptions
from lockstep.reduce import CommHook, Reducer
from lockstep.settings import read_settings
from lockstep.torch_private.groups import gloo_num_threads
from lockstep.torch_private.modules import TorchsSyncBatchNorm

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


class TorchNames(torch_parallel.DistributedDataParallel):
    """Methods of torch's wrapper that only ask or set something; abstract."""

    reducer: Any
    logger: Any
    device: Any
    process_group: ProcessGroup
    forward_sync_buffers: bool
    static_graph: bool
    _workers: World
    _hook: CommHook | None = None
    # What torch sets in each object; nothing here depends on the last three.
    require_forward_param_sync = True
    _divide_by_initial_world_size = True
    _lazy_init_ran = False
    _use_python_reducer = False
    broadcast_bucket_size = 250 << 20
    use_side_stream_for_tensor_copies = False

    def train(self, mode: bool = True) -> Self:
        """Set the module in training mode, or in evaluation mode."""
        nn.Module.train(self, mode)
        return self

    def _post_forward(self, output: Any) -> Any:
        return output

    @property
    def broadcast_buffers(self) -> bool:
        """Torch's older name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def will_sync_module_buffers(self) -> bool:
        """Return whether there are buffers that are overwritten with rank 0's before a training forward."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self.named_module_buffers)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether gradients are averaged; False within `no_sync`."""
        return self.reducer is None or self.reducer.watch.synchronizes

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        if self.reducer is not None:
            self.reducer.watch.synchronizes = value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: those of forwards in here, and of backwards in here (local).

        The first backward with its forward outside averages what was accumulated too.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def join_device(self) -> torch.device:
        """The device for `Join`'s own messages."""
        device: torch.device = self.device
        return device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group of `Join`'s own messages."""
        return self.process_group

    def _set_static_graph(self) -> None:
        if self.reducer is not None and self.reducer.num_reductions > 0 and not self.static_graph:
            self._log_and_throw(  # type: ignore[no-untyped-call]
                RuntimeError, "Static graph: _set_static_graph should be called before training loop starts."
            )
        warn_of_ignored(is_static_again=self.static_graph, finds_unused=self.find_unused_parameters)
        self.static_graph = True

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {**describe_wrapper(self), **self.logger.values()}

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise ValueError("DDP runtime logging sample rate should be equal or greater than 1 (LS303)")
        self.logger.sample_rate = sample_rate

    def _remove_autograd_hooks(self) -> None:
        if self.reducer is not None:
            self.reducer.close()

    def _check_reducer_finalized(self) -> None:
        if self.reducer is not None and not self.reducer.is_idle:
            raise RuntimeError(
                "Expected to have finished reduction in the prior iteration before starting a new one. (LS326)"
            )

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Do nothing: outputs are not cloned."""

    def _set_sparse_metadata(self, global_unique_ids: Any) -> None:
        """Do nothing: sparse gradients need none."""

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return torch's context manager for ranks with uneven numbers of inputs (collective to leave).

        Args:
            divide_by_initial_world_size: Divide by the number of ranks there are; else of those that still have inputs.
            enable: Whether it does anything.
            throw_on_early_termination: Raise on every rank when the first one has run out of inputs.
        """
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )


def arguments_from_torch(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with which an object of torch's class was made, from its attributes, pickled or not."""
    taken = (
        *("device_ids", "output_device", "dim", "find_unused_parameters", "gradient_as_bucket_view", "static_graph"),
        *("mixed_precision", "skip_all_reduce_unused_params", "process_group"),
    )
    is_default = state.get("bucket_bytes_cap_default", True)
    return {
        **{name: state[name] for name in taken if name in state},
        "forward_sync_buffers": state.get("forward_sync_buffers", state.get("broadcast_buffers", True)),
        "bucket_cap_mb": None if is_default else state["bucket_bytes_cap"] / (1 << 20),
    }


@final
class Statistics:
    """The times of sampled steps and the last error; torch's wrapper calls this its `logger`."""

    def __init__(self) -> None:
        self.sample_rate = 100
        """After the first ten, every so many steps are sampled."""
        self.joins_uneven_inputs = False
        self._sampled: dict[str, int] = {"iteration": 0}
        self._sums = dict.fromkeys(_DURATIONS, 0)
        self._num_sampled = 0
        self._error = ""

    def sample(self, reducer: Reducer) -> None:
        """Note the times of the step before, if it is one to be sampled; called when a forward begins."""
        number = reducer.num_reductions
        if number > _NUM_ALWAYS_SAMPLED and number % self.sample_rate != 0:
            return
        times = reducer.times.moments()
        if not times.messages_end > times.backward_end >= times.backward_start > times.forward_start > 0:
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
        self._error = text

    def values(self) -> dict[str, Any]:
        error = {"has_error": 1, "error": self._error} if self._error else {}
        joins = {"join_uneven_inputs": 1} if self.joins_uneven_inputs else {}
        return {**self._sampled, **joins, **error}


def describe_shared_arguments(wrapper: Any, *, sends_at_start: bool, given: ComparisonOptions) -> list[str]:
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
        "compare": given.compares,
    }
    return [f"{name}={value!r}" for name, value in arguments.items()]


def describe_wrapper(wrapper: Any) -> dict[str, Any]:
    module: nn.Module = wrapper.module
    world: World = wrapper._workers  # noqa: SLF001 - of a `TorchNames`
    reducer: Reducer | None = wrapper.reducer
    flags = ("find_unused_parameters", "gradient_as_bucket_view", "is_multi_device_module")
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
        "has_sync_bn": int(any(isinstance(each, TorchsSyncBatchNorm) for each in module.modules())),
        **read_settings().launch_facts(),
        "device_ids": _joined(wrapper.device_ids or ()),
        "output_device": -1 if wrapper.output_device is None else wrapper.output_device,
        "broadcast_buffers": int(wrapper.forward_sync_buffers),
        "bucket_cap_bytes": wrapper.bucket_bytes_cap,
        **{name: int(getattr(wrapper, name)) for name in flags},
    }
    if wrapper.static_graph:
        facts["static_graph"] = 1
    if wrapper._hook is not None:  # noqa: SLF001
        facts["comm_hook"] = wrapper._hook.name  # noqa: SLF001
    if backend == "gloo":
        facts["gloo_num_threads"] = gloo_num_threads()
    if reducer is not None:
        facts["num_buckets_reduced"] = reducer.schedule.num_buckets_sent
        unused = [bucket.slots[index].parameter.nbytes for bucket in reducer.buckets for index in bucket.absent]
        if unused or wrapper.find_unused_parameters:
            facts["unused_parameter_size"] = sum(unused)
        if reducer.plan.is_in_order:
            facts["has_rebuilt_buckets"] = 1
            facts["rebuilt_bucket_sizes"] = sizes
            facts["rebuilt_per_bucket_param_indices"] = " ".join(str(number) for group in members for number in group)
            facts["prev_iteration_grad_ready_order_indices"] = _joined(number for group in members for number in group)
    return facts


def _joined(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
