"""Names of environment variables that others set: launchers, users, libraries. `settings.py` reads them."""

from dataclasses import dataclass

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "PET_NNODES", "PET_NPROC_PER_NODE"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("OMPI_MCA_ess_base_jobid", "PMIX_RANK", "PMIX_NAMESPACE", "PMI_RANK", "PMI_SIZE", "PMI_KVSNAME", "PMI_ID"),
    *("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_NNODES", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_TASK"),
    "SLURM_STEP_RESV_PORTS",
)
"""Variables that launchers set for a worker."""
RECORDED_PREFIXES = (
    *("CUBLAS_", "CUDA_", "CUDNN_", "GLOO_", "KMP_", "LOCKSTEP_", "MKL_", "NCCL_", "OMP_", "OMPI_COMM_", "PYTORCH_"),
    *("SLURM_JOB_ID", "SLURM_STEP_", "SLURM_N", "TORCH_", "TORCHELASTIC_", "TORCHINDUCTOR_"),
)
"""How the names of variables begin that are recorded with a run."""
RECORDED = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONHASHSEED"),
        "NVIDIA_VISIBLE_DEVICES",
    }
)
"""Variables that are recorded with a run, besides those whose names begin with one of `RECORDED_PREFIXES`."""
KERNEL_VARIABLES = {
    "cpu": (
        *("ATEN_CPU_CAPABILITY", "DNNL_DEFAULT_FPMATH_MODE", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS"),
        *("ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA"),
    ),
    "cuda": (
        *(CUBLAS_VARIABLE, "CUBLASLT_WORKSPACE_SIZE", "DISABLE_ADDMM_CUDA_LT", "NVIDIA_TF32_OVERRIDE"),
        "TORCH_CUDNN_V8_API_DISABLED",
    ),
}
"""Variables from which libraries choose their kernels, by the type of device."""
VISIBLE_VARIABLES = {"xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""The variables that hide accelerators other than CUDA's: their numbers, separated by commas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldVariables:
    """A launcher's variables about this worker, as text; None for those that are not set."""

    rank: str | None
    """RANK: number of this worker in the world."""
    world_size: str | None
    """WORLD_SIZE: how many workers there are."""
    local_rank: str | None
    """LOCAL_RANK: number of this worker on its host."""
    local_world_size: str | None
    """LOCAL_WORLD_SIZE: how many workers are on its host."""
    master_addr: str | None
    """MASTER_ADDR: host of the rendezvous."""
    master_port: str | None
    """MASTER_PORT: its TCP port."""
    agent_store: str | None
    """TORCHELASTIC_USE_AGENT_STORE: "True" if torchrun's agent serves the rendezvous, and not rank 0."""
    launcher: str
    """Name of the launcher, for messages: `"Slurm"`."""
    remedy: str
    """What the user can do if one of the variables is missing."""
