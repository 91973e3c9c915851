"""A selection of PyTorch's own tests on "shm", small enough for every run; `torch_distributed` runs them all."""

from collections.abc import Iterator

import pytest
from tests.conformance.served import TorchTests
from tests.conformance.torch_distributed import Selection

SELECTION = {
    "collectives": (
        "test_Backend_enum_class",
        "test_get_backend",
        "test_all_reduce_sum",
        "test_all_reduce_sum_async",
        "test_all_reduce_sum_complex",
        "test_all_reduce_max",
        "test_all_reduce_min",
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
        "test_DistributedDataParallelCPU_grad_is_view",
        "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
        "test_get_future",
    ),
}


@pytest.fixture(scope="module")
def torch_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchTests]:
    """Torch's tests under Gloo's skip conditions."""
    selection = Selection(
        backend="shm",
        world_size=4,
        conditions=("gloo",),
        patterns=(),
        jobs=1,
        timeout_seconds=120,
        start="fork",
    )
    with TorchTests(selection, "gloo", tmp_path_factory.mktemp("gloo")) as tests:
        yield tests


@pytest.mark.parametrize(("kind", "test"), [(kind, test) for kind, tests in SELECTION.items() for test in tests])
def test_what_torch_asks_of_a_backend_holds(kind: str, test: str, torch_tests: TorchTests) -> None:
    outcome = torch_tests.run(test)
    assert outcome.status == "passed", f"{outcome.reason}\n{outcome.log}"
