"""Who looks at the backwards of a reducer, and has a part in the status that its ranks exchange."""

from typing import Protocol, final

from lockstep.reduce.bucket_set import Bucket
from lockstep.reduce.status import GroupStatus, RankStatus


class BackwardObserver(Protocol):
    """Looks at the backwards of one rank. All are called by the thread that runs the backward."""

    def begin(self) -> None:
        """Look at what `.grad` of the parameters hold: a backward begins (local)."""

    def forget_begin(self) -> None:
        """Forget the last `begin`: that backward has accumulated nothing (local)."""

    def look_at(self, bucket: Bucket) -> None:
        """Look at the gradients of this rank, which are about to be reduced (local)."""

    def fill_in(self, status: RankStatus) -> RankStatus:
        """Return the status of this rank with what there is to compare (local)."""

    def compare(self, status: GroupStatus) -> None:
        """Look at the status of all ranks, and raise on all alike (collective where they differ, which all see)."""


@final
class NoObserver:
    """Looks at nothing."""

    def begin(self) -> None:
        """Do nothing."""

    def forget_begin(self) -> None:
        """Do nothing."""

    def look_at(self, bucket: Bucket) -> None:
        """Do nothing."""

    def fill_in(self, status: RankStatus) -> RankStatus:
        return status

    def compare(self, status: GroupStatus) -> None:
        """Do nothing."""
