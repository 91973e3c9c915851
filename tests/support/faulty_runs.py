"""Short runs in which a step fails on one worker or on all, through something that can fail in a real run.

A run has all that a step may write to: parameters, buffers, an optimizer with state, a scheduler, generators that the
loss draws from. A *fault* is armed for one step: that step fails, is taken again, and the run goes on to its end.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.comm import World

NUM_SHARDS = 4
BATCH_SIZE = 8
FAILING_STEP = 1
"""Not the first one: then the optimizer has state, and buckets are in the order in which gradients arrive."""


class InjectedError(RuntimeError):
    """What a fault raises."""


class Running(nn.Module):
    """Has BatchNorm, dropout, and a buffer that each forward puts another tensor in the place of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs))
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        outputs: Tensor = self.last(nn.functional.dropout(hidden, 0.2))
        return outputs


class Growing(Running):
    """Also has a buffer that grows, so that the other ranks must be told its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(1, 5))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, inputs.detach()[:1]])
        return super().forward(inputs)


class FaultyOptimizer(torch.optim.AdamW):
    """Raises when it is told to: before it writes anything, or after."""

    fault = ""
    scheduler_fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        fault, self.fault = self.fault, ""
        if fault == "before":
            raise InjectedError("the optimizer has failed before its update")
        super().step(closure)
        if fault == "after":
            raise InjectedError("the optimizer has failed after its update")


class FaultyScheduler(torch.optim.lr_scheduler.StepLR):
    """Raises when its optimizer tells it to, in the middle of its step; an attribute of its own would be its state."""

    def get_lr(self) -> Any:
        optimizer: Any = self.optimizer
        if optimizer.scheduler_fails:
            optimizer.scheduler_fails = False
            raise InjectedError("the scheduler has failed")
        return super().get_lr()


@dataclasses.dataclass
class LossCount:
    """How many losses were computed. A plain number of a run would be reported as state that a shard changes."""

    made: int = 0


class Run:
    """One worker's part of a run.

    Attributes:
        spoil: Called with each loss, for a fault.
    """

    def __init__(self, world: World | None, model: type[nn.Module] = Running, **options: Any) -> None:
        self.world = world
        self.model: Any = model()
        self.optimizer = FaultyOptimizer(self.model.parameters(), lr=0.01)
        self.scheduler = FaultyScheduler(self.optimizer, 2)
        self.spoil: Callable[[Tensor], Tensor] = lambda loss: loss
        self.losses = LossCount()
        self.trainer = ls.Trainer(
            self.model,
            self.optimizer,
            loss=self.loss,
            num_shards=NUM_SHARDS,
            scheduler=self.scheduler,
            world=world,
            **{"verify_steps": 0, **options},  # faults are injected into the calls of the step itself
        )
        inputs = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
        self.loader = ls.ShardedLoader(
            data, batch_size=BATCH_SIZE, num_shards=NUM_SHARDS, world=lambda: self.trainer.world
        )

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return a loss that depends on every generator."""
        noise = torch.rand(()) + random.random() + float(np.random.rand())  # noqa: NPY002 - what user code does
        loss = nn.functional.mse_loss(model(batch[0]), batch[1]) * noise
        self.losses.made += 1
        return self.spoil(loss)

    def everything(self) -> dict[str, Any]:
        """Return all that a step may change, by value."""
        state = self.trainer.state_dict()
        state.pop("fingerprint")
        numpy_state = np.random.get_state()  # noqa: NPY002
        return {
            **by_value(state),
            "buffers": by_value(dict(self.model.named_buffers())),
            "python": random.getstate(),
            "numpy": (numpy_state[1].tobytes(), *numpy_state[2:]),
            "torch": by_value(torch.get_rng_state()),
        }

    def save(self) -> None:
        """Save the run where nobody looks."""
        self.trainer.save("unused.ckpt")

    def draw(self) -> None:
        torch.rand(3)
        random.random()
        np.random.randn(3)  # noqa: NPY002

    def finish(self) -> str:
        """Take the steps that are left in the epoch, and return the digest."""
        for batch in self.loader.epoch(0, self.trainer.cursor.step):
            self.trainer.step(batch)
            if self.trainer.cursor.epoch == 1:
                break
        return self.trainer.digest()


def by_value(value: Any) -> Any:
    """Return a nested value with the bytes of tensors in their place."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().cpu().contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return {name: by_value(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [by_value(each) for each in value]
    return value


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of what has changed."""
    return [name for name in before if before[name] != after[name]]


# -- Faults: each arms a run, and returns what disarms it --------------------------------------------------------------

Fault = Callable[[Run], Callable[[], object]]


def fail(*_: Any) -> None:
    raise InjectedError("something has failed")


def nothing() -> None:
    """Disarm nothing."""


def in_the_loss(number: int) -> Fault:
    """Return a fault of the loss function, in the `number`-th shard that the worker runs in this step."""

    def arm(run: Run) -> Callable[[], object]:
        failing = run.losses.made + number

        def spoil(loss: Tensor) -> Tensor:
            if run.losses.made == failing:
                raise InjectedError("the loss function has failed")
            return loss

        run.spoil = spoil
        return nothing

    return arm


def in_the_last_backward(run: Run) -> Callable[[], object]:
    """Fail in a hook on the gradient of the first layer: when the last shard's backward has sent buckets already."""
    world_size = 1 if run.world is None else run.world.world_size
    left = NUM_SHARDS // world_size

    def fail(_gradients: tuple[Tensor, ...]) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise InjectedError("the backward has failed")

    return hook_before_accumulation(run.model.first.bias, fail)


def hook_before_accumulation(parameter: Tensor, hook: Callable[[tuple[Tensor, ...]], Any]) -> Callable[[], object]:
    """Call a hook with each gradient of a parameter before it is accumulated, in the backward of each shard.

    A hook on the parameter itself would be called with the reduced gradient.
    """
    function = parameter.view_as(parameter).grad_fn
    assert function is not None
    node = function.next_functions[0][0]
    assert node is not None
    handle = node.register_prehook(hook)

    def remove(_node: object = node) -> None:  # the node lives as long as something holds it
        handle.remove()

    return remove


def in_a_changed_model(run: Run) -> Callable[[], object]:
    run.model.last.bias.requires_grad_(False)
    return lambda: run.model.last.bias.requires_grad_(True)


def with_a_loss_that_is_not_finite(run: Run) -> Callable[[], object]:
    run.spoil = lambda loss: loss * float("inf")

    def disarm() -> None:
        run.spoil = lambda loss: loss

    return disarm


def with_a_gradient_that_is_not_finite(run: Run) -> Callable[[], object]:
    """Let a part of a gradient be NaN."""
    return hook_before_accumulation(run.model.norm.weight, lambda gradients: (gradients[0] + float("nan"),))


def with_another_learning_rate(run: Run) -> Callable[[], object]:
    """Set an option of the optimizer; an error where not all workers do."""
    group = run.optimizer.param_groups[0]
    before, group["lr"] = group["lr"], 0.5
    return lambda: group.update(lr=before)


def with_a_parameter_that_is_written(run: Run) -> Callable[[], object]:
    def write(loss: Tensor) -> Tensor:
        with torch.no_grad():
            run.model.last.bias.add_(1.0)
        return loss

    run.spoil = write

    def disarm() -> None:
        run.spoil = lambda loss: loss

    return disarm


def in_the_optimizer(run: Run) -> Callable[[], object]:
    """Fail in the optimizer before it has written anything."""
    run.optimizer.fault = "before"
    return nothing


def in_a_hook_of_the_optimizer(run: Run) -> Callable[[], object]:
    """Fail in a hook that runs before the optimizer's step."""

    def fail(*_: Any) -> None:
        raise InjectedError("a hook has failed")

    return run.optimizer.register_step_pre_hook(fail).remove
