"""Ranks that are threads of one process, each with a `World` of its own, for tests that need no processes.

    def test_sum() -> None:
        def program(world: World) -> float:
            tensor = torch.tensor(float(world.rank))
            dist.all_reduce(tensor, group=world.group)
            return tensor.item()

        assert run_ranks(3, program) == [3.0, 3.0, 3.0]

Ranks take turns, so a test is the same in every run (`tests.support.turns`). A rank must not wait for another in any
way but through its group. What belongs to a process and not to a thread, they share: torch's default dtype, its number
of threads, its deterministic switches, the environment; the random generators each has for itself.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final, TypeVar

from tests.support.threaded_group import ThreadedProcessGroup
from tests.support.threaded_work import GroupState
from tests.support.turns import Turns, restored_generators
from torch.distributed import distributed_c10d

from lockstep.comm import World

Result = TypeVar("Result")

_TURN_SECONDS: Final = 100.0
"""A rank that does not come to its next call in this time waits for something that does not come."""


def run_ranks(
    num_ranks: int,
    function: Callable[[World], Result],
    *,
    poisons: bool = False,
    has_default_group: bool = False,
    turn_seconds: float = _TURN_SECONDS,
) -> list[Result]:
    """Run `function(world)` on each of `num_ranks` ranks, and return their results in rank order.

    Args:
        num_ranks: How many.
        function: What each runs, in a thread of its own.
        poisons: Whether outputs of a call hold poison until it is waited for.
        has_default_group: Whether the group is torch's default group too, for code that asks for that.
        turn_seconds: How long a rank may take from one call to the next.

    Raises:
        BaseException: What the first rank that failed raised; notes say what others raised.
    """
    turns = Turns(num_ranks, turn_seconds)
    state = GroupState(turns, range(num_ranks), poisons=poisons)
    results: dict[int, Result] = {}

    def run(rank: int, worlds: "_WorldsOfThreads") -> None:
        error: BaseException | None = None
        try:
            turns.begin(rank)
            group = ThreadedProcessGroup(state, rank)
            worlds.enter(group, is_default=has_default_group)
            results[rank] = function(World(rank=rank, world_size=num_ranks, group=group))
        except BaseException as failure:  # noqa: BLE001 - it is raised by `run_ranks`
            error = failure
        finally:
            turns.end(rank, error)

    with _worlds_of_threads() as worlds, restored_generators():
        for rank in range(num_ranks):
            threading.Thread(target=run, args=(rank, worlds), name=f"rank {rank}", daemon=True).start()
        turns.wait_for_all()
    failures = turns.failures()
    if failures:
        (first, cause), *others = failures
        cause.add_note(f"Raised by rank {first}, the first to fail.")
        for rank, error in others:
            cause.add_note(f"Then rank {rank}: {type(error).__name__}: {error}")
        raise cause
    return [results[rank] for rank in range(num_ranks)]


def make_subgroup(world: World, ranks: list[int]) -> World:
    """Return the world of a new group of some ranks of `world`; each of them calls, also when its group is broken."""
    assert isinstance(world.group, ThreadedProcessGroup)
    group = world.group.make_subgroup(ranks)
    worlds: Any = distributed_c10d._world
    worlds.enter(group, is_default=False)
    return World(rank=group.rank(), world_size=group.size(), group=group)


class _WorldsOfThreads:
    """What torch.distributed knows, for each rank its own; threads that are no rank have that of the process."""

    def __init__(self, of_process: Any) -> None:
        vars(self).update(_of_process=of_process, _of_thread=threading.local())

    def enter(self, group: ThreadedProcessGroup, *, is_default: bool) -> None:
        """Let torch know a group of this thread's."""
        if not hasattr(self._of_thread, "world"):
            self._of_thread.world = _make_world()
        world = self._of_thread.world
        name = f"threaded_{len(world.pg_map)}"
        group.setGroupName(name)
        world.pg_map[group] = "threaded", group.get_group_store()
        world.pg_names[group] = name
        world.pg_group_ranks[group] = {thread: rank for rank, thread in enumerate(group.state.threads)}
        world.pg_backend_config[group] = "cpu:threaded"
        if is_default:
            world.default_pg = group

    def _current(self) -> Any:
        return getattr(self._of_thread, "world", self._of_process)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._current(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._current(), name, value)


@contextmanager
def _worlds_of_threads() -> Iterator[_WorldsOfThreads]:
    of_process = distributed_c10d._world
    worlds = _WorldsOfThreads(of_process)
    distributed_c10d._world = worlds  # type: ignore[assignment]
    try:
        yield worlds
    finally:
        distributed_c10d._world = of_process


def _make_world() -> SimpleNamespace:
    return SimpleNamespace(
        default_pg=None,
        pg_map={},
        pg_names={},
        pg_group_ranks={},
        pg_backend_config={},
        group_count=0,
        tags_to_pg={},
        pg_to_tag={},
        pg_coalesce_state={},
        pg_default_device={},
        comms=[],
    )
