"""What torch's `DistributedDataParallel` offers besides a forward and a reduction, under torch's names.

Other programs use these: Join and accelerate the public ones, Lightning and torch's own tests the private ones. They
need only the attributes below, which the wrapper sets.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join
from torch.nn import parallel as torch_parallel

from lockstep.comm import World
from lockstep.parallel.registered_hook import RegisteredHook
from lockstep.parallel.statistics import describe_wrapper, list_options
from lockstep.parallel.warned import warn_of_ignored


class TorchNames(torch_parallel.DistributedDataParallel):
    """Methods of torch's wrapper that only ask or set something; abstract.

    It is a subclass of torch's for the sake of `isinstance`: accelerate, Lightning, `torch.distributed.checkpoint` and
    the compiler ask for it.
    """

    reducer: Any
    logger: Any
    device: Any
    process_group: ProcessGroup
    forward_sync_buffers: bool
    static_graph: bool
    _workers: World
    _hook: RegisteredHook | None = None
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
        return self.require_forward_param_sync and self.forward_sync_buffers and len(self.modules_buffers) > 0

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
        options = list_options(self)
        if self._hook is not None:
            options["comm_hook"] = self._hook.name
        return {**describe_wrapper(self.module, self._workers, self.reducer, options), **self.logger.values()}

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
