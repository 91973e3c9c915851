"""The backend "shm" when ranks are killed, stopped, late or interrupted. Real processes, real signals."""

import atexit
import gc
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from tests.process.ranks import CPU, Posts, Rank, Ranks, mixed_calls
from torch.utils.data import DataLoader

from lockstep.comm import report_failure
from lockstep.comm.shm import native
from lockstep.errors import CollectiveTimeoutError, GroupError, PeerLostError

QueuedWork = Callable[[], Any]
MANY = (5 << 20) // 4
"""float32 elements of 5 MB: more than a send buffer, so several rounds; and several chunks of a message."""
NOTICED_WITHIN = 60.0
"""Seconds after which every survivor has an error: some milliseconds, and the rest for a machine that is busy. Without
notice it would wait for the group's timeout, which is five."""


# -- A peer is killed --------------------------------------------------------------------------------------------------


def all_reduce(rank: Rank, victim: int, group: Any) -> QueuedWork:
    tensor = torch.ones(4)
    return lambda: dist.all_reduce(tensor)


def all_reduce_of_many(rank: Rank, victim: int, group: Any) -> QueuedWork:
    tensor = torch.ones(MANY)
    return lambda: dist.all_reduce(tensor)


def all_reduce_in_place(rank: Rank, victim: int, group: Any) -> QueuedWork:
    tensor = group.allocate_tensor(MANY, dtype=torch.float32, device=CPU)
    return lambda: dist.all_reduce(tensor)


def all_reduce_async(rank: Rank, victim: int, group: Any) -> QueuedWork:
    tensor = torch.ones(MANY)

    def call() -> None:
        work: Any = dist.all_reduce(tensor, async_op=True)
        work.wait()

    return call


def broadcast(rank: Rank, victim: int, group: Any) -> QueuedWork:
    tensor = torch.ones(MANY)
    return lambda: dist.broadcast(tensor, victim)


def reduce(rank: Rank, victim: int, group: Any) -> QueuedWork:
    tensor = torch.ones(MANY)
    return lambda: dist.reduce(tensor, (victim + 1) % rank.size)


def all_gather(rank: Rank, victim: int, group: Any) -> QueuedWork:
    tensor = torch.ones(MANY)
    outputs = [torch.empty(MANY) for _ in range(rank.size)]
    return lambda: dist.all_gather(outputs, tensor)


def reduce_scatter(rank: Rank, victim: int, group: Any) -> QueuedWork:
    output, whole = torch.empty(MANY), torch.ones(rank.size * MANY)
    return lambda: dist.reduce_scatter_single(output, whole)


def all_to_all(rank: Rank, victim: int, group: Any) -> QueuedWork:
    output, whole = torch.empty(rank.size * MANY), torch.ones(rank.size * MANY)
    return lambda: dist.all_to_all_single(output, whole)


def gather(rank: Rank, victim: int, group: Any) -> QueuedWork:
    tensor, root = torch.ones(MANY), (victim + 1) % rank.size
    outputs = [torch.empty(MANY) for _ in range(rank.size)] if rank.number == root else None
    return lambda: dist.gather(tensor, outputs, root)


def scatter(rank: Rank, victim: int, group: Any) -> QueuedWork:
    output = torch.empty(MANY)
    inputs = [torch.ones(MANY) for _ in range(rank.size)] if rank.number == victim else None
    return lambda: dist.scatter(output, inputs, victim)


def barrier(rank: Rank, victim: int, group: Any) -> QueuedWork:
    return dist.barrier


def objects(rank: Rank, victim: int, group: Any) -> QueuedWork:
    found: list[Any] = [None] * rank.size
    return lambda: dist.all_gather_object(found, {"rank": rank.number})


def send(rank: Rank, victim: int, group: Any) -> QueuedWork:
    tensor = torch.ones(MANY)
    if rank.number == victim:
        return lambda: [dist.recv(tensor, peer) for peer in range(rank.size) if peer != victim]
    return lambda: dist.send(tensor, victim)


def recv(rank: Rank, victim: int, group: Any) -> QueuedWork:
    tensor = torch.ones(MANY)
    if rank.number == victim:
        return lambda: [dist.send(tensor, peer) for peer in range(rank.size) if peer != victim]
    return lambda: dist.recv(tensor, victim)


def recv_from_any(rank: Rank, victim: int, group: Any) -> QueuedWork:
    if rank.number == victim:
        return recv(rank, victim, group)
    tensor = torch.ones(MANY)
    return lambda: dist.recv(tensor)


CALLS = (
    *(all_reduce, all_reduce_of_many, all_reduce_in_place, all_reduce_async, broadcast, reduce, all_gather),
    *(reduce_scatter, all_to_all, gather, scatter, barrier, objects, send, recv, recv_from_any),
)


WAIT_SECONDS = 4
"""The timeout of ranks that wait in vain; both have to be in the call by then, on a machine that is busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What a survivor says of the error that it got."""

    moment: float
    """When it got it."""
    rank: int
    """Which rank is lost."""
    message: str
    """The text."""


def lose(call: QueuedWork, attempts: int = 3) -> Loss:
    """Make a call until a rank is lost: a survivor that the victim had told its part completes the first."""
    for _ in range(attempts):
        try:
            call()
        except PeerLostError as error:
            return Loss(moment=time.monotonic(), rank=error.rank, message=str(error))
    raise AssertionError("every call succeeded")


def call_until_lost(
    rank: Rank, prepare: Callable[[Rank, int, Any], QueuedWork], victim: int, when: str
) -> tuple[Loss, float, Loss]:
    """Make a call once, and then with a victim that never makes it, or stops before the last word of its part."""
    call = prepare(rank, victim, rank.join())
    if rank.number == victim:
        posts = Posts()
        count = posts.count_of(call)
        if when == "before the call":
            rank.say()
            signal.pause()
        posts.stop_before(count, rank.say)
        call()
    call()
    rank.say()
    first = lose(call)
    again = time.monotonic()
    second = lose(call, attempts=1)
    return first, again, second


@pytest.mark.parametrize(
    ("prepare", "size"),
    [(call, 3) for call in CALLS] + [(all_reduce, 2), (send, 2)],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_every_survivor_learns_in_time_which_rank_was_killed(
    prepare: Callable[[Rank, int, Any], QueuedWork], size: int, tmp_path: Path
) -> None:
    for when, victim in (("before the call", 0), ("within the call", size - 1)):
        with Ranks(tmp_path, size, call_until_lost, prepare, victim, when) as ranks:
            survivors = [number for number in range(size) if number != victim]
            ranks.hear(victim)
            for number in survivors:
                ranks.hear(number)
                ranks.wait_until(number, "sleeping")
            killed = ranks.send_signal(victim, signal.SIGKILL)
            for number in survivors:
                first, again, second = ranks.result(number)
                assert first.rank == victim, first.message
                assert f"Rank {victim} (process {ranks.pid(victim)}) is lost" in first.message
                assert first.moment - killed < NOTICED_WITHIN, when
                assert (second.rank, second.message) == (first.rank, first.message)
                assert second.moment - again < NOTICED_WITHIN


def wait_for_a_late_rank(rank: Rank) -> Loss | None:
    """Make a call in which rank 0 waits first for rank 1, which is busy elsewhere, and then for rank 2."""
    rank.join()
    dist.barrier()
    rank.say()
    if rank.number == 0:
        return lose(dist.barrier)
    rank.hear()
    return None


def test_a_death_is_noticed_though_the_rank_that_is_waited_for_lives(tmp_path: Path) -> None:
    with Ranks(tmp_path, 3, wait_for_a_late_rank) as ranks:
        for number in (0, 1, 2):
            ranks.hear(number)
        ranks.wait_until(0, "sleeping")
        killed = ranks.send_signal(2, signal.SIGKILL)
        loss = ranks.result(0)
    assert loss.rank == 2
    assert loss.moment - killed < NOTICED_WITHIN


# -- A peer is stopped, or there are many ------------------------------------------------------------------------------


def stream(rank: Rank, num_steps: int) -> int:
    """Make calls and check their results for so many steps, or until rank 0 is told to end; return how many."""
    group = rank.join()
    step = 0
    while step < num_steps:
        mixed_calls(rank, group, step)
        step += 1
        if rank.number == 0:
            rank.say(step)
        goes_on = torch.tensor([not rank.has_mail()])
        dist.broadcast(goes_on, 0)
        if not goes_on:
            break
    dist.destroy_process_group()
    return step


def test_a_rank_that_is_stopped_for_a_while_delays_the_others_and_changes_nothing(tmp_path: Path) -> None:
    with Ranks(tmp_path, 3, stream, 1_000_000) as ranks:
        for number in (0, 1, 2, 0):
            for _ in range(5):
                ranks.hear(0)
            ranks.send_signal(number, signal.SIGSTOP)
            ranks.wait_until(number, "stopped")
            time.sleep(0.3)  # several times as long as a rank sleeps before it looks whether its peers live
            ranks.send_signal(number, signal.SIGCONT)
        ranks.say(0, "end")
        steps = ranks.results()
    assert steps == [steps[0]] * 3
    assert steps[0] >= 20


def test_ranks_that_outnumber_the_cores_get_right_results(tmp_path: Path) -> None:
    size = min(max(6, (os.cpu_count() or 1) + 1), 12)
    with Ranks(tmp_path, size, stream, 12) as ranks:
        assert ranks.results() == [12] * size


# -- A peer does not come ----------------------------------------------------------------------------------------------


def wait_in_vain(rank: Rank) -> tuple[float, GroupError]:
    """Make a call that the last rank makes only when the others have given up; say how long it took and what was."""
    group = rank.join()
    dist.barrier()
    is_late = rank.number == rank.size - 1
    # The late one would wait for minutes if it did not get the error of the others.
    if not is_late:
        group.set_timeout(timedelta(seconds=WAIT_SECONDS))
    else:
        rank.hear()
    began = time.monotonic()
    with pytest.raises(GroupError) as caught:
        dist.all_reduce(torch.ones(3))
    return time.monotonic() - began, caught.value


def test_a_rank_that_does_not_come_is_named_in_time_and_gets_an_error_when_it_comes(tmp_path: Path) -> None:
    with Ranks(tmp_path, 3, wait_in_vain) as ranks:
        late = 2
        waited = [ranks.result(number) for number in range(late)]
        ranks.say(late)
        seconds, error = ranks.result(late)
    assert isinstance(error, CollectiveTimeoutError)  # nobody was lost: the same on both ends
    assert f"waited {WAIT_SECONDS} s in all_reduce(sum, float32 [3])" in str(error)
    assert seconds < NOTICED_WITHIN
    for number, (seconds, error) in enumerate(waited):
        assert WAIT_SECONDS <= seconds < NOTICED_WITHIN
        assert isinstance(error, CollectiveTimeoutError)
        # Its own, or that of the rank whose time was up first.
        teller = next(each for each in range(late) if str(error).startswith(f"Rank {each} waited"))
        assert f"waited {WAIT_SECONDS} s in all_reduce(sum, float32 [3]) for rank {late}." in str(error), number
        assert f"Rank {late} is not in a call of this group." in str(error)
        for other in set(range(late)) - {teller}:
            assert f"Rank {other} waits in all_reduce(sum, float32 [3]);" in str(error)


def wait_for_messages_in_vain(rank: Rank) -> list[str]:
    """Send and receive on groups of their own, while the other ranks sit by."""
    rank.join()
    tensor = torch.ones(3)
    said = []
    calls: tuple[Callable[[Any], Any], ...] = (
        lambda group: dist.send(tensor, 1, group=group),
        lambda group: dist.recv(tensor, 1, group=group),
        lambda group: dist.recv(tensor, group=group),
    )
    for call in calls:
        group: Any = dist.new_group(backend="shm")
        group.set_timeout(timedelta(seconds=0.2))
        if rank.number == 0:
            with pytest.raises(CollectiveTimeoutError) as caught:
                call(group)
            said.append(str(caught.value))
            rank.say()
        else:
            rank.hear()
            # It was taken for lost, and the error said "failed".
            with pytest.raises(CollectiveTimeoutError, match=r"^Rank 0 waited 0.2 s in (send|recv)\("):
                dist.send(tensor, 0, group=group)
        dist.destroy_process_group(group)
    return said


def test_a_message_that_does_not_come_is_an_error_in_time(tmp_path: Path) -> None:
    with Ranks(tmp_path, 3, wait_for_messages_in_vain) as ranks:
        for _ in range(3):
            ranks.hear(0)
            ranks.say(1)
            ranks.say(2)
        (sent, received, received_from_any), _, _ = ranks.results()
    assert "waited 0.2 s in send(3 elements of float32, to rank 1, tag 0) for rank 1." in sent
    assert "waited 0.2 s in recv(3 elements of float32, from rank 1, tag 0) for rank 1." in received
    assert "waited 0.2 s in recv(3 elements of float32, from any rank, tag 0) for any rank." in received_from_any


# -- A peer is interrupted ---------------------------------------------------------------------------------------------


def be_interrupted(rank: Rank, prepare: Callable[[Rank, int, Any], QueuedWork]) -> Any:
    """Make a call that rank 1 makes only when rank 0 was interrupted in it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
    call = prepare(rank, 1, rank.join())
    dist.barrier()
    if rank.number == 0:
        rank.say()
        with pytest.raises(KeyboardInterrupt):
            call()
        moment = time.monotonic()
        dist.destroy_process_group()
        return moment
    rank.hear()
    return lose(call, attempts=1)


@pytest.mark.parametrize(
    "prepare",
    [all_reduce, all_reduce_of_many, all_reduce_async, barrier, send, recv, recv_from_any],
    ids=lambda call: call.__name__,
)
def test_a_rank_that_is_interrupted_stops_at_once_and_the_others_get_an_error(
    prepare: Callable[[Rank, int, Any], QueuedWork], tmp_path: Path
) -> None:
    with Ranks(tmp_path, 2, be_interrupted, prepare) as ranks:
        ranks.hear(0)
        ranks.wait_until(0, "sleeping")
        interrupted = ranks.send_signal(0, signal.SIGINT)
        assert ranks.result(0) - interrupted < NOTICED_WITHIN
        ranks.say(1)
        loss = ranks.result(1)
    assert loss.rank == 0


def cut_a_message(rank: Rank) -> None:
    """Be interrupted between two chunks of a message, and try to go on with the next."""
    rank.join()
    if rank.number == 0:
        lose(lambda: dist.send(torch.ones(MANY), 1), attempts=2)
        return
    library: Any = native.load()
    count = 0
    post = library.lockstep_raise

    def interrupt(address: int) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        post(address)

    library.lockstep_raise = interrupt
    tensor = torch.zeros(MANY)
    with pytest.raises(KeyboardInterrupt):
        dist.recv(tensor, 0)
    with pytest.raises(GroupError, match="KeyboardInterrupt"):
        dist.recv(tensor, 0)


def test_the_rest_of_an_interrupted_message_is_not_taken_for_the_next(tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, cut_a_message) as ranks:
        ranks.results()


# -- A peer has children -----------------------------------------------------------------------------------------------


def fork(child: Callable[[], Any]) -> int:
    """Start a copy of this process that does something, ends as a script does, and says nothing."""
    pid = os.fork()
    if pid == 0:
        child()
        atexit._run_exitfuncs()  # what the end of a script calls
        os._exit(0)
    return pid


def have_children(rank: Rank) -> None:
    """Make calls while forked children come, drop what they have of the group, and go."""
    group = rank.join()
    kept: list[torch.Tensor] = [group.allocate_tensor(10_000, dtype=torch.float32, device=CPU).fill_(7.0)]
    mixed_calls(rank, group, 0)

    def call() -> None:
        with pytest.raises(GroupError, match=f"forked from rank {rank.number} of the group and is no rank itself"):
            dist.all_reduce(torch.ones(1))

    def fail() -> None:
        report_failure(ValueError("of a child"))

    def write() -> None:
        # What a child wrote once was in its parent's tensor, and what it was given was its parent's to give.
        kept[0].zero_()
        with pytest.raises(GroupError, match="is no rank itself"):
            group.allocate_tensor(10_000, dtype=torch.float32, device=CPU)

    for child in (gc.collect, call, fail, write, kept.clear, dist.destroy_process_group, group.shutdown):
        pid = fork(child)
        mixed_calls(rank, group, 1)
        assert os.waitpid(pid, 0)[1] == 0
        mixed_calls(rank, group, 2)
    assert kept[0].min() == kept[0].max() == 7.0
    loader: Any = DataLoader(range(8), batch_size=2, num_workers=1, multiprocessing_context="fork")
    for step, batch in enumerate(loader):
        dist.all_reduce(batch)
        assert batch.tolist() == [2 * rank.size * step, (2 * step + 1) * rank.size]
    mixed_calls(rank, group, 3)
    dist.barrier()


def test_children_that_a_rank_forks_do_not_disturb_the_group(tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, have_children) as ranks:
        ranks.results()


def outlive(rank: Rank) -> Loss:
    """Leave a child behind that has a copy of everything."""
    rank.join()
    dist.barrier()
    if rank.number == 1:
        rank.say(fork(signal.pause))
        signal.pause()
    return lose(dist.barrier)


def test_a_child_that_outlives_its_killed_parent_does_not_hide_the_death(tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, outlive) as ranks:
        child = ranks.hear(1)
        ranks.wait_until(0, "sleeping")
        killed = ranks.send_signal(1, signal.SIGKILL)
        try:
            loss = ranks.result(0)
            assert psutil.pid_exists(child)
        finally:
            os.kill(child, signal.SIGKILL)
    assert loss.rank == 1
    assert loss.moment - killed < NOTICED_WITHIN
