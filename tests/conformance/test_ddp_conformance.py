"""A selection of PyTorch's own tests of DistributedDataParallel on ours, small enough for every run.

`torch_ddp` runs them all.
"""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.conformance.served import TorchTests
from tests.conformance.torch_ddp import CONDITIONS, WORLD_SIZES
from tests.conformance.torch_distributed import Selection

SELECTION = (
    # End to end: the same weights as one process that sees the whole batch, saved and loaded on the way.
    "test_DistributedDataParallel",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_requires_grad",
    "test_DistributedDataParallel_with_amp_and_grad_is_view",
    # no_sync
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_grads_same_across_ranks_with_no_sync",
    # Parameters without a gradient, and outputs without a part in the loss
    "test_ddp_shared_grad_acc_unused_params",
    "test_output_unused_in_loss_dict_module",
    "test_output_unused_in_loss_tuple_module",
    "test_undefined_grad_parity_unused_parameters",
    "test_ddp_returns_tensor_with_no_grad",
    # Graphs that are static, and that are not
    "test_ddp_static_graph_nested_types",
    "test_ddp_new_tensor_in_fwd",
    "test_ddp_new_tensor_in_fwd_static_graph",
    "test_static_graph_multi_forward",
    # Communication hooks
    "test_ddp_hook_parity_powerSGD",
    "test_post_localSGD_optimizer_step_reload",
    # join
    "test_ddp_join_model_equivalence",
    "test_ddp_join_respects_forward_sync_buffers_false",
    "test_ddp_uneven_input_exception",
    "test_ddp_uneven_input_join_disable",
    "test_ddp_uneven_inputs_stop_iteration_sync_bn",
    # SyncBatchNorm
    "test_DistributedDataParallel_SyncBatchNorm",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient",
    "test_ddp_inference",
    # Buffers
    "test_ddp_broadcast_buffer",
    "test_ddp_broadcast_buffer_via_hook",
    "test_ddp_broadcast_buffers_deprecation_warning",
    "test_ddp_buffer_hook_allreduce",
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false",
    "test_ddp_sync_module_states",
    # Ignored parameters, models that differ
    "test_ddp_ignore_params_arg",
    "test_get_data_parallel_params",
    "test_ddp_model_diff_num_params_across_ranks",
    "test_ddp_model_diff_shape_across_ranks",
    # Logging data
    "test_ddp_comm_hook_logging",
    "test_ddp_python_error_logged",
    "test_different_graph_across_ranks",
    "test_static_graph_api_cpu",
    "test_sync_bn_logged",
    # Arguments, inputs, hooks of modules
    "test_ddp_bucket_cap_mb_list",
    "test_ddp_device_mesh_initialization",
    "test_ddp_namedtuple",
    "test_ddp_forward_backward_hook",
    "test_ddp_remove_autograd_hooks",
    "test_ddp_sink_noclone",
    "test_stateless_api_with_ddp",
)


@pytest.fixture(scope="module")
def torch_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[TorchTests]]:
    """Torch's tests on as many workers as most ask for, and on more."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                TorchTests(
                    Selection(
                        backend="gloo",
                        world_size=world_size,
                        conditions=(CONDITIONS,),
                        patterns=(),
                        jobs=1,
                        timeout_seconds=120,
                        start="fork",
                        wrapper="lockstep",
                    ),
                    CONDITIONS,
                    tmp_path_factory.mktemp(f"world-{world_size}"),
                )
            )
            for world_size in WORLD_SIZES
        ]


@pytest.mark.parametrize("test", SELECTION)
def test_what_torch_asks_of_its_wrapper_holds_for_ours(test: str, torch_tests: list[TorchTests]) -> None:
    for each in torch_tests:
        outcome = each.run(test)
        if outcome.status != "skipped":  # for too few workers
            break
    assert outcome.status == "passed", f"{outcome.reason}\n{outcome.log}"
