"""Unusual scripts without a mistake: they must be right, and nothing may be reported."""

import copy
import gc
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tests.mistakes.script import (
    SAME,
    WORLD_SIZE,
    Wrap,
    batch,
    batches,
    correct,
    dataset,
    loss_of,
    net,
    sgd,
    train,
    trained,
    whole,
)
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader, DistributedSampler


@correct(SAME)
def a_critic_with_spectral_norm_is_frozen_for_the_generator(rank: int, wrap: Wrap):
    torch.manual_seed(0)
    critic = wrap(nn.Sequential(spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 1)))
    generator = wrap(nn.Linear(4, 4))
    optimizers = sgd(generator), sgd(critic)
    for inputs, _labels in batches(rank):
        critic.requires_grad_(True)
        optimizers[1].zero_grad()
        (critic(generator(inputs).detach()).mean() - critic(inputs).mean()).backward()
        optimizers[1].step()
        critic.requires_grad_(False)
        optimizers[0].zero_grad()
        (-critic(generator(inputs)).mean()).backward()
        optimizers[0].step()
    critic.requires_grad_(True)
    return nn.ModuleList([generator, critic])


@correct(trained)
def a_learning_rate_is_looked_for_first(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    for step, data in enumerate(batches(rank + 20, 4)):
        optimizer.param_groups[0]["lr"] = 1e-4 * 10**step
        train(model, optimizer, iter([data]))
    model.load_state_dict(before[0])
    optimizer.load_state_dict(before[1])
    return train(model, optimizer, batches(rank))


@correct(trained)
def rank_0_keeps_an_average_of_weights_for_its_checkpoint(rank: int, wrap: Wrap):
    model = wrap(net())
    average = copy.deepcopy(model.module) if rank == 0 else None
    optimizer = sgd(model)
    for data in batches(rank):
        train(model, optimizer, iter([data]))
        if average is not None:
            with torch.no_grad():
                for kept, new in zip(average.parameters(), model.module.parameters(), strict=True):
                    kept.lerp_(new, 0.1)
    return model


@correct(SAME)
def a_student_learns_from_a_teacher(rank: int, wrap: Wrap):
    teacher = net(seed=5).eval().requires_grad_(False)
    model = wrap(net())

    def distil(model, data):
        return nn.functional.mse_loss(model(data[0]), teacher(data[0])) + loss_of(model, data)

    return train(model, sgd(model), batches(rank), distil)


@correct(SAME)
def lbfgs_calls_a_closure(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for data in batches(rank, 3):

        def closure(data=data):
            optimizer.zero_grad()
            loss = loss_of(model, data)
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            return mean / dist.get_world_size()

        optimizer.step(closure)
    return model


@correct(SAME)
def all_ranks_stop_when_one_has_no_more_data(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    mine = batches(rank, 6 - rank)
    while True:
        data = next(mine, None)
        has_more = torch.tensor(float(data is not None))
        dist.all_reduce(has_more, op=dist.ReduceOp.MIN)
        if not has_more or data is None:
            return model
        train(model, optimizer, iter([data]))


class LowRank(nn.Module):
    """A frozen layer and what is added to it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs):
        return self.layer(inputs) + self.up(self.down(inputs))


@correct(SAME)
def adapters_of_low_rank_are_trained(rank: int, wrap: Wrap):
    module = net()
    module[0], module[3] = LowRank(module[0]), LowRank(module[3])
    model = wrap(module)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
    return train(model, optimizer, batches(rank))


@correct(trained)
def sgd_is_written_by_hand(rank: int, wrap: Wrap):
    model = wrap(net())
    for data in batches(rank):
        model.zero_grad()
        loss_of(model, data).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
    return model


class DropsLayers(nn.Module):
    """A model that leaves layers out at random, others on each rank."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self._generator = generator

    def forward(self, inputs):
        hidden = self.first(inputs)
        for layer in self.layers:
            if torch.rand((), generator=self._generator) > 0.5:
                hidden = hidden + torch.tanh(layer(hidden))
        return self.last(hidden)


@correct(SAME)
def layers_are_dropped_at_random_on_each_rank(rank: int, wrap: Wrap):
    model = wrap(DropsLayers(torch.Generator().manual_seed(rank)), find_unused_parameters=True)
    return train(model, sgd(model), batches(rank, 8))


@correct(SAME)
def one_forward_has_two_backwards(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for inputs, labels in batches(rank):
        outputs = model(inputs)
        optimizer.zero_grad()
        nn.functional.cross_entropy(outputs, labels).backward(retain_graph=True)
        outputs.square().mean().backward()
        optimizer.step()
    return model


@correct(trained)
def the_model_is_wrapped_anew_in_each_epoch(rank: int, wrap: Wrap):
    module = net()
    for epoch in range(3):
        model = wrap(module)
        train(model, sgd(model), (batch(2 * epoch + step, rank) for step in range(2)))
    return module


@correct(SAME)
def weights_look_ahead(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    slow = [each.detach().clone() for each in model.parameters()]
    for step, data in enumerate(batches(rank, 8)):
        train(model, optimizer, iter([data]))
        if step % 3 == 2:
            with torch.no_grad():
                for kept, fast in zip(slow, model.parameters(), strict=True):
                    fast.copy_(kept.lerp_(fast, 0.5))
    return model


@correct(trained)
def rank_0_validates_with_gradients_on(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for data in batches(rank):
        train(model, optimizer, iter([data]))
        if rank == 0:
            loss_of(model.eval(), batch(60, 0)).item()
            model.train()
    return model


class AllGather(torch.autograd.Function):
    """Gathers a tensor of each rank; the gradients of all ranks for what one has sent are added up."""

    @staticmethod
    def forward(context, mine):
        found = [torch.zeros_like(mine) for _ in range(WORLD_SIZE)]
        dist.all_gather(found, mine)
        return tuple(found)

    @staticmethod
    def backward(context, *slopes):
        total = torch.stack(slopes)
        dist.all_reduce(total)
        return total[dist.get_rank()]


all_gather: Any = AllGather.apply


def gathered_contrast(gather, model, data):
    features = torch.cat(gather(model(data[0])))
    scores = features @ features.t()
    return nn.functional.cross_entropy(scores, (torch.arange(len(features)) + 1) % len(features))


def contrasted():
    model = net()
    return train(model, sgd(model), whole(), partial(gathered_contrast, lambda features: [features]))


@correct(contrasted)
def features_are_gathered_with_their_gradients(rank: int, wrap: Wrap):
    model = wrap(net())
    return train(model, sgd(model), batches(rank), partial(gathered_contrast, all_gather))


@correct(SAME)
def minima_are_made_flat(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for data in batches(rank):
        optimizer.zero_grad()
        loss_of(model, data).backward()
        moves = [0.05 * each.grad / (each.grad.norm() + 1e-9) for each in model.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), moves)
        optimizer.zero_grad()
        loss_of(model, data).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()
    return model


class Recurrent(nn.Module):
    """A recurrent model whose state is carried from one part of a sequence to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, inputs, state):
        hidden, state = self.cells(inputs[:, None], state)
        return self.head(hidden[:, 0]), state


@correct(SAME)
def a_state_is_carried_from_batch_to_batch(rank: int, wrap: Wrap):
    model = wrap(Recurrent())
    optimizer = sgd(model)
    state = None
    for inputs, labels in batches(rank):
        outputs, state = model(inputs, state)
        optimizer.zero_grad()
        nn.functional.cross_entropy(outputs, labels).backward()
        optimizer.step()
        state = tuple(each.detach() for each in state)
    return model


class Momentum(nn.Module):
    """An encoder, one that follows it, and a queue of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = net(), net().requires_grad_(False)
        self.register_buffer("queue", torch.zeros(16, 3))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, inputs):
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            keys = torch.cat(all_gather(self.key(inputs)))
            begin = int(self.place)
            self.queue[begin : begin + len(keys)] = keys
            self.place.copy_((self.place + len(keys)) % 16)
        return self.query(inputs) @ self.queue.t().clone()


@correct(SAME)
def an_encoder_follows_with_momentum_and_a_queue(rank: int, wrap: Wrap):
    model = wrap(Momentum())
    return train(model, sgd(model), batches(rank))


@correct(SAME)
def noise_on_gradients_has_one_seed(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    noise = torch.Generator().manual_seed(3)
    for data in batches(rank):
        optimizer.zero_grad()
        loss_of(model, data).backward()
        for parameter in model.parameters():
            parameter.grad += 0.01 * torch.randn(parameter.shape, generator=noise)
        optimizer.step()
    return model


@correct(trained)
def each_rank_logs_what_it_sees(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    seen = []
    for inputs, labels in batches(rank):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        norm = nn.utils.get_total_norm([each.grad for each in model.parameters()])
        optimizer.step()
        seen.append((loss.item(), float(norm), float(inputs.std())))
        if rank == 0:
            seen.append(sum(float(each.detach().square().sum()) for each in model.module.parameters()))
    return model


@correct(SAME)
def a_loss_without_a_batch_is_backed_too(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for inputs, labels in batches(rank):
        optimizer.zero_grad()
        penalty = sum(each.square().sum() for each in model.module.parameters())
        (nn.functional.cross_entropy(model(inputs), labels) + 1e-3 * penalty).backward()
        optimizer.step()
    return model


@correct(SAME)
def two_wrapped_networks_have_one_optimizer_each_and_one_loss(rank: int, wrap: Wrap):
    torch.manual_seed(0)
    encoder, head = wrap(nn.Linear(4, 8)), wrap(nn.Linear(8, 3))
    optimizers = sgd(encoder), torch.optim.Adam(head.parameters(), lr=0.01)
    for inputs, labels in batches(rank):
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.cross_entropy(head(torch.tanh(encoder(inputs))), labels).backward()
        for optimizer in optimizers:
            optimizer.step()
    return nn.ModuleList([encoder, head])


@correct(SAME)
def two_samplers_with_two_views_of_each_sample(rank: int, wrap: Wrap):
    data = dataset(8)
    samplers: list[Any] = [DistributedSampler(data, 2, rank, seed=1)]
    if rank == 0:  # so the collector lists the samplers in another order on this rank
        gc.collect()
    samplers.append(DistributedSampler(data, 2, rank, seed=2))
    model = wrap(net())
    optimizer = sgd(model)
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for picked in zip(*(DataLoader(data, batch_size=2, sampler=sampler) for sampler in samplers), strict=True):
            inputs, labels = (torch.cat(parts) for parts in zip(*picked, strict=True))
            train(model, optimizer, iter([(torch.cat([inputs, inputs + 0.1]), labels.repeat(2))]))
    return model
