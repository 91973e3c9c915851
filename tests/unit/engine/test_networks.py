"""Networks that the loss uses beside the model are cared for wherever the model is; so is a part that a test adds."""

import copy
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.checkpoint.file import load_checkpoint, read_manifest
from lockstep.checkpoint.inspection import verify_checkpoint
from lockstep.comm import World
from lockstep.engine import run_state
from lockstep.engine.networks import find_networks, networks_walk
from lockstep.engine.saving import unpack_state
from lockstep.engine.state_parts import StatePart, StateParts
from lockstep.errors import CheckpointError, LossError, ParameterMismatchError
from lockstep.sharding.transfer import receive_state, send_state

NUM_SHARDS = 4


class Net(nn.Module):
    """BatchNorm, and a counter that is not saved."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs


class Centre(nn.Module):
    """The running centre of a teacher's outputs, as in DINO: a buffer that each forward moves, and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(3))

    @torch.no_grad()
    def forward(self, outputs: Tensor) -> Tensor:
        centred = outputs - self.mean
        self.mean.mul_(0.9).add_(outputs.mean(0), alpha=0.1)
        return centred


class Distilling:
    """A run whose loss uses a teacher, an average of the model that the loop moves, and a centre."""

    def __init__(self, world: World | None, **options: Any) -> None:
        self.model = Net(0)
        teacher, centre = Net(1), Centre()

        def loss(model: nn.Module, batch: Any) -> Tensor:
            with torch.no_grad():
                target = centre(teacher(batch[0] + 0.1 * torch.randn_like(batch[0])))
            return nn.functional.mse_loss(model(batch[0]), target)

        def distance(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
            return (model(batch[0]) - centre(teacher.train()(batch[0]))).square().sum(), len(batch[0])

        self.teacher, self.centre, self.distance = teacher, centre, distance
        self.trainer = ls.Trainer(
            self.model,
            torch.optim.AdamW(self.model.parameters(), lr=0.01),
            loss=loss,
            num_shards=NUM_SHARDS,
            world=world,
            **options,
        )
        inputs = torch.randn(48, 5, generator=torch.Generator().manual_seed(2))
        self.loader = ls.ShardedLoader(TensorDataset(inputs), batch_size=8, num_shards=NUM_SHARDS, world=world)

    def train(self, last: int = 6) -> "Distilling":
        for batch in self.loader.epoch(0, self.trainer.cursor.step):
            self.trainer.step(batch)
            with torch.no_grad():
                for mine, other in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                    mine.lerp_(other, 0.1)
            if self.trainer.global_step == last:
                break
        return self

    def bits(self) -> str:
        """Return numbers for all that the run has, whatever the trainer's digest is of."""
        values = [self.model.state_dict(), self.teacher.state_dict(), self.centre.state_dict()]
        return f"{self.trainer.digest()} {[[each.double().sum().item() for each in some.values()] for some in values]}"


@pytest.fixture(scope="module")
def undisturbed() -> str:
    return run_ranks(1, lambda world: Distilling(world).train().bits())[0]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_an_evaluation_leaves_their_buffers_and_modes_alone(workers: int, undisturbed: str) -> None:
    def program(world: World) -> tuple[str, float]:
        run = Distilling(world).train(3)
        run.teacher.eval()
        modes = [each.training for each in run.teacher.modules()]
        before = run.bits()
        found = run.trainer.evaluate(run.loader, run.distance)["metric"].value
        swa = ls.SWA(0)
        swa.tensors = {name: each.detach().clone() for name, each in run.model.state_dict().items()}
        run.trainer.update_batchnorm(run.loader, swa, run.distance)
        assert run.bits() == before
        assert [each.training for each in run.teacher.modules()] == modes
        run.teacher.train()
        return run.train().bits(), found

    found = run_ranks(workers, program)
    assert {bits for bits, _ in found} == {undisturbed}
    assert {value for _, value in found} == {run_ranks(1, program)[0][1]}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_resumed_run_has_them(workers: int, undisturbed: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    run_ranks(2, lambda world: Distilling(world).train(3).trainer.save(path))
    assert verify_checkpoint(path).is_intact
    assert read_manifest(path).digest == run_ranks(1, lambda world: Distilling(world).train(3).trainer.digest())[0]

    def resume(world: World) -> str:
        run = Distilling(world)
        run.trainer.load(path)
        return run.train().bits()

    assert set(run_ranks(workers, resume)) == {undisturbed}
    fresh, checkpoint = Distilling(None), load_checkpoint(path)
    fresh.model.load_state_dict(checkpoint.model)
    fresh.trainer.internals.load_networks(unpack_state(checkpoint))  # as an evaluation does
    assert fresh.trainer.digest() == checkpoint.manifest.digest


class LateTeacher:
    """A loss function that makes its teacher when it is first called, or is given one by the loop."""

    def __init__(self, *, is_training: bool) -> None:
        self.is_training = is_training
        self.teacher: nn.Module | None = None

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if self.teacher is None:
            self.teacher = Net(1).train(self.is_training)
        with torch.no_grad():
            target = self.teacher(batch[0])
        return nn.functional.mse_loss(model(batch[0]), target)


def train_with(loss: LateTeacher, world: World, *, given: int = -1) -> tuple[str, list[float]]:
    model = Net(0)
    trainer = ls.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, num_shards=4, world=world)
    inputs = torch.randn(48, 5, generator=torch.Generator().manual_seed(2))
    for batch in ls.ShardedLoader(TensorDataset(inputs), batch_size=8, num_shards=4, world=world).epoch(0):
        if batch.cursor.step == given:
            loss.teacher = Net(1)
        trainer.step(batch)
    assert loss.teacher is not None
    return trainer.digest(), [each.double().sum().item() for each in loss.teacher.state_dict().values()]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_one_that_comes_after_the_trainer_is_cared_for_or_refused(workers: int) -> None:
    # Shards wrote the buffers of each worker's own copy, and neither a digest nor a checkpoint held it.
    def late(world: World) -> tuple[str, list[float]]:
        return train_with(LateTeacher(is_training=False), world)

    def given(world: World) -> tuple[str, list[float]]:
        loss = LateTeacher(is_training=False)
        loss.teacher = Net(1).eval()
        return train_with(loss, world, given=3)

    for program in (late, given):
        found = run_ranks(workers, program)
        assert all(each == run_ranks(1, program)[0] for each in found)

    def refused(world: World) -> None:
        # With the batch statistics of that network the loss is no mean over samples either: a rank may find that first.
        with pytest.raises(Exception, match=r"has made a network while the shards of epoch 0|not a mean over samples"):
            train_with(LateTeacher(is_training=True), world)

    run_ranks(workers, refused)


def test_writes_to_the_parameters_of_one_that_comes_after_the_trainer_are_refused() -> None:
    # Only those of the networks that the trainer was made with were looked at.
    class Written(LateTeacher):
        def __call__(self, model: nn.Module, batch: Any) -> Tensor:
            if self.teacher is None:
                return model(batch[0]).square().mean()
            with torch.no_grad():
                next(self.teacher.parameters()).mul_(0.5)
            return super().__call__(model, batch)

    def refused(world: World) -> None:
        with pytest.raises(LossError, match=r"Parameter teacher\.\S+ was written on rank 0"):
            train_with(Written(is_training=False), world, given=2)

    run_ranks(2, refused)


def test_a_state_that_lacks_one_is_warned_of_and_one_that_has_more_is_refused(tmp_path: Path) -> None:
    run = Distilling(None).train(2)
    state = copy.deepcopy(run.trainer.state_dict())
    networks = state.pop("networks")  # as in a file of an earlier format
    with pytest.warns(UserWarning, match=r"uses (teacher|centre), of which the state holds nothing"):
        run.trainer.load_state_dict(state)
    before = run.bits()
    with pytest.raises(CheckpointError, match=r"holds a network critic .* uses (teacher, centre|centre, teacher): the"):
        run.trainer.load_state_dict({**state, "networks": {**networks, "critic": networks["teacher"]}})
    networks["centre"]["mean"] = torch.zeros(4)
    with pytest.raises(CheckpointError, match="does not fit"):
        run.trainer.load_state_dict({**state, "networks": networks})
    assert run.bits() == before


def hand_over(world: World, make: Callable[[World | None], Any], train: Callable[[Any], Any]) -> Any:
    """Give a worker that is made anew, on rank 1, the state that another one has; return both runs."""
    run = make(None)
    if world.rank == 0:
        train(run)
        send_state(world, {0: run.trainer.internals.state_for_new_worker()}, [1])
    else:
        torch.manual_seed(99)
        present = run.trainer.internals
        present.take_state(receive_state(world, 0, {0: present.own_places()})[0])
    return run


def test_a_worker_that_joins_has_them(undisturbed: str) -> None:
    def program(world: World) -> tuple[str, str, float]:
        run = hand_over(world, Distilling, lambda run: run.train(3))
        return run.bits(), run.train().bits(), float(torch.rand(()))

    first, second = run_ranks(2, program)
    assert first == second
    assert first[1] == undisturbed


@pytest.mark.parametrize("what", ["teacher.layers.0.weight", "teacher.layers.1.running_mean", "centre.mean"])
@pytest.mark.parametrize("at", [0, 2])
def test_values_that_one_rank_alone_has_loaded_are_found(what: str, at: int) -> None:
    def program(world: World) -> str:
        run = Distilling(world)
        if at:
            run.train(at)
        if world.rank == 1:
            network, _, name = what.partition(".")
            state = getattr(run, network).state_dict()
            state[name].add_(1.0)
        before = run.bits()
        with pytest.raises(ParameterMismatchError) as failure:
            run.train(at + 1)
        assert run.bits() == before
        return str(failure.value)

    for text in run_ranks(2, program):
        assert f"{what} has other values on rank 1 than on rank 0" in text


def test_the_other_half_of_a_gan_is_its_own_trainers(tmp_path: Path) -> None:
    # Each loss uses the other's model. A file of one has both, but does not undo what the other has loaded itself.
    def make() -> tuple[Any, Any, Any]:
        generator, critic = Net(0), nn.Linear(3, 1)
        options: dict[str, Any] = {"num_shards": NUM_SHARDS}
        first = ls.Trainer(
            generator,
            torch.optim.SGD(generator.parameters(), lr=0.1),
            loss=lambda model, batch: -critic(model(batch[0])).mean(),
            **options,
        )
        second = ls.Trainer(
            critic,
            torch.optim.SGD(critic.parameters(), lr=0.1),
            loss=lambda model, batch: model(generator(batch[0]).detach()).square().mean(),
            **options,
        )
        return first, second, ls.ShardedLoader(TensorDataset(torch.rand(16, 5)), batch_size=8, num_shards=NUM_SHARDS)

    first, second, loader = make()
    for number, batch in enumerate(loader.epoch(0)):
        first.step(batch)
        if number == 0:
            first.save(tmp_path / "first.ckpt")
        second.step(batch)
    second.save(tmp_path / "second.ckpt")
    assert first.digest() != second.digest()
    assert second._state.parts.compared().keys() == {"weight", "bias"}
    again = make()
    again[1].load(tmp_path / "second.ckpt")
    again[0].load(tmp_path / "first.ckpt")
    assert torch.equal(again[1].model.weight, second.model.weight)


# -- A part that nobody knows ------------------------------------------------------------------------------------------


class Counted(StatePart):
    """A part of its own: a module whose buffer the loss moves, and a number that the loop counts."""

    def __init__(self) -> None:
        self.module = nn.BatchNorm1d(5).requires_grad_(requires_grad=False)
        self.number = 0

    def save(self) -> dict[str, Any]:
        return {"counted": {"number": self.number, "module": self.module.state_dict()}}

    def load(self, saved: Any) -> None:
        self.number = saved["counted"]["number"]
        self.module.load_state_dict(saved["counted"]["module"])

    def save_for_worker(self) -> dict[str, Any]:
        return {**self.save(), "counted twice": 2 * self.number}

    def load_for_worker(self, saved: Any) -> None:
        self.load(saved)
        assert saved["counted twice"] == 2 * self.number

    def check(self, saved: Any) -> None:
        if "counted" not in saved:
            raise CheckpointError("there is no counted")

    def keep(self, *, is_stepped: bool) -> Callable[[], object]:
        before = copy.deepcopy(self.save())
        return lambda: self.load(before)

    def modules(self) -> Sequence[nn.Module]:
        return [self.module]

    def tensors(self) -> dict[str, Tensor]:
        return {f"counted/{name}": each for name, each in self.module.state_dict().items()}

    def describe(self) -> dict[str, str]:
        return {"counted": str(self.number)}

    def compared(self) -> dict[str, Tensor]:
        return {f"counted {name}": each for name, each in self.module.named_parameters()}

    def compared_at_begin(self) -> dict[str, Tensor]:
        return {f"counted {name}": each for name, each in self.module.named_buffers()}


HIDDEN: ContextVar[Counted] = ContextVar("HIDDEN")
"""The part of this rank, where no search for networks finds its module."""


@pytest.fixture
def _added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_state, "StateParts", lambda parts: StateParts([*parts, HIDDEN.get()]))


class Counting:
    """A run with it, which nothing but the list of parts knows."""

    def __init__(self, world: World | None) -> None:
        self.part = Counted()
        HIDDEN.set(self.part)
        self.part.number = 7
        if world is not None and world.rank == 1:
            self.part.number = START["rank 1"]
        self.model = nn.Linear(5, 1)
        with torch.no_grad():
            self.model.weight.fill_(0.5)
            self.model.bias.zero_()
        fails = self.fails = [False]

        def loss(model: nn.Module, batch: Any) -> Tensor:
            loss = model(HIDDEN.get().module(batch[0])).square().mean()
            if fails[0]:
                raise RuntimeError("injected")
            return loss

        self.loss = loss
        self.trainer = ls.Trainer(
            self.model, torch.optim.SGD(self.model.parameters(), lr=0.1), loss=loss, num_shards=4, world=world
        )
        inputs = torch.randn(32, 5, generator=torch.Generator().manual_seed(0))
        self.loader = ls.ShardedLoader(TensorDataset(inputs), batch_size=8, num_shards=4, world=world)

    def train(self, last: int = 4) -> "Counting":
        for batch in self.loader.epoch(0, self.trainer.cursor.step):
            self.trainer.step(batch)
            if self.trainer.global_step == last:
                break
        return self

    def bits(self) -> tuple[str, int, list[float]]:
        return self.trainer.digest(), self.part.number, [each.sum().item() for each in self.part.module.buffers()]


START = {"rank 1": 7}


@pytest.mark.usefixtures("_added")
@pytest.mark.parametrize("workers", [1, 2])
def test_every_use_of_the_state_knows_a_part_that_was_added(workers: int, tmp_path: Path) -> None:
    whole = run_ranks(1, lambda world: Counting(world).train().bits())[0]

    def program(world: World) -> None:
        run = Counting(world).train(2)
        before = run.bits()
        run.fails[0] = True
        with pytest.raises(RuntimeError):  # a step that fails
            run.train(3)
        run.fails[0] = False
        assert run.bits() == before
        run.trainer.evaluate(run.loader, lambda model, batch: (run.loss(model, batch), 1))
        assert run.bits() == before
        run.trainer.verify(run.loader, 1)
        assert run.bits() == before
        path = run.trainer.save(tmp_path / "a.ckpt")
        assert run.train().bits() == whole
        resumed = Counting(world)  # from here on the loss uses its module
        resumed.part.number = 0
        resumed.trainer.load(path)
        assert resumed.bits() == before
        wrong = {**copy.deepcopy(resumed.trainer.state_dict()), "callbacks": {"Other": {}}, "counted": {"number": "x"}}
        with pytest.raises(CheckpointError):
            resumed.trainer.load_state_dict(wrong)
        assert resumed.bits() == before
        assert resumed.train().bits() == whole

    run_ranks(workers, program)


@pytest.mark.usefixtures("_added")
def test_workers_with_other_parts_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_on_one(world: World, name: str) -> str:
        run = Counting(world).train(1)
        if world.rank == 1:
            run.part.module.state_dict()[name].add_(1)
        with pytest.raises(ParameterMismatchError) as failure:
            run.train(2)
        return str(failure.value)

    for name in ("weight", "running_mean"):
        for text in run_ranks(2, partial(load_on_one, name=name)):
            assert f"counted {name} has other values on rank 1" in text
    monkeypatch.setitem(START, "rank 1", 8)
    with pytest.raises(ValueError, match="different arguments: counted is 8 and 7"):
        run_ranks(2, Counting)


@pytest.mark.usefixtures("_added")
def test_a_worker_that_joins_has_a_part_that_was_added() -> None:
    def program(world: World) -> Any:
        run = hand_over(world, Counting, lambda run: run.train(2))
        return run.bits(), run.train().bits()

    first, second = run_ranks(2, program)
    assert first == second


# -- Which networks a loss uses ----------------------------------------------------------------------------------------


class Loop:
    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.teacher = nn.Linear(2, 2)
        self.critics = [nn.Linear(2, 2)]
        self.average = nn.Linear(2, 2)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return model(batch) + self.teach(batch) + sum(critic(batch) for critic in self.critics)

    def teach(self, batch: Any) -> Any:
        return self.teacher(batch) if len(batch) else self.teach(batch)

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        return self.loss(model, batch)


def test_a_network_that_the_object_of_a_loss_holds_beside_is_not_used() -> None:
    loop = Loop()
    for loss in (loop.loss, loop):
        found = find_networks(networks_walk([loss]), loop.model)
        assert {id(each) for each in found.values()} == {id(loop.teacher), id(loop.critics[0])}
        assert set(found) == {"teacher", "critics.0"}


def make_loss() -> Any:
    teacher = nn.Linear(2, 2)
    return teacher, lambda model, batch: model(batch) + teacher(batch)


def test_two_networks_of_one_name_are_both_found() -> None:
    # The second one of two loss functions' got neither care for its buffers nor a comparison.
    (first, one), (second, other) = make_loss(), make_loss()
    assert find_networks(networks_walk([one, other]), nn.Linear(2, 2)) == {"teacher": first, "teacher (2)": second}
    assert find_networks(networks_walk([one, one]), nn.Linear(2, 2)) == {"teacher": first}


class Settings:
    """A global object, of which a loss mentions one network."""

    def __init__(self) -> None:
        self.teacher, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    @property
    def center(self) -> nn.Module:
        return self._make()

    def _make(self) -> nn.Module:
        return CENTERS[0]


CENTERS = [nn.Linear(2, 2)]
SETTINGS = Settings()


@torch.no_grad()
def teach(batch: Any) -> Any:
    return SETTINGS.teacher(batch) + SETTINGS.center(batch)


def test_what_a_decorated_function_mentions_of_a_global_object_is_found() -> None:
    found = find_networks(networks_walk([lambda model, batch: model(batch) + teach(batch)]), nn.Linear(2, 2))
    assert set(map(id, found.values())) == {id(SETTINGS.teacher), id(CENTERS[0])}
