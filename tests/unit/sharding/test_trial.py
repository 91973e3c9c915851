from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim

from lockstep.sharding.trial import can_be_cut


class Plain(optim.Optimizer):
    """Subtracts what `change` returns for the gradient of a parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def change(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.each():
            assert parameter.grad is not None
            parameter.sub_(0.1 * self.change(parameter, parameter.grad))

    def each(self) -> Iterator[torch.Tensor]:
        for group in self.param_groups:
            yield from (each for each in group["params"] if each.grad is not None)


class Sign(Plain):
    def change(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.sign()


class Trust(Plain):
    def change(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * parameter.norm() / gradient.norm()


class ClippedAlone(Plain):
    """Only a large gradient shows that it has the norm of a parameter in it."""

    def change(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * min(1.0, 100.0 / float(gradient.norm()))


class Noisy(Plain):
    def change(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.randn_like(gradient)


class Together(Plain):
    def change(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / sum(each.grad.norm() for each in self.each() if each.grad is not None)


class Lookahead(Plain):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.inner = optim.SGD(self.param_groups)


def parameters() -> list[nn.Parameter]:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(5, 7), nn.LayerNorm(7))
    return [*model.parameters(), nn.Parameter(torch.zeros(()))]


@pytest.mark.parametrize(
    "kind", ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax", Sign]
)
def test_what_treats_each_element_alike_is_cut(kind: Any) -> None:
    assert can_be_cut(getattr(optim, kind)(parameters()) if isinstance(kind, str) else kind(parameters()))


@pytest.mark.parametrize("kind", [optim.Adafactor, Trust, ClippedAlone])
def test_what_reads_a_whole_parameter_gets_whole_ones(kind: Any) -> None:
    assert not can_be_cut(kind(parameters()))


def test_muon_gets_whole_matrices() -> None:
    assert not can_be_cut(optim.Muon([nn.Parameter(torch.zeros(4, 6))]))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Noisy, "otherwise where others are not"),
        (Together, "otherwise where others are not"),
        (optim.LBFGS, "no closure"),
        (Lookahead, "holds another one"),
    ],
)
def test_what_needs_all_parameters_is_refused(kind: Any, why: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s){kind.__name__}.*{why}.*LS535"):
        can_be_cut(kind(parameters()))


def test_a_parameter_that_cannot_be_cut_is_named() -> None:
    for parameter, why in ((torch.zeros(0, 4), "no elements"), (torch.zeros(6, 4)[:, ::2], "gaps in memory")):
        with pytest.raises(ValueError, match=rf"{why}.*LS535"):
            can_be_cut(optim.SGD([nn.Parameter(parameter)], lr=0.1))


def test_a_trial_leaves_no_trace() -> None:
    optimizer = optim.AdamW(parameters(), lr=0.1)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)  # which has put a `step` into the optimizer
    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    assert can_be_cut(optimizer)
    assert torch.equal(torch.rand(()), expected)
    assert not optimizer.state
    assert scheduler.last_epoch == 0
