"""Models and optimizers that a trainer cannot train, or not save, are refused with what to do instead."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer, SparseAdam
from torch.utils.data import TensorDataset

from lockstep.data import ShardedLoader
from lockstep.engine import Trainer

TENSORS = TensorDataset(torch.ones(2, 3))


class Several(Optimizer):
    """An optimizer for matrices and one for the rest, as people write it."""

    def __init__(self, model: nn.Module, kept: Any) -> None:
        parameters = list(model.parameters())
        super().__init__(parameters, {})
        matrices = SGD([each for each in parameters if each.dim() == 2], lr=0.1, momentum=0.9)
        rest = Adam([each for each in parameters if each.dim() != 2])
        self.parts = kept(matrices, rest)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure


class Saved(Several):
    """One that saves its parts."""

    def state_dict(self) -> dict[str, Any]:
        return {str(number): part.state_dict() for number, part in enumerate(self.parts)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for number, part in enumerate(self.parts):
            part.load_state_dict(state_dict[str(number)])


class Wrapping(Optimizer):
    """One that wraps another, and has its state and groups."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        self.inner.step()


class Kept(SGD):
    """One that keeps what it needs in attributes."""

    def __init__(self, model: nn.Module, *, keeps: bool) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.averages = [parameter.detach().clone() for parameter in model.parameters()]
        self.count, self.keeps, self.held = 0, keeps, list(model.parameters())

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        if self.keeps:
            self.count += 1
            for average, parameter in zip(self.averages, self.held, strict=True):
                average.lerp_(parameter.detach(), 0.5)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).mean()


def step(trainer: Trainer) -> None:
    trainer.step(next(ShardedLoader(TENSORS, batch_size=2, num_shards=1).epoch(0)))


def make(optimizer: Optimizer, model: nn.Module) -> Trainer:
    return Trainer(model, optimizer, loss=loss, num_shards=1)


@pytest.mark.parametrize("kept", [lambda *parts: list(parts), lambda *parts: dict(enumerate(parts))])
def test_an_optimizer_that_would_be_saved_without_its_parts_is_refused(kept: Any) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"a Several that holds another one, parts\[0\] \(SGD\)"):
        make(Several(model, kept), model)


def test_an_optimizer_that_saves_its_parts_or_shares_their_state_is_not() -> None:
    model = nn.Linear(3, 2)
    make(Saved(model, lambda *parts: list(parts)), model)
    make(Wrapping(SGD(model.parameters(), lr=0.1)), model)


def test_saving_what_an_optimizer_keeps_in_attributes_is_warned_of() -> None:
    model = nn.Linear(3, 2)
    trainer = make(Kept(model, keeps=True), model)
    step(trainer)
    with pytest.warns(UserWarning, match="Steps have changed averages, count of the optimizer, a Kept"):
        trainer.state_dict()


def test_saving_an_optimizer_whose_attributes_stay_is_not() -> None:
    for optimizer_of in (lambda model: Kept(model, keeps=False), lambda model: Adam(model.parameters())):
        model = nn.Linear(3, 2)
        trainer = Trainer(model, optimizer_of(model), loss=loss, num_shards=1, scaler=torch.amp.GradScaler("cpu"))
        torch.optim.lr_scheduler.StepLR(trainer.optimizer, 2)
        step(trainer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trainer.state_dict()


def test_sparse_adam_is_refused_with_what_to_use() -> None:
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True))
    with pytest.raises(ValueError, match=r"dense ones.*Use torch\.optim\.Adam"):
        make(SparseAdam(model.parameters()), model)


@pytest.mark.parametrize(
    "lazy", [lambda: nn.LazyLinear(2), lambda: nn.Sequential(nn.Linear(3, 2), nn.LazyBatchNorm1d())]
)
def test_a_lazy_model_is_refused_with_what_to_do_first(lazy: Any) -> None:
    model = lazy()
    with pytest.raises(ValueError, match=r"has no shape yet.*Run one forward"):
        make(SGD(model.parameters(), lr=0.1), model)
    model(torch.ones(2, 3))
    make(SGD(model.parameters(), lr=0.1), model)
