"""What a loss function is told (`place`), and what it may return besides the loss."""

from typing import Any

import pytest
import torch
from tests.support.threaded_ranks import run_ranks
from tests.unit.engine.test_trainer import data, mean_loss, model
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.comm import World
from lockstep.data import ShardedLoader
from lockstep.engine import StepPlace, Trainer
from lockstep.errors import LossError
from lockstep.means import Mean

ALONE = World(rank=0, world_size=1, group=None)


def take_steps(world: World, loss: Any, length: int = 22, epochs: int = 1) -> tuple[str, list[dict[str, float]]]:
    net = model()
    trainer = Trainer(net, torch.optim.SGD(net.parameters(), lr=0.1), loss=loss, num_shards=4, world=world)
    loader = ShardedLoader(data(length), batch_size=8, num_shards=4, seed=3, world=world)
    found = [dict(trainer.step(batch).values) for epoch in range(epochs) for batch in loader.epoch(epoch)]
    return trainer.digest(), found


def test_further_values_are_means_over_the_whole_batch() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        positive = batch[1] > 0
        of_positive = (batch[1] * positive).sum() / positive.sum().clamp(min=1)
        return {"loss": mean_loss(model, batch), "target": batch[1].mean(), "positive": (of_positive, positive.sum())}

    net = model()
    trainer = Trainer(net, torch.optim.SGD(net.parameters(), lr=0.1), loss=loss, num_shards=4)
    for batch in ShardedLoader(data(), batch_size=8, num_shards=4, seed=3).epoch(0):
        targets = torch.cat([part.data[1] for part in batch.slices])
        values = trainer.step(batch).values
        assert values["target"] == pytest.approx(targets.mean().item(), rel=1e-12)
        assert values["positive"] == pytest.approx(targets[targets > 0].mean().item(), rel=1e-12)


def test_further_values_have_the_same_bits_on_any_number_of_workers() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        outputs = model(batch[0])
        return {"loss": (outputs - batch[1]).square().mean(), "z": outputs.mean(), "a": outputs.square().mean()}

    # The last batch has 2 samples for 4 shards: a worker without any learns the names from the others.
    expected = take_steps(ALONE, loss, length=10)
    assert [list(values) for values in expected[1]] == [["a", "z"]] * 2
    for workers in (2, 4):
        assert run_ranks(workers, lambda world: take_steps(world, loss, length=10)) == [expected] * workers


def test_other_names_in_one_shard_are_an_error_on_every_worker() -> None:
    def loss(model: nn.Module, batch: Any, place: StepPlace) -> Any:
        return {"loss": mean_loss(model, batch), "other" if place.shard == 3 else "kl": 1.0}

    def program(world: World) -> str:
        with pytest.raises(LossError) as failure:
            take_steps(world, loss)
        return str(failure.value)

    assert all("for shard 3 than for shard 0" in text for text in run_ranks(2, program))


def test_a_mean_of_nothing_in_one_shard_is_not_called_a_model_that_has_diverged() -> None:
    def loss(model: nn.Module, batch: Any, place: StepPlace) -> Any:
        return mean_loss(model, batch) * (float("nan") if place.shard == 2 else 1.0)

    with pytest.raises(LossError, match=r"shard 2, .* targets of this shard are all ignored.*ls\.Mean") as caught:
        take_steps(ALONE, loss)
    assert "learning rate" not in str(caught.value)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"kl": 1.0}, 'as "loss"'),
        ({"loss": 1.0}, "depends on the model"),
        ({"loss": None, "kl": "much"}, "'kl' as a str"),
    ],
)
def test_a_dictionary_that_says_nothing_is_refused(result: dict[str, Any], message: str) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        return {**result, "loss": mean_loss(model, batch)} if result.get("loss", 1) is None else result

    with pytest.raises(LossError, match=message):
        take_steps(ALONE, loss)


def test_the_place_says_which_shard_of_which_step_is_computed() -> None:
    seen: list[StepPlace] = []

    def loss(model: nn.Module, batch: Any, place: StepPlace) -> Tensor:
        seen.append(place)
        return mean_loss(model, batch) * (1 + place.global_step)

    take_steps(ALONE, loss, length=16, epochs=2)
    assert [(each.epoch, each.step, each.global_step, each.shard) for each in seen] == [
        (epoch, step, 2 * epoch + step, shard) for epoch in (0, 1) for step in (0, 1) for shard in range(4)
    ]


def test_a_loss_that_takes_other_arguments_is_refused_when_the_trainer_is_made() -> None:
    def loss(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return ((outputs - targets) * weights).mean()

    with pytest.raises(TypeError, match=r"takes \(outputs.*expected \(model, batch\), or \(model, batch, place\)"):
        take_steps(ALONE, loss)


# -- Shards that have nothing to learn from ----------------------------------------------------------------------------


NUM_SHARDS = 3


class Branches(nn.Module):
    """A model with one part for samples that count, and another for those that do not."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(6, 4, sparse=sparse)
        self.counted, self.other, self.never = nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, words: Tensor) -> Tensor:
        hidden, counts = self.words(words), words < 3
        parts = [self.counted(hidden[counts]), self.other(hidden[~counts])]
        return torch.cat([part for part in parts if len(part)])


def word_data() -> TensorDataset:
    return TensorDataset(torch.tensor([0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0, 0, 1, 2, 1, 0, 2]))


def counted_mean(model: nn.Module, batch: Any) -> Mean:
    """Return the mean over samples that count, which is 0 / 0 where there are none, and their number."""
    (words,) = batch
    weights = torch.cat([(words < 3)[words < 3], (words < 3)[words >= 3]]).float()[:, None]
    return Mean((model(words).square() * weights).sum(), weights.sum())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)


def run(world: World, *, sparse: bool) -> tuple[str, dict[str, Tensor]]:
    model = Branches(sparse=sparse)
    trainer = Trainer(model, optimizer_of(model), loss=counted_mean, num_shards=NUM_SHARDS, world=world)
    for batch in ShardedLoader(word_data(), batch_size=9, num_shards=NUM_SHARDS, shuffle=False, world=world).epoch(0):
        trainer.step(batch)
    return trainer.digest(), model.state_dict()


@pytest.mark.parametrize("sparse", [False, True])
def test_what_only_shards_without_weight_use_is_updated_as_in_a_plain_loop(*, sparse: bool) -> None:
    answers = [answer for size in (1, 2, 3) for answer in run_ranks(size, lambda world: run(world, sparse=sparse))]
    assert len({digest for digest, _ in answers}) == 1
    plain = Branches()
    optimizer = optimizer_of(plain)
    for words in word_data().tensors[0].split(9):
        optimizer.zero_grad()
        total, weight = counted_mean(plain, (words,))
        (total / weight).backward()
        optimizer.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(answers[0][1][name], value, msg=name)
