"""Schedules by name, parameter groups by pattern, precision and the gradient's norm."""

from typing import Any

import pytest
import torch
from tests.support.faulty_runs import Run
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn

import lockstep as ls
from lockstep.comm import World


def factors(kind: Any, num_steps: int = 8, **options: Any) -> list[float]:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = ls.make_schedule(optimizer, kind, num_steps=num_steps, **options)
    found = []
    for _ in range(num_steps + 1):
        found.append(round(optimizer.param_groups[0]["lr"], 6))
        optimizer.step()
        scheduler.step()
    return found


def test_schedules_warm_up_and_go_down() -> None:
    assert factors("constant", 4, warmup=3) == [0.25, 0.5, 0.75, 1, 1]
    assert factors("linear", 4) == [1, 0.75, 0.5, 0.25, 0]
    assert factors("linear", 8, warmup=0.5, final=0.5)[3:] == [0.8, 1, 0.875, 0.75, 0.625, 0.5]
    assert factors("cosine", 4) == [1, 0.853553, 0.5, 0.146447, 0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"warmup": 8}, "warmup is 8, expected fewer steps than the run has"),
        ({"warmup": 1.5}, "warmup is 1.5"),
        ({"warmup": -1}, "warmup is -1"),
        ({"final": 2}, "final is 2"),
        ({"num_steps": 0}, "num_steps of a schedule is 0"),
    ],
)
def test_schedules_out_of_range_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        factors("cosine", **options)
    with pytest.raises(ValueError, match="The schedule is 'cos'"):
        factors("cos")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))


def test_groups_follow_the_first_pattern_and_what_has_one_dimension() -> None:
    model = net()
    groups = ls.parameter_groups(model, {"2.*": {"lr": 0.5}, "*": {}}, no_decay=True)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [([names[id(each)] for each in group.pop("params")], group) for group in groups]
    assert found == [
        (["0.weight"], {}),
        (["0.bias", "1.weight", "1.bias"], {"weight_decay": 0.0}),
        (["2.weight"], {"lr": 0.5}),
        (["2.bias"], {"weight_decay": 0.0, "lr": 0.5}),
    ]
    with pytest.raises(ValueError, match=r"group 'head.\*' has no parameters"):
        ls.parameter_groups(model, {"head.*": {}})
    with pytest.raises(TypeError, match=r"group '2.\*' has 0.1, expected options"):
        ls.parameter_groups(model, {"2.*": 0.1})  # type: ignore[dict-item]


def test_a_misspelt_option_of_a_group_is_refused() -> None:
    def trainer(option: str) -> ls.Trainer:
        model = net()
        optimizer = torch.optim.SGD(ls.parameter_groups(model, {"2.*": {option: 0.5}}), lr=0.1, momentum=0.9)
        return ls.Trainer(model, optimizer, loss=lambda model, batch: model(batch).sum(), num_shards=1)

    for option, meant in (("lrr", "lr"), ("weightdecay", "weight_decay"), ("momentun", "momentum")):
        with pytest.raises(ValueError, match=f"the option '{option}', which .* Did you mean '{meant}'"):
            trainer(option)
    for option in ("lr", "initial_lr", "max_momentum", "lr_scale", "name"):
        trainer(option).close()


def test_the_norm_is_computed_without_changing_a_bit() -> None:
    def train(world: World | None, **options: Any) -> tuple[str, list[float | None]]:
        run = Run(world, **options)
        norms = [run.trainer.step(batch).grad_norm for batch in run.loader.epoch(0)]
        return run.trainer.digest(), norms

    plain, without = run_ranks(1, lambda _: train(None))[0]
    digest, norms = run_ranks(1, lambda _: train(None, track_grad_norm=True))[0]
    assert digest == plain
    assert without == [None] * len(norms)
    assert all(norm is not None and norm > 0 for norm in norms)
    assert run_ranks(2, lambda world: train(world, track_grad_norm=True)) == [(digest, norms)] * 2
    assert run_ranks(1, lambda _: train(None, max_grad_norm=1e9))[0] == (digest, norms)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_precision_is_that_of_autocast(precision: Any) -> None:
    seen: set[torch.dtype] = set()

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(5, 1)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.layer(inputs)
            seen.add(outputs.dtype)
            return outputs

    def train(world: World | None) -> str:
        model = Watched()

        def loss(model: nn.Module, batch: Any) -> Tensor:
            return nn.functional.mse_loss(model(batch[0]), batch[1])

        def metric(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
            return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])

        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer = ls.Trainer(model, optimizer, loss=loss, num_shards=4, precision=precision, world=world)
        inputs = torch.randn(16, 5, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
        loader = ls.ShardedLoader(data, batch_size=8, num_shards=4, world=world)
        for batch in loader.epoch(0):
            trainer.step(batch)
        trainer.evaluate(loader, metric)
        assert (trainer.scaler is not None) == (precision == "float16")
        return trainer.digest()

    alone = run_ranks(1, lambda _: train(None))
    assert run_ranks(2, train) == alone * 2
    assert seen == {getattr(torch, precision)}


def test_the_norm_is_that_of_gradients_that_are_not_scaled() -> None:
    def norms(world: World | None, **options: Any) -> list[float | None]:
        run = Run(world, **options)
        return [run.trainer.step(batch).grad_norm for batch in run.loader.epoch(0)]

    def scaled(world: World | None = None, **options: Any) -> list[float | None]:
        return norms(world, scaler=torch.amp.GradScaler("cpu", init_scale=16.0), **options)

    found = scaled(track_grad_norm=True)
    assert found == norms(None, track_grad_norm=True)  # a power of two changes no bit
    assert scaled(max_grad_norm=1e9) == found
    assert run_ranks(2, lambda world: scaled(world, track_grad_norm=True)) == [found] * 2


def test_a_worker_whose_first_step_has_no_samples_for_it_can_scale() -> None:
    # As after a resume before the last batch: the scaler of that worker had never seen a loss.
    def train(world: World | None) -> str:
        torch.manual_seed(0)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = lambda model, batch: model(batch[0]).square().mean()  # noqa: E731
        trainer = ls.Trainer(model, optimizer, loss=loss, num_shards=4, precision="float16", world=world)
        data = torch.utils.data.TensorDataset(torch.ones(2, 2))
        for epoch in range(2):
            for batch in ls.ShardedLoader(data, batch_size=4, num_shards=4, world=world).epoch(epoch):
                trainer.step(batch)
        return trainer.digest()

    alone = run_ranks(1, lambda _: train(None))
    assert run_ranks(4, train) == alone * 4


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="precision is 'half', expected 'float32' or 'bfloat16' or 'float16'"):
        Run(None, precision="half")
