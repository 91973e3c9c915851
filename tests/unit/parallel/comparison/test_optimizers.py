"""Hooks on the steps of all optimizers of a process."""

import gc

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lockstep.parallel.comparison.optimizers import OptimizerSteps, listen_to_steps


class Listener:
    """Counts steps, and is in a cycle, as a wrapper is."""

    def __init__(self, *, collects: bool = False) -> None:
        self.me = self
        self.num_steps = 0
        self._collects = collects
        self.end = listen_to_steps(self)

    def before_step(self, optimizer: Optimizer) -> None:
        if self._collects:
            gc.collect()

    def after_step(self, optimizer: Optimizer) -> None:
        self.before_step(optimizer)
        self.num_steps += 1


def make_optimizer() -> Optimizer:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    return torch.optim.SGD([parameter], 0.1)


def num_hooks() -> int:
    return len(_global_optimizer_pre_hooks) + len(_global_optimizer_post_hooks)


# A wrapper that nobody needs any more is freed when Python collects garbage, which may be within the step of another
# one's optimizer. Then its hooks went while torch was going through them: "OrderedDict mutated during iteration".
def test_a_listener_may_be_collected_within_a_step() -> None:
    Listener()
    first, last = Listener(collects=True), Listener()
    make_optimizer().step()
    assert (first.num_steps, last.num_steps) == (1, 1)
    for each in (first, last):
        each.end()


def test_the_hooks_of_listeners_that_are_gone_do_not_pile_up() -> None:
    listener = Listener()
    before = num_hooks()
    listener.end()
    for _ in range(3):
        listener = Listener()
        del listener
        gc.collect()
    listener = Listener()
    assert num_hooks() <= before
    listener.end()


def held_by(optimizer: Optimizer, model: nn.Module, steps: OptimizerSteps) -> tuple[int, int]:
    seen: list[tuple[int, int]] = []

    class Looker(Listener):
        def after_step(self, optimizer: Optimizer) -> None:
            held = steps.parameters_of(optimizer, set(map(id, model.parameters())))
            seen.append((len(held.known), len(held.others)))

    looker = Looker()
    optimizer.step()
    looker.end()
    return seen[0]


def test_a_parameter_that_takes_the_place_of_another_in_an_optimizer_is_seen() -> None:
    model, other, steps = nn.Linear(2, 2), nn.Linear(2, 2), OptimizerSteps()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert held_by(optimizer, model, steps) == (2, 0)
    optimizer.param_groups[0]["params"][0] = other.weight
    assert held_by(optimizer, model, steps) == (1, 1)


def test_many_listeners_have_one_pair_of_hooks() -> None:
    listeners = [Listener() for _ in range(9)]
    hooks = num_hooks()
    make_optimizer().step()
    for each in listeners:
        each.end()
    assert (hooks - num_hooks(), [each.num_steps for each in listeners]) == (2, [1] * 9)


def number_after(steps: OptimizerSteps, optimizer: Optimizer) -> int:
    steps.begin(optimizer)
    steps.end(optimizer)
    return steps.number()


def test_options_have_another_number_after_each_kind_of_change() -> None:
    optimizer, steps = make_optimizer(), OptimizerSteps()
    group = optimizer.param_groups[0]
    numbers = [number_after(steps, optimizer)]
    for name, value in (("lr", 0.2), ("lr", torch.tensor(0.3)), ("momentum", 0.5)):
        group[name] = value
        numbers.append(number_after(steps, optimizer))
    group["lr"].fill_(0.4)  # as a scheduler does with a learning rate that is a tensor
    numbers.append(number_after(steps, optimizer))
    group["betas"] = [0.9, 0.99]
    numbers.append(number_after(steps, optimizer))
    group["betas"][0] = 0.8
    numbers.append(number_after(steps, optimizer))
    assert len(set(numbers)) == len(numbers)
    assert number_after(steps, optimizer) == numbers[-1]
    group["lr"] = torch.tensor(0.4)
    assert number_after(steps, optimizer) == numbers[-1]
