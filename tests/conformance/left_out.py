"""The tests that are not asked of our class, each with its reason. That ours fails today is none.

Nor is that torch's own fails: it does where SyncBatchNorm meets a CPU, or a static graph was saved; ours need not.
"""

from dataclasses import dataclass
from enum import Enum


class Reason(Enum):
    """Why a test may be left out."""

    PRIVATE_STATE = "inspects the C++ reducer's private state"
    NEEDS_GPU = "needs a GPU / NCCL for real"
    DEMANDS_ERROR = "demands an error where Lockstep does the right thing"


@dataclass(frozen=True, slots=True)
class LeftOut:
    reason: Reason
    detail: str
    """What it is, in this test."""

    def __str__(self) -> str:
        return f"left out: {self.reason.value}: {self.detail}"


_UNUSED = "a parameter without gradient, without find_unused_parameters, must raise in forward 2; here it trains"

LEFT_OUT = {
    "test_ddp_multiple_nested_unused_params_error": LeftOut(Reason.DEMANDS_ERROR, _UNUSED),
    "test_ddp_multiple_nested_unused_params_err_ignore_params": LeftOut(Reason.DEMANDS_ERROR, _UNUSED),
    "test_ddp_unused_params_rebuild_buckets_exception": LeftOut(Reason.DEMANDS_ERROR, _UNUSED),
    "test_ddp_control_flow_same_across_ranks": LeftOut(
        Reason.DEMANDS_ERROR, f"{_UNUSED}; and reads reducer._get_local_used_map()"
    ),
    "test_ddp_control_flow_different_across_ranks": LeftOut(
        Reason.DEMANDS_ERROR, f"{_UNUSED}; and reads reducer._get_local_used_map()"
    ),
    "test_invalid_static_graph": LeftOut(
        Reason.DEMANDS_ERROR, "static_graph, and a graph that changes, must raise; here it trains"
    ),
    "test_detect_ddp_is_actually_static": LeftOut(Reason.PRIVATE_STATE, "reads reducer._ddp_graph_static()"),
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger": LeftOut(
        Reason.PRIVATE_STATE, "hands the C++ logger of the C++ reducer to a C++ function, which must write into it"
    ),
    "test_ddp_profiling_torch_profiler": LeftOut(
        Reason.PRIVATE_STATE,
        "a profile must show what only the C++ reducer does: search_unused_parameters, a broadcast of rebuilt buckets",
    ),
    "test_ddp_device": LeftOut(
        Reason.NEEDS_GPU, "forward must find its inputs on the device with the number of the rank; the CPU has none"
    ),
    "test_ddp_logging_data_gpu": LeftOut(
        Reason.NEEDS_GPU, "the log must hold the rank as device_ids, which a module on the CPU cannot have"
    ),
}
"""By name of test. The last two fail with torch's own class too, here."""
