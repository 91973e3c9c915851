"""What user code may do, as in plain PyTorch, and once made a run depend on its workers: the same on one and three.

Each case trains a few steps of four shards, which one worker adds up alone and three send as one, one and the sum of
two. It returns what must be the same.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import lockstep as ls

pytestmark = pytest.mark.usefixtures("warm_workers")

NUM_SHARDS = 4
BATCH_SIZE = 8
Answer = list[Any]


def inputs(num_samples: int = 32) -> Tensor:
    return torch.randn(num_samples, 3, generator=torch.Generator().manual_seed(0)).double()


def batches() -> ls.ShardedLoader:
    return ls.ShardedLoader(TensorDataset(inputs()), batch_size=BATCH_SIZE, num_shards=NUM_SHARDS, shuffle=False)


def squared(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch[0]).square().mean()
    return loss


def layer(outputs: int = 3) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, outputs).double()


def make(model: nn.Module, loss: Any = squared, optimizer: Any = torch.optim.SGD, **options: Any) -> ls.Trainer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return ls.Trainer(model, optimizer(trained, lr=0.1), loss=loss, num_shards=NUM_SHARDS, **options)


def train(trainer: ls.Trainer, after_step: Callable[[], object] = lambda: None) -> Answer:
    """Return the digest after each step, or the error that ends them."""
    digests: Answer = []
    for batch in batches().epoch(0):
        try:
            trainer.step(batch)
        except ls.LockstepError as error:
            return [*digests, type(error).__name__, str(error).replace("rank 1", "rank 0")]
        after_step()
        digests.append(trainer.digest())
    return digests


class Positions(nn.Module):
    """Adds two parameters through views, so that autograd gives both gradients one memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.position = nn.Parameter(torch.randn(3).double())
        self.kind = nn.Parameter(torch.randn(3).double())

    def forward(self, values: Tensor) -> Tensor:
        return torch.tanh(values * (self.position.unsqueeze(0) + self.kind.unsqueeze(0)))


def gradients_in_one_memory() -> Answer:
    def twice(model: nn.Module, batch: Any) -> Tensor:
        (squared(model, batch) * 0.5).backward()  # waits for the gradients of the rest in that memory
        return model(batch[0]).abs().mean()

    return [train(make(Positions(), max_grad_norm=0.1)), train(make(Positions(), twice))]


class Noisy(torch.optim.SGD):
    """Draws random numbers, as Langevin dynamics and stochastic rounding do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(torch.randn_like(parameter) * 1e-3)


def random_numbers_outside_shards() -> Answer:
    model = layer()
    between = make(model)

    def draw() -> None:
        with torch.no_grad():
            model.weight[0] = torch.randn(3)
            between.evaluate(batches(), lambda model, batch: (squared(model, batch), torch.rand(())))
            model.weight[1] = torch.randn(3)

    return [train(make(layer(), optimizer=Noisy)), train(between, draw)]


class Differences(torch.optim.Optimizer):
    """Keeps `.grad.data` of the last step."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad.data
            parameter.sub_(gradient * 2 - self.state[parameter].get("last", 0), alpha=0.1)
            self.state[parameter]["last"] = gradient


def held_gradients() -> Answer:
    return train(make(layer(), optimizer=Differences))


def backwards_of_ones_own() -> Answer:
    """A generator that learns through a discriminator with a trainer of its own; and a probe between two steps."""
    discriminator, generator = layer(1), layer()
    norms: list[str] = []

    def judge(_model: nn.Module, batch: Any) -> Tensor:
        return discriminator(generator(batch[0])).mean()

    def tell_apart(_model: nn.Module, batch: Any) -> Tensor:
        return functional.softplus(discriminator(batch[0]) - discriminator(generator(batch[0]).detach())).mean()

    def probe() -> None:
        digests.extend(trainer.digest() for trainer in trainers)
        generator.zero_grad()
        squared(generator, [inputs(4)]).backward()
        norms.append(generator.weight.grad.norm().item().hex())

    digests: list[str] = []
    trainers = make(discriminator, tell_apart), make(generator, judge)
    for batch in batches().epoch(0):
        for trainer in trainers:
            trainer.step(batch)
        probe()
    return [digests, norms]


def a_backward_in_the_loss() -> Answer:
    def in_two_parts(model: nn.Module, batch: Any) -> Tensor:
        (squared(model, batch) * 0.5).backward()
        return model[0](batch[0]).abs().mean()

    return train(make(nn.Sequential(layer(), layer()), in_two_parts))


def clip(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.02, 0.02)


def hooks_after_accumulation() -> Answer:
    """Registered before the trainer is made, after it, and for each step anew."""
    before, after, anew = layer(), layer(), layer()
    for parameter in before.parameters():
        parameter.register_post_accumulate_grad_hook(clip)
    trainers = make(before), make(after)
    for parameter in after.parameters():
        parameter.register_post_accumulate_grad_hook(clip)
    again = make(anew)
    handles: list[Any] = []

    def register() -> None:
        while handles:
            handles.pop().remove()
        handles.extend(parameter.register_post_accumulate_grad_hook(clip) for parameter in anew.parameters())

    register()
    return [train(trainers[0]), train(trainers[1]), train(again, register)]


class Teacher(nn.Module):
    """Keeps an average of the weights in frozen parameters, as MoCo does, and writes it in its forward."""

    def __init__(self, *, through_data: bool) -> None:
        super().__init__()
        self.student, self.teacher = layer(), layer().requires_grad_(False)
        self.through_data = through_data

    def forward(self, values: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                (mine.data if self.through_data else mine).lerp_(theirs, 0.5)
        output: Tensor = self.student(values) - self.teacher(values)
        return output


def a_forward_that_writes_parameters() -> Answer:
    found = [train(make(Teacher(through_data=through_data), nonzero)) for through_data in (False, True)]
    assert all("teacher" in answer[-1] for answer in found)
    return found


class Gathering(nn.Linear):
    """Adds up over the workers in evaluations, which they make together."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training and dist.is_initialized():
            dist.all_reduce(torch.ones(1))
        return super().forward(inputs)


def collectives_in_evaluation_mode() -> Answer:
    return train(make(Gathering(3, 3).double()))


def nonzero(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - 1).square().mean()


class Buffers(nn.Module):
    """Has a buffer that its first forward makes, one that grows, and one without memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()
        self.register_buffer("mean", None)
        self.register_buffer("bank", torch.zeros(1, 3).double())
        self.register_buffer("mask", torch.ones(1, 3).double().expand(3, 3))
        self.mean: Tensor | None
        self.bank: Tensor
        self.mask: Tensor

    def forward(self, values: Tensor) -> Tensor:
        now = values.detach().mean(0)
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        self.bank = torch.cat([self.bank, values.detach()[:1]])[-3:]
        output: Tensor = self.layer(values - self.mean) @ self.mask - self.bank.mean(0)
        return output


def buffers_of_any_kind() -> Answer:
    spoilt = make(Buffers(), lambda model, batch: squared(model, batch) * float("inf"), nonfinite="skip")
    return [train(make(Buffers())), train(spoilt)]


class Sometimes(nn.Module):
    """Uses a layer in two segments, which are checkpointed, each with a backward of its own, for some samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, values: Tensor) -> Tensor:
        hidden = values.clone().requires_grad_(True)
        for _ in range(2):
            hidden = checkpoint(self.segment, hidden, use_reentrant=True) if values.mean() > 0 else self.segment(hidden)
        output: Tensor = self.layer(hidden)
        return output

    def segment(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.layer(hidden))


def checkpoints_of_some_shards() -> Answer:
    means = [part.mean() for part in inputs()[:BATCH_SIZE].chunk(NUM_SHARDS)]
    assert {bool(mean > 0) for mean in means} == {True, False}
    return train(make(Sometimes()))


def gradients_that_are_not_finite_somewhere() -> Answer:
    # Each worker looks at a part of every bucket: one bad number, wherever it is, is seen on all of them.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 100), nn.Linear(100, 200), nn.Linear(200, 1)).double()
    trainer = make(model, nonfinite="skip")
    places = [(parameter, index) for parameter in model.parameters() for index in (0, parameter.numel() - 1)]
    answer: Answer = []
    for number, (parameter, index) in enumerate(places):
        bad = torch.zeros(parameter.numel(), dtype=torch.float64)
        bad[index] = (torch.inf, torch.nan)[number % 2]
        hook = parameter.register_hook(lambda gradient, bad=bad: gradient + bad.view_as(gradient))
        answer.append(trainer.step(next(batches().epoch(number))).is_skipped)
        hook.remove()
    assert all(answer)
    return [*answer, *train(make(model))]


class LateSparse(nn.Module):
    """Has its first sparse gradients in the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer(8).float()
        self.table = nn.Parameter(torch.randn(4, 8))
        self.is_used = False

    def forward(self, values: Tensor) -> Tensor:
        found: Tensor = self.layer(values.float())
        if self.is_used:
            found = found + functional.embedding((values > 0).long(), self.table, sparse=True).sum(1)
        return found


def sparse_gradients_that_come_late() -> Answer:
    model = LateSparse()

    def use() -> None:
        model.is_used = True

    return train(make(model), use)


CASES = (
    gradients_in_one_memory,
    random_numbers_outside_shards,
    held_gradients,
    backwards_of_ones_own,
    a_backward_in_the_loss,
    hooks_after_accumulation,
    a_forward_that_writes_parameters,
    collectives_in_evaluation_mode,
    buffers_of_any_kind,
    checkpoints_of_some_shards,
    sparse_gradients_that_come_late,
    gradients_that_are_not_finite_somewhere,
)


def run_all(_run: ls.Run | None = None) -> dict[str, Answer]:
    return {case.__name__: try_case(case) for case in CASES}


def try_case(case: Callable[[], Answer]) -> Answer:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps that are skipped
        try:
            return case()
        except Exception as error:  # noqa: BLE001 - one case is not to hide the others
            return [repr(error)]


def test_one_and_three_workers_do_the_same() -> None:
    alone = run_all()
    for answers in ls.launch(run_all, devices="cpu:3"):
        for name, expected in alone.items():
            assert len(str(expected)) > 2 * 64, expected  # digests, and not an error of the case's own
            assert answers[name] == expected, name
