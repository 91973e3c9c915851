"""Models and optimizers that a trainer cannot train, or not save, are refused with what to do instead."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer, SparseAdam
from torch.utils.data import TensorDataset

from lockstep.data import ShardedLoader
from lockstep.engine import Trainer
from lockstep.errors import CheckpointError

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


# -- The state of an optimizer in a file -------------------------------------------------------------------------------


def run_of(
    optimizer: Callable[[nn.Module], Optimizer], names: str = "abc", dtype: torch.dtype = torch.float32
) -> tuple[Trainer, ShardedLoader]:
    """Return a trainer of a model whose parts were made in this order, and whose values depend on their names."""
    parts = {name: nn.Linear(3, 3) for name in names}
    for name, part in parts.items():
        generator = torch.Generator().manual_seed(ord(name))
        for parameter in part.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        values = batch[0].to(dtype)
        for name in "abc":
            values = model.get_submodule(name)(values)
        return values.square().mean()

    model = nn.ModuleDict(parts).to(dtype)
    data = TensorDataset(torch.randn(16, 3, generator=torch.Generator().manual_seed(0)))
    trainer = Trainer(model, optimizer(model), loss=loss, num_shards=2)
    return trainer, ShardedLoader(data, batch_size=4, num_shards=2)


def train(run: tuple[Trainer, ShardedLoader], steps: int) -> str:
    trainer, loader = run
    for batch in loader.epoch(0, trainer.cursor.step):
        trainer.step(batch)
        if trainer.global_step == steps:
            break
    return trainer.digest()


def by_group(model: nn.Module) -> Optimizer:
    biases = [each for each in model.parameters() if each.ndim == 1]
    return Adam([{"params": biases, "lr": 0.1}, {"params": [each for each in model.parameters() if each.ndim > 1]}])


def in_groups_turned_round(model: nn.Module) -> Optimizer:
    first, second = by_group(model).param_groups
    return Adam([{"params": second["params"]}, {"params": first["params"], "lr": 0.1}])


@pytest.mark.parametrize("make", [lambda model: Adam(model.parameters(), lr=0.1), by_group], ids=["one", "two"])
def test_the_state_goes_to_the_parameters_of_the_same_names(make: Any, tmp_path: Path) -> None:
    # All have the same shapes, so moments went to other parameters without an error.
    whole = train(run_of(make), 4)
    run = run_of(make)
    train(run, 2)
    path = run[0].save(tmp_path / "a.ckpt")
    other = run_of(make, names="cab")
    other[0].load(path)
    assert train(other, 4) == whole
    moments = {
        name: other[0].optimizer.state[parameter]["exp_avg"] for name, parameter in other[0].model.named_parameters()
    }
    assert moments.keys() == dict(run[0].model.named_parameters()).keys()
    with pytest.raises(CheckpointError, match=r"in other groups: (it has|group 0 has)"):
        run_of(in_groups_turned_round)[0].load(path)


class OfItsOwn(Adam):
    """Saves its state in a way of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"mine": super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["mine"])


def test_a_state_that_cannot_be_put_in_order_is_refused() -> None:
    def make(model: nn.Module) -> Optimizer:
        return OfItsOwn(model.parameters(), lr=0.1)

    run = run_of(make)
    train(run, 2)
    run_of(make)[0].load_state_dict(run[0].state_dict())
    with pytest.raises(
        CheckpointError, match="OfItsOwn saves its state in a way of its own, which cannot be put in ord"
    ):
        run_of(make, names="bca")[0].load_state_dict(run[0].state_dict())


class Sliced(Optimizer):
    """Keeps strided views of the parameters, as Prodigy with slice_p does, and state that belongs to no parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        whole = self.state["global"]  # a text, and no parameter
        whole["distance"] = whole.get("distance", torch.zeros((), dtype=torch.float64)) + 0.1
        shared = whole.setdefault("shared", torch.zeros(2))
        shared += 1
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("first", parameter.detach().clone().flatten()[::11])
            state.setdefault("shared", shared)
            state.setdefault("tiles", (parameter.detach().flatten()[:2].clone().expand(3, 2), None))
            wide = state["wide"] = (
                state.get("wide", torch.zeros_like(parameter, dtype=torch.float64)) + parameter.grad / 3
            )
            step = state["first"].mean() + state["tiles"][0].mean() + state["shared"].sum() + wide
            parameter.sub_((0.01 * whole["distance"] * step).to(parameter.dtype))


class Outer(Optimizer):
    """Wraps another optimizer without `Optimizer.__init__`, as torch_optimizer's Lookahead does."""

    def __init__(self, inner: Optimizer, *, by_address: bool) -> None:
        self.inner, self.by_address = inner, by_address
        self.param_groups = inner.param_groups
        self.state: Any = defaultdict(dict)
        self.defaults = dict(inner.defaults)
        for group in self.param_groups:
            group["counter"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        for group in self.param_groups:
            group["counter"] += 1
            for parameter in group["params"]:
                slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
                if group["counter"] % 2 == 0:
                    slow.lerp_(parameter, 0.5)
                    parameter.copy_(slow)
        return loss

    def state_dict(self) -> dict[str, Any]:
        inner = self.inner.state_dict()
        places = {id(each): number for number, each in enumerate(self.param_groups[0]["params"])}
        slow = {id(key) if self.by_address else places[id(key)]: value for key, value in self.state.items()}
        return {"inner": inner["state"], "slow": slow, "param_groups": inner["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        self.inner.load_state_dict({"state": state_dict["inner"], "param_groups": groups})
        super().load_state_dict({"state": state_dict["slow"], "param_groups": groups})
        self.param_groups = self.inner.param_groups


def kept_wide(model: nn.Module) -> Optimizer:
    return torch.optim.NAdam(model.parameters(), lr=0.01)  # has scalars in float32


OPTIMIZERS: dict[str, Any] = {
    "sliced": Sliced,
    "wrapping": lambda model: Outer(Adam(model.parameters(), lr=0.1), by_address=False),
    "scalars": kept_wide,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:The optimizer continues with the options .* counter")
def test_an_optimizer_of_a_package_is_resumed_with_the_same_bits(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    # torch gives state the dtype of its parameter when it is loaded, which changes bits.
    whole = train(run_of(OPTIMIZERS[kind], dtype=dtype), 4)
    run = run_of(OPTIMIZERS[kind], dtype=dtype)
    train(run, 2)
    path = run[0].save(tmp_path / "a.ckpt")
    assert train(run, 4) == whole
    resumed = run_of(OPTIMIZERS[kind], dtype=dtype)
    resumed[0].load(path)
    assert train(resumed, 4) == whole


def test_steps_of_a_wrapper_outside_of_the_trainer_are_refused() -> None:
    run = run_of(OPTIMIZERS["wrapping"])
    train(run, 1)
    with pytest.raises(ValueError, match=r"outside of Trainer\.step"):
        run[0].optimizer.step()


def test_a_state_that_names_parameters_by_their_addresses_is_told() -> None:
    run = run_of(lambda model: Outer(Adam(model.parameters(), lr=0.1), by_address=True))
    train(run, 2)
    with pytest.warns(UserWarning, match=r"Outer, says by addresses in memory .*LS519"):
        run[0].state_dict()
    with pytest.raises(CheckpointError, match="no worker can join this run"):
        run[0]._state.parts.save_for_worker()
