"""How often a step waits for an asynchronous device, and what becomes of an error on one worker of such a device."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.support.asynchronous_device import asynchronous_device
from tests.support.fake_device import FakeDevice
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.comm import World
from lockstep.means import Mean
from lockstep.parallel.comparison.optimizers import listen_to_steps

NUM_STEPS = 7
STEADY_STEP = 4
"""The steps before it compare contents, plan buckets, and make the optimizer's state."""
MakeOptimizer = Callable[[Any], Optimizer]


def fused(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, 0.01, fused=True)


def fused_sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, 0.01, momentum=0.9, fused=True)


def plain(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def mean_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def weighted_loss(model: nn.Module, batch: list[Tensor]) -> Mean:
    weights = (batch[0][:, :1] > 0).float()
    total = weights.sum()
    return Mean((weights * (model(batch[0]) - batch[1]).square()).sum(), total)


def make_data() -> TensorDataset:
    inputs = torch.randn(8 * NUM_STEPS, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


class Training:
    """A run on one worker of a device."""

    def __init__(self, world: World | None, device: str, optimizer: MakeOptimizer, loss: Any, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)).to(device)
        self.optimizer = optimizer(self.model.parameters())
        self.trainer = ls.Trainer(
            self.model, self.optimizer, loss=loss, num_shards=4, world=world, deterministic=False, **options
        )
        self.loader = ls.ShardedLoader(make_data(), batch_size=8, num_shards=4, world=lambda: self.trainer.world)


@pytest.mark.parametrize(
    ("workers", "optimizer", "loss", "options"),
    [
        (1, fused, mean_loss, {}),
        (1, fused_sgd, weighted_loss, {"max_grad_norm": 0.5}),
        (2, fused_sgd, mean_loss, {"balance": "speed"}),
        (2, fused, weighted_loss, {"max_grad_norm": 0.5, "nonfinite": "skip"}),
    ],
)
def test_a_steady_step_does_not_wait_for_the_device(
    workers: int, optimizer: MakeOptimizer, loss: Any, options: dict[str, Any]
) -> None:
    def program(world: World) -> list[float]:
        with asynchronous_device() as device:
            run = Training(world if workers > 1 else None, device.name, optimizer, loss, **options)
            results = []
            for number, batch in enumerate(run.loader.epoch(0)):
                with device.no_blocking_reads() if number >= STEADY_STEP else nullcontext():
                    results.append(run.trainer.step(batch))
            return [result.loss for result in results]

    losses = run_ranks(workers, program)
    assert losses[0][-1] < losses[0][0]
    assert losses == [losses[0]] * workers


class Onlooker:
    def before_step(self, optimizer: Optimizer) -> None:
        """Look."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Look."""


def test_a_wrapper_that_is_alive_elsewhere_in_the_process_makes_no_step_wait() -> None:
    onlooker = Onlooker()
    end = listen_to_steps(onlooker)
    try:
        test_a_steady_step_does_not_wait_for_the_device(1, fused, mean_loss, {})
    finally:
        end()


@pytest.mark.parametrize("workers", [2])
def test_with_an_optimizer_that_cannot_be_left_out_a_steady_step_waits_once(workers: int) -> None:
    def program(world: World) -> list[list[str]]:
        with asynchronous_device() as device:
            run = Training(world if workers > 1 else None, device.name, plain, mean_loss)
            waits = []
            for batch in run.loader.epoch(0):
                device.waits.clear()
                run.trainer.step(batch)
                waits.append(list(device.waits))
            return waits[STEADY_STEP:]

    for waits in run_ranks(workers, program):
        for of_step in waits:
            assert len(of_step) == 1
            assert "losses.py" in of_step[0]


# -- A step that is not finite -----------------------------------------------------------------------------------------


def spoil_loss(loss: Tensor) -> Tensor:
    return loss * float("inf")


def spoil_gradient(loss: Tensor) -> Tensor:
    loss.register_hook(lambda gradient: gradient * float("nan"))
    return loss


def train_with_bad_steps(
    world: World | None, bad: dict[int, Any], *, reads_first: bool = False, looks: bool = False, **options: Any
) -> tuple[list[str], str]:
    """Take each step until it succeeds; return what was raised before which step, and the digest at the end."""
    with asynchronous_device() as device:
        spoil: list[Any] = [None]

        def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
            found = mean_loss(model, batch)
            return found if spoil[0] is None else spoil[0](found)

        bad = dict(bad)
        run = Training(world, device.name, fused, loss, **options)
        if reads_first:
            run.optimizer.register_step_post_hook(lambda *_: None)
        said = []
        while run.trainer.cursor.epoch == 0:
            for batch in run.loader.epoch(0, run.trainer.cursor.step):
                spoil[0] = bad.pop(batch.cursor.step, None) if world is None or world.rank == 1 else None
                try:
                    result = run.trainer.step(batch)
                    if looks:
                        assert result.weight == 8
                except ls.LossError as error:
                    said.append(f"{batch.cursor.step}: {error}")
                    break
        digest = run.trainer.digest()
        run.trainer.close()
        return said, digest


@pytest.mark.parametrize(
    ("workers", "spoil", "options", "looks"),
    [
        (1, spoil_loss, {}, True),
        (1, spoil_gradient, {"max_grad_norm": 0.5}, False),
        (2, spoil_gradient, {}, True),
        (2, spoil_loss, {"max_grad_norm": 0.5}, False),
    ],
)
def test_a_step_that_is_not_finite_changes_nothing_and_is_an_error_of_the_next(
    workers: int, spoil: Any, options: dict[str, Any], *, looks: bool
) -> None:
    def program(world: World, bad: dict[int, Any]) -> tuple[list[str], str]:
        return train_with_bad_steps(world if workers > 1 else None, bad, looks=looks, **options)

    undisturbed = run_ranks(workers, lambda world: program(world, {}))[0][1]
    for said, digest in run_ranks(workers, lambda world: program(world, {4: spoil})):
        assert len(said) == 1
        assert said[0].startswith("5: ")
        assert "at epoch 0, step 4 (counted from 0)" in said[0]
        assert digest == undisturbed


class Epochs(ls.Callback):
    def __init__(self) -> None:
        self.ended: list[int] = []

    def on_epoch(self, trainer: Any, epoch: int) -> None:
        self.ended.append(epoch)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_last_step_that_is_undone_ends_no_epoch(workers: int) -> None:
    def program(world: World) -> tuple[list[str], list[int]]:
        epochs = Epochs()
        alone_or_all = world if workers > 1 else None
        said, _ = train_with_bad_steps(alone_or_all, {NUM_STEPS - 1: spoil_loss}, callbacks=[epochs])
        return [each.partition(":")[0] for each in said], epochs.ended

    assert run_ranks(workers, program) == [([str(NUM_STEPS - 1)], [0])] * workers


@pytest.mark.parametrize(("workers", "spoil"), [(1, spoil_gradient), (2, spoil_loss)])
@pytest.mark.filterwarnings("ignore:The loss of shard", "ignore:The gradient", "ignore:On rank")
def test_a_step_that_the_device_skips_leaves_what_one_leaves_that_the_host_skips(workers: int, spoil: Any) -> None:
    def program(world: World, *, reads_first: bool) -> tuple[list[str], str]:
        return train_with_bad_steps(
            world if workers > 1 else None, {3: spoil, 5: spoil}, reads_first=reads_first, nonfinite="skip"
        )

    on_device = run_ranks(workers, lambda world: program(world, reads_first=False))
    on_host = run_ranks(workers, lambda world: program(world, reads_first=True))
    assert on_device == on_host
    assert on_device[0][0] == []


def test_an_error_of_the_last_step_is_raised_where_workers_meet_next() -> None:
    def program(world: World) -> tuple[str, int]:
        with asynchronous_device() as device:
            run = Training(world, device.name, fused, mean_loss)
            batches = list(run.loader.epoch(0))
            for batch in batches[:4]:
                run.trainer.step(batch)
            before = run.trainer.digest()
            with torch.no_grad():
                batches[4].slices[0].data[0].fill_(float("nan"))
            result = run.trainer.step(batches[4])
            assert run.trainer.digest() == before
            if world.rank == 0:  # looking at it on one rank alone leaves the others as they are
                assert result.loss != result.loss
                assert run.trainer.state_dict()["step"] == 4
            with pytest.raises(ls.LossError, match="is nan at epoch 0, step 4"):
                run.trainer.evaluate(run.loader, lambda model, batch: (model(batch[0]).sum(), len(batch[0])))
            result = run.trainer.step(run.trainer.cursor.step == 4 and batches[5])
            return str(result.loss), run.trainer.cursor.step

    assert len(set(run_ranks(2, program))) == 1


# -- Failures of one worker --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "optimizer"), [(0, fused), (1, plain)])
def test_an_error_on_one_worker_is_an_error_of_the_same_step_on_all(rank: int, optimizer: MakeOptimizer) -> None:
    def program(world: World, failing_step: int) -> tuple[list[str], str]:
        fails = False

        def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
            if fails:
                raise RuntimeError("the loss has failed")
            return mean_loss(model, batch)

        with asynchronous_device() as device:
            run = Training(world, device.name, optimizer, loss)
            said = []
            for number, batch in enumerate(run.loader.epoch(0)):
                if number == failing_step:
                    fails = world.rank == rank
                    with pytest.raises((RuntimeError, ls.ReductionError)) as caught:
                        run.trainer.step(batch)
                    said.append(str(caught.value))
                    fails = False
                run.trainer.step(batch)
            return said, run.trainer.digest()

    undisturbed = [digest for _, digest in run_ranks(2, lambda world: program(world, -1))]
    for said, digest in run_ranks(2, lambda world: program(world, 5)):
        assert len(said) == 1
        assert "the loss has failed" in said[0]
        assert digest == undisturbed[0]


def test_further_values_of_the_loss_travel_in_the_row_and_are_those_of_a_cpu() -> None:
    def with_values(model: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
        loss, number = mean_loss(model, batch), len(batch[0])
        values = {"loss": loss, "double": 2 * loss.detach(), "number": (number, len(batch[0]))}
        return {**values, "late": (loss.detach(), (batch[0][:, 0] > 0).sum())} if model.training else values

    def train(run: Training, device: FakeDevice | None) -> list[dict[str, float]]:
        results = []
        for number, batch in enumerate(run.loader.epoch(0)):
            run.model.train(number != 1)  # a name that comes, goes and comes again
            with device.no_blocking_reads() if device is not None and number >= STEADY_STEP else nullcontext():
                results.append(run.trainer.step(batch))
        return [dict(result.values) for result in results]

    def program(world: World) -> list[dict[str, float]]:
        with asynchronous_device() as device:
            return train(Training(world, device.name, fused, with_values), device)

    expected = run_ranks(1, lambda world: train(Training(world, "cpu", fused, with_values), None))[0]
    assert [set(values) for values in expected[:3]] == [
        {"double", "number", "late"},
        {"double", "number"},
        {"double", "number", "late"},
    ]
    for workers in (1, 2, 3):
        assert run_ranks(workers, program) == [expected] * workers
