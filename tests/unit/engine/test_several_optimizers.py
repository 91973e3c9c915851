"""Several optimizers in one trainer: against a plain loop, on 1 to 4 workers, saved in between, and after a failure."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.comm import World
from lockstep.data import ShardedLoader
from lockstep.engine import Trainer
from lockstep.engine.schedules import ReduceLROnPlateau
from lockstep.engine.stopping import Freeze
from lockstep.errors import CheckpointError

SHARDS = 4


def networks() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "generator": nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)),
            "critic": nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(), nn.Dropout(0.3), nn.Linear(8, 1)),
        }
    )


def noise(batch: Any) -> Tensor:
    return torch.randn(len(batch[0]), 3)


def critic_loss(model: nn.ModuleDict, batch: Any) -> Any:
    fake = model["generator"](noise(batch)).detach()
    real, made = model["critic"](batch[0]).mean(), model["critic"](fake).mean()
    return {"loss": made - real + 0.1 * real.square(), "real": real}


def generator_loss(model: nn.ModuleDict, batch: Any) -> Tensor:
    return -model["critic"](model["generator"](noise(batch))).mean()


def data() -> TensorDataset:
    return TensorDataset(torch.randn(32, 2, generator=torch.Generator().manual_seed(5)) + 3)


def make_trainer(net: nn.ModuleDict, world: World | None = None, **options: Any) -> Trainer:
    critic = torch.optim.Adam(net["critic"].parameters(), lr=0.01)
    generator = torch.optim.SGD(net["generator"].parameters(), lr=0.05, momentum=0.9)
    chosen: dict[str, Any] = {
        "loss": {"critic": critic_loss, "generator": generator_loss},
        "every": {"generator": 2},
        "scheduler": {"generator": StepLR(generator, 1, gamma=0.5)},
        "num_shards": SHARDS,
    }
    return Trainer(net, {"critic": critic, "generator": generator}, world=world, **{**chosen, **options})


def loader(world: World | None = None) -> ShardedLoader:
    return ShardedLoader(data(), batch_size=8, num_shards=SHARDS, world=world)


def train(world: World, path: Path | None = None) -> tuple[str, list[float], list[dict[str, float]]]:
    net = networks()
    training = make_trainer(net, world)
    results = []
    for batch in loader(world).epoch(0):
        results.append(training.step(batch))
        if path is not None and training.global_step == 3:
            training.save(path)
            training.close()
            net = networks()
            training = make_trainer(net, world)
            training.load(path)
    return training.digest(), [each.loss for each in results], [dict(each.values) for each in results]


def test_a_gan_has_the_same_bits_on_any_number_of_workers() -> None:
    expected = train(World(rank=0, world_size=1, group=None))
    assert set(expected[2][0]) == {"critic", "critic/real"}
    assert set(expected[2][1]) == {"critic", "critic/real", "generator"}
    for workers in (2, 3, 4):
        assert run_ranks(workers, train) == [expected] * workers


def test_a_gan_that_is_saved_between_two_steps_continues_with_the_same_bits(tmp_path: Path) -> None:
    expected = train(World(rank=0, world_size=1, group=None))
    assert train(World(rank=0, world_size=1, group=None), tmp_path / "run.ckpt") == expected
    assert run_ranks(2, lambda world: train(world, tmp_path / "both.ckpt")) == [expected] * 2


def test_updates_are_those_of_a_plain_loop() -> None:
    def make() -> nn.ModuleDict:
        net = networks().double()
        return nn.ModuleDict(
            {"generator": nn.Sequential(net["generator"][0], net["generator"][3]), "critic": net["critic"][:2]}
        )

    def critic(model: nn.ModuleDict, batch: Any) -> Tensor:
        inputs = batch[0].double()
        return (
            (model["critic"](inputs) - model["critic"](model["generator"](inputs[:, [0, 1, 0]]).detach()))
            .square()
            .mean()
        )

    def generator(model: nn.ModuleDict, batch: Any) -> Tensor:
        return model["critic"](model["generator"](batch[0].double()[:, [0, 1, 0]])).square().mean()

    ours, plain = make(), make()
    training = make_trainer(ours, loss={"critic": critic, "generator": generator}, max_grad_norm=0.5)
    optimizers = {
        "critic": torch.optim.Adam(plain["critic"].parameters(), lr=0.01),
        "generator": torch.optim.SGD(plain["generator"].parameters(), lr=0.05, momentum=0.9),
    }
    scheduler = StepLR(optimizers["generator"], 1, gamma=0.5)
    for number, batch in enumerate(loader().epoch(0), start=1):
        training.step(batch)
        whole = [torch.cat([part.data[0] for part in batch.slices])]
        for name, loss in (("critic", critic), ("generator", generator)):
            if name == "critic" or number % 2 == 0:
                plain.zero_grad()
                loss(plain, whole).backward()
                nn.utils.clip_grad_norm_(plain[name].parameters(), 0.5)
                optimizers[name].step()
        if number % 2 == 0:
            scheduler.step()
    for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_one_loss_steps_each_optimizer_when_its_turn_has_come() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0].double()).square().mean()

    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)).double()
    body = torch.optim.SGD(ours[0].parameters(), lr=0.1)
    head = torch.optim.SGD(ours[1].parameters(), lr=0.1)
    training = Trainer(ours, {"body": body, "head": head}, loss=loss, every={"body": 3}, num_shards=SHARDS)
    for number, batch in enumerate(loader().epoch(0), start=1):
        before = [each.clone() for each in ours.parameters()]
        training.step(batch)
        changed = [not torch.equal(*pair) for pair in zip(before, ours.parameters(), strict=True)]
        assert changed == [number == 3, number == 3, True, True]


@pytest.mark.parametrize("limit", [None, 1.0])
def test_a_scaler_leaves_out_an_optimizer_whose_parameters_are_frozen(limit: float | None) -> None:
    # It raised "No inf checks were recorded for this optimizer", after it had stepped the others.
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
    optimizers = {str(number): torch.optim.SGD(net[number].parameters(), lr=0.01) for number in range(2)}
    training = Trainer(
        net,
        optimizers,
        loss=lambda model, batch: model(batch[0]).square().mean(),
        num_shards=SHARDS,
        scaler=torch.amp.GradScaler("cpu", init_scale=16.0),
        max_grad_norm=limit,
        callbacks=[Freeze("0.*", until_epoch=1)],
    )
    for epoch in range(2):
        before = [each.clone() for each in net.parameters()]
        for batch in loader().epoch(epoch):
            training.step(batch)
        changed = [not torch.equal(*pair) for pair in zip(before, net.parameters(), strict=True)]
        assert changed == [epoch == 1, epoch == 1, True, True]


def test_a_metric_that_stagnates_lowers_the_rate_of_one_of_several_optimizers() -> None:
    # Each of them was refused as that of another trainer.
    net = networks()
    optimizers = {name: torch.optim.SGD(net[name].parameters(), lr=0.1) for name in ("critic", "generator")}

    def make(scheduled: str) -> Trainer:
        plateau = ReduceLROnPlateau(optimizers["critic"], "loss", patience=0, factor=0.5)
        scheduler = {scheduled: StepLR(optimizers[scheduled], 99)}
        loss = {"critic": critic_loss, "generator": generator_loss}
        return Trainer(net, optimizers, loss=loss, num_shards=SHARDS, scheduler=scheduler, callbacks=[plateau])

    first, *_ = loader().epoch(0)
    training = make("generator")
    training.step(first)
    for _ in range(2):
        training.evaluate(loader(), lambda _model, _batch: {"loss": (1.0, 1)})
    assert [group["lr"] for group in training.optimizer.param_groups] == [0.05, 0.1]
    training.close()
    with pytest.raises(ValueError, match="ReduceLROnPlateau and the scheduler StepLR would both"):
        make("critic").step(first)


def test_a_step_that_fails_in_its_second_update_continues_there() -> None:
    failures = iter([True])

    def failing(model: nn.ModuleDict, batch: Any) -> Tensor:
        if next(failures, False):
            raise OSError("a disk is gone")
        return generator_loss(model, batch)

    net = networks()
    training = make_trainer(net, loss={"critic": critic_loss, "generator": failing})
    first, second, *rest = loader().epoch(0)
    training.step(first)
    with pytest.raises(OSError, match="a disk is gone"):
        training.step(second)
    saved = copy.deepcopy(training.state_dict())
    assert saved["optimizer"]["num_updates"] == 1
    continued = training.step(second)
    assert set(continued.values) == {"critic", "critic/real", "generator"}
    assert continued.loss == continued.values["critic"]  # of the update that was made before the failure
    for batch in rest:
        training.step(batch)
    assert training.digest() == train(World(rank=0, world_size=1, group=None))[0]
    # It once showed the critic's loss of the last step that was taken before, which no update of this one has.
    training.load_state_dict(saved)
    resumed = training.step(second)
    assert set(resumed.values) == {"generator"}
    assert resumed.loss == continued.values["generator"]


def test_a_checkpoint_of_other_optimizers_is_refused(tmp_path: Path) -> None:
    make_trainer(networks(), scheduler=None).save(tmp_path / "a.ckpt")
    other = make_trainer(networks(), scheduler=None, every={"generator": 3})
    with pytest.raises(CheckpointError, match=r"generator \(in every 2 steps\).*generator \(in every 3 steps\)"):
        other.load(tmp_path / "a.ckpt")
    alone = networks()
    plain = Trainer(alone, torch.optim.Adam(alone.parameters()), loss=generator_loss, num_shards=SHARDS)
    with pytest.raises(CheckpointError, match="critic: Adam, generator: SGD"):
        plain.load(tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": {"generators": 2}}, "names of optimizers"),
        ({"every": {"generator": 2, "critic": 2}}, "at least one step in every step"),
        ({"every": {"generator": 0}}, "at least 1"),
        ({"loss": {"critic": critic_loss}}, "one for each of critic, generator"),
        ({"scheduler": {"other": None}}, "expected names of critic, generator"),
    ],
)
def test_names_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(networks(), **options)


def test_a_parameter_in_two_optimizers_is_refused() -> None:
    net = networks()
    parts = {"critic": torch.optim.Adam(net["critic"].parameters()), "all": torch.optim.Adam(net.parameters())}
    with pytest.raises(ValueError, match=r"critic and all both hold critic\.0\.weight"):
        Trainer(net, parts, loss=critic_loss, num_shards=SHARDS)


def test_a_part_that_is_stepped_in_the_loop_is_refused() -> None:
    net = networks()
    critic = torch.optim.Adam(net["critic"].parameters())
    trainer = Trainer(net, {"critic": critic}, loss=critic_loss, num_shards=SHARDS)
    trainer.step(next(iter(loader().epoch(0))))
    with pytest.raises(ValueError, match=r"outside of Trainer\.step"):
        critic.step()


def test_several_losses_do_not_continue_without_a_lost_worker() -> None:
    with pytest.raises(ValueError, match="apart by one of the updates"):
        make_trainer(networks(), on_worker_loss="continue")


# -- One checkpoint of several trainers --------------------------------------------------------------------------------


NUM_STEPS = 4
SAVED_AFTER = 2


class Pair:
    """Two trainers with a network, an optimizer and a loader each."""

    def __init__(self, world: World | None, *, width: int = 4) -> None:
        torch.manual_seed(0)
        generator = nn.Linear(3, 3)
        discriminator = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
        steps = torch.optim.SGD(discriminator.parameters(), 0.01, momentum=0.9)
        self.trainers = [
            ls.Trainer(
                generator,
                torch.optim.AdamW(generator.parameters(), 0.01),
                loss=lambda model, batch: model(batch[0]).square().mean(),
                num_shards=2,
                world=world,
            ),
            ls.Trainer(
                discriminator,
                steps,
                loss=lambda model, batch: model(batch[0]).square().mean(),
                num_shards=2,
                seed=1,
                scheduler=torch.optim.lr_scheduler.StepLR(steps, 2, 0.5),
                world=world,
            ),
        ]
        rows = TensorDataset(torch.randn(32, 3, generator=torch.Generator().manual_seed(1)))
        self.loaders = [ls.ShardedLoader(rows, batch_size=8, num_shards=2, seed=seed, world=world) for seed in (0, 1)]

    def train(self, stop: int) -> None:
        start = self.trainers[0].cursor.step
        for trainer, loader in zip(self.trainers, self.loaders, strict=True):
            for _, batch in zip(range(start, stop), loader.epoch(0, start), strict=False):
                trainer.step(batch)

    def digests(self) -> list[str]:
        return [trainer.digest() for trainer in self.trainers]

    def close(self) -> None:
        for trainer in self.trainers:
            trainer.close()


def test_trainers_resume_together_from_one_file_on_another_number_of_workers(tmp_path: Path) -> None:
    def save(world: World) -> list[str]:
        pair = Pair(world)
        pair.train(SAVED_AFTER)
        first, second = pair.trainers
        first.save(tmp_path / "both.ckpt", extra={"discriminator": second})
        pair.train(NUM_STEPS)
        digests = pair.digests()
        pair.close()
        return digests

    (expected, _) = run_ranks(2, save)
    pair = Pair(None)
    first, second = pair.trainers
    first.load(tmp_path / "both.ckpt", extra={"discriminator": second})
    assert second.cursor == first.cursor
    assert first.cursor.step == SAVED_AFTER
    pair.train(NUM_STEPS)
    assert pair.digests() == expected


def test_where_one_trainer_cannot_take_its_state_none_is_changed(tmp_path: Path) -> None:
    pair = Pair(None)
    pair.train(SAVED_AFTER)
    first, second = pair.trainers
    first.save(tmp_path / "both.ckpt", extra={"discriminator": second})
    other = Pair(None, width=5)
    before = other.digests()
    with pytest.raises(ls.CheckpointError):
        other.trainers[0].load(tmp_path / "both.ckpt", extra={"discriminator": other.trainers[1]})
    assert other.digests() == before
    assert [trainer.cursor.step for trainer in other.trainers] == [0, 0]


def test_a_load_that_fails_is_no_beginning() -> None:
    # What the other trainer loaded of this model, which its loss uses, was then left out.
    pair = Pair(None)
    state = pair.trainers[0].state_dict()
    with pytest.raises(ls.CheckpointError):
        pair.trainers[0].load_state_dict({**state, "model": {"weight": torch.zeros(5, 5)}})
    used = pair.trainers[0].model
    critic = nn.Linear(3, 1)
    other = ls.Trainer(
        critic,
        torch.optim.SGD(critic.parameters(), 0.1),
        loss=lambda model, batch: model(used(batch[0])).square().mean(),
        num_shards=2,
    )
    saved = other.state_dict()
    ((name, values),) = saved["networks"].items()
    other.load_state_dict({**saved, "networks": {name: {key: torch.ones_like(each) for key, each in values.items()}}})
    assert torch.equal(used.weight, torch.ones(3, 3))
