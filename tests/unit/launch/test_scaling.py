"""How many workers a launch wants after a request, and after a new one has failed; without processes."""

import errno
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.devices import Device
from lockstep.devices.choose import CPU
from lockstep.launch.continuation import WorkerReports
from lockstep.launch.control import ControlSocket, RefusedError, connect
from lockstep.launch.membership import Changes, Generation, Wishes, WorkerLimits
from lockstep.launch.restarts import Elastic
from lockstep.launch.scaling import Scaling, named_parts
from lockstep.launch.worker_pool import End


class Launch:
    """Workers 0 to 2, each on a GPU of its own, and worker 3, which was started to join them."""

    is_stopping = is_over = False
    is_settled = True
    limits = WorkerLimits(max_workers=6)

    def __init__(self, elastic: Elastic | None = None) -> None:
        self.generation = Generation(number=0, workers=(0, 1, 2))
        self.reports = WorkerReports()
        self.pids = {worker: 100 + worker for worker in range(4)}
        self.workers = {worker: self.worker(worker) for worker in range(4)}
        launch: Any = SimpleNamespace(pool=self, continuation=self, elastic=elastic or Elastic(), force=False)
        self.scaling = Scaling(launch)
        self.scaling._new[3] = self.workers[3]

    @staticmethod
    def worker(number: int) -> Any:
        device = Device(name="cuda:0", visible=f"GPU-{number}", label=f"GPU {number} (NVIDIA T4)")
        return SimpleNamespace(
            number=number,
            device=device,
            end=End.FAILED,
            has_returned=False,
            failure=lambda: SimpleNamespace(traceback="", reason=""),
            describe_end=lambda: "ended with exit code 1",
        )

    def start(self, number: int, device: Device) -> Any:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    def is_new(self, worker: int) -> bool:
        return worker == 3

    def arrived(self) -> tuple[int, ...]:
        return ()

    def change(self, wishes: Wishes) -> Changes:
        self.wishes = wishes
        return Changes()

    def fail_to_join(self) -> None:
        self.scaling.take_end(self.workers[3])


def test_a_failed_join_is_no_answer_to_a_later_request() -> None:
    launch = Launch()
    launch.fail_to_join()
    with pytest.raises(RefusedError, match="worker 3 ended with exit code 1"):
        launch.scaling.request_result()
    assert "1 worker of 3 will leave" in launch.scaling.begin_request({"op": "release", "device": "GPU2"})
    assert launch.scaling.request_result() is None  # `lockstep scale --release` ended with the error of the join
    launch.generation = Generation(number=1, workers=(0, 1))
    assert str(launch.scaling.request_result()).startswith("2 workers: rank 0")


def test_a_worker_that_leaves_is_not_replaced_because_another_has_failed_to_join() -> None:
    launch = Launch()
    launch.scaling.let_go(2)
    launch.fail_to_join()
    assert launch.scaling.num_wanted == 2


def test_a_run_goes_on_where_no_process_can_be_started_for_a_lost_worker(caplog: pytest.LogCaptureFixture) -> None:
    # The error of fork, where a limit of processes or memory is reached, ended the launch and all that trained on.
    launch = Launch(Elastic(respawn=3))
    launch.generation = Generation(number=1, workers=(0, 1))
    launch.workers[2].end = End.LOST
    launch.scaling.take_end(launch.workers[2])
    launch.workers[3].end = End.LOST
    launch.scaling.take_end(launch.workers[3])
    launch.scaling.advance()
    launch.scaling.advance()
    assert launch.wishes.num_workers == 2
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("A new worker could not be started: [Errno 11] Resource temporarily unavailable. The others")


def test_a_run_goes_on_where_no_descriptor_is_left_for_a_request(tmp_path: Path) -> None:
    # It ended the launch, with all its workers.
    watched: list[Callable[[], bool]] = []
    pool: Any = SimpleNamespace(watch=lambda _descriptor, call: watched.append(call), forget=lambda _descriptor: None)
    control = ControlSocket(tmp_path, pool, lambda _request: "", lambda: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with connect(tmp_path):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            assert watched[0]()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert watched[0]()
        assert len(watched) == 2, "it is accepted a moment later"
        control.close()


# -- Which worker `lockstep scale --release` means ---------------------------------------------------------------------


WHOLE = Device(name="cuda:0", visible="GPU-5b2c-1", label="GPU 0 (NVIDIA RTX 3090)")
PART = Device(name="cuda:0", visible="MIG-5b2c-3", label="GPU 0:1 (NVIDIA A100 and more)")
PAIR = Device(name="cuda:0", visible="GPU-aa,GPU-bb", label="GPU 2 (NVIDIA H100) and GPU 13 (NVIDIA H100)")


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("GPU0", WHOLE, {"0"}),
        ("gpu:0", WHOLE, {"0"}),
        (" 0 ", WHOLE, {"0"}),
        ("0", PART, set()),  # it let go of the workers on all instances of the card
        ("0:1", PART, {"0:1"}),
        ("GPU 0:1", PART, {"0:1"}),
        ("0:10", PART, set()),
        ("1", PART, set()),
        ("13", PAIR, {"13"}),  # only the first card of a worker had a number
        ("1", PAIR, set()),
        ("GPU-b", PAIR, {"GPU-bb"}),
        ("GPU-", PAIR, {"GPU-aa", "GPU-bb"}),
        ("MIG-5B2C", PART, {"MIG-5b2c-3"}),
        ("", WHOLE, set()),  # every UUID begins with nothing
        ("g", WHOLE, set()),
        ("0", CPU, set()),
    ],
)
def test_a_card_is_named_as_in_device_ids(name: str, device: Device, expected: set[str]) -> None:
    assert named_parts(name, device) == expected
