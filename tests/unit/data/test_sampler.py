import copy
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from lockstep.data import DistributedSampler
from lockstep.errors import GroupError


def dataset(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(length))


@pytest.mark.parametrize("length", [1, 2, 7, 12, 100])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_order_is_torchs(length: int, num_replicas: int, shuffle: bool, drop_last: bool) -> None:
    for rank in range(num_replicas):
        ours = DistributedSampler(dataset(length), num_replicas, rank, shuffle, 7, drop_last)
        torchs: TorchSampler[int] = TorchSampler(dataset(length), num_replicas, rank, shuffle, 7, drop_last)
        if drop_last and length % num_replicas:
            # torch takes ceil((length - n) / n) per rank, which is the same number.
            assert ours.num_samples == torchs.num_samples
        for epoch in (0, 3):
            ours.set_epoch(epoch)
            torchs.set_epoch(epoch)
            assert list(ours) == list(torchs)
        assert len(ours) == len(torchs)
        assert ours.total_size == torchs.total_size


@pytest.mark.parametrize("length", [0, 1, 7, 12])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5])
def test_without_padding_each_index_comes_exactly_once(length: int, num_replicas: int) -> None:
    samplers = [DistributedSampler(dataset(length), num_replicas, rank, pad=False) for rank in range(num_replicas)]
    assert sorted(index for sampler in samplers for index in sampler) == list(range(length))
    assert [len(sampler) for sampler in samplers] == [len(list(sampler)) for sampler in samplers]


def test_rank_outside_the_world_is_refused_in_torchs_words() -> None:
    with pytest.raises(ValueError, match=r"Invalid rank 3, rank should be in the interval \[0, 2\]"):
        DistributedSampler(dataset(5), 3, 3)


def test_dropping_and_not_padding_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="choose one"):
        DistributedSampler(dataset(5), 1, 0, drop_last=True, pad=False)


def test_torchs_programs_take_it_for_torchs() -> None:
    ours: TorchSampler[int] = DistributedSampler(dataset(7), 3, 1)
    assert isinstance(ours, TorchSampler)
    torchs: TorchSampler[int] = TorchSampler(dataset(7), 3, 1)
    assert vars(torchs).keys() <= vars(ours).keys()


def test_a_subclass_may_set_what_torchs_does() -> None:
    class FirstTwo(DistributedSampler):
        def __init__(self) -> None:
            super().__init__(dataset(100), 2, 0, drop_last=True)
            self.num_samples, self.total_size = 2, 4

    sampler = FirstTwo()
    assert list(sampler) == list(DistributedSampler(dataset(100), 2, 0))[:2]
    assert len(sampler) == 2


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("new_length", [4, 23])
def test_a_data_set_of_another_length_is_followed(pad: bool, new_length: int) -> None:
    samples = list(range(10))
    measured = [DistributedSampler(samples, 3, rank, pad=pad) for rank in range(3)]
    drawn = [DistributedSampler(samples, 3, rank, pad=pad) for rank in range(3)]
    samples[:] = range(new_length)
    fresh = [DistributedSampler(samples, 3, rank, pad=pad) for rank in range(3)]
    assert [len(sampler) for sampler in measured] == [len(sampler) for sampler in fresh]
    assert [list(sampler) for sampler in drawn] == [list(sampler) for sampler in fresh]


@pytest.mark.parametrize("place", [{}, {"num_replicas": 2}, {"rank": 0}])
def test_without_a_group_no_rank_gets_everything(place: dict[str, int]) -> None:
    with pytest.raises(GroupError, match="init_process_group"):
        DistributedSampler(dataset(5), **place)


# -- A forgotten set_epoch ---------------------------------------------------------------------------------------------


def sampler_of_100(*, shuffle: bool = True, pad: bool = True) -> DistributedSampler:
    return DistributedSampler(dataset(100), 2, 1, shuffle, pad=pad)


def trained(batches: Iterable[Any]) -> list[Any]:
    """Return the batches of an epoch, each of which has had a backward."""
    found = []
    for batch in batches:
        found.append(batch)
        torch.ones(1, requires_grad=True).sum().backward()
    return found


def warnings_of(epochs: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True, action="always") as caught:
        warnings.filterwarnings(
            "ignore", "This process .* is multi-threaded", DeprecationWarning
        )  # Python's, of a fork
        epochs()
    return [str(warning.message) for warning in caught]


def test_a_second_epoch_of_the_same_order_is_warned_of_once() -> None:
    sampler = sampler_of_100()
    assert warnings_of(lambda: trained(sampler)) == []
    (said,) = warnings_of(lambda: [trained(sampler) for _ in range(3)])
    assert "Two epochs of this DistributedSampler had the same order" in said
    assert "sampler.set_epoch(epoch) before each epoch" in said
    assert "ls.ShardedLoader" in said


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [7, 10, None])
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_second_epoch_is_noticed_through_a_loader(workers: int, batch_size: int | None, drop_last: bool) -> None:
    loader = DataLoader(
        dataset(100),
        batch_size,
        sampler=sampler_of_100(),
        drop_last=drop_last and batch_size is not None,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    assert warnings_of(lambda: trained(loader)) == []
    assert len(warnings_of(lambda: [trained(loader) for _ in range(2)])) == 1


def test_each_epoch_that_was_set_counts() -> None:
    sampler = sampler_of_100()

    def train(epochs: int, sets: Callable[[int], object]) -> None:
        for epoch in range(epochs):
            sets(epoch)
            trained(sampler)

    assert warnings_of(lambda: train(3, sampler.set_epoch)) == []
    assert warnings_of(lambda: train(3, lambda _epoch: sampler.set_epoch(4))) == []  # the same order on purpose
    assert warnings_of(lambda: train(3, lambda epoch: setattr(sampler, "epoch", 10 + epoch))) == []
    assert len(warnings_of(lambda: trained(sampler))) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_whose_epochs_are_set_is_left_in_peace(workers: int) -> None:
    sampler = sampler_of_100()
    loader = DataLoader(dataset(100), 10, sampler=sampler, num_workers=workers, persistent_workers=workers > 0)

    def train() -> None:
        for epoch in range(3):
            sampler.set_epoch(epoch)
            assert len(trained(loader)) == 5

    assert warnings_of(train) == []


@pytest.mark.parametrize("batch_size", [10, 50])  # 50 is this rank's whole share
def test_a_glance_at_the_first_batch_is_no_epoch(batch_size: int) -> None:
    loader = DataLoader(dataset(100), batch_size, sampler=sampler_of_100())

    def look_and_train() -> None:
        next(iter(loader))
        trained(loader)

    assert warnings_of(look_and_train) == []
    assert len(warnings_of(lambda: trained(loader))) == 1


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [10, 25])  # with 25 all indices are sent before the first batch
def test_a_glance_before_set_epoch_in_each_epoch_is_not_warned_of(workers: int, batch_size: int) -> None:
    """As in PyTorch's tutorial: `len(next(iter(loader))[0])`, then `set_epoch`, then the epoch."""
    loader = DataLoader(dataset(100), batch_size, sampler=(sampler := sampler_of_100()), num_workers=workers)

    def train() -> None:
        for epoch in range(3):
            next(iter(loader))
            sampler.set_epoch(epoch)
            trained(loader)

    assert warnings_of(train) == []


def test_few_batches_that_are_loaded_ahead_are_warned_of_in_the_third_epoch() -> None:
    loader = DataLoader(dataset(100), 25, sampler=sampler_of_100(), num_workers=2)
    assert len(warnings_of(lambda: [trained(loader) for _ in range(3)])) == 1


def test_the_warning_shows_the_line_that_iterates() -> None:
    loader = DataLoader(dataset(100), 10, sampler=sampler_of_100())
    with warnings.catch_warnings(record=True, action="always") as caught:
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        for _ in range(2):
            for _batch in loader:
                torch.ones(1, requires_grad=True).sum().backward()
    assert caught[0].filename == __file__


def test_epochs_that_are_cut_short_are_never_warned_of() -> None:
    loader = DataLoader(dataset(100), 10, sampler=sampler_of_100())

    def train() -> None:
        for _ in range(3):
            for step, _ in enumerate(loader):
                if step == 3:
                    break

    assert warnings_of(train) == []


def test_two_iterators_of_one_epoch_are_one_epoch() -> None:
    sampler = sampler_of_100()

    def train() -> None:
        for first, second in zip(sampler, sampler, strict=True):
            assert first == second

    assert warnings_of(train) == []


def test_an_order_that_may_stay_is_not_warned_of_nor_one_of_an_evaluation() -> None:
    for sampler in (sampler_of_100(shuffle=False), sampler_of_100(pad=False)):
        assert warnings_of(lambda each=sampler: [trained(each) for _ in range(3)]) == []  # type: ignore[misc]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_measures_on_the_training_data_is_no_second_one(workers: int) -> None:
    # It was warned of, unless no_grad stood around the loop: within the loop it was not seen.
    sampler = sampler_of_100()
    loader = DataLoader(dataset(100), 10, sampler=sampler, num_workers=workers)

    def train() -> None:
        for epoch in range(3):
            sampler.set_epoch(epoch)
            trained(loader)
            for _ in range(2):
                list(loader)

    assert warnings_of(train) == []
    assert len(warnings_of(lambda: [trained(loader) for _ in range(3)])) == 1


def test_an_evaluation_after_each_epoch_of_training_is_not_taken_for_loading_ahead() -> None:
    # Its sampler was left at shuffle=True. The training between two evaluations was taken for one on its samples.
    sampler, evaluated = sampler_of_100(), sampler_of_100()

    def train() -> None:
        for epoch in range(3):
            sampler.set_epoch(epoch)
            trained(DataLoader(dataset(100), 10, sampler=sampler))
            with torch.no_grad():
                list(DataLoader(dataset(100), 10, sampler=evaluated))

    assert warnings_of(train) == []


class Refusing(Sampler[int]):
    @property
    def sampler(self) -> object:
        raise RuntimeError("not yet")

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


def test_a_sampler_whose_attributes_raise_errors_is_used_as_torch_uses_it() -> None:
    assert len(list(DataLoader(dataset(3), sampler=Refusing()))) == 3


def test_an_epoch_within_compiled_code_is_gone_through() -> None:
    sampler = sampler_of_100()
    number = len(list(sampler))
    add: Callable[[Any], Any] = torch.compile(lambda value: value + len(list(sampler)), backend="eager")
    assert add(torch.zeros(1)) == number


class Drawing(IterableDataset[int]):
    """Goes through a sampler in the data-loading process, where nobody can call `set_epoch`."""

    def __init__(self, sampler: DistributedSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)


def test_a_copy_in_a_data_loading_process_is_silent() -> None:
    sampler = sampler_of_100()
    expected = trained(sampler)
    # the forked process would raise it, and the loader here again
    assert list(DataLoader(Drawing(sampler), None, num_workers=1)) == expected


def test_copies_know_what_the_sampler_knew() -> None:
    sampler = sampler_of_100()
    trained(sampler)
    for twin in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert len(warnings_of(lambda each=twin: trained(each))) == 1  # type: ignore[misc]
