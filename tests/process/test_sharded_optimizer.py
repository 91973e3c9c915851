"""A shared optimizer has the bits of the whole one: on any number of workers, through kills and files."""

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.engine.step_engine import StepEngine

pytestmark = pytest.mark.usefixtures("warm_workers")

KINDS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda parameters: optim.AdamW(parameters, lr=1e-2),
    "adagrad": lambda parameters: optim.Adagrad(parameters, lr=1e-2, initial_accumulator_value=0.1),
    "adafactor": lambda parameters: optim.Adafactor(parameters, lr=1e-2),
}
STEPS = 6


class Death(NamedTuple):
    rank: int
    step: int
    """Of this worker's, from 1."""
    moment: str
    """`shards`: in the step's first forward; `update`: after its own part is updated; `commit`: after the step."""


class Outcome(NamedTuple):
    digest: str
    state: str
    num_bytes: int
    world_size: int


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 6001), nn.ReLU(), nn.Linear(6001, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))


def hash_of(state: Any) -> str:
    number = hashlib.sha256()
    for place, values in sorted(state.items()):
        for name, value in sorted(values.items()):
            data = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if isinstance(value, Tensor) else b""
            number.update(f"{place} {name} {value if not data else value.shape}".encode() + data)
    return number.hexdigest()


def train(
    _run: Any,
    kinds: list[str],
    *,
    shared: bool = True,
    neighbours: int = 1,
    deaths: tuple[Death, ...] = (),
    file: Path | None = None,
    saves_at: int = -1,
) -> dict[str, Outcome]:
    found = {}
    for kind in kinds:
        model = make_model()
        optimizer = KINDS[kind](model.parameters())
        data = TensorDataset(torch.randn(24 * STEPS, 20), torch.randint(3, (24 * STEPS,)))
        trainer = ls.Trainer(
            model,
            optimizer,
            loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
            num_shards=4,
            scheduler=optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            max_grad_norm=0.5,
            shard_optimizer=shared,
            neighbours=neighbours,
            on_worker_loss="continue",
            verify_steps=0,
        )
        if not trainer.join() and trainer.world.world_size > 1:
            for death in deaths:
                if death.rank == trainer.world.rank:
                    die_at(death, model, optimizer)
        if file is not None and saves_at < 0:
            trainer.load(file)
        loader = trainer.loader(data, batch_size=24)
        for batch in loader.epoch(0, trainer.cursor.step):
            trainer.step(batch)
            if trainer.global_step == saves_at and file is not None:
                trainer.save(file)
        state = trainer.state_dict()["optimizer"]["state"]
        found[kind] = Outcome(
            trainer.digest(), hash_of(state), trainer.internals.sharing.num_bytes, trainer.world.world_size
        )
        trainer.close()
    return found


def die_at(death: Death, model: nn.Module, optimizer: optim.Optimizer) -> None:
    counts = {"shards": 0, "update": 0, "commit": 0}

    def reach(moment: str) -> None:
        counts[moment] += 1
        if moment == death.moment and counts[moment] == death.step:
            os.kill(os.getpid(), signal.SIGKILL)

    if death.moment == "shards":
        model.register_forward_pre_hook(lambda *_: reach("shards"))
    elif death.moment == "update":
        optimizer.register_step_post_hook(lambda *_: reach("update"))
    else:
        step = StepEngine.step

        def step_and_die(engine: StepEngine, batch: Any) -> Any:
            result = step(engine, batch)
            reach("commit")
            return result

        StepEngine.step = step_and_die  # type: ignore[method-assign, assignment]


@pytest.fixture(scope="module")
def whole() -> dict[str, Outcome]:
    return ls.launch(train, list(KINDS), shared=False, workers=1)[0]


@pytest.mark.parametrize(("workers", "neighbours"), [(1, 1), (2, 0), (3, 1), (4, 0), (4, 1)])
def test_state_and_digest_are_those_of_the_whole_optimizer(
    whole: dict[str, Outcome], workers: int, neighbours: int
) -> None:
    found = ls.launch(train, list(KINDS), neighbours=neighbours, workers=workers)
    for kind, expected in whole.items():
        outcomes = [each[kind] for each in found]
        assert {each[:2] for each in outcomes} == {expected[:2]}
    num_all = sum(each["adamw"].num_bytes for each in found) / min(neighbours + 1, workers)
    share = min(neighbours + 1, workers) / workers
    assert all(each["adamw"].num_bytes <= num_all * (share + 0.05) for each in found)


@pytest.mark.parametrize("moment", ["shards", "update", "commit"])
@pytest.mark.parametrize("workers", [2, 3])
def test_no_part_is_lost_with_a_worker(whole: dict[str, Outcome], workers: int, moment: str) -> None:
    death = Death(rank=workers - 1, step=3, moment=moment)
    for kind in ("adamw", "adafactor") if workers == 3 else ("sgd",):
        found = ls.launch(train, [kind], deaths=(death,), workers=workers)
        assert {(each[kind][:2], each[kind].world_size) for each in found} == {(whole[kind][:2], workers - 1)}


def test_two_neighbours_are_lost_one_after_the_other(whole: dict[str, Outcome]) -> None:
    deaths = (Death(1, 2, "update"), Death(2, 4, "update"))
    found = ls.launch(train, ["adamw"], deaths=deaths, workers=4)
    assert {(each["adamw"][:2], each["adamw"].world_size) for each in found} == {(whole["adamw"][:2], 2)}


def test_a_new_worker_gets_its_part(whole: dict[str, Outcome]) -> None:
    found = ls.launch(
        train, ["adamw"], deaths=(Death(0, 2, "update"),), workers=3, elastic=ls.Elastic(respawn=1, spares=1)
    )
    assert {each["adamw"][:2] for each in found} == {whole["adamw"][:2]}


def test_a_part_that_nobody_else_holds_is_said_to_be_lost(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ls.WorkerFailedError, match="No worker is left that holds a part of the optimizer's state"):
        ls.launch(train, ["adamw"], deaths=(Death(1, 3, "update"),), neighbours=0, workers=3)
    assert "so a lost worker ends the run" in capfd.readouterr().err  # before it has begun


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [("adamw", (3, True), (2, True)), ("adagrad", (2, True), (1, False)), ("adafactor", (1, False), (3, True))],
)
def test_a_file_is_that_of_the_whole_optimizer(
    whole: dict[str, Outcome], tmp_path: Path, before: tuple[int, bool], after: tuple[int, bool], kind: str
) -> None:
    file = tmp_path / "run.ckpt"
    ls.launch(train, [kind], shared=before[1], workers=before[0], file=file, saves_at=3)
    found = ls.launch(train, [kind], shared=after[1], workers=after[0], file=file)
    assert {each[kind][:2] for each in found} == {whole[kind][:2]}


def train_script(_run: Any, kind: str, *, wrapper: str, shared: bool) -> tuple[str, str]:
    """A loop of a user: groups with options of their own, a scheduler, clipping, a group that is added, a file."""
    model = make_model()
    frozen, late = list(model[0].parameters()), list(model[4].parameters())
    groups = [{"params": list(model[2].parameters())}, {"params": frozen, "weight_decay": 0.0}]
    wrap = {"ls": ls.DistributedDataParallel, "torch": nn.parallel.DistributedDataParallel}[wrapper]
    wrapped = wrap(model)

    def make() -> Any:
        if shared:
            return ls.ShardedOptimizer(groups, getattr(optim, kind), lr=1e-2)
        return getattr(optim, kind)(groups, lr=1e-2)

    optimizer = make()
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for step in range(STEPS):
        if step == 2:
            optimizer.add_param_group({"params": late, "lr": 1e-3})
        if step == 4 and shared:  # as a program that is resumed
            optimizer.consolidate_state_dict(to=None)
            saved, groups = optimizer.state_dict(), [{"params": group["params"]} for group in optimizer.param_groups]
            optimizer = make()
            optimizer.load_state_dict(saved)
        if step in {0, 4}:
            scheduler = optim.lr_scheduler.MultiStepLR(optimizer, [1], 0.5)
        optimizer.zero_grad()
        inputs = torch.randn(8, 20, generator=generator)
        functional.cross_entropy(wrapped(inputs), torch.arange(8) % 3).backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
    if shared:
        optimizer.consolidate_state_dict(to=None)
    return hash_of({0: model.state_dict()}), hash_of(optimizer.state_dict()["state"])


@pytest.mark.parametrize("kind", ["AdamW", "Adafactor"])
@pytest.mark.parametrize("wrapper", ["ls", "torch"])
def test_scripts_have_the_bits_of_the_whole_optimizer(kind: str, wrapper: str) -> None:
    expected = ls.launch(train_script, kind, wrapper=wrapper, shared=False, workers=3)
    assert ls.launch(train_script, kind, wrapper=wrapper, shared=True, workers=3) == expected


class FailsOnOne(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1 and self.param_groups[0]["fails"]:
            raise MemoryError("no memory for the state")
        return super().step(closure)


def step_with_failure(_run: Any) -> None:
    parameters = list(make_model().parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = ls.ShardedOptimizer([{"params": parameters, "fails": False}], FailsOnOne, lr=0.1, momentum=0.9)
    optimizer.step()
    with pytest.raises(ValueError, match=r"consolidate_state_dict.*LS535"):
        optimizer.state_dict()
    optimizer.param_groups[0]["fails"] = True
    optimizer.step()


def test_a_failed_update_of_one_rank_is_an_error_on_all() -> None:
    with pytest.raises(ls.WorkerFailedError, match="no memory for the state") as raised:
        ls.launch(step_with_failure, workers=3)
    assert "update has failed on rank 1" in str(raised.value)
