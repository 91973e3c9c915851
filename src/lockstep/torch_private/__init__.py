"""Names that torch does not promise to keep, each under a name of ours: nothing else in the package uses one.

"Private" is a name with a leading underscore, of a module, a class or an object of torch, and what we rely on by
observation: how a reference count behaves, in which order graph tasks are numbered. Each entry has its purpose and what
we rely on. `tests/unit/torch_private` has a contract test for each, which checks that it *behaves* so, and names the
feature that breaks if it does not. With a new torch, run these first.

The tests pass with torch 2.11, 2.12, 2.13 and 2.15. Names are bound when this is imported, so a call costs
what it costs in torch. `torch._foreach_*` are here too: torch's documentation lists only some of them, as beta.

    memory      storages, versions, reference counts, foreach operations
    autograd    the engine's callbacks and graph tasks, hooks on gradients
    modules     what modules and optimizers keep inside
    groups      process groups, their stores and backends
    loaders     how far a DataLoader is
    compiler    torch.compile, seen from outside and without importing it
    compiler_import    optimizers that do not import the compiler, and its switches when somebody else does
    values      nested values, dispatch modes, kernels of devices, the default device
    store_protocol    how a client of the TCPStore greets it
    sharded_checkpoints    what torch.distributed.checkpoint pickles; import it by itself, for it is slow to import

Methods by which torch calls *us* (`_allgather_base` of a process group, `_check_comm_hook` of a DDP) are no uses: they
stay with the class that has them, and `tests/conformance` runs torch's own tests on them.
"""

from lockstep.torch_private.autograd import (
    NO_GRAPH_TASK,
    current_graph_task_id,
    is_in_distributed_autograd,
    is_inside_func_grad,
    post_accumulate_grad_hooks,
    queue_callback,
    run_backward_of_leaf,
    tensor_hooks,
)
from lockstep.torch_private.compiler import (
    compile_module,
    disable_compiler,
    forget_compiled_call,
    has_compiled_part,
    has_cuda_graphs_of_compiler,
    is_compiled_autograd_on,
    is_compiled_function,
    is_compiled_module,
    is_compiler_error,
    mark_uncompiled,
    original_of_compiled,
    skip_frames,
)
from lockstep.torch_private.compiler_import import (
    is_inductor_deterministic,
    set_inductor_deterministic,
    use_optimizers_without_compiler,
)
from lockstep.torch_private.groups import (
    AnyFuture,
    GroupRequest,
    abort_device_backends,
    backend_of,
    count_calls,
    default_group,
    default_timeout,
    device_types,
    gloo_announcements,
    gloo_num_threads,
    gloo_options,
    intercept_group_making,
    intercept_timeouts,
    leave_recording_to,
    list_groups,
    make_backend,
    register_backend,
    root_mesh,
    set_default_backend,
    set_timeout,
    store_of,
)
from lockstep.torch_private.memory import (
    REFERENCES_OF_ONE_HOLDER,
    count_storage_users,
    foreach_add_,
    foreach_copy_,
    foreach_div_,
    foreach_lerp_,
    foreach_mul_,
    foreach_norm,
    storage_address,
    storage_use_count,
    version_of,
)
from lockstep.torch_private.modules import (
    AnyBatchNorm,
    buffer_registry,
    check_comm_hook,
    find_tensors,
    forget_scaling,
    former_parameters_of,
    forward_pre_hooks,
    has_forward_or_backward_hooks,
    has_step_on_device,
    has_torchs_comm_hook,
    ignored_names,
    localize_tensor_parallel,
    make_replica_shell,
    module_registry,
    non_persistent_buffer_names,
    optimizer_step_pre_hooks,
    parameter_registry,
    separate_registries,
    set_precision_attributes,
    set_state_dict_versions,
    step_unless,
    stop_torchs_reducer,
    warn_of_unequal_devices,
)
from lockstep.torch_private.values import (
    TorchDispatchMode,
    default_device_of_thread,
    has_kernel,
    num_stored_elements,
    tree_leaves,
    tree_map_only,
)

__all__ = [
    "NO_GRAPH_TASK",
    "REFERENCES_OF_ONE_HOLDER",
    "AnyBatchNorm",
    "AnyFuture",
    "GroupRequest",
    "TorchDispatchMode",
    "abort_device_backends",
    "backend_of",
    "buffer_registry",
    "check_comm_hook",
    "compile_module",
    "count_calls",
    "count_storage_users",
    "current_graph_task_id",
    "default_device_of_thread",
    "default_group",
    "default_timeout",
    "device_types",
    "disable_compiler",
    "find_tensors",
    "foreach_add_",
    "foreach_copy_",
    "foreach_div_",
    "foreach_lerp_",
    "foreach_mul_",
    "foreach_norm",
    "forget_compiled_call",
    "forget_scaling",
    "former_parameters_of",
    "forward_pre_hooks",
    "gloo_announcements",
    "gloo_num_threads",
    "gloo_options",
    "has_compiled_part",
    "has_cuda_graphs_of_compiler",
    "has_forward_or_backward_hooks",
    "has_kernel",
    "has_step_on_device",
    "has_torchs_comm_hook",
    "ignored_names",
    "intercept_group_making",
    "intercept_timeouts",
    "is_compiled_autograd_on",
    "is_compiled_function",
    "is_compiled_module",
    "is_compiler_error",
    "is_in_distributed_autograd",
    "is_inductor_deterministic",
    "is_inside_func_grad",
    "leave_recording_to",
    "list_groups",
    "localize_tensor_parallel",
    "make_backend",
    "make_replica_shell",
    "mark_uncompiled",
    "module_registry",
    "non_persistent_buffer_names",
    "num_stored_elements",
    "optimizer_step_pre_hooks",
    "original_of_compiled",
    "parameter_registry",
    "post_accumulate_grad_hooks",
    "queue_callback",
    "register_backend",
    "root_mesh",
    "run_backward_of_leaf",
    "separate_registries",
    "set_default_backend",
    "set_inductor_deterministic",
    "set_precision_attributes",
    "set_state_dict_versions",
    "set_timeout",
    "skip_frames",
    "step_unless",
    "stop_torchs_reducer",
    "storage_address",
    "storage_use_count",
    "store_of",
    "tensor_hooks",
    "tree_leaves",
    "tree_map_only",
    "use_optimizers_without_compiler",
    "version_of",
    "warn_of_unequal_devices",
]
