"""`lockstep devices` as a user runs it, on this machine, and with the driver of fake_driver.c."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.process import warm

COMMAND = "from lockstep.cli.main import main; main()"
DRIVERS_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
# The linker of a process that was forked has read LD_LIBRARY_PATH before: it finds libraries that are loaded already.
WITH_CUDA = (
    f"import ctypes, os; [ctypes.CDLL(os.environ['LD_LIBRARY_PATH'] + '/' + name) for name in {DRIVERS_LIBRARIES}]; "
    "import torch; torch.version.cuda = '12.8'; " + COMMAND
)
DRIVER = Path(__file__).with_name("fake_driver.c")
TRAIN = """
model: lockstep.recipes.digits:Net
data: lockstep.recipes.digits:datasets
"""


def run(*arguments: str, code: str = COMMAND, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    return warm.run([sys.executable, "-c", code, *arguments], env={**environment, **variables})


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with the libraries of a driver."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("driver")
    for name in DRIVERS_LIBRARIES:
        subprocess.run([compiler, "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", folder / name, DRIVER], check=True)
    return str(folder)


@pytest.fixture(scope="module")
def no_driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder whose libraries hide those of a driver that this machine may have."""
    folder = tmp_path_factory.mktemp("no_driver")
    (folder / "libnvidia-ml.so.1").write_text("no library")
    return str(folder)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[int]:
    """Return the pid of a process that stands for somebody's training, and has opened CUDA's library."""
    library = tmp_path / "libcuda.so.1"
    library.touch()
    with library.open() as stream:
        code = "import time; time.sleep(600)"
        process = subprocess.Popen([sys.executable, "-c", code, "train.py"], pass_fds=[stream.fileno()])
    yield process.pid
    process.kill()
    process.wait()


def test_without_a_driver_it_says_so_in_one_line_and_shows_the_cpu(no_driver: str) -> None:
    # In a new interpreter, whose linker reads the variable.
    code = "import torch; torch.version.cuda = None; " + COMMAND
    done = subprocess.run(
        [sys.executable, "-c", code, "devices"],
        env={**os.environ, "LD_LIBRARY_PATH": no_driver},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert lines[0] == "No GPU can be used: no NVIDIA driver is installed here."
    assert lines[1].startswith(f"CPU: {len(os.sched_getaffinity(0))} cores, ")
    assert lines[2:] == [
        "auto would take CPU, 2 workers (no NVIDIA driver is installed here)",
        "auto:3 would take CPU, 3 workers (no NVIDIA driver is installed here)",
    ]


def test_the_table_shows_who_holds_what_and_what_auto_takes(driver: str, holder: int) -> None:
    done = run("devices", code=WITH_CUDA, LD_LIBRARY_PATH=driver, FAKE_HOLDER=str(holder))
    user = psutil.Process(holder).username()
    assert (done.returncode, done.stderr) == (0, "")
    [first] = [line for line in done.stdout.splitlines() if "NVIDIA T4 " in line and "97 %" in line]
    assert "10.0 GiB" in first
    assert "16.0 GiB" in first
    assert f"{user}, pid {holder}, python" in first
    assert f"auto would take GPU 1 (GPU 0 is held by {user}, pid {holder}, python" in done.stdout
    assert "auto:3 would be refused: 3 workers need 3 GPUs, but of 2 here 1 can be taken:" in done.stdout


def test_requests_are_tried(driver: str) -> None:
    done = run("devices", "0,1", "auto:1>=20GiB", "7", code=WITH_CUDA, LD_LIBRARY_PATH=driver)
    assert "0,1 would take GPU 0, GPU 1\n  The cards are unequal (GPU 0: NVIDIA T4, 16 GiB; GPU 1:" in done.stdout
    assert "auto:1>=20GiB would take GPU 1 (GPU 0 has 16.0 GiB of free memory)" in done.stdout
    assert "7 would be refused: device_ids asks for GPU 7, but the only ones here are 0, 1" in done.stdout
    assert done.returncode == 0


def test_json_is_one_document_and_nothing_else(driver: str, holder: int) -> None:
    done = run("devices", "--json", "auto", "0", code=WITH_CUDA, LD_LIBRARY_PATH=driver, FAKE_HOLDER=str(holder))
    found = json.loads(done.stdout)
    assert [gpu["uuid"][:6] for gpu in found["gpus"]] == ["GPU-aa", "GPU-bb"]
    assert found["gpus"][0]["memory_free_bytes"] == 10 * 2**30
    [process] = found["gpus"][0]["holders"]
    assert (process["pid"], process["memory_bytes"]) == (holder, 5 * 2**30)
    assert process["since"][:4].isdigit()
    taken, refused = found["requests"]
    assert [device["visible"][:6] for device in taken["devices"]] == ["GPU-bb"]
    assert refused["devices"] == []
    assert refused["refused"].startswith("device_ids asks for GPUs that are not free")


def test_cudas_numbers_are_not_nvidia_smis(driver: str) -> None:
    # CUDA counts the fast card first: its number 0 is nvidia-smi's 1.
    done = run("devices", "1", "0", code=WITH_CUDA, LD_LIBRARY_PATH=driver, CUDA_VISIBLE_DEVICES="0")
    assert "\n1 would take GPU 1\n" in done.stdout
    assert "0 would be refused: device_ids asks for GPU 0, which CUDA_VISIBLE_DEVICES=0 hides" in done.stdout


def test_a_driver_that_fails_is_one_line_and_no_reason_to_train_on_the_cpu(driver: str) -> None:
    done = run("devices", "auto", "cpu:2", code=WITH_CUDA, LD_LIBRARY_PATH=driver, FAKE_STATUS="18")
    assert "No GPU can be used: the NVIDIA driver was updated but the old one still runs: reboot." in done.stdout
    assert "auto would be refused: auto looks for GPUs, but" in done.stdout
    assert "cpu:2 would take CPU, 2 workers" in done.stdout
    assert done.returncode == 0


def test_train_refuses_a_held_card_before_it_makes_anything(driver: str, holder: int, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(TRAIN + f"device_ids: [GPU-aa]\nrun_dir: {tmp_path / 'run'}\n")
    done = run("train", str(config), code=WITH_CUDA, LD_LIBRARY_PATH=driver, FAKE_HOLDER=str(holder))
    assert done.returncode == 2
    user = psutil.Process(holder).username()
    assert f"error: device_ids asks for GPUs that are not free: GPU 0 is held by {user}, pid" in done.stderr
    assert not (tmp_path / "run").exists()


def test_train_says_where_it_trains(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(TRAIN + "epochs: 1\ndevice_ids: 'cpu:1'\n" + f"run_dir: {tmp_path / 'run'}\n")
    done = run("train", str(config), "--force")
    assert done.returncode == 0, done.stderr
    assert "devices: CPU, 1 worker\n" in done.stdout


def test_the_links_between_workers_are_tested_with_each_backend() -> None:
    done = run("devices", "--test", "--json", "cpu:2")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [device["name"] for device in found["devices"]] == ["cpu", "cpu"]
    assert [(each["backend"], each["device"]) for each in found["links"]] == [("shm", "cpu"), ("gloo", "cpu")]
    for each in found["links"]:
        [report] = each["reports"]
        assert (report["ranks"], report["problem"]) == ([0, 1], "")
        assert report["seconds"] > 0


IN_A_CONTAINER = """
import json, os, subprocess, sys
import lockstep_command
lockstep_command._put_off_package_init()  # which imports torch
from lockstep.devices.inventory import look_up_holder
def seen(pid):
    holder = look_up_holder(pid, memory_bytes=1, is_graphics=False)
    return [holder.user is not None, holder.is_self]
wait = [sys.executable, "-c", "input()"]
other = subprocess.Popen(wait, stdin=subprocess.PIPE)
before = seen(os.getpid())
with open(sys.argv[1]) as library:
    user = subprocess.Popen(wait, stdin=subprocess.PIPE, pass_fds=[library.fileno()])
    found = {"own, without a GPU": before, "own": seen(os.getpid()), "user": seen(user.pid), "other": seen(other.pid)}
    with open("/proc/self/status") as status:  # of the namespace of /proc
        [outer] = [int(line.split()[1]) for line in status if line.startswith("NSpid")]
    print(json.dumps({**found, "own by its outer id": seen(outer)}))
for process in (user, other):
    process.communicate(b"\\n")
"""


def in_a_namespace(*options: str, library: Path) -> dict[str, list[bool]]:
    """Run IN_A_CONTAINER in a new namespace of process ids."""
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", *options]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], check=False).returncode:
        pytest.skip("may not make namespaces")
    command = [*unshare, sys.executable, "-c", IN_A_CONTAINER, str(library)]
    found: dict[str, list[bool]] = json.loads(subprocess.check_output(command, text=True, timeout=100))
    return found


def test_an_id_of_the_hosts_is_not_taken_for_a_process_of_the_container(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").touch()
    found = in_a_namespace("--mount-proc", library=tmp_path / "libcuda.so.1")
    assert found == {
        "own, without a GPU": [False, False],
        "own": [True, True],
        "user": [True, False],
        "other": [False, False],  # the driver's id is by chance that of a process here, which uses no GPU
        "own by its outer id": [True, True],
    }


def test_a_process_is_itself_by_the_id_that_the_host_has_for_it(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").touch()
    assert in_a_namespace(library=tmp_path / "libcuda.so.1")["own by its outer id"] == [True, True]
