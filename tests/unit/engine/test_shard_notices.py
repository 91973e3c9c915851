"""Notices of what sees one shard where a plain loop sees the batch; and none where there is nothing to say."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy, linear, mse_loss, normalize, pdist
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

from lockstep.data import ShardedLoader
from lockstep.engine import Trainer
from lockstep.engine.shard_notices import split_samples
from lockstep.errors import LossError
from lockstep.means import Mean, mean_over_ranks

ROWS, WIDTH, BATCH, NUM_SHARDS = 6, 6, 24, 4
"""As wide as a slice has samples: a shape alone proves nothing."""


def take_steps(net: nn.Module, loss: Any, num_shards: int = NUM_SHARDS, *, exact_mean: bool = True) -> None:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(2 * BATCH, WIDTH, generator=generator), torch.arange(2 * BATCH) % WIDTH)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = Trainer(net, optimizer, loss=loss, num_shards=num_shards, exact_mean=exact_mean)
    for batch in ShardedLoader(data, batch_size=BATCH, num_shards=num_shards, seed=1).epoch(0):
        trainer.step(batch)


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def views(net: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return normalize(net(batch[0])), normalize(net(batch[0] + 0.1))


def nt_xent(one: Tensor, other: Tensor) -> Tensor:
    both = torch.cat([one, other])
    scores = (both @ both.T - 1e9 * torch.eye(len(both))) / 0.5
    return cross_entropy(scores, torch.arange(len(both)).roll(len(one)))


COMPARING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "two views": nt_xent,
    "pairs of two views": lambda one, other: cross_entropy(one @ other.T, torch.arange(len(one))),
    "keys without a gradient": lambda one, other: cross_entropy(
        one[:, 1:] @ other.detach()[:, 1:].T, torch.arange(ROWS)
    ),
    "einsum": lambda one, other: torch.einsum("nd,md->nm", one, other).logsumexp(1).mean(),
    "linear": lambda one, other: linear(one, other).logsumexp(1).mean(),
    "distances": lambda one, other: torch.cdist(one, other).min(1).values.mean(),
    "distances within": lambda one, _: pdist(one).mean(),
    "differences": lambda one, other: (one[:, None] - other[None]).square().sum(-1).min(1).values.mean(),
    "similarity": lambda one, other: cosine_similarity(one[:, None], other[None], dim=-1).logsumexp(1).mean(),
    "cross-correlation": lambda one, other: (one.T @ other - torch.eye(WIDTH)).square().mean(),
}


@pytest.mark.parametrize("name", COMPARING)
def test_a_loss_that_compares_samples_is_told_of_once(name: str) -> None:
    with pytest.warns(UserWarning, match=r"has its own alone, 6 in shard 0: .* \(LS532\)") as warned:
        take_steps(encoder(), lambda net, batch: COMPARING[name](*views(net, batch)))
    assert len(warned) == 1


def frozen() -> nn.Module:
    return nn.Sequential(encoder(), nn.Linear(WIDTH, ROWS, bias=False).requires_grad_(False))


class Attention(nn.Module):
    """Looks at places within each sample, of which there are as many as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
        self.positions = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.centers = nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.layer(inputs[:, None] + self.positions)
        weights = (hidden @ hidden.transpose(1, 2)).softmax(-1)
        return torch.cdist((weights @ hidden).mean(1), self.centers)


def run_mean(name: str, value: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.register_buffer(name, torch.zeros(WIDTH))
            self.register_buffer("table", torch.zeros(4 * ROWS, WIDTH))

        def forward(self, inputs: Tensor) -> Tensor:
            held = dict(self.named_buffers())
            held[name].copy_(value(held[name], inputs.detach()))
            held["table"].mul_(0.9).add_(inputs.detach().mean(0))
            features: Tensor = self.layer(inputs) - held[name]
            return features

    return Running()


@pytest.mark.parametrize(
    "make",
    [
        encoder,
        frozen,
        Attention,
        lambda: weight_norm(nn.Linear(WIDTH, ROWS, bias=False)),
        lambda: nn.Sequential(encoder(), nn.Dropout(0.1), nn.LayerNorm(WIDTH)),
        lambda: run_mean("mean", lambda mean, inputs: 0.9 * mean + 0.1 * inputs.mean(0)),
        lambda: run_mean("counts", lambda counts, inputs: counts + torch.eye(WIDTH)[inputs.argmax(1)].sum(0)),
    ],
)
def test_ordinary_layers_and_running_means_are_not_told_of(make: Callable[[], nn.Module]) -> None:
    centers = nn.Parameter(torch.randn(ROWS, WIDTH), requires_grad=False)
    take_steps(make(), lambda net, batch: cross_entropy(net(batch[0]), batch[1]))
    take_steps(make(), lambda net, batch: mse_loss(normalize(net(batch[0])) @ normalize(centers).T, batch[0]))


class Bank(nn.Module):
    def __init__(self, write: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(WIDTH, WIDTH), write
        self.register_buffer("rows", torch.zeros(8 * ROWS, WIDTH))
        self.register_buffer("start", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        features: Tensor = self.layer(inputs)
        self.write(self, features.detach())
        return features


def write_at_pointer(bank: Any, features: Tensor) -> None:
    bank.rows[(bank.start + torch.arange(len(features))) % len(bank.rows)] = features
    bank.start += len(features)


def write_anywhere(bank: Any, features: Tensor) -> None:
    bank.rows[torch.arange(len(features)) * 7] = features


def shift(bank: Any, features: Tensor) -> None:
    bank.rows = torch.cat([features, bank.rows])[: 8 * ROWS]


@pytest.mark.parametrize("write", [write_at_pointer, write_anywhere, shift])
@pytest.mark.parametrize("is_beside", [False, True])
def test_a_buffer_that_is_written_by_rows_is_told_of_once(write: Any, is_beside: bool) -> None:
    bank, net = Bank(write), encoder()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        features = model(batch[0])
        return mse_loss(features, bank(batch[0]).detach() if is_beside else batch[0])

    with pytest.warns(UserWarning, match=r"writes the buffer (bank\.)?rows by rows, .* of 6 samples") as warned:
        take_steps(net if is_beside else bank, loss)
    assert len(warned) == 1


def test_with_one_shard_there_is_nothing_to_say() -> None:
    take_steps(Bank(write_at_pointer), lambda net, batch: nt_xent(*views(net, batch)), num_shards=1)


def root_of_error(net: nn.Module, batch: Any) -> Tensor:
    return mse_loss(net(batch[0]).sum(1), batch[1].float()).sqrt()


def noisy(net: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(net(batch[0] + 0.1 * torch.randn(batch[0].shape)), batch[1])


def penalized(net: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(net(batch[0]), batch[1]) + sum(each.square().sum() for each in net.parameters())


def only_in_training(net: nn.Module, batch: Any) -> Tensor:
    assert net.training
    return 2 * cross_entropy(net(batch[0]), batch[1])


CLASS_WEIGHTS = torch.tensor([0.1, 1.0, 3.0, 2.0, 1.0, 0.5])
NO_MEANS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "sum": lambda net, batch: cross_entropy(net(batch[0]), batch[1], reduction="sum"),
    "class weights": lambda net, batch: cross_entropy(net(batch[0]), batch[1], weight=CLASS_WEIGHTS),
    "ignored targets": lambda net, batch: cross_entropy(net(batch[0]), batch[1], ignore_index=2),
    "root": root_of_error,
    "root of errors that are alike": lambda net, batch: (net(batch[0]).mean(1) + 3).square().mean().sqrt(),
    "in a dictionary": lambda net, batch: {"loss": cross_entropy(net(batch[0]), batch[1], weight=CLASS_WEIGHTS)},
}
MEANS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "mean": lambda net, batch: cross_entropy(net(batch[0]), batch[1]),
    "class weights": lambda net, batch: Mean(
        cross_entropy(net(batch[0]), batch[1], weight=CLASS_WEIGHTS, reduction="sum"),
        CLASS_WEIGHTS[batch[1]].sum(),
    ),
    "ignored targets": lambda net, batch: Mean(
        cross_entropy(net(batch[0]), batch[1], ignore_index=2, reduction="sum"), (batch[1] != 2).sum()
    ),
    "penalty": penalized,
    "noise": noisy,
    "no evaluation mode": only_in_training,
}


def dropping() -> nn.Module:
    return nn.Sequential(encoder(), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("make", [encoder, dropping])
@pytest.mark.parametrize("name", NO_MEANS)
def test_a_loss_that_is_no_mean_over_samples_is_refused_in_the_first_step(
    name: str, make: Callable[[], nn.Module]
) -> None:
    net = make()
    before = [each.clone() for each in net.state_dict().values()]
    with pytest.raises(LossError, match=r"not a mean over samples: .* exact_mean=False.* \(LS533\)"):
        take_steps(net, NO_MEANS[name])
    assert all(map(torch.equal, before, net.state_dict().values()))


@pytest.mark.parametrize("make", [encoder, dropping])
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_over_samples_is_trained(name: str, make: Callable[[], nn.Module]) -> None:
    take_steps(make(), MEANS[name])


def test_a_loss_of_another_kind_is_trained_where_that_is_said() -> None:
    take_steps(encoder(), root_of_error, exact_mean=False)
    take_steps(encoder(), root_of_error, num_shards=1)  # the shard is the batch


Samples = Sequence[tuple[Tensor, int]]


@dataclass
class Labelled:
    inputs: Tensor
    target: int


def together(samples: Samples) -> tuple[Tensor, Tensor]:
    return torch.stack([each for each, _ in samples]), torch.tensor([target for _, target in samples])


def of_each(net: nn.Module, inputs: Sequence[Tensor], targets: Sequence[Any]) -> Tensor:
    found = [
        cross_entropy(net(one[None])[0], torch.as_tensor(target)) for one, target in zip(inputs, targets, strict=True)
    ]
    return torch.stack(found).mean()


BATCHES: dict[str, tuple[Callable[[Samples], Any], Callable[[nn.Module, Any], Any]]] = {
    "as many steps in time, which come first, as samples": (
        lambda samples: torch.stack([together(samples)[0]] * len(samples)),
        lambda net, batch: net(batch).square().mean((0, 2)).sqrt().mean(),
    ),
    "time first": (
        lambda samples: (together(samples)[0].T, together(samples)[1]),
        lambda net, batch: cross_entropy(net(batch[0].T), batch[1]),
    ),
    "a count": (
        lambda samples: (*together(samples), len(samples)),
        lambda net, batch: cross_entropy(net(batch[0]), batch[1], reduction="sum") / batch[2],
    ),
    "objects": (
        lambda samples: [Labelled(*sample) for sample in samples],
        lambda net, batch: of_each(net, [each.inputs for each in batch], [each.target for each in batch]),
    ),
    "arrays": (
        lambda samples: [each.numpy() for each in together(samples)],
        lambda net, batch: cross_entropy(net(torch.from_numpy(batch[0])), torch.from_numpy(batch[1])),
    ),
    "weights of two tasks": (
        lambda samples: (*together(samples), torch.arange(1.0, 3)),
        lambda net, batch: cross_entropy(net(batch[0]), batch[1]) * batch[2].prod() + net(batch[0]).mean(),
    ),
}


def take_steps_of(collate: Any, loss: Any, rows: int) -> str:
    data = [(torch.randn(WIDTH, generator=torch.Generator().manual_seed(each)), each % WIDTH) for each in range(BATCH)]
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    trainer = Trainer(net, torch.optim.SGD(net.parameters(), lr=0.1), loss=loss, num_shards=2)
    for batch in ShardedLoader(data, batch_size=2 * rows, num_shards=2, seed=1, collate_fn=collate).epoch(0):
        trainer.step(batch)
    return trainer.digest()


@pytest.mark.parametrize("rows", [1, 2, 3, 6])
@pytest.mark.parametrize("name", BATCHES)
def test_a_mean_over_samples_is_trained_whatever_a_batch_looks_like(name: str, rows: int) -> None:
    collate, loss = BATCHES[name]
    take_steps_of(collate, loss, rows)


@pytest.mark.parametrize("rows", [1, 2, 6])
@pytest.mark.parametrize("name", ["time first", "objects", "arrays"])
def test_a_loss_that_is_no_mean_is_found_by_loading_samples_again(name: str, rows: int) -> None:
    collate, mean = BATCHES[name]
    losses = (
        lambda net, batch: mean(net, batch) * len(batch if name == "objects" else batch[1]),
        lambda net, batch: mean(net, batch).square(),
    )
    for loss in losses:
        with pytest.raises(LossError, match=r"four times.*\(LS533\)" if rows == 1 else "LS533"):
            take_steps_of(collate, loss, rows)


def test_a_collate_function_that_draws_is_not_taken_for_a_loss_that_is_no_mean() -> None:
    def mix(samples: Samples) -> list[Any]:
        return [[(one + samples[int(torch.randint(len(samples), ()))][0]) / 2, target] for one, target in samples]

    take_steps_of(mix, lambda net, batch: of_each(net, *zip(*batch, strict=True)), 4)


def test_no_batch_is_drawn_from_a_loader_that_the_loss_holds_but_for_training() -> None:
    drawn: list[float] = []
    others = iter(DataLoader(TensorDataset(torch.arange(100.0)), batch_size=1))

    def loss(net: nn.Module, batch: Any) -> Tensor:
        other = next(others)[0]
        drawn.append(other.item())
        return cross_entropy(net(batch[0]), batch[1]) + (net(batch[0]) * other).square().mean()

    with pytest.warns(UserWarning, match="has changed loss: others"):
        take_steps_of(together, loss, 6)
    assert drawn == [*map(float, range(4))]


class Named(NamedTuple):
    values: Tensor
    texts: list[str]
    found: dict[str, Tensor]


def test_samples_are_split_wherever_they_are() -> None:
    rows = torch.arange(8).reshape(4, 2)
    parts = split_samples(Named(rows, ["a", "b", "c", "d"], {"one": rows[:, 0]}), 4, 1)
    first, others = (part.data for part in parts)
    assert (first.values.tolist(), first.texts, first.found["one"].tolist()) == ([[0, 1]], ["a"], [0])
    assert (len(others.values), others.texts, others.found["one"].tolist()) == (3, ["b", "c", "d"], [2, 4, 6])
    assert not split_samples((rows, torch.ones(3)), 4, 1)  # a part of which samples?


class Merging(nn.Linear):
    """Adds to its weight for evaluations, as merged low-rank updates do."""

    def train(self, mode: bool = True) -> "Merging":
        with torch.no_grad():
            self.weight += (self.training - mode) * 1.0
        super().train(mode)
        return self


def test_models_that_cannot_be_compared_in_evaluation_mode_are_trained() -> None:
    take_steps(Merging(WIDTH, WIDTH), MEANS["mean"])
    normed = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, track_running_stats=False))
    take_steps(normed, MEANS["mean"])


def test_a_count_that_came_with_the_batch_is_that_of_all_parts() -> None:
    take_steps(encoder(), lambda net, batch: Mean(cross_entropy(net(batch[0]), batch[1], reduction="sum"), ROWS))


def test_a_weight_with_a_gradient_is_refused() -> None:
    def loss(net: nn.Module, batch: Any) -> Mean:
        weight = net(batch[0])[:, 0].exp()
        return Mean((weight * cross_entropy(net(batch[0]), batch[1], reduction="none")).sum(), weight.sum())

    with pytest.raises(LossError, match=r"depends on parameters.*weight.detach\(\)"):
        take_steps(encoder(), loss)


def test_a_mean_over_ranks_in_the_loss_of_a_trainer_is_refused() -> None:
    """A worker computes several shards one after the other, and the mean of each would be over others' too."""
    with pytest.raises(LossError, match=r"Return ls\.Mean\(total, count\)"):
        take_steps(encoder(), lambda net, batch: mean_over_ranks(net(batch[0]).sum(), len(batch[0])))


def test_a_pair_is_told_once_and_a_sum_in_it_refused() -> None:
    """A metric returns a sum and a count, and given as a loss it made the gradient as large as the slice."""
    with pytest.warns(FutureWarning, match=r"Return ls\.Mean\(total, weight\).*LS507") as warned:
        take_steps(encoder(), lambda net, batch: (cross_entropy(net(batch[0]), batch[1]), len(batch[1])))
    assert len(warned) == 1
    with pytest.warns(FutureWarning, match="LS507"), pytest.raises(LossError, match="LS533"):
        take_steps(encoder(), lambda net, batch: (cross_entropy(net(batch[0]), batch[1], reduction="sum"), ROWS))
