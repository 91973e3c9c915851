"""What a worker makes of its launchers' variables. The environments were recorded: Slurm 22.05, Open MPI 5.0."""

from collections.abc import Mapping
from typing import Any

import pytest

from lockstep.comm.bootstrap.identity import (
    WorldVariables,
    expand_node_list,
    expand_tasks_per_node,
    find_world,
    is_announced,
)
from lockstep.errors import GroupError
from lockstep.settings import Settings

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "gpu1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {  # srun -N2 -n3: the third task
    "SLURM_JOB_ID": "10",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
BATCH_SCRIPT = {"SLURM_JOB_ID": "3", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-9419@1",
    "PMIX_RANK": "1",
}
INTEL_MPI = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PYTORCHJOB = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "train-master-0",
    "MASTER_PORT": "23456",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
}
OWN = {"RANK": "7", "WORLD_SIZE": "12", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
ADDRESS = {"MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "4444"}


def world(*environments: Mapping[str, str], **more: str) -> WorldVariables:
    merged: dict[str, str] = {}
    for environment in environments:
        merged |= environment
    return find_world(Settings(merged | more).launchers())


def numbers(found: WorldVariables) -> tuple[Any, ...]:
    return found.rank, found.world_size, found.local_rank, found.local_world_size


@pytest.mark.parametrize(
    ("environment", "place", "address"),
    [
        (TORCHRUN, ("5", "8", "1", "4"), "gpu1"),
        (SLURM, ("2", "3", "0", "1"), "gpu07"),
        (OPEN_MPI, ("1", "2", "1", "2"), "127.0.0.1"),
        (INTEL_MPI | ADDRESS, ("3", "4", "1", "2"), "10.1.2.3"),
        (PYTORCHJOB, ("1", "2", None, None), "train-master-0"),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu07"}, ("2", "3", "0", "1"), "127.0.0.1"),  # no name needs to be resolved
        (SLURM | ADDRESS, ("2", "3", "0", "1"), "10.1.2.3"),
        (SLURM | {"RANK": "2", "WORLD_SIZE": "3"}, ("2", "3", "0", "1"), "gpu07"),
        # A launcher in each task may start several workers, and mpirun's daemons have Slurm's numbers.
        (SLURM | TORCHRUN, ("5", "8", "1", "4"), "gpu1"),
        (OPEN_MPI | TORCHRUN, ("5", "8", "1", "4"), "gpu1"),
        (SLURM | OPEN_MPI, ("1", "2", "1", "2"), "127.0.0.1"),
        (SLURM | OWN, ("7", "12", "3", "4"), None),
        ({"WORLD_SIZE": "2"}, (None, "2", None, None), None),
    ],
)
def test_the_variables_of_every_launcher_are_read(
    environment: Mapping[str, str], place: tuple[Any, ...], address: str | None
) -> None:
    found = world(environment)
    assert numbers(found) == place
    assert found.master_addr == address
    assert is_announced(found)


def test_tasks_of_a_step_agree_on_a_port_and_steps_do_not() -> None:
    first, second = world(SLURM), world(SLURM, SLURM_PROCID="0", SLURM_NODEID="0")
    assert first.master_port == second.master_port
    assert 20000 <= int(first.master_port or 0) < 29000
    assert world(SLURM, SLURM_STEP_ID="1").master_port != first.master_port
    assert world(SLURM, SLURM_STEP_RESV_PORTS="12000-12003").master_port == "12000"


@pytest.mark.parametrize(
    "environment", [{}, BATCH_SCRIPT, {"SLURM_JOB_ID": "3"}, SLURM | {"SLURM_STEP_NUM_TASKS": "1"}]
)
def test_a_process_alone_is_not_announced(environment: Mapping[str, str]) -> None:
    assert not is_announced(world(environment))


def test_srun_that_speaks_pmi_is_slurm() -> None:
    assert world(SLURM, PMI_RANK="2", PMI_SIZE="3").launcher == "Slurm"


@pytest.mark.parametrize(
    ("environment", "more", "said"),
    [
        (SLURM, {"RANK": "0", "WORLD_SIZE": "3"}, "RANK is 0 and SLURM_PROCID, set by Slurm, is 2"),
        (SLURM, {"WORLD_SIZE": "4"}, "WORLD_SIZE is 4 and SLURM_STEP_NUM_TASKS, set by Slurm, is 3"),
        (OPEN_MPI, {"RANK": "0", "WORLD_SIZE": "1"}, "RANK is 0 and OMPI_COMM_WORLD_RANK, set by Open MPI, is 1"),
    ],
)
def test_a_contradiction_names_both_variables(environment: Mapping[str, str], more: dict[str, str], said: str) -> None:
    with pytest.raises(GroupError, match=said):
        world(environment, more)


@pytest.mark.parametrize("more", [{"WORLD_SIZE": "2"}, {"RANK": "1"}])
def test_nodes_for_tasks_are_explained(more: dict[str, str]) -> None:
    with pytest.raises(GroupError, match=r"count nodes, of which there are 2.*SLURM_NTASKS.*SLURM_PROCID"):
        world(SLURM, more)


def test_an_unknown_number_of_nodes_is_not_reported() -> None:
    # The message ended with "count nodes, of which there are None".
    with pytest.raises(GroupError, match="RANK is 0 and SLURM_PROCID") as raised:
        world(SLURM, RANK="0", SLURM_NNODES="", SLURM_STEP_NUM_NODES="")
    assert "None" not in str(raised.value)


def test_one_task_for_a_node_of_several_gpus_is_refused_unless_it_is_meant() -> None:
    one_each = SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_ON_NODE": "4"}
    with pytest.raises(GroupError, match=r"each node has 4 GPUs.*--ntasks-per-node=4"):
        world(one_each)
    assert world(one_each, SLURM_NTASKS_PER_NODE="1").world_size == "2"
    assert world(one_each, SLURM_GPUS_PER_TASK="4").world_size == "2"
    assert world(one_each, TORCHRUN).world_size == "8"


@pytest.mark.parametrize(
    ("environment", "remedy"),
    [
        (BATCH_SCRIPT, "start the script with srun"),
        ({"PET_NNODES": "2"}, "let the pod's command be torchrun"),
        ({}, "Start the script with lockstep run or torchrun"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "mpirun -x MASTER_ADDR=HOST"),
    ],
)
def test_the_remedy_fits_the_launcher(environment: Mapping[str, str], remedy: str) -> None:
    assert remedy in world(environment).remedy


def test_a_rank_of_pmix_without_a_size_is_refused() -> None:
    with pytest.raises(GroupError, match="PMIX_RANK is 1, so this process is one of several"):
        world(PMIX_RANK="1", PMIX_NAMESPACE="prterun-host-1@1")
    assert world(PMIX_RANK="1", RANK="1", WORLD_SIZE="2").world_size == "2"


def test_a_script_in_a_step_of_one_task_may_number_its_own_workers() -> None:
    shell = SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    assert numbers(world(shell, RANK="2", WORLD_SIZE="3"))[:2] == ("2", "3")


def test_rank_0_on_another_node_than_the_first_needs_an_address() -> None:
    elsewhere = SLURM | {"SLURM_PROCID": "0", "SLURM_NODEID": "1"}
    with pytest.raises(GroupError, match="Set MASTER_ADDR to rank 0's node"):
        world(elsewhere)
    assert world(elsewhere, ADDRESS).master_addr == "10.1.2.3"


def test_a_list_of_nodes_that_cannot_be_read_is_shown() -> None:
    with pytest.raises(GroupError, match=r"gpu\[1-.*Set MASTER_ADDR"):
        world(SLURM, SLURM_STEP_NODELIST="gpu[1-")


# -- Slurm's lists, as `scontrol show hostnames` expands them ----------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu7", ["gpu7"]),
        ("login,gpu7", ["login", "gpu7"]),
        ("gpu[1-3]", ["gpu1", "gpu2", "gpu3"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("gpu[1-2,007,10]", ["gpu1", "gpu2", "gpu007", "gpu10"]),
        ("a[1-2],b[3],c", ["a1", "a2", "b3", "c"]),
        ("rack[1-2]n[01-02]-ib", ["rack1n01-ib", "rack1n02-ib", "rack2n01-ib", "rack2n02-ib"]),
    ],
)
def test_a_list_of_nodes_is_expanded_in_its_order(text: str, names: list[str]) -> None:
    assert expand_node_list(text) == names


@pytest.mark.parametrize("text", ["", "gpu[1-", "gpu1]", "gpu[a-b]", "gpu[[1]]", "gpu1,", "gpu[]"])
def test_what_is_no_list_of_nodes_is_shown(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of nodes"):
        expand_node_list(text)


def test_tasks_per_node_are_expanded() -> None:
    assert expand_tasks_per_node("4(x2),1") == [4, 4, 1]
    with pytest.raises(ValueError, match="is not a list of tasks"):
        expand_tasks_per_node("4x2")
