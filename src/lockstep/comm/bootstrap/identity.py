"""Which worker this process is, from what its launcher put into the environment, or from arguments. Pure.

launcher                rank                   workers                local rank                    where to meet
--------                ----                   -------                ----------                    -------------
torchrun, lockstep run,
Kubernetes, Ray Train   RANK                   WORLD_SIZE             LOCAL_RANK                    MASTER_ADDR, _PORT
mpirun of Open MPI      OMPI_COMM_WORLD_RANK   OMPI_COMM_WORLD_SIZE   OMPI_COMM_WORLD_LOCAL_RANK    on one host: there
mpiexec of MPICH, Intel PMI_RANK               PMI_SIZE               MPI_LOCALRANKID               on one host: there
Slurm's srun            SLURM_PROCID           SLURM_STEP_NUM_TASKS   SLURM_LOCALID                 first of the nodes

[Note: the innermost launcher] One launcher may start another, and a process inherits the variables of all. torchrun may
run under srun, one per node: then its variables count, and Slurm's numbers are those of its agents. mpirun starts its
daemons with srun on a Slurm cluster. So the order is that of the table. But RANK and WORLD_SIZE may also be left over
from something else, or computed by a script: unless torchrun set them, they must not contradict the rest.
"""

import itertools
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

from lockstep.errors import GroupError, counted

Variables = Mapping[str, str]
"""Those variables of the environment that launchers set; empty ones are left out."""

_FIRST_PORT = 20000
_NUM_PORTS = 9000
"""Range of the port when none is given: below those that the kernel and Kubernetes hand out, and
without 29400 and 29500, torch's own."""
_LOOPBACK = "127.0.0.1"
_HIGHEST_PORT = 65535
_REMEDY = "Start the script with lockstep run or torchrun, or call ls.launch, which sets up the group by itself."
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldVariables:
    """A launcher's variables about this worker, as text; None for those that are not set."""

    rank: str | None
    world_size: str | None
    local_rank: str | None
    local_world_size: str | None
    master_addr: str | None
    master_port: str | None
    agent_store: str | None = None
    """TORCHELASTIC_USE_AGENT_STORE: "True" if torchrun's agent serves the rendezvous, and not rank 0."""
    launcher: str
    """Name of the launcher, for messages: `"Slurm"`."""
    remedy: str
    """What the user can do if one of the variables is missing."""
    names: tuple[str, str] = "RANK", "WORLD_SIZE"
    """Which variables rank and world size are taken from."""


def find_world(variables: Variables) -> WorldVariables:
    """Return rank, world size and address by the launchers, as torch's variables; GroupError if they contradict."""
    direct = read_torch_variables(variables)
    if "TORCHELASTIC_RUN_ID" in variables:
        return direct
    report = _from_open_mpi(variables) or _from_pmi(variables) or _from_slurm(variables)
    if report is None:
        _check_size_is_known(variables, direct)
        return replace(direct, remedy=_explain_unstarted(variables) or _REMEDY)
    if _starts_launchers(report, direct):
        return direct
    _compare(variables, report, direct)
    if report.launcher == "Slurm" and direct.rank is None:
        _check_tasks(variables, report)
    own = {each.name: getattr(direct, each.name) for each in fields(direct)}
    kept = {"launcher", "remedy", "names"}
    return replace(report, **{name: value for name, value in own.items() if value and name not in kept})


def read_torch_variables(variables: Variables) -> WorldVariables:
    """Return the values of torch.distributed's own variables, without those of other launchers."""
    return WorldVariables(
        rank=variables.get("RANK"),
        world_size=variables.get("WORLD_SIZE"),
        local_rank=variables.get("LOCAL_RANK"),
        local_world_size=variables.get("LOCAL_WORLD_SIZE"),
        master_addr=variables.get("MASTER_ADDR"),
        master_port=variables.get("MASTER_PORT"),
        agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE"),
        launcher=_name_launcher(variables),
        remedy=_REMEDY,
    )


def _name_launcher(variables: Variables) -> str:
    run_id = variables.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return "the environment"
    return "lockstep run" if run_id.startswith("lockstep-") else "torchrun"


def is_announced(world: WorldVariables) -> bool:
    """Return whether a launcher says that this process is one of several workers; its rank may be missing."""
    return world.world_size not in {None, "1"}


def find_rank_and_size(
    variables: WorldVariables, init_method: str | None, rank: int, world_size: int, *, has_store: bool
) -> tuple[int, int]:
    """Return rank and world size; for `env://`, what is -1 is taken from the environment. Pure."""
    if has_store or not (init_method or "env://").startswith("env://"):
        if world_size < 0 or rank < 0:
            raise GroupError(
                f"rank is {rank} and world_size is {world_size}, but {init_method or 'a store'} provides neither: "
                "give both. (LS101)"
            )
    else:
        _check_environment(variables, rank, world_size)
        rank = rank if rank >= 0 else int(variables.rank or "")
        world_size = world_size if world_size >= 0 else int(variables.world_size or "")
    if not 0 <= rank < world_size:
        raise GroupError(
            f"Rank {rank} is outside a world of {counted(world_size, 'worker')}: ranks are 0 to {world_size - 1}. "
            "Check that the number of workers counts processes, not hosts. (LS102)"
        )
    return rank, world_size


def _check_environment(variables: WorldVariables, rank: int, world_size: int) -> None:
    given: Mapping[str, bool] = {"rank": rank >= 0, "world_size": world_size >= 0}
    values = {field.name: getattr(variables, field.name) for field in fields(variables)}
    needed = [name for name in ("rank", "world_size", "master_addr", "master_port") if not given.get(name)]
    missing = [name.upper() for name in needed if not values[name]]
    for name in needed:
        if values[name] and name != "master_addr" and not values[name].isdecimal():
            expected = "a number from 0 to WORLD_SIZE - 1" if name == "rank" else "a whole number"
            source = "" if variables.launcher == "the environment" else f", set by {variables.launcher}"
            raise GroupError(
                f"{name.upper()} is {values[name]!r} in the environment{source}, expected {expected}. (LS102)"
            )
    if missing:
        raise GroupError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set in the environment, so this "
            f"worker has no rank in a world. {variables.remedy} (LS101)"
        )
    if not 0 < int(values["master_port"]) <= _HIGHEST_PORT:
        raise GroupError(
            f"MASTER_PORT is {values['master_port']} in the environment, expected 1 to {_HIGHEST_PORT}. (LS102)"
        )


# -- Open MPI, and others that speak PMI -------------------------------------------------------------------------------


def _from_open_mpi(variables: Variables) -> WorldVariables | None:
    names = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    job = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid")  # of Open MPI 5 and 4
    return _from_mpi(variables, "Open MPI", names, job, "mpirun", "-x MASTER_ADDR=HOST -x MASTER_PORT=29500")


def _from_pmi(variables: Variables) -> WorldVariables | None:
    if "SLURM_STEP_ID" in variables and variables.get("PMI_RANK") == variables.get("SLURM_PROCID"):
        return None  # srun sets PMI variables too, and more in its own variables
    names = "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
    job = variables.get("PMI_KVSNAME") or variables.get("PMI_ID")
    return _from_mpi(variables, "MPI", names, job, "mpiexec", "-genv MASTER_ADDR HOST -genv MASTER_PORT 29500")


def _from_mpi(  # how one library's launcher differs from another's
    variables: Variables, launcher: str, names: tuple[str, str, str, str], job: str | None, program: str, options: str
) -> WorldVariables | None:
    rank, world_size, local_rank, local_world_size = map(variables.get, names)
    if rank is None or world_size is None:
        return None
    return WorldVariables(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=_LOOPBACK if local_world_size == world_size else None,
        master_port=_derive_port(job) if job is not None else None,
        launcher=launcher,
        remedy=(
            f"{program} does not say which host rank 0 is on: set its address for all workers, with {program} "
            f"{options}, where HOST is the first of its hosts."
        ),
        names=names[:2],
    )


def _derive_port(job: str) -> str:
    """Return a port that is the same for all workers of a job, and almost always another one for another job."""
    return str(_FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS)


# -- Slurm -------------------------------------------------------------------------------------------------------------


def _from_slurm(variables: Variables) -> WorldVariables | None:
    """Return the report for a task of a step; None for a batch script, which has Slurm's variables too."""
    if "SLURM_STEP_ID" not in variables or "SLURM_PROCID" not in variables:
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS"
    nodes = [] if "MASTER_ADDR" in variables else _nodes(variables)
    if nodes and variables["SLURM_PROCID"] == "0" != variables.get("SLURM_NODEID", "0"):
        raise GroupError(
            f"Rank 0 runs on node {variables['SLURM_NODEID']} of the step (SLURM_NODEID), as --distribution=arbitrary "
            f"allows, but the other ranks connect to the first node, {nodes[0]}. "
            "Set MASTER_ADDR to rank 0's node. (LS105)"
        )
    reserved = variables.get("SLURM_STEP_RESV_PORTS", "").partition("-")[0].partition(",")[0]
    job = f"{variables.get('SLURM_JOB_ID')}.{variables['SLURM_STEP_ID']}"
    return WorldVariables(
        rank=variables["SLURM_PROCID"],
        world_size=variables.get(size_name),
        local_rank=variables.get("SLURM_LOCALID"),
        local_world_size=_tasks_here(variables),
        master_addr=_LOOPBACK if len(nodes) == 1 else nodes[0] if nodes else None,
        master_port=reserved or _derive_port(job),
        launcher="Slurm",
        remedy="Start the script with srun, one task for each worker.",
        names=("SLURM_PROCID", size_name),
    )


def _nodes(variables: Variables) -> list[str]:
    text = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
    try:
        return expand_node_list(text) if text else []
    except ValueError as error:
        raise GroupError(
            f"Slurm's list of nodes cannot be read: {error} Set MASTER_ADDR to the first node. (LS105)"
        ) from error


def _tasks_here(variables: Variables) -> str | None:
    per_node = variables.get("SLURM_STEP_TASKS_PER_NODE")
    try:
        return None if per_node is None else str(expand_tasks_per_node(per_node)[int(variables["SLURM_NODEID"])])
    except (KeyError, ValueError, IndexError):
        return None


def _check_tasks(variables: Variables, report: WorldVariables) -> None:
    """Refuse one task for each of several nodes that have several GPUs, unless it was requested explicitly."""
    gpus = variables.get("SLURM_GPUS_ON_NODE", "")
    num_nodes = variables.get("SLURM_STEP_NUM_NODES") or variables.get("SLURM_NNODES")
    is_meant = {"SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_NODE"} & set(variables)
    if gpus.isdecimal() and int(gpus) > 1 and report.world_size == num_nodes != "1" and not is_meant:
        raise GroupError(
            f"Slurm started {num_nodes} tasks, one on each of {num_nodes} nodes, and each node has {gpus} GPUs "
            f"(SLURM_GPUS_ON_NODE), of which one worker would use one. A worker is a task, not a node: use "
            f"--ntasks-per-node={gpus}. If one worker should have all GPUs of its node, use --ntasks-per-node=1, or "
            "start torchrun in each task. (LS105)"
        )


# -- Contradictions ----------------------------------------------------------------------------------------------------


def _starts_launchers(report: WorldVariables, direct: WorldVariables) -> bool:
    """Return whether each task seems to be a launcher that has started several workers and set their ranks."""
    if report.world_size == "1" and direct.rank is not None and direct.world_size is not None:
        return True  # a shell on a node, or a script that starts its workers itself
    sizes = (direct.world_size, direct.local_world_size, report.world_size)
    if direct.rank is None or not all(size is not None and size.isdecimal() for size in sizes):
        return False
    world_size, local_world_size, num_tasks = (int(size or 0) for size in sizes)
    return local_world_size > 1 and world_size == num_tasks * local_world_size


def _compare(variables: Variables, report: WorldVariables, direct: WorldVariables) -> None:
    differences = list(_differences(report, direct))
    if not differences:
        return
    names, launcher = " and ".join(name for name, _ in differences), report.launcher
    raise GroupError(
        f"The environment contradicts itself: {'; '.join(text for _, text in differences)}."
        f"{_explain_nodes(variables, report, direct)} Unset {names} to be the worker that {launcher} started; "
        f"or, if {names} {'is' if len(differences) == 1 else 'are'} right, unset those of {launcher}. (LS104)"
    )


def _differences(report: WorldVariables, direct: WorldVariables) -> Iterator[tuple[str, str]]:
    pairs = (direct.rank, report.rank), (direct.world_size, report.world_size)
    for (mine, its), name, source in zip(pairs, direct.names, report.names, strict=True):
        if mine is not None and its is not None and mine != its:
            yield name, f"{name} is {mine} and {source}, set by {report.launcher}, is {its}"


def _explain_nodes(variables: Variables, report: WorldVariables, direct: WorldVariables) -> str:
    """Return an explanation if the numbers seem to count nodes instead of tasks, else an empty text."""
    if report.launcher != "Slurm":
        return ""
    num_nodes = variables.get("SLURM_STEP_NUM_NODES") or variables.get("SLURM_NNODES")
    if num_nodes is None:
        return ""
    counts_nodes = direct.world_size == num_nodes != report.world_size
    is_node = direct.rank == variables.get("SLURM_NODEID") != report.rank
    if not (counts_nodes or (is_node and num_nodes != "1")):
        return ""
    return (
        f" It seems to count nodes, of which there are {num_nodes}: a worker is a task, so WORLD_SIZE is SLURM_NTASKS, "
        "not SLURM_NNODES, and RANK is SLURM_PROCID, not SLURM_NODEID."
    )


def _check_size_is_known(variables: Variables, direct: WorldVariables) -> None:
    """Refuse a rank of PMIx without a world size: each process would train by itself."""
    if "PMIX_RANK" in variables and direct.world_size is None:
        raise GroupError(
            f"PMIX_RANK is {variables['PMIX_RANK']}, so this process is one of several, but their number is not set. "
            "Start the script with mpirun or srun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in "
            "each. (LS101)"
        )


def _explain_unstarted(variables: Variables) -> str:
    """Return what to do if the variables are those of a launcher that was not used to start the workers."""
    if "PET_NNODES" in variables or "PET_NPROC_PER_NODE" in variables:
        return "The PET_ variables of this pod are for torchrun: let the pod's command be torchrun SCRIPT."
    if "SLURM_JOB_ID" in variables and "SLURM_STEP_ID" not in variables:
        return "This is a job of Slurm, but not one of its tasks: start the script with srun."
    return ""


# -- Slurm's lists: see `scontrol show hostnames` and the environment variables of srun(1) -----------------------------


def expand_node_list(text: str) -> list[str]:
    """Return the names of hosts in `"gpu[01-03,7],login"`, in its order; ValueError if it is not such a list."""
    return [name for entry in _split(text) for name in _expand(entry)]


def expand_tasks_per_node(text: str) -> list[int]:
    """Return how many tasks each host has, in their order, from `"4(x2),1"`; ValueError if it is not such a list."""
    counts: list[int] = []
    for part in text.split(","):
        match = _REPEATED.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a list of tasks per node such as '4(x2),1'.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _split(text: str) -> Iterator[str]:
    """Yield the entries: what stands between the commas outside brackets."""
    depth, entry = 0, ""
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if depth not in {0, 1}:
            raise _not_a_list(text)
        if letter == "," and depth == 0:
            yield entry
            entry = ""
        else:
            entry += letter
    if depth != 0 or not entry:
        raise _not_a_list(text)
    yield entry


def _expand(entry: str) -> Iterator[str]:
    pieces = re.split(r"\[([^\]]*)\]", entry)  # fixed text and the insides of brackets, in turn
    choices = [_numbers(piece, entry) if position % 2 else [piece] for position, piece in enumerate(pieces)]
    return map("".join, itertools.product(*choices))


def _numbers(inside: str, entry: str) -> list[str]:
    numbers: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _not_a_list(entry)
        width = len(match[1])
        numbers += [f"{number:0{width}}" for number in range(int(match[1]), int(match[2] or match[1]) + 1)]
    return numbers


def _not_a_list(text: str) -> ValueError:
    return ValueError(f"{text!r} is not a list of nodes such as 'gpu[01-03,7],login'.")
