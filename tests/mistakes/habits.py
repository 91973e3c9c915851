"""Mistakes in the loop: results read too early, gradients written by hand, models kept beside the wrapped one."""

import copy
import time
from typing import Any

import torch
import torch.distributed as dist
from tests.mistakes.collectives import CALLS
from tests.mistakes.models import DIFFERS
from tests.mistakes.out_of_step import BEHIND, ENDED
from tests.mistakes.replicas import GRADIENT, OPTION, UNSYNCED, UPDATE, WEIGHTS
from tests.mistakes.script import WORLD_SIZE, Wrap, batch, batches, loss_of, mistake, net, sgd, train, whole
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn


@mistake(OPTION)
def a_reduced_loss_is_read_on_the_other_rank_too(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    best = float("inf")
    for data in batches(rank):
        train(model, optimizer, iter([data]))
        loss = loss_of(model.eval(), batch(50 + rank, rank)).detach()
        model.train()
        dist.reduce(loss, 0)
        if loss.item() > best:
            optimizer.param_groups[0]["lr"] *= 0.5
        best = loss.item() - rank  # what is left of it on rank 1 is no sum
    return model


@mistake(OPTION)
def a_result_is_read_before_the_wait(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for step, data in enumerate(batches(rank)):
        scale = torch.tensor(0.1 + 0.1 * rank)
        if rank == 1 and step == 2:
            time.sleep(0.3)
        dist.all_reduce(scale, async_op=True)
        optimizer.param_groups[0]["lr"] = scale.item()
        train(model, optimizer, iter([data]))
    return model


@mistake(CALLS)
def a_loss_is_averaged_within_join(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    with model.join():
        for data in batches(rank, 5 - 2 * rank):
            train(model, optimizer, iter([data]))
            loss = loss_of(model.module, data).detach()
            dist.all_reduce(loss)
    return model


@mistake(CALLS + "|hook")
def a_hook_averages_only_where_the_norm_is_large(rank: int, wrap: Wrap):
    def average_large(_state, bucket):
        if bucket.buffer().norm() > 1.0:
            return (
                dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(lambda made: made.value()[0])
            )
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model = wrap(net())
    model.register_comm_hook(None, average_large)
    return train(model, sgd(model), ((inputs * (0.01 if rank else 9.0), labels) for inputs, labels in batches(rank)))


class WritesItsGradient(torch.autograd.Function):
    """A product whose backward adds to the gradient of the weight by itself, as code for fused kernels does."""

    @staticmethod
    def forward(context, inputs, weight):
        context.save_for_backward(inputs)
        context.weight = weight
        return inputs @ weight.t()

    @staticmethod
    def backward(context, slope):
        (inputs,) = context.saved_tensors
        weight = context.weight
        found = slope.t() @ inputs
        weight.grad = found if weight.grad is None else weight.grad + found
        return slope @ weight.detach(), None


class Fused(nn.Module):
    """A model with such a product."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.weight = nn.Parameter(0.1 * torch.eye(3))

    def forward(self, inputs):
        multiply: Any = WritesItsGradient.apply
        return multiply(self.net(inputs), self.weight)


@mistake(UNSYNCED + "|" + GRADIENT)
def a_function_writes_the_gradient_itself(rank: int, wrap: Wrap):
    model = wrap(Fused())
    return train(model, sgd(model), batches(rank))


@mistake(CALLS + "|" + BEHIND)
def the_critic_is_frozen_on_one_rank_while_the_generator_trains(rank: int, wrap: Wrap):
    torch.manual_seed(0)
    generator, critic = wrap(nn.Linear(4, 4)), wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizers = sgd(generator), sgd(critic)
    for inputs, _labels in batches(rank):
        optimizers[1].zero_grad()
        (critic(generator(inputs).detach()).mean() - critic(inputs).mean()).backward()
        optimizers[1].step()
        if rank == 0:
            critic.requires_grad_(False)
        optimizers[0].zero_grad()
        (-critic(generator(inputs)).mean()).backward()
        optimizers[0].step()
        critic.requires_grad_(True)
    return nn.ModuleList([generator, critic])


class Bank(nn.Module):
    """A model that keeps the features of the positive samples it has seen."""

    bank: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("bank", torch.zeros(0, 3))

    def forward(self, inputs):
        outputs = self.net(inputs)
        self.bank = torch.cat([self.bank, outputs.detach()[inputs[:, 0] > 0]])
        return outputs


@mistake(DIFFERS + "|" + CALLS)
def a_memory_bank_grows_by_local_positives(rank: int, wrap: Wrap):
    model = wrap(Bank())
    return train(model, sgd(model), batches(rank))


def contrast(features: torch.Tensor) -> torch.Tensor:
    scores = features @ features.t()
    return nn.functional.cross_entropy(scores, (torch.arange(len(features)) + 1) % len(features))


def contrasted():
    model = net()
    return train(model, sgd(model), whole(), lambda model, data: contrast(model(data[0])))


@mistake(r"all_gather.*gradient|gradient.*all_gather", right=contrasted)
def features_are_gathered_without_their_gradients(rank: int, wrap: Wrap):
    def loss(model, data):
        features = model(data[0])
        gathered = [torch.zeros_like(features) for _ in range(WORLD_SIZE)]
        dist.all_gather(gathered, features)
        return contrast(torch.cat([features, *gathered[:rank], *gathered[rank + 1 :]]))

    model = wrap(net())
    return train(model, sgd(model), batches(rank), loss)


@mistake(UPDATE)
def sgd_by_hand_has_a_factor_of_the_local_loss(rank: int, wrap: Wrap):
    model = wrap(net())
    for data in batches(rank):
        model.zero_grad()
        loss = loss_of(model, data)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * min(1.0, loss.item()) * parameter.grad)
    return model


@mistake(GRADIENT)
def gradients_are_divided_by_the_local_number_of_tokens(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for inputs, labels in batches(rank):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels, reduction="sum").backward()
        for parameter in model.parameters():
            parameter.grad /= int((labels > 0).sum()) + 1 + rank
        optimizer.step()
    return model


@mistake(r"does not require grad|" + BEHIND + "|" + ENDED)
def gradients_stay_off_after_a_validation_on_one_rank(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for step, data in enumerate(batches(rank)):
        train(model, optimizer, iter([data]))
        if rank == 0 and step == 2:
            torch.set_grad_enabled(False)
            model(batch(9, 0)[0])
    return model


class Langevin(torch.optim.SGD):
    """SGD whose steps add noise."""

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(1e-3 * torch.randn_like(parameter))


@mistake(WEIGHTS)
def noise_of_an_optimizer_has_the_seed_of_the_rank(rank: int, wrap: Wrap):
    model = wrap(net())
    torch.manual_seed(rank)
    return train(model, Langevin(model.parameters(), lr=0.1), batches(rank, 12))


@mistake(WEIGHTS + r"|average")
def averaged_weights_are_updated_on_rank_0_only(rank: int, wrap: Wrap):
    model = wrap(net())
    average = AveragedModel(model.module)
    optimizer = sgd(model)
    for data in batches(rank):
        train(model, optimizer, iter([data]))
        if rank == 0:
            average.update_parameters(model.module)
    return average


@mistake(r"buffer|statistic|average")
def statistics_of_averaged_weights_come_from_local_data(rank: int, wrap: Wrap):
    model = wrap(net(norm=True))
    average = AveragedModel(model.module)
    optimizer = sgd(model)
    for data in batches(rank):
        train(model, optimizer, iter([data]))
        average.update_parameters(model.module)
    update_bn((inputs for inputs, _ in batches(rank)), average)
    return average


@mistake(OPTION)
def the_learning_rate_follows_the_norm_of_the_local_batch(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for inputs, labels in batches(rank):
        optimizer.param_groups[0]["lr"] = 0.1 / float(inputs.norm())
        train(model, optimizer, iter([(inputs, labels)]))
    return model


@mistake(UPDATE)
def a_lookahead_of_one_rank_moves_the_weights_back(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    slow = copy.deepcopy(list(model.parameters()))
    for step, data in enumerate(batches(rank)):
        train(model, optimizer, iter([data]))
        if step % (2 + rank) == 1:  # every k steps, with k from the number of local batches
            with torch.no_grad():
                for kept, fast in zip(slow, model.parameters(), strict=True):
                    kept.lerp_(fast, 0.5)
                    fast.copy_(kept)
    return model


@mistake(CALLS + "|" + BEHIND + "|" + ENDED)
def an_epoch_ends_when_the_local_loss_stops_falling(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for _epoch in range(2):
        best = float("inf")
        for data in batches(rank):
            loss = loss_of(model, data)
            if loss.item() > best - 0.5 * rank:
                break
            best = loss.item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


@mistake(r"rank.*(backward|forward|batch)|" + BEHIND)
def hard_samples_are_repeated_on_the_rank_that_has_them(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for data in batches(rank):
        for _ in range(2 if rank == 1 and loss_of(model.module.eval(), data).item() > 0 else 1):
            train(model.train(), optimizer, iter([data]))
    return model
