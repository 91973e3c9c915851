"""The trainer on several workers, against one worker and against itself."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.checkpoint import state_digest

Answer = dict[str, Any]


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(37, 1, 6, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs.mean((1, 2, 3)).gt(0).long())


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 2)
    ).double()


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def metric(model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, float]]:
    value = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
    return {"loss": (value, len(batch[1])), "count": (torch.tensor(float(len(batch[1]))), 1)}


def train(run: ls.Run, num_shards: int) -> Answer:
    model = build_model()
    trainer = ls.Trainer(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), loss=loss, num_shards=num_shards, seed=4
    )
    # Batches of 12: the last has one sample, so that some workers have nothing to do in it.
    loader = ls.ShardedLoader(dataset(), batch_size=12, num_shards=num_shards, seed=4)
    losses = [trainer.step(batch).loss for epoch in range(2) for batch in loader.epoch(epoch)]
    means = trainer.evaluate(loader, metric)
    return {
        "digest": trainer.digest(),
        "losses": losses,
        "test": means["loss"].value,
        "counted": means["count"].total,
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
    }


@pytest.fixture(scope="module")
def one_worker() -> Answer:
    [answer] = ls.launch(train, 4, devices="cpu")
    return answer


@pytest.mark.parametrize("workers", [2, 3])
def test_more_workers_train_the_same_model(workers: int, one_worker: Answer) -> None:
    answers = ls.launch(train, 4, devices=f"cpu:{workers}")
    assert len({answer["digest"] for answer in answers}) == 1
    assert answers[0]["losses"] == pytest.approx(one_worker["losses"], rel=1e-9)
    assert answers[0]["test"] == pytest.approx(one_worker["test"], rel=1e-9)
    assert {answer["counted"] for answer in answers} == {37.0}
    for name, value in answers[0]["weights"].items():
        torch.testing.assert_close(value, one_worker["weights"][name], rtol=1e-8, atol=1e-10)


def test_the_same_run_has_the_same_digest_twice(one_worker: Answer) -> None:
    first, second = (ls.launch(train, 2, devices="cpu:2") for _ in range(2))
    assert first[0]["digest"] == second[0]["digest"]
    assert first[0]["digest"] == state_digest(first[1]["weights"])
    assert first[0]["digest"] != one_worker["digest"]  # another number of shards is another run


def test_a_model_that_is_left_different_on_a_rank_becomes_rank_0s() -> None:
    def build(run: ls.Run) -> str:
        torch.manual_seed(run.rank)
        model = build_model()
        trainer = ls.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, num_shards=2)
        return trainer.digest()

    first, second = ls.launch(build, devices="cpu:2")
    assert first == second
