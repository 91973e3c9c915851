"""Variables, read from mappings."""

import os

import pytest

from lockstep.errors import UsageError
from lockstep.secrets import hide_secrets
from lockstep.settings import Settings, channel_variables


def test_calls_are_compared_when_that_is_asked_for() -> None:
    # "false" and "no" once switched it on.
    assert all(Settings({"LOCKSTEP_CHECK": text}).check() for text in ("1", "true", "Yes", "ON", " on "))
    assert not any(Settings({"LOCKSTEP_CHECK": text}).check() for text in ("0", "false", "No", "OFF", "", " "))
    assert not Settings({}).check()
    with pytest.raises(UsageError, match="LOCKSTEP_CHECK is 'maybe', expected 1, true, yes or on"):
        Settings({"LOCKSTEP_CHECK": "maybe"}).check()


def test_all_workers_hash_text_alike() -> None:
    # A vocabulary made from a set had another order in every process, under `lockstep run` too.
    assert Settings({}).for_worker({}, seed=2**32 + 7)["PYTHONHASHSEED"] == "7"
    assert Settings({"PYTHONHASHSEED": ""}).for_worker({})["PYTHONHASHSEED"] == "0"
    assert Settings({"PYTHONHASHSEED": "random"}).for_worker({}, seed=1)["PYTHONHASHSEED"] == "random"


def test_cublas_is_reproducible_from_the_first_product_of_a_worker_on() -> None:
    # The trainer set it in its constructor, which is too late after a first matrix product.
    assert Settings({}).for_worker({})["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert Settings({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}).for_worker({})["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_overrides_come_before_the_users_values_and_these_before_defaults() -> None:
    made = Settings({"A": "theirs", "B": "theirs"}).for_worker({"A": "ours"}, defaults={"B": "default", "C": "default"})
    assert {name: made[name] for name in "ABC"} == {"A": "ours", "B": "theirs", "C": "default"}


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({}, None),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),  # what every torchrun without an id sets
        ({"TORCHELASTIC_RUN_ID": "mine"}, "torchrun mine"),
        ({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"}, "Slurm 12.0"),
        ({"SLURM_JOB_ID": "12"}, "Slurm 12.batch"),
        ({"SLURM_JOB_ID": "12", "TORCHELASTIC_RUN_ID": "mine"}, "torchrun mine"),
    ],
)
def test_a_job_is_what_its_restarts_have_in_common(variables: dict[str, str], job: str | None) -> None:
    assert Settings(variables).job() == job


def test_secrets_of_a_command_are_not_recorded() -> None:
    command = ["lockstep", "train", "a.yaml", "data_args.api_key=abc", "--token", "abc", "--password=a=bc", "-v"]
    others = ["model_args.tokenizer=bert", "max_tokens=512", "data_args.url=https://me:abc@host/a", "--token"]
    shown = hide_secrets([*command, *others])
    assert "abc" not in " ".join(shown)
    assert shown[:4] == ["lockstep", "train", "a.yaml", "data_args.api_key=***"]
    assert shown[4:8] == ["--token", "***", "--password=***", "-v"]
    assert shown[8:] == ["model_args.tokenizer=bert", "max_tokens=512", "data_args.url=https://***@host/a", "--token"]


def test_a_channel_belongs_to_the_process_that_the_launcher_started() -> None:
    # What a worker starts inherits the variable. It would read messages that are meant for the worker.
    variable = channel_variables(7, 4321, "")["LOCKSTEP_CHANNEL"]
    ours, others = {"MASTER_PORT": "4321"}, {"MASTER_PORT": "4322"}
    assert Settings({"LOCKSTEP_CHANNEL": variable} | ours).channel() is None  # of a child of this process
    variable = variable.replace(str(os.getpid()), str(os.getppid()))
    assert Settings({"LOCKSTEP_CHANNEL": variable} | ours).channel() == 7
    assert Settings({"LOCKSTEP_CHANNEL": variable} | others).channel() is None  # another launcher's worker
    assert Settings({"LOCKSTEP_CHANNEL": "x,y,z", "MASTER_PORT": "4321"}).channel() is None
    assert Settings({}).channel() is None


def test_the_backend_of_cpu_tensors_is_shared_memory_or_gloo() -> None:
    assert Settings({}).cpu_backend() == "shm"
    assert Settings({"LOCKSTEP_CPU_BACKEND": " Gloo "}).cpu_backend() == "gloo"
    with pytest.raises(UsageError, match="LOCKSTEP_CPU_BACKEND is 'mpi', expected shm"):
        Settings({"LOCKSTEP_CPU_BACKEND": "mpi"}).cpu_backend()
