"""What torch reads from a process group: its name, its description, and which of its features work."""

from torch.distributed import ProcessGroup


class PythonProcessGroup(ProcessGroup):
    """A group without a C++ backend for CPU tensors, with the properties that torch reads from such a backend."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this form
        self._name = ""
        self._description = ""

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "shm"

    # Torch keeps name and description in the backends of a group, of which this one has none.
    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - torch's name
        self._description = description

    @property
    def supports_splitting(self) -> bool:
        """Whether `split_group` works: no, `new_group` does."""
        return False

    @property
    def supports_coalescing(self) -> bool:
        """Whether single calls can be collected into one: no, the coalesced collectives work as such."""
        return False

    @property
    def supports_time_estimate(self) -> bool:
        """Whether calls can be estimated instead of made: no."""
        return False
