"""A selection of PyTorch's own tests of DistributedDataParallel on ours, small enough for every run.

`torch_ddp` runs them all.
"""

import json
import sys
from pathlib import Path

import pytest
from tests.conformance.command import run

SELECTION = {
    "gradients": (
        # End to end: the same weights as one process that sees the whole batch, saved and loaded on the way.
        "test_DistributedDataParallel",
        "test_DistributedDataParallelCPU",
        "test_DistributedDataParallelCPU_grad_is_view",
        "test_DistributedDataParallel_requires_grad",
        "test_DistributedDataParallel_with_amp_and_grad_is_view",
        "test_ddp_create_graph",
        # no_sync
        "test_accumulate_gradients_no_sync",
        "test_accumulate_gradients_no_sync_grad_is_view",
        "test_accumulate_gradients_no_sync_allreduce_hook",
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
        "test_ddp_hook_parity_allreduce",
        "test_ddp_hook_parity_powerSGD",
        "test_post_localSGD_optimizer_step_reload",
    ),
    "surface": (
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
        # The sampler
        "test_DistributedSampler_padding",
    ),
}


@pytest.mark.parametrize("kind", SELECTION)
def test_what_torch_asks_of_its_wrapper_holds_for_ours(kind: str, tmp_path: Path) -> None:
    output, log = tmp_path / "results.json", tmp_path / "log"
    command = [sys.executable, "-m", "tests.conformance.torch_ddp", "--wrapper", "lockstep", "--timeout", "15"]
    run([*command, "--start", "fork", "--output", str(output), "--tests", *SELECTION[kind]], log)
    assert output.exists(), log.read_text()
    statuses = [outcome["status"] for outcome in json.loads(output.read_text())["outcomes"]]
    assert set(statuses) == {"passed"}, log.read_text()
    assert len(statuses) == len(SELECTION[kind]), "torch has renamed some of the selected tests"
