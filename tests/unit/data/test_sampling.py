"""Samples drawn by weights or put together by length: how often, in which order, alike on any number of workers."""

import copy
from collections import Counter
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lockstep.comm import World
from lockstep.data import ShardedLoader, balanced_weights
from lockstep.data.order import Sampling
from lockstep.engine import Trainer
from lockstep.means import Mean

ALONE = World(rank=0, world_size=1, group=None)
LENGTHS = torch.arange(40) * 7 % 40
LABELS = torch.tensor([0] * 30 + [1] * 6 + [2] * 4)


class Noisy(Dataset[Any]):
    """Samples with augmentation."""

    def __init__(self) -> None:
        self.targets = LABELS.tolist()

    def __len__(self) -> int:
        return len(LABELS)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.rand(())


def loader(dataset: Any = None, world: World = ALONE, **options: Any) -> ShardedLoader:
    chosen = {"batch_size": 8, "num_shards": 4, "seed": 5} | options
    return ShardedLoader(Noisy() if dataset is None else dataset, world=world, **chosen)


def seen(of: ShardedLoader, epoch: int = 0, start_step: int = 0) -> list[tuple[int, int, int, float]]:
    """Return step, shard, sample and noise of each sample."""
    return [
        (batch.cursor.step, part.shard, index, noise)
        for batch in of.epoch(epoch, start_step)
        for part in batch.slices
        for index, noise in zip(part.data[0].tolist(), part.data[1].tolist(), strict=True)
    ]


def test_samples_come_as_often_as_their_weights_say_and_those_without_weight_never() -> None:
    weights = np.where(LABELS.numpy() == 2, 3.0, np.where(LABELS.numpy() == 1, 1.0, 0.0))
    weighted = loader(weights=weights)
    counts = Counter(int(LABELS[index]) for epoch in range(100) for _, _, index, _ in seen(weighted, epoch))
    assert sum(counts.values()) == 100 * 40
    assert counts[0] == 0
    assert counts[2] / counts[1] == pytest.approx(12 / 6, rel=0.1)


@pytest.mark.parametrize(
    "dataset",
    [
        None,
        TensorDataset(torch.arange(40), LABELS),
        Subset(ConcatDataset([TensorDataset(LABELS), TensorDataset(LABELS)]), range(10, 70)),
    ],
)
def test_balanced_draws_each_class_equally_often(dataset: Any) -> None:
    balanced = loader(dataset, weights="balanced")
    labels = torch.cat([LABELS, LABELS])[10:70] if isinstance(dataset, Subset) else LABELS
    counts = Counter(
        int(labels[index])
        for epoch in range(100)
        for batch in balanced.epoch(epoch)
        for part in batch.slices
        for index in part.indices
    )
    assert [counts[label] / (len(labels) * 100) for label in range(3)] == pytest.approx([1 / 3] * 3, rel=0.08)
    given = loader(dataset, weights=balanced_weights([f"class {label}" for label in labels]))
    assert given.source == balanced.source


def test_a_sample_that_is_drawn_twice_has_another_random_state_each_time() -> None:
    weights = torch.zeros(40)
    weights[3] = weights[39] = 1
    found = seen(loader(weights=weights))
    assert {index for _, _, index, _ in found} == {3, 39}
    assert len({noise for *_, noise in found}) == 40
    parts = [part for batch in loader(weights=weights).epoch(0) for part in batch.slices]
    assert all(list(part.indices) == part.data[0].tolist() for part in parts)


def test_draws_do_not_depend_on_workers_or_on_where_an_epoch_begins() -> None:
    alone = seen(loader(weights="balanced"), 1)
    for size in (2, 3):
        parts = [
            seen(loader(world=World(rank=rank, world_size=size, group=None), weights="balanced"), 1)
            for rank in range(size)
        ]
        assert sorted(part for each in parts for part in each) == sorted(alone)
    assert seen(loader(weights="balanced"), 1, start_step=2) == [each for each in alone if each[0] >= 2]
    assert seen(loader(weights="balanced"), 0) != alone


def test_an_evaluation_counts_each_sample_once() -> None:
    weighted = loader(weights="balanced")
    batches = list(weighted.fixed_assignment_epoch())
    assert sorted(index for batch in batches for part in batch.slices for index in part.indices) == list(range(40))
    again = [part.indices for batch in weighted.fixed_assignment_epoch(each_once=False) for part in batch.slices]
    assert again == [part.indices for batch in weighted.epoch(0) for part in batch.slices]


def test_a_batch_has_samples_of_similar_lengths_and_batches_come_in_a_random_order() -> None:
    lengths = torch.randint(1, 500, (1003,), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(torch.arange(1003))
    means = []
    for epoch in range(2):
        steps = [
            [index for part in batch.slices for index in part.indices]
            for batch in loader(data, lengths=lengths.tolist()).epoch(epoch)
        ]
        assert sorted(index for step in steps for index in step) == list(range(1003))
        assert [len(step) for step in steps] == [8] * 125 + [3]
        spreads = [int(lengths[step].max() - lengths[step].min()) for step in steps]
        assert sum(spreads) / len(spreads) < 20  # about 390 in a random order
        means.append([lengths[step].double().mean().item() for step in steps])
    assert means[0] != means[1]
    for mean in means:
        rises = sum(after > before for before, after in pairwise(mean))
        assert 40 < rises < 85


def test_the_samples_that_drop_last_leaves_out_have_any_length() -> None:
    bucketed = loader(TensorDataset(torch.arange(43)), lengths=range(43), drop_last=True)
    left_out = []
    for epoch in range(40):
        found = {index for batch in bucketed.epoch(epoch) for part in batch.slices for index in part.indices}
        left_out.append(min(set(range(43)) - found))
    assert min(left_out) < 10
    assert max(left_out) > 30


def test_an_epoch_describes_its_order_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # The weights of a million samples took milliseconds in each step.
    described = Mock(return_value="drawn")
    monkeypatch.setattr(Sampling, "__str__", lambda _: described())
    assert len(list(loader(weights="balanced").epoch(0))) == 5
    described.assert_called_once()


def test_other_weights_are_another_source() -> None:
    assert len({loader(weights=weights).source for weights in (None, "balanced", [1.0] * 40)}) == 3


@pytest.mark.parametrize(
    ("dataset", "weights", "options", "message"),
    [
        (None, [1.0] * 39, {}, "weights has 39 numbers, and the data set has 40 samples"),
        (None, torch.ones(40, 1), {}, r"weights has the shape \[40, 1\]"),
        (None, [1.0] * 39 + [-1.0], {}, "weight of sample 39 is -1.0, expected zero or more"),
        (None, [float("nan")] * 40, {}, "weight of sample 0 is nan"),
        (None, [0.0] * 40, {}, "add up to 0.0"),
        (None, [1.0] * 40, {"shuffle": False}, "shuffle=False keeps the order"),
        (None, "balance", {}, "expected 'balanced'"),
        (None, ["a"] * 40, {}, "weights is a list that cannot be read as numbers"),
        (None, None, {"lengths": [1] * 41}, "lengths has 41 numbers, and the data set has 40 samples"),
        (None, None, {"lengths": [-1] * 40}, "length of sample 0 is -1.0"),
        (None, None, {"lengths": [1] * 40, "shuffle": False}, "similar length into one batch, and shuffle=False"),
        (TensorDataset(torch.ones(40)), "balanced", {}, r"TensorDataset holds 40 numbers of torch.float32.*balanced_w"),
        (range(40), "balanced", {}, "range has no targets or labels"),
    ],
)
def test_weights_and_lengths_that_cannot_be_used_are_refused(
    dataset: Any, weights: Any, options: Any, message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        loader(dataset, weights=weights, **options)


def test_labels_that_are_no_classes_are_refused() -> None:
    for labels in ([0, float("nan")], [[0, 1]], []):
        with pytest.raises(ValueError, match="one class for each sample"):
            balanced_weights(labels)


def count_tokens(model: nn.Module, batch: Any) -> Mean:
    indices, noise = batch
    tokens = (indices % 7) + 1
    losses = model(noise[:, None]).squeeze(1).square()
    return Mean((losses * tokens).sum(), tokens.sum())


def train(world: World, state: Any, stop: int | None, options: dict[str, Any]) -> tuple[str, Any]:
    """Train from a saved state to the end of epoch 1, or to step `stop` of epoch 0; return digest and state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = Trainer(model, optimizer, loss=count_tokens, num_shards=4, world=world)
    if state is not None:
        trainer.load_state_dict(copy.deepcopy(state))  # threads share it
    data = loader(world=world, **options)
    for epoch in range(trainer.cursor.epoch, 2):
        for batch in data.epoch(epoch, trainer.cursor.step):
            trainer.step(batch)
            if trainer.cursor.step == stop:
                return trainer.digest(), trainer.state_dict()
    return trainer.digest(), trainer.state_dict()


@pytest.mark.parametrize(
    "options", [{"weights": "balanced"}, {"lengths": LENGTHS}, {"weights": "balanced", "lengths": LENGTHS}]
)
def test_the_model_is_the_same_on_any_number_of_workers_and_after_a_stop(options: dict[str, Any]) -> None:
    whole = {run_ranks(size, lambda world: train(world, None, None, options)[0])[0] for size in (1, 2, 3)}
    assert len(whole) == 1
    _, saved = run_ranks(3, lambda world: train(world, None, 2, options))[0]
    for size in (1, 2):
        assert set(run_ranks(size, lambda world: train(world, saved, None, options)[0])) == whole
    with pytest.raises(ValueError, match="was trained on a loader of"):
        train(ALONE, saved, None, {"weights": [1.0] * 40})
