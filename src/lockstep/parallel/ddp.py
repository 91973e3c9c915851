"""`DistributedDataParallel`: a module whose gradients are averaged over the ranks of a group.

It is a subclass of torch's for the sake of `isinstance`: accelerate, Lightning, `torch.distributed.checkpoint` and the
compiler ask for it. The reduction is `lockstep.reduce`; torch's C++ reducer is not used. Inherited is what has nothing
to do with gradients: the list of buffers, the checks of a hook's signature, `scatter` and `gather`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Joinable
from torch.nn import parallel as torch_parallel

from lockstep.comm import current_world
from lockstep.devices.transfer import InputCopies
from lockstep.errors import GroupError
from lockstep.parallel.arguments import (
    call_in_precision,
    check_parameters,
    find_buffer_syncs,
    find_limits,
    find_placement,
    find_world,
    prepare_precisions,
    reduce_dtype,
    refuse_sync_batch_norm_on_cpu,
    warn_of_ignored,
)
from lockstep.parallel.averaging import (
    DelayedParameters,
    ModuleSync,
    built_in_hook,
    check_delayed,
    check_hook,
    check_options,
)
from lockstep.parallel.buffers import broadcast_model
from lockstep.parallel.comparison import ComparisonOptions
from lockstep.parallel.comparison.forwards import describe_parts, warn_of_unlike_parts
from lockstep.parallel.comparison.order import compare_values, models_over
from lockstep.parallel.torch_names import Statistics, TorchNames, arguments_from_torch, describe_shared_arguments
from lockstep.processes.loaded_states import warn_of_missed_states
from lockstep.reduce import CommHook, ReducerOptions, TrainedModel, check_same_model
from lockstep.torch_private.compiler_import import disable_compiler, disable_compiler_here
from lockstep.torch_private.groups import root_mesh
from lockstep.torch_private.modules import (
    has_torchs_comm_hook,
    ignored_names,
    localize_tensor_parallel,
    stop_torchs_reducer,
)

_TORCHS: Any = torch_parallel.DistributedDataParallel
"""Bound now: `lockstep.drop_in` puts ours in its place."""
_NOT_COPIED: Final = frozenset({"process_group", "reducer", "_workers", "_sync", "_hook"})
"""Attributes that belong to a group, or live only in this process: a copy begins anew over the default group."""


class DistributedDataParallel(TorchNames):
    """Wrap `module` so that every backward averages its gradients over `process_group`.

        model = ls.DistributedDataParallel(Net().to(run.device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_fn(model, (inputs, labels)).backward()    # every rank has the mean gradient
        optimizer.step()

    Same names and meaning as `torch.nn.parallel.DistributedDataParallel` of torch 2.13. Differences that a user can
    see: a forward through `.module` synchronises as well; unused parameters need no flag; parameters may be added,
    frozen, unfrozen, cast and moved after wrapping; buffers are broadcast in training only, before each forward and
    with its gradients, so that one rank may evaluate alone and all evaluate the same; parameters that differ between
    ranks in name, order, shape or dtype are an error on every rank. Buckets that overlap with backward: Li et al.,
    "PyTorch Distributed" (VLDB 2020).

    Constructing is collective: every rank of the group must, with the same module.

    Args:
        module: Any module with a parameter that requires a gradient; its parameters may lie on several devices.
        device_ids: None, or a list with the one device to which forward moves its inputs.
        output_device: Accepted because torch does; kept, without effect.
        dim: That of `scatter` and `gather`, which nothing calls any more.
        broadcast_buffers: Deprecated in torch: `forward_sync_buffers`, and at construction too.
        init_sync: Compare the ranks' parameters and overwrite them with rank 0's at construction.
        process_group: The group; None for the default group.
        bucket_cap_mb: Size of a gradient bucket in MiB; None for 25, and 1 for the last one to travel.
        find_unused_parameters: Unused parameters are found without it; with it, buckets keep their first order.
        check_reduction: Accepted, without effect, as in torch.
        gradient_as_bucket_view: Whether `.grad` is a view as torch understands it. It lies in its bucket in any case.
        static_graph: Accepted; nothing depends on the graph being static.
        delay_all_reduce_named_params: Pairs of a name and a parameter that are kept out of the buckets and reduced in
            one message when the gradient of `param_to_hook_all_reduce` arrives.
        param_to_hook_all_reduce: See there; both or neither.
        mixed_precision: torch's `_MixedPrecision`: run forward and backward in `param_dtype`, reduce in `reduce_dtype`.
        device_mesh: A one-dimensional mesh instead of a group.
        skip_all_reduce_unused_params: Do not send buckets that no gradient arrived in; all ranks must use the same
            parameters then, always.
        bucket_cap_mb_list: Sizes in MiB of the last bucket to travel, of the one before it, ...; the last size is that
            of all the rest.
        batched_grad_copy: Accepted: small gradients are copied together anyway.
        forward_sync_buffers: Overwrite buffers (BatchNorm's statistics) with rank 0's before each training forward, and
            again at the end of each backward that synchronises.
        on_skip: What becomes of a batch that one rank skips after its forward (`continue` in an `except`, a loss that
            is not finite): "stop" for an error on all ranks in the next backward, or "zeros": that rank takes part in
            the backward of the others with zeros that do not count in the mean, and steps its optimizers as they do.
            See `skip_backward`.
        nonfinite: What becomes of an optimizer step with a gradient that is not finite: "stop" for an error that
            names rank and parameter, "skip" to change nothing in that step; a GPU tells one step later. A GradScaler
            sees them first.
        compare: Whether each backward compares the ranks' parameters, optimizers, steps, samplers and modes. Turn it
            off where they are to differ: models that are averaged now and then, say. Weights that are moved for a
            backward and put back before the step need no switch.

    Raises:
        GroupError: There is no process group.
        ParameterMismatchError: Ranks wrap different models.
        RuntimeError: Nothing to train, parameters that are not initialised yet, or both a group and a mesh.
        ValueError: `device_ids` or a bucket size that do not fit, or one of the two arguments for delayed parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Iterable[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: Tensor | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        on_skip: Literal["stop", "zeros", "error"] = "stop",
        nonfinite: Literal["stop", "skip"] = "stop",
        compare: bool = True,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        check_options(nonfinite, on_skip)
        delayed = check_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
        self._workers, self.process_group = find_world(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
            if root_mesh(device_mesh) != device_mesh:  # as torch does
                localize_tensor_parallel(module)
        self.parameters_to_ignore = {*ignored_names(module), *(name for name, _ in delayed)}
        self._module_parameters = [
            parameter for name, parameter in module.named_parameters() if name not in self.parameters_to_ignore
        ]
        check_parameters([*self._module_parameters, *(parameter for _, parameter in delayed)])
        devices, self.device_ids, self.output_device = find_placement(
            self._module_parameters or [parameter for _, parameter in delayed], device_ids, output_device
        )
        refuse_sync_batch_norm_on_cpu(module, devices[0])
        warn_of_ignored(
            check_reduction=check_reduction,
            mixed_precision=mixed_precision,
            finds_unused=static_graph and find_unused_parameters,
        )
        sync_at_start, self.forward_sync_buffers = find_buffer_syncs(broadcast_buffers, forward_sync_buffers)
        limits = find_limits(bucket_cap_mb, bucket_cap_mb_list)

        self.module = module
        self.dim = dim
        self.device, self.device_type = devices[0], devices[0].type
        self._input_copies = InputCopies(
            torch.device(self.device_type, self.device_ids[0]) if self.device_ids else self.device
        )
        self.is_multi_device_module = len(devices) > 1
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.mixed_precision = mixed_precision
        self.static_graph = static_graph
        self.bucket_bytes_cap = max(limits.sizes_bytes)
        self.bucket_bytes_cap_list = list(limits.sizes_bytes) if bucket_cap_mb_list else []
        self.bucket_bytes_cap_default = bucket_cap_mb is None and not bucket_cap_mb_list
        self.logger: Any = Statistics()
        self._options = ComparisonOptions(
            model_number=models_over(self._workers).add(),
            compares=compare,
            nonfinite=nonfinite,
            on_skip="stop" if on_skip == "error" else on_skip,  # its earlier name
        )
        self._limits = limits

        warn_of_missed_states(module)
        model = TrainedModel(module, self.parameters_to_ignore)
        if init_sync:
            parts = describe_parts(model, with_buffers=not sync_at_start) if compare else {}
            is_alike = check_same_model(
                model,
                self._workers,
                with_buffers=sync_at_start or self.forward_sync_buffers,
                arguments=describe_shared_arguments(self, sends_at_start=sync_at_start, given=self._options),
                besides=str(parts),
            )
            if compare:
                compare_values(model, self._workers, self._options.model_number)
            if compare and not is_alike:
                warn_of_unlike_parts(parts, self._workers)
            broadcast_model(model, self.process_group, 0, with_buffers=sync_at_start)
        self._delayed: DelayedParameters | None = None
        if delayed and param_to_hook_all_reduce is not None:
            self._delayed = DelayedParameters(module, dict(delayed), param_to_hook_all_reduce, self._workers)
            self._delayed.broadcast()
        prepare_precisions(module, mixed_precision, self.parameters_to_ignore)
        self._connect(model)

    def _connect(self, model: TrainedModel) -> None:
        options = ReducerOptions(
            purpose="a wrapped model's backward",
            limits=self._limits,
            as_view=self.gradient_as_bucket_view,
            dtype=reduce_dtype(self.mixed_precision),
            follows_arrival=self.static_graph or not self.find_unused_parameters,
            compares_buffers=self.forward_sync_buffers,
            skips_unused=self.skip_all_reduce_unused_params,
        )
        self._sync = ModuleSync(self, model, self._workers, options, self._options, self._delayed)
        self.reducer: Any = self._sync.reducer  # torch's attribute is of another type

    # -- Forward -------------------------------------------------------------------------------------------------------

    @disable_compiler_here  # the module within is compiled, this is not
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward, on inputs moved to the device of `device_ids` if one was given.

        Collective in training mode if the module has buffers that are broadcast.
        """
        if not self._workers.has_group:
            raise GroupError(
                "The process group over which this module was wrapped was destroyed. Make a new one with "
                "ls.init_process_group() and wrap the module again, or call the module itself to use it on one "
                "rank. (LS204)"
            )
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            with self._inside_ddp_forward():
                output = call_in_precision(self.module, self.mixed_precision, self.parameters_to_ignore, inputs, kwargs)
            return self._post_forward(output)

    @disable_compiler
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self._lazy_init_ran:
            self._setup_in_backward_optimizers()  # type: ignore[no-untyped-call]
            self._lazy_init_ran = True
        if not self.device_ids:
            return inputs, kwargs
        moved: tuple[tuple[Any, ...], dict[str, Any]] = self._input_copies.move((inputs, kwargs))
        return moved

    def skip_backward(self) -> None:
        """Take part in a backward of the other ranks with nothing, in place of a backward of this rank's (collective).

        For a batch that this rank leaves out. The mean is then over the other ranks, and `.grad` holds it here too: go
        on as after a backward, with clipping and the optimizer's step.
        """
        if self._sync.comparison is not None:
            self._sync.comparison.take_part_with_nothing()

    def train(self, mode: bool = True) -> Self:
        """Set the module in training mode, or in evaluation mode."""
        if self._sync.comparison is not None:
            self._sync.comparison.expect_writes()
        return super().train(mode)

    # -- Buffers -------------------------------------------------------------------------------------------------------

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:  # type: ignore[override] # torch assigns to it
        """The buffers by name, those of layers that were added after wrapping too."""
        return self._sync.buffers.named()

    @property
    def modules_buffers(self) -> list[Tensor]:  # type: ignore[override] # likewise
        """Likewise without their names."""
        return list(self.named_module_buffers.values())

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        hook = getattr(self, "buffer_hook", None)
        if hook is None:
            self._sync.buffers.source = authoritative_rank
            self._sync.buffers.send()
            return
        futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, self.named_module_buffers)
        if futures is not None and self.reducer is not None:
            self.reducer.schedule.wait_at_end(futures)

    # -- What synchronises, and how ------------------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let `hook(state, bucket)` reduce each bucket, as in torch (each rank calls, with the same hook).

        Raises:
            RuntimeError: There is one already.
            TypeError: It cannot be called.
            ValueError: Its signature is not a hook's.
        """
        check_hook(self, hook)
        self._register_hook(CommHook(function=hook, state=state, name=hook.__qualname__))

    def _register_hook(self, hook: CommHook) -> None:
        if self._hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once. (LS309)")
        self._hook = hook
        self._sync.use_hook(hook)

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        self._register_hook(built_in_hook(comm_hook_type, self.process_group))

    # -- Uneven inputs -------------------------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> ModuleSync:
        """Return what mirrors this module's collectives on a rank that has run out of inputs."""
        self.logger.joins_uneven_inputs = True
        self._sync.divides_by_all = kwargs.get("divide_by_initial_world_size", True)
        self._sync.set_joining(True)
        return self._sync

    # -- torch's private names that other programs use -----------------------------------------------------------------

    def _update_process_group(self, new_process_group: ProcessGroup) -> None:
        self.process_group = new_process_group
        self._workers = current_world(new_process_group)
        self._options = replace(self._options, model_number=models_over(self._workers).add())
        if self._delayed is not None:
            self._delayed.world = self._workers
        self._sync.close()
        self._connect(TrainedModel(self.module, self.parameters_to_ignore))
        if self._hook is not None:
            self._sync.use_hook(self._hook)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs; as torch's, only with the default group."""
        delayed = None if self._delayed is None else self._delayed.names_for_copy()
        self._check_default_group()  # type: ignore[no-untyped-call]
        state = {name: value for name, value in self.__dict__.items() if name not in _NOT_COPIED}
        return {**state, "_delayed": delayed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin anew, over the default group (local)."""
        nn.Module.__setstate__(self, state)
        if "_limits" not in state:  # torch has pickled an object of its class, whose name `lockstep.drop_in` replaces
            DistributedDataParallel.__init__(self, self.module, init_sync=False, **arguments_from_torch(state))
            self.__dict__.update({name: state[name] for name in vars(nn.Module()) if name in state})
            return
        self._workers, self.process_group = find_world(None, None)
        self._options = replace(self._options, model_number=models_over(self._workers).add())
        self._hook = None
        if self._delayed is not None:
            names, trigger_name = cast("tuple[list[str], str]", self._delayed)  # what `__getstate__` has put there
            self._delayed = DelayedParameters.of_names(self.module, names, trigger_name, self._workers)
        self._connect(TrainedModel(self.module, self.parameters_to_ignore))


def convert_wrapper(wrapper: Any) -> DistributedDataParallel:
    """Make an object of torch's class one of Lockstep's, in place: other references to it remain right.

    For libraries that construct torch's class. Collective, as wrapping is. Call it before the first forward, and before
    `register_comm_hook`. An object of Lockstep's stays as it is.
    """
    if isinstance(wrapper, DistributedDataParallel):
        return wrapper
    if type(wrapper) is not _TORCHS:
        raise TypeError(
            f"A {type(wrapper).__name__} cannot become lockstep.DistributedDataParallel, expected an object of torch's "
            "DistributedDataParallel. Wrap the module with lockstep.DistributedDataParallel instead. (LS324)"
        )
    state: Mapping[str, Any] = dict(vars(wrapper))
    if state["mixed_precision"] is not None:
        raise ValueError(
            "This DistributedDataParallel has mixed_precision, whose hooks would stay in the module. Wrap the module "
            "with lockstep.DistributedDataParallel(module, mixed_precision=...) instead. (LS324)"
        )
    if has_torchs_comm_hook(wrapper):
        raise ValueError(
            "This DistributedDataParallel has a communication hook already, which would be lost. Convert it before "
            "register_comm_hook. (LS309)"
        )
    stop_torchs_reducer(wrapper)
    converted: DistributedDataParallel = wrapper
    object.__setattr__(converted, "__class__", DistributedDataParallel)
    DistributedDataParallel.__init__(converted, wrapper.module, **arguments_from_torch(state))
    vars(converted).update({name: state[name] for name in vars(nn.Module()) if name in state})
    return converted
