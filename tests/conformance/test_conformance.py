"""A selection of PyTorch's own tests on "shm", small enough for every run; `torch_distributed` runs them all."""

import json
import sys
from pathlib import Path

import pytest
from tests.conformance.command import run

BACKEND = "shm"

SELECTION = {
    "collectives": (
        "test_Backend_enum_class",
        "test_get_backend",
        "test_all_reduce_sum",
        "test_all_reduce_sum_async",
        "test_all_reduce_sum_complex",
        "test_all_reduce_m[ai][xn]",
        "test_all_reduce_full_group_product",
        "test_broadcast",
        "test_reduce_sum",
        "test_gather",
        "test_scatter",
        "test_all_gather",
        "test_all_gather_complex",
        "test_sparse_all_reduce_sum",
    ),
    "messages": (
        "test_send_recv",
        "test_send_recv_any_source",
        "test_send_recv_with_tag",
        "test_isend",
        "test_irecv",
        "test_batch_isend_irecv_gloo",
        "test_batch_isend_irecv_gloo_tags",
        "test_barrier",
        "test_barrier_timeout_full_group",
        "test_all_gather_object_default_pg",
        "test_all_gather_object_subgroup",
        "test_gather_object",
        "test_scatter_object_list",
        "test_destroy_group",
    ),
    "training": (
        "test_all_reduce_coalesced_sum",
        "test_all_reduce_coalesced_full_group_max",
        "test_all_gather_coalesced_simple",
        "test_all_gather_coalesced_with_empty",
        "test_DistributedDataParallelCPU",
        "test_DistributedDataParallelCPU_grad_is_view",
        "test_DistributedDataParallel_requires_grad",
        "test_accumulate_gradients_no_sync",
        "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
        "test_grads_same_across_ranks_with_no_sync",
        "test_static_graph_api_cpu",
        "test_ddp_create_graph",
        "test_get_future",
    ),
    "all_to_all": (
        "test_all_to_all",
        "test_all_to_all_complex",
        "test_all_to_all_single_equal_split",
        "test_all_to_all_single_unequal_split",
    ),
}
CONDITIONS = {"all_to_all": "mpi"}
"""The name that torch's skip conditions see, where it is not "gloo": they allow these to one backend only."""


@pytest.mark.parametrize("kind", SELECTION)
def test_what_torch_asks_of_a_backend_holds(kind: str, tmp_path: Path) -> None:
    output, log = tmp_path / "results.json", tmp_path / "log"
    command = [sys.executable, "-m", "tests.conformance.torch_distributed", "--backend", BACKEND, "--timeout", "15"]
    command += ["--conditions", CONDITIONS.get(kind, "gloo"), "--start", "fork", "--output", str(output)]
    run([*command, "--tests", *SELECTION[kind]], log)
    assert output.exists(), log.read_text()
    statuses = [outcome["status"] for outcome in json.loads(output.read_text())["outcomes"]]
    assert set(statuses) == {"passed"}, log.read_text()
    assert len(statuses) >= len(SELECTION[kind]), "torch has renamed some of the selected tests"
