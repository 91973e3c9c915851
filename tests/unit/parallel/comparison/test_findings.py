"""What is said where ranks differ, from what they exchange: values in, words out."""

import atexit
import gc
import json
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, Dataset, DistributedSampler, SequentialSampler, TensorDataset, random_split

from lockstep.comm import World
from lockstep.errors import ReductionError
from lockstep.parallel.comparison import optimizers, order, values
from lockstep.parallel.comparison.check import Reduced
from lockstep.parallel.comparison.data import (
    DataSamplers,
    LoaderPositions,
    SameDataWarning,
    UnevenBatchWarning,
    describe_items,
)
from lockstep.parallel.comparison.forwards import _describe
from lockstep.parallel.comparison.optimizers import (
    HeldParameters,
    IdleOptimizers,
    OptimizerSteps,
    OutsideParameters,
    OutsideValue,
    find_outside_difference,
    listen_to_steps,
)
from lockstep.parallel.comparison.order import WrappedModels, find_other_order
from lockstep.parallel.comparison.values import HandAveraging
from lockstep.reduce import GroupStatus
from lockstep.torch_private.loaders import note_sampler


def head(bits: int, *, width: int = 3) -> OutsideValue:
    return OutsideValue("weight of a Linear", (width, 3), bits, float(bits))


def test_a_parameter_outside_is_named_with_both_values() -> None:
    text = find_outside_difference([(head(1), head(7)), (head(1), head(8))])
    assert "weight of a Linear adds up to 8.0 on rank 1 and to 7.0 on rank 0" in text


@pytest.mark.parametrize("others", [(head(1),), (), (head(2, width=4),)])
def test_parts_of_a_model_that_are_equal_or_of_other_shapes_are_not_warned_of(others: tuple[OutsideValue, ...]) -> None:
    assert find_outside_difference([(head(1),), others]) == ""


def names(*held: str) -> dict[int, frozenset[str]]:
    return {number: frozenset(each.split()) for number, each in enumerate(held, start=1)}


def test_models_that_have_changed_places_are_found_by_their_names() -> None:
    text = find_other_order([names("module encoder", "module decoder"), names("module decoder", "module encoder")])
    assert text.startswith("Wrapped model 1 on rank 1 is called 'decoder', which is wrapped model 2 on rank 0")


@pytest.mark.parametrize(
    "other",
    [
        names("module encoder", "module decoder"),
        names("encoder best", "decoder"),
        names("best", "decoder"),
        names("", ""),
        names("decoder"),
    ],
)
def test_other_names_alone_are_no_other_order(other: dict[int, frozenset[str]]) -> None:
    assert find_other_order([names("module encoder", "module decoder"), other]) == ""


def status(sizes: tuple[int, int], backwards: tuple[int, int]) -> GroupStatus:
    return GroupStatus(failed=(), changed=(), batch_sizes=sizes, nums_backwards=backwards)


def test_a_rank_that_accumulates_more_now_and_then_is_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    warning = UnevenBatchWarning()
    for sizes, backwards in [((8, 4), (2, 1)), ((4, 4), (1, 1)), ((8, 4), (2, 1))]:
        warning.compare(status(sizes, backwards))
    (said,) = recwarn.list
    assert "rank 0 trained on 8 samples in 2 backwards and rank 1 on 4 in 1 backward" in str(said.message)


@pytest.mark.parametrize(
    "sizes",
    [
        [(3, 2), (6, 4)],
        [(6, 4), (3, 2), (6, 4), (3, 2)],
        [(8, 8), (4, 4), (8, 8), (6, 4)],
        [(7, 6), (4, 4), (7, 6)],  # real samples of which there are fewer on a rank, and as many made ones
        [(5, 5), (9, 9), (6, 4), (3, 2)],
    ],
)
def test_steps_that_alternate_between_numbers_of_forwards_have_one_ratio(
    sizes: list[tuple[int, int]], recwarn: pytest.WarningsRecorder
) -> None:
    warning = UnevenBatchWarning()
    for each in sizes:
        warning.compare(status(each, (1, 1)))
    assert [str(said.message)[:16] for said in recwarn.list] == ["In one step rank"]


@pytest.mark.parametrize(
    "sizes",
    [
        [(31, 40), (28, 33), (31, 40), (31, 40)],
        [(5, 5), (9, 9), (7, 8), (9, 6), (9, 6)],
        [(3, 0), (6, 0), (3, 0)],
        [(4, 4), (8, 8), (4, 4), (8, 8)],
    ],
)
def test_sizes_that_vary_or_are_not_known_are_not_warned_of(
    sizes: list[tuple[int, int]], recwarn: pytest.WarningsRecorder
) -> None:
    warning = UnevenBatchWarning()
    for each in sizes:
        warning.compare(status(each, (1, 1)))
    assert not recwarn.list


def step_idly(
    idle: IdleOptimizers,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    num_reductions: int,
    owned: Collection[int] = (),
) -> None:
    trained = dict(model.named_parameters())
    for each in trained.values():
        each.grad = torch.zeros_like(each)
    idle.look_at(optimizer, OptimizerSteps().parameters_of(optimizer, ()), trained, owned, num_reductions)


def test_an_optimizer_of_a_copy_is_refused_in_its_third_step() -> None:
    idle, model, optimizer = IdleOptimizers(), nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters())
    for num_reductions in (1, 2, 2):  # twice after one reduction, which counts once
        step_idly(idle, model, optimizer, num_reductions)
    with pytest.raises(ReductionError, match="model's parameter weight"):
        step_idly(idle, model, optimizer, 3)


def test_an_optimizer_of_other_parameters_is_not_refused() -> None:
    idle, model = IdleOptimizers(), nn.Linear(2, 2)
    owned = set(map(id, model.parameters()))  # another optimizer steps them
    for num_reductions in range(1, 6):
        step_idly(idle, model, torch.optim.SGD(nn.Linear(2, 2).parameters()), num_reductions, owned)
        step_idly(IdleOptimizers(), model, torch.optim.SGD(nn.Linear(2, 5).parameters()), num_reductions)


def end_of(rank: int, store: dist.Store, num_backwards: int, monkeypatch: pytest.MonkeyPatch) -> WrappedModels:
    monkeypatch.setattr(order, "group_store", lambda _group: store)
    group: Any = object()
    wrapped = WrappedModels(World(rank=rank, world_size=2, group=group))
    model = wrapped.model(wrapped.add())
    model.title = "a model"
    for _ in range(num_backwards):
        model.begin_reduction()
    return wrapped


def test_a_rank_that_ends_reads_that_another_one_waits_for_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    ahead, behind = end_of(0, store, 7, monkeypatch), end_of(1, store, 7, monkeypatch)
    with caplog.at_level(logging.WARNING, "lockstep"):
        thread = threading.Thread(target=behind.compare_ends)
        thread.start()
        ahead.post("waits", {1: 8})
        thread.join(20)
    (said,) = caplog.messages
    assert "The script of rank 1 has ended after 7 backwards of a model, and rank 0 has begun backward 8" in said


def test_a_forked_child_that_ends_is_not_the_end_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It wrote "ended" in its parent's name: a false alarm on the other ranks.
    handlers: list[Callable[[], object]] = []
    monkeypatch.setattr(atexit, "register", handlers.append)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    wrapped = end_of(0, store, 7, monkeypatch)
    wrapped.watch()
    wrapped.post("waits", {1: 7})
    child = os.fork()
    if child == 0:
        handlers[0]()
        os._exit(0)
    os.waitpid(child, 0)
    assert json.loads(dist.PrefixStore("lockstep/end", store).get("0"))[0] == "waits"


def test_ranks_that_end_together_read_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    ends = [end_of(rank, store, 3, monkeypatch) for rank in range(2)]
    with caplog.at_level(logging.WARNING, "lockstep"), ThreadPoolExecutor() as pool:
        list(pool.map(lambda end: end.compare_ends(), ends, timeout=20))
    assert not caplog.messages


def test_a_rank_that_has_failed_is_no_rank_that_has_skipped_a_batch(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The others said that it had skipped a batch, below its own traceback.
    store = dist.HashStore()
    failing, other = end_of(0, store, 3, monkeypatch), end_of(1, store, 4, monkeypatch)
    other.post("waits", {1: 8})
    with caplog.at_level(logging.WARNING, "lockstep"):
        monkeypatch.setattr(sys, "last_value", KeyError("mine"), raising=False)
        failing.compare_ends()
        monkeypatch.delattr(sys, "last_value")
        other.compare_ends()
    assert not caplog.messages


def test_a_rank_that_has_wrapped_many_models_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_LONGEST_WAIT_SECONDS", 0.1)
    wrapped = end_of(0, dist.HashStore(), 3, monkeypatch)
    for _ in range(20):
        wrapped.model(wrapped.add()).begin_reduction()
    pauses: list[float] = []
    monkeypatch.setattr(order, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pauses.append))
    begin = time.monotonic()
    wrapped.compare_ends()
    assert pauses
    assert time.monotonic() - begin < 2


def test_a_rank_waits_for_one_more_backward_of_the_others_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    # It waited for ten seconds wherever another rank still saved or evaluated.
    times = iter([0.0, 60.0, 60.1, 60.2, 62.0, 99.0])  # the first backwards may compile
    monkeypatch.setattr(order, "time", SimpleNamespace(monotonic=lambda: next(times)))
    wrapped = end_of(0, dist.HashStore(), 4, monkeypatch)
    assert wrapped.wait_seconds == pytest.approx(2.3)
    wrapped.model(1).begin_reduction()
    wrapped.model(1).begin_reduction()
    assert wrapped.wait_seconds == 10.0


def test_models_that_are_gone_are_forgotten_but_for_the_last_that_were_used(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = end_of(0, dist.HashStore(), 1, monkeypatch)
    for index in range(200):
        model = wrapped.model(wrapped.add())
        if index % 2:
            model.begin_reduction()
    assert [each.number for each in wrapped.last()] == [187, 189, 191, 193, 195, 197, 199, 201]


def reduced(number: int) -> Reduced:
    """A reduction that has ended, with a batch of two samples."""
    alike = GroupStatus(failed=(), changed=(), batch_sizes=(2, 2), nums_backwards=(1, 1))
    return Reduced(number=number, status=alike)


def compare_positions(*positions: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Compare how far two ranks are, in one backward after the other."""
    found = LoaderPositions()
    found.reset(reduced(4))
    for number, each in enumerate(positions, start=5):
        found.judge(each, ())
        found.reset(reduced(number))


def test_a_rank_that_stays_ahead_in_its_loader_has_skipped_a_batch() -> None:
    with pytest.warns(UserWarning, match="rank 1 had drawn 1 batch more from its DataLoader than rank 0"):
        compare_positions(((4,), (5,)), ((5,), (6,)), ((6,), (7,)))
    with pytest.warns(UserWarning, match="rank 0 had drawn 2 batches more from its DataLoader than rank 1"):
        compare_positions(((3, 4), (3, 2)), ((4, 4), (3, 3)), ((5, 4), (3, 4)))
    with warnings.catch_warnings():  # as the message says for threads that draw batches ahead
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="In 3 backwards in a row rank")
        compare_positions(((4,), (5,)), ((5,), (6,)), ((6,), (7,)))


def test_loaders_that_cannot_be_compared_are_no_mistake() -> None:
    compare_positions(((4,), (5,)), ((5,), (8,)), ((6,), (7,)), ((7,), (9,)))
    compare_positions(*[((4, number), (number,)) for number in range(20)])


def test_the_loaders_that_batches_come_from_are_found() -> None:
    loader: DataLoader[torch.Tensor] = DataLoader(torch.zeros(777, 1))
    iterator = iter(loader)
    for _ in range(333):
        next(iterator)
    positions = LoaderPositions()
    positions.reset(reduced(1))
    assert 333 in positions.record()
    next(iterator)
    assert 334 in positions.record()


class Epochs(Dataset[int]):
    """A data set whose samples depend on an attribute that the loop writes."""

    epoch = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return 10 * self.epoch + index


@pytest.mark.parametrize("is_told", [True, False])
def test_processes_that_keep_an_old_data_set_are_told_of(is_told: bool) -> None:
    # They were started with what the data set was then: every epoch had the samples of the first one, silently.
    dataset, positions = Epochs(), LoaderPositions()
    part = torch.utils.data.Subset(dataset, range(4))
    loader = DataLoader(part, 2, num_workers=1, persistent_workers=is_told, multiprocessing_context="fork")
    with warnings.catch_warnings(record=True, action="always") as said:
        for epoch in range(3):
            dataset.epoch = epoch
            for number, _ in enumerate(loader, start=2 * epoch + 2):
                positions.reset(reduced(number))
    texts = [str(each.message) for each in said]
    assert len(texts) == is_told
    assert all("Attribute epoch of the Epochs" in text and "was 0 and is 1 now" in text for text in texts)


class Images(Dataset[int]):
    """A data set of files."""

    def __init__(self, names: list[str]) -> None:
        self.files = [Path(name) for name in names]
        self.classes = {"cat": 0, "dog": 1}
        self.cache: list[str] = []

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> int:
        raise AssertionError("nothing is read")


def test_what_a_data_set_holds_is_told_apart_without_reading_it() -> None:
    names = [f"{index}.png" for index in range(2000)]
    images, others = Images(names), Images(names[::-1])
    assert describe_items(images) == describe_items(Images(names))
    images.cache.append("2.png")
    assert describe_items(images) == describe_items(Images(names))
    assert set(describe_items(images)) == {"data.files", "data.classes"}
    assert describe_items(others)["data.files"][0][0] == "PosixPath('1999.png')"
    parts = [random_split(images, [1500, 500], torch.Generator().manual_seed(seed))[0] for seed in (1, 1, 2)]
    first, same, other = (describe_items(part) for part in parts)
    assert first == same
    assert first["data.indices"] != other["data.indices"]
    assert first["data.dataset.files"] == other["data.dataset.files"]
    rows = torch.arange(8.0).bfloat16()
    assert describe_items(TensorDataset(rows)) != describe_items(TensorDataset(rows.flip(0)))


class Sized(Dataset[int]):
    """A data set of four samples with any attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise AssertionError("nothing is read")


def test_what_may_differ_between_ranks_that_do_as_they_should_is_not_told_apart() -> None:
    def losses(rank: int) -> torch.Tensor:
        values = torch.zeros(4)
        values[rank] = 0.5
        return values

    here, there = (
        describe_items(
            Sized(
                files=[(f"/tmp/of-{rank}/{number}.png", number) for number in range(4)],
                paths=[Path(f"/tmp/of-{rank}/{number}.png") for number in range(4)],
                options={"rank": rank, "cache": f"/tmp/{rank}"},
                losses=losses(rank),
                adjacency=torch.eye(4).to_sparse() * rank,
            )
        )
        for rank in (0, 1)
    )
    assert here == there
    assert set(here) == {"data.files", "data.paths"}
    assert not describe_items(Sized(sampler=SequentialSampler(range(4)), sampler_list=[0, 3, 2, 1]))


def found_samplers(sampler: DistributedSampler[int]) -> DataSamplers:
    samplers = DataSamplers(World(rank=0, world_size=2, group=None))
    note_sampler(sampler)
    samplers.begin()
    return samplers


def test_samplers_that_are_gone_are_forgotten() -> None:
    # One for each epoch, or for each evaluation.
    samplers = DataSamplers(World(rank=0, world_size=2, group=None))
    for _ in range(20):
        sampler: DistributedSampler[int] = DistributedSampler(range(4), num_replicas=2, rank=0)
        note_sampler(sampler)
        samplers.begin()
    assert len(samplers._found) <= 3


def difference(here: Any, there: Any) -> str:
    """Return what ranks 0 and 1 raise, whose loaders have begun to read these data sets."""
    gc.collect()
    records = []
    for dataset in (here, there):
        sampler: DistributedSampler[int] = DistributedSampler(dataset, num_replicas=2, rank=0)
        iterator = iter(DataLoader(dataset, sampler=sampler))
        samplers = DataSamplers(World(rank=0, world_size=2, group=None))
        samplers.begin()
        records.append(samplers.record())
        del sampler, iterator
    error = samplers.judge(records, [])
    return "" if error is None else str(error)


def test_an_unseeded_random_split_is_named_with_the_samples_that_differ() -> None:
    # It named two texts with numbers that nobody can act on, and never random_split.
    images = Images([f"{index}.png" for index in range(20)])
    parts = [torch.utils.data.Subset(images, indices) for indices in ([7, 3, 1, 2], [7, 0, 8, 5])]
    assert difference(parts[0], parts[0]) == ""
    said = difference(*parts)
    assert "Ranks 1 and 0 train on different parts of the data" in said
    assert "data.indices differ: 0, 8, 5, ... on rank 1 and 3, 1, 2, ... on rank 0. random_split without a" in said
    assert "generator=torch.Generator().manual_seed(0))" in said
    assert "number" not in said
    files = [Images([f"{index}.png" for index in order]) for order in ([0, 1, 2], [0, 2, 1])]
    assert "in data.files: PosixPath('2.png'), PosixPath('1.png'), ... on rank 1" in difference(*files)
    rows = [TensorDataset(torch.full((4,), each)) for each in (1.0, 2.0)]
    assert "in data.tensors[0]: both begin with a tensor of (4,), with other values" in difference(*rows)


def test_a_sampler_that_lacks_what_torchs_has_is_left_alone() -> None:
    class Weighted(DistributedSampler[int]):
        def __init__(self) -> None:
            self.dataset, self.num_replicas, self.rank, self.epoch, self.num_samples = Sized(), 2, 0, 0, 2

    sampler = Weighted()
    samplers = found_samplers(sampler)
    assert "epoch" not in str(samplers.record())
    del sampler


def test_samplers_of_one_replica_may_have_data_of_the_rank() -> None:
    def number(length: int) -> int:
        sampler: DistributedSampler[int] = DistributedSampler(range(length), num_replicas=1, rank=0, shuffle=False)
        found = found_samplers(sampler).number()
        del sampler
        return found

    gc.collect()
    assert number(20) == number(18)


def test_unlike_numbers_of_samplers_are_compared_once() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(range(20), num_replicas=2, rank=0)
    samplers = found_samplers(sampler)
    before = samplers.number()
    samplers.judge([samplers.record(), ()], [])
    assert (samplers.record(), samplers.number() == before) == ((), False)
    del sampler


def test_samplers_of_unlike_lengths_and_orders_have_unlike_numbers() -> None:
    def number(length: int, *, shuffle: bool) -> int:
        sampler: DistributedSampler[int] = DistributedSampler(range(length), num_replicas=2, rank=0, shuffle=shuffle)
        found = found_samplers(sampler).number()
        del sampler
        return found

    gc.collect()
    assert len({number(20, shuffle=True), number(18, shuffle=True), number(20, shuffle=False)}) == 3
    assert number(20, shuffle=True) == number(20, shuffle=True)


def step_by_hand(gradients: list[float]) -> list[bool]:
    """Step on ranks whose gradients have these values; return on which they are found to be averaged by hand."""
    store = dist.HashStore()

    def run(rank: int) -> bool:
        group: Any = object()
        by_hand_ = HandAveraging(World(rank=rank, world_size=len(gradients), group=group), 1)
        parameter = nn.Parameter(torch.zeros(3))
        parameter.grad = torch.full((3,), gradients[rank])
        return by_hand_.is_done([parameter])

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(gradients)) as pool:
        patch.setattr(values, "group_store", lambda _group: store)
        return list(pool.map(run, range(len(gradients)), timeout=30))


def test_gradients_that_are_the_same_on_all_ranks_were_averaged_by_hand() -> None:
    assert step_by_hand([0.5, 0.5, 0.5]) == [True] * 3
    assert step_by_hand([0.5, 0.5, 0.25]) == [False] * 3


def test_a_rank_that_steps_alone_with_its_own_gradients_waits_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_WAIT_SECONDS", 0.1)
    monkeypatch.setattr(values, "group_store", lambda _group: dist.HashStore())
    group: Any = object()
    assert not HandAveraging(World(rank=1, world_size=2, group=group), 1).is_done([nn.Parameter(torch.zeros(3))])


def test_equal_gradients_of_unlike_inputs_are_not_the_same_data() -> None:
    def look(inputs: tuple[int, int]) -> None:
        warning = SameDataWarning(may_read=True)
        status: Any = SimpleNamespace(empty=(), inputs=inputs, gradients=(5, 5))
        for _ in range(3):
            warning.compare(status)

    look((1, 2))
    with pytest.warns(UserWarning, match="all 2 ranks computed the same gradients"):
        look((1, 1))


class OnDevice(nn.Module):
    """A layer that prints its device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def extra_repr(self) -> str:
        return f"size=4, device={self.device}"


def test_layers_on_the_devices_of_their_ranks_are_alike() -> None:
    assert _describe(OnDevice("cuda:0")) == _describe(OnDevice("cuda:1"))
    assert _describe(OnDevice("cuda:0")) != _describe(OnDevice("cpu"))


def test_parameters_of_other_wrappers_are_asked_for_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[nn.Parameter] = []

    def has_place(parameter: nn.Parameter) -> bool:
        asked.append(parameter)
        return len(asked) <= 4

    monkeypatch.setattr(optimizers, "has_place", has_place)
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter], 0.1)
    found, held = OutsideParameters(may_read=True), OptimizerSteps().parameters_of(optimizer, ())
    for _ in range(64):
        found.note_step(optimizer, held)
    assert (len(asked), found.record()) == (4, ())
    found.note_step(optimizer, held)  # its wrapper is gone
    assert [each.shape for each in found.record()] == [(3,)]


def test_parameters_outside_that_step_twice_for_one_backward_are_told() -> None:
    # Every rank answered that it did not know them, so the ranks exchanged that in each backward, and nothing was said.
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    outside = OutsideParameters(may_read=True)
    held = HeldParameters(all=[parameter], known=[], others=[parameter])

    def step() -> None:
        parameter.grad = torch.ones(2)
        optimizer.step()
        outside.note_step(optimizer, held)

    for _ in range(2):
        step()
    outside.number()
    assert outside.record() is None
    outside.judge([None, None], [])
    for _ in range(2):
        step()
    outside.number()
    record = outside.record()
    assert record
    with pytest.warns(UserWarning, match="A parameter that is trained"):
        outside.judge([record, (replace(record[0], bits=1),)], [])
    assert outside.number() == 0


# -- Hooks on the steps of all optimizers of a process -----------------------------------------------------------------


class Listener:
    """Counts steps, and is in a cycle, as a wrapper is."""

    def __init__(self, *, collects: bool = False) -> None:
        self.me = self
        self.num_steps = 0
        self._collects = collects
        self.end = listen_to_steps(self)

    def before_step(self, optimizer: Optimizer) -> None:
        if self._collects:
            gc.collect()

    def after_step(self, optimizer: Optimizer) -> None:
        self.before_step(optimizer)
        self.num_steps += 1


def make_optimizer() -> Optimizer:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    return torch.optim.SGD([parameter], 0.1)


def num_hooks() -> int:
    return len(_global_optimizer_pre_hooks) + len(_global_optimizer_post_hooks)


# A wrapper that nobody needs any more is freed when Python collects garbage, which may be within the step of another
# one's optimizer. Then its hooks went while torch was going through them: "OrderedDict mutated during iteration".
def test_a_listener_may_be_collected_within_a_step() -> None:
    Listener()
    first, last = Listener(collects=True), Listener()
    make_optimizer().step()
    assert (first.num_steps, last.num_steps) == (1, 1)
    for each in (first, last):
        each.end()


def test_the_hooks_of_listeners_that_are_gone_do_not_pile_up() -> None:
    listener = Listener()
    before = num_hooks()
    listener.end()
    for _ in range(3):
        listener = Listener()
        del listener
        gc.collect()
    listener = Listener()
    assert num_hooks() <= before
    listener.end()


def held_by(optimizer: Optimizer, model: nn.Module, steps: OptimizerSteps) -> tuple[int, int]:
    seen: list[tuple[int, int]] = []

    class Looker(Listener):
        def after_step(self, optimizer: Optimizer) -> None:
            held = steps.parameters_of(optimizer, set(map(id, model.parameters())))
            seen.append((len(held.known), len(held.others)))

    looker = Looker()
    optimizer.step()
    looker.end()
    return seen[0]


def test_a_parameter_that_takes_the_place_of_another_in_an_optimizer_is_seen() -> None:
    model, other, steps = nn.Linear(2, 2), nn.Linear(2, 2), OptimizerSteps()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert held_by(optimizer, model, steps) == (2, 0)
    optimizer.param_groups[0]["params"][0] = other.weight
    assert held_by(optimizer, model, steps) == (1, 1)


def test_many_listeners_have_one_pair_of_hooks() -> None:
    listeners = [Listener() for _ in range(9)]
    hooks = num_hooks()
    make_optimizer().step()
    for each in listeners:
        each.end()
    assert (hooks - num_hooks(), [each.num_steps for each in listeners]) == (2, [1] * 9)


def number_after(steps: OptimizerSteps, optimizer: Optimizer) -> int:
    steps.begin(optimizer)
    steps.end(optimizer)
    return steps.number()


def test_options_have_another_number_after_each_kind_of_change() -> None:
    optimizer, steps = make_optimizer(), OptimizerSteps()
    group = optimizer.param_groups[0]
    numbers = [number_after(steps, optimizer)]
    for name, value in (("lr", 0.2), ("lr", torch.tensor(0.3)), ("momentum", 0.5)):
        group[name] = value
        numbers.append(number_after(steps, optimizer))
    group["lr"].fill_(0.4)  # as a scheduler does with a learning rate that is a tensor
    numbers.append(number_after(steps, optimizer))
    group["betas"] = [0.9, 0.99]
    numbers.append(number_after(steps, optimizer))
    group["betas"][0] = 0.8
    numbers.append(number_after(steps, optimizer))
    assert len(set(numbers)) == len(numbers)
    assert number_after(steps, optimizer) == numbers[-1]
    group["lr"] = torch.tensor(0.4)
    assert number_after(steps, optimizer) == numbers[-1]
