"""What torch reads from a process group: its name, its description, and which of its features work."""

from torch.distributed import ProcessGroup


class PythonProcessGroup(ProcessGroup):
    """A group without a C++ backend for CPU tensors, with the properties that torch reads from such a backend.

    Args:
        rank: Number of this process in the group.
        size: Number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this form
        self._name = ""
        self._description = ""

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return `"shm"`."""
        return "shm"

    # Torch keeps name and description in the backends of a group, of which this one has none.
    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Return the name that torch gave the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        """Take the name that torch gives the group."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        """Return the description that the group was made with."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - torch's name
        """Take the description that the group is made with."""
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
