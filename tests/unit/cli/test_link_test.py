"""`lockstep devices --test`: what it prints of what the workers found, and its exit code."""

from collections.abc import Sequence

import pytest
from tests.unit.devices.machines import gpu, machine
from typer.testing import CliRunner

from lockstep.cli import devices as command
from lockstep.cli.devices import BackendLinks
from lockstep.comm.link_check import LinkReport
from lockstep.devices import Placement, choose_devices

APP = command.COMMAND
PAIR, OTHER, ALL = (0, 1), (0, 2), (0, 1, 2)
THREE = choose_devices("auto", inventory=machine(gpu(0), gpu(1), gpu(4)))


def found(*reports: tuple[tuple[int, ...], str], backend: str = "nccl", warning: str = "") -> BackendLinks:
    made = [LinkReport(ranks=ranks, seconds=0.0 if text else 0.0042, problem=text) for ranks, text in reports]
    return BackendLinks(backend=backend, device="cuda", reports=made, warning=warning)


def run(monkeypatch: pytest.MonkeyPatch, links: Sequence[BackendLinks], *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(command, "place_workers", lambda request, *, force: THREE)
    monkeypatch.setattr(command, "check_placement", lambda placement: links)
    result = CliRunner().invoke(APP, ["--test", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_right_sums_end_with_success(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run(monkeypatch, [found((PAIR, ""), (OTHER, ""), (ALL, ""))])
    assert (code, err) == (0, "")
    [row] = [line for line in out.splitlines() if "GPU 0 (NVIDIA GeForce RTX 3090) - GPU 4 (NVIDIA" in line]
    assert "nccl (cuda)" in row
    assert "4.2 ms" in row
    assert "all 3" in out
    assert out.endswith("Every sum was right.\n")


@pytest.mark.parametrize("problem", ["Rank 2: 1 of 262139 sums of torch.float32 are wrong.", "Rank 2: it did not end."])
def test_a_wrong_sum_is_named_and_ends_with_failure(monkeypatch: pytest.MonkeyPatch, problem: str) -> None:
    code, out, _ = run(monkeypatch, [found((PAIR, ""), (OTHER, problem))])
    assert code == 1
    assert problem in out
    assert "do not add up correctly: nccl between GPU 0 (NVIDIA GeForce RTX 3090) - GPU 4 (" in out
    assert "NCCL_P2P_DISABLE=1" in out
    code, out, _ = run(monkeypatch, [found((OTHER, problem))], "--json")
    assert code == 1
    assert f'"problem": "{problem}"' in out


def test_what_is_known_of_this_nccl_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run(monkeypatch, [found((ALL, ""), warning="NCCL 2.18.1 is known to return wrong results.")])
    assert (code, err) == (0, "warning: NCCL 2.18.1 is known to return wrong results.\n")
    assert out.endswith("Every sum was right.\n")


def test_one_device_or_several_requests_cannot_be_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = run(monkeypatch, [], "auto", "cpu")
    assert (code, err.splitlines()[0]) == (2, "error: --test takes one request, but 2 are given: auto cpu. (LS821)")
    one = Placement(devices=THREE.devices[:1], reason="GPU 0")
    monkeypatch.setattr(command, "place_workers", lambda request, *, force: one)
    result = CliRunner().invoke(APP, ["--test"])
    assert result.exit_code == 2
    assert result.stderr == (
        "error: --test needs two devices or more, but the request gets one: GPU 0. (LS821)\n"
        "`lockstep explain LS821` says more.\n"
    )
