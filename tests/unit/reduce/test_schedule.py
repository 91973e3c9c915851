"""Which bucket is sent when, and what travels with the last message: the reduction only writes down its calls."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.threaded_ranks import run_ranks
from torch import nn

from lockstep.comm import World
from lockstep.reduce import BucketLimits, GroupStatus, TrainedModel
from lockstep.reduce.buckets import Bucket, BucketSet, allocate_buckets
from lockstep.reduce.plan import plan_buckets
from lockstep.reduce.reduction import Finish
from lockstep.reduce.schedule import BucketSchedule
from lockstep.reduce.status import RankStatus, StatusOverHosts, StatusTrailer, status_length

NUM_BUCKETS = 3


class Recorder:
    """A reduction that adds nothing up."""

    def __init__(self, *, is_one_at_a_time: bool = False) -> None:
        self.scale = 1.0
        self.is_one_at_a_time = is_one_at_a_time
        self.said: list[str] = []

    def all_reduce(self, bucket: Bucket, *, index: int, is_last: bool, waits: bool) -> Finish:
        self.said.append(f"start {index}{' last' if is_last else ''}")
        return lambda: self.said.append(f"finish {index}")

    def expect_nothing(self) -> None:
        self.said.append("expect nothing")


def buckets_of(world: World, **options: Any) -> tuple[BucketSet, list[nn.Parameter]]:
    """Return buckets of one parameter each; the last parameter's is first."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(NUM_BUCKETS)])
    trained = TrainedModel(model).trained
    limits = BucketLimits(sizes_bytes=(1,))
    length = 0 if options.pop("without_trailer", False) else status_length(world.world_size)
    plan = plan_buckets([each.spec for each in trained], limits, trailer_length=length, **options)
    assert world.group is not None
    return allocate_buckets(plan, trained, world.group, as_view=True), [each.parameter for each in trained]


def scheduled(
    world: World, recorder: Recorder | None = None, *, skips_unused: bool = False, **options: Any
) -> tuple[BucketSchedule, Recorder, list[Bucket]]:
    recorder = Recorder() if recorder is None else recorder
    schedule = BucketSchedule(world, recorder, purpose="a test", skips_unused=skips_unused)
    bucket_set, _ = buckets_of(world, **options)
    schedule.use(bucket_set, StatusTrailer(bucket_set.trailer))
    return schedule, recorder, list(bucket_set.buckets)


def arrive(bucket: Bucket) -> None:
    bucket.slots[0].parameter.grad = torch.ones(2)
    bucket.slots[0].has_arrived = True
    bucket.num_pending -= 1


def on_one_rank(program: Callable[[World], Any]) -> Any:
    return run_ranks(1, program)[0]


def test_buckets_are_sent_in_order_whatever_the_order_of_arrival() -> None:
    def program(world: World) -> list[list[str]]:
        schedule, recorder, buckets = scheduled(world)
        schedule.begin()
        seen = []
        for number in (1, 0, 2):
            arrive(buckets[number])
            schedule.send_full()
            seen.append(list(recorder.said))
        schedule.complete(RankStatus())
        return [*seen, recorder.said[2:]]

    after_one, after_two, after_three, rest = on_one_rank(program)
    assert after_one == []
    assert after_two == after_three == ["start 0", "start 1"]  # the last one carries the status, and waits for the end
    assert rest == ["start 2 last", "finish 0", "finish 1", "finish 2"]


@pytest.mark.parametrize("options", [{"only_gradients": True}, {"has_extra_message": True}])
def test_a_last_bucket_without_a_trailer_need_not_wait(options: dict[str, bool]) -> None:
    def program(world: World) -> tuple[list[str], GroupStatus]:
        schedule, recorder, buckets = scheduled(world, **options)
        for bucket in buckets:
            arrive(bucket)
        schedule.send_full()
        sent = list(recorder.said)
        return sent, schedule.complete(RankStatus(has_changed=True, batch_size=9))

    sent, status = on_one_rank(program)
    assert sent == ["start 0", "start 1", "start 2 last"]
    assert (status.failed, status.changed, status.batch_sizes) == ((), (0,), (9,))


def test_a_reduction_that_runs_alone_is_waited_for_before_the_next() -> None:
    def program(world: World) -> list[str]:
        schedule, recorder, _ = scheduled(world, Recorder(is_one_at_a_time=True), only_gradients=True)
        schedule.complete(RankStatus())
        return recorder.said

    said = on_one_rank(program)
    assert said[:5] == ["start 0", "finish 0", "start 1", "finish 1", "start 2 last"]


def test_buckets_of_which_nothing_arrived_may_stay_behind() -> None:
    def program(world: World) -> tuple[list[str], int, list[float]]:
        schedule, recorder, buckets = scheduled(world, skips_unused=True, has_extra_message=True)
        arrive(buckets[1])
        schedule.complete(RankStatus())
        return recorder.said, schedule.num_buckets_sent, [float(each.used_counts) for each in buckets]

    assert on_one_rank(program) == (["start 1", "finish 1"], 1, [0.0, 1.0, 0.0])


def test_what_travels_besides_starts_before_the_last_message_and_ends_with_it() -> None:
    def program(world: World) -> list[str]:
        schedule, recorder, _ = scheduled(world)

        def start() -> Finish:
            recorder.said.append("start besides")
            return lambda: recorder.said.append("finish besides")

        schedule.send_besides = start
        schedule.on_end_of_backward = lambda: recorder.said.append("end of backward")
        schedule.complete(RankStatus())
        return recorder.said

    said = on_one_rank(program)
    assert said[0] == "end of backward"
    assert said.index("start 1") < said.index("start besides") < said.index("start 2 last")
    assert said[-1] == "finish besides"


@pytest.mark.parametrize("over_hosts", [False, True])
def test_the_status_of_all_ranks_is_read_on_each(over_hosts: bool) -> None:
    def program(world: World) -> list[GroupStatus]:
        assert world.group is not None
        schedule = BucketSchedule(world, Recorder(), purpose="a test")
        bucket_set, _ = buckets_of(world, without_trailer=over_hosts, has_extra_message=True)
        status = StatusOverHosts(world.group, "a test") if over_hosts else StatusTrailer(bucket_set.trailer)
        schedule.use(bucket_set, status)
        found = []
        for step in range(2):
            schedule.begin()
            found.append(schedule.complete(RankStatus(has_failed=world.rank == step, batch_size=world.rank + step)))
            schedule.reset()
        return found

    for first, second in run_ranks(3, program, poisons=True):
        assert (first.failed, first.batch_sizes) == ((0,), (0, 1, 2))
        assert (second.failed, second.batch_sizes) == ((1,), (1, 2, 3))


def test_since_when_it_waits_is_known_until_all_has_come() -> None:
    def program(world: World) -> list[bool]:
        waits = []

        class Slow(Recorder):
            def all_reduce(self, bucket: Bucket, *, index: int, is_last: bool, waits: bool) -> Finish:
                return note

        def note() -> None:
            waits.append(schedule.times.seconds_waiting > 0)

        schedule, _, _ = scheduled(world, Slow())
        note()
        schedule.complete(RankStatus())
        # The reduction is counted next. A thread that saw a wait after that took it for one in the next backward, and
        # the other rank, whose script had ended, was said to have skipped a batch.
        note()
        return waits

    assert on_one_rank(program) == [False, True, True, True, False]


def test_futures_of_others_are_waited_for_once() -> None:
    def program(world: World) -> list[int]:
        schedule, _, _ = scheduled(world)
        waited: list[int] = []

        class Waited(torch.futures.Future[object]):
            def wait(self) -> Any:
                waited.append(1)

        schedule.wait_at_end([Waited()])
        for _ in range(2):
            schedule.complete(RankStatus())
            schedule.reset()
        return waited

    assert on_one_rank(program) == [1]
