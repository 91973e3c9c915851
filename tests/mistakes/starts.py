"""Mistakes before the first step: what is resumed, read, scaled, added to the model or given to an optimizer."""

import copy
import time

import torch
import torch.distributed as dist
from tests.mistakes.collectives import CALLS
from tests.mistakes.mean import EQUAL
from tests.mistakes.models import DIFFERS, OUTSIDE
from tests.mistakes.out_of_step import BEHIND, ENDED
from tests.mistakes.replicas import GRADIENT, OPTION, STATE, UPDATE
from tests.mistakes.script import SAME, Wrap, batch, batches, dataset, loss_of, mistake, net, sgd, train, trained, whole
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler

import lockstep as ls

PREFIX = r"module\.|prefix|(no|none).*key|key.*(fit|match)"


def adam_state(steps: int = 3):
    model = net(seed=7)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    train(model, optimizer, batches(5, steps))
    return model.state_dict(), optimizer.state_dict()


@mistake(STATE)
def the_optimizer_took_steps_before_wrapping_on_one_rank(rank: int, wrap: Wrap):
    module = net()
    optimizer = sgd(module, momentum=0.9)
    if rank == 1:
        train(module, optimizer, batches(7, 2))
    return train(wrap(module), optimizer, batches(rank))


@mistake(STATE + "|" + BEHIND + "|" + ENDED)
def rank_0_alone_resumes_before_wrapping(rank: int, wrap: Wrap):
    module, epoch = net(), 0
    weights, state = adam_state()
    if rank == 0:
        module.load_state_dict(weights)
        epoch = 2
    model = wrap(module)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    if rank == 0:
        optimizer.load_state_dict(state)
    while epoch < 4:
        train(model, optimizer, batches(rank + 2 * epoch, 2))
        epoch += 1
    return model


@mistake(OPTION)
def the_scheduler_is_resumed_on_rank_0_only(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    if rank == 0:
        state = scheduler.state_dict()
        scheduler.load_state_dict({**state, "last_epoch": 3, "_last_lr": [0.05]})
        optimizer.param_groups[0]["lr"] = 0.05
    for data in batches(rank):
        train(model, optimizer, iter([data]))
        scheduler.step()
    return model


@mistake(DIFFERS)
def each_rank_loads_its_own_checkpoint(rank: int, wrap: Wrap):
    model = wrap(net())
    own = copy.deepcopy(model.module)
    train(own, sgd(own), batches(rank, 2))
    model.module.load_state_dict(own.state_dict())  # checkpoint_{rank}.pt
    return train(model, sgd(model), batches(rank))


def loaded():
    model = net(seed=3)
    return train(model, sgd(model), whole())


@mistake(PREFIX, right=loaded)
def a_checkpoint_without_the_prefix_is_loaded_loosely(rank: int, wrap: Wrap):
    model = wrap(net())
    model.load_state_dict(net(seed=3).state_dict(), strict=False)
    return train(model, sgd(model), batches(rank))


@mistake(PREFIX, right=loaded)
def a_checkpoint_with_the_prefix_is_loaded_loosely(rank: int, wrap: Wrap):
    saved = wrap(net(seed=3)).state_dict()
    model = wrap(net())
    model.module.load_state_dict(saved, strict=False)
    return train(model, sgd(model), batches(rank))


@mistake(GRADIENT)
def the_scaler_is_on_on_one_rank(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=rank == 0)
    for data in batches(rank):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, data)).backward()
        scaler.step(optimizer)
        scaler.update()
    return model


@mistake(OPTION)
def a_broadcast_config_is_not_read_back(rank: int, wrap: Wrap):
    config = {"lr": 0.2} if rank == 0 else {"lr": 0.1}
    dist.broadcast_object_list([config], src=0)
    model = wrap(net())
    return train(model, sgd(model, lr=config["lr"]), batches(rank))


@mistake(OPTION + "|" + CALLS)
def objects_are_received_in_another_order(rank: int, wrap: Wrap):
    lr, momentum = [0.1], [0.9]
    for values in (lr, momentum) if rank == 0 else (momentum, lr):
        dist.broadcast_object_list(values, src=0)
    model = wrap(net())
    return train(model, sgd(model, lr=lr[0], momentum=momentum[0]), batches(rank))


@mistake(OPTION)
def the_learning_rate_falls_with_the_clock(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    began = time.perf_counter()
    for data in batches(rank):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + time.perf_counter() - began)
        train(model, optimizer, iter([data]))
    return model


@mistake(OPTION)
def a_parameter_group_is_added_on_one_rank(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = torch.optim.SGD(model.module[0].parameters(), lr=0.1)
    for step, data in enumerate(batches(rank)):
        if step == 2 + 2 * rank:
            optimizer.add_param_group({"params": list(model.module[3].parameters()), "lr": 0.01})
        train(model, optimizer, iter([data]))
    return model


@mistake(DIFFERS)
def the_head_is_replaced_after_wrapping_with_random_weights(rank: int, wrap: Wrap):
    model = wrap(net())
    torch.manual_seed(rank)
    model.module[3] = nn.Linear(8, 3)
    return train(model, sgd(model), batches(rank))


@mistake(OUTSIDE + r"|copy|replaced|no gradients", right=None)
def the_head_is_replaced_and_the_optimizer_keeps_the_old_one(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    torch.manual_seed(5)
    model.module[3] = nn.Linear(8, 3)
    return train(model, optimizer, batches(rank))


@mistake(DIFFERS)
def adapters_are_injected_after_wrapping(rank: int, wrap: Wrap):
    model = wrap(net())
    torch.manual_seed(10 + rank)
    model.module[0] = nn.Sequential(model.module[0].requires_grad_(False), nn.Linear(8, 2), nn.Linear(2, 8))
    return train(model, sgd(model), batches(rank))


@mistake(r"batch.?norm|layer|buffer|" + CALLS)
def batch_norm_is_synchronized_on_one_rank(rank: int, wrap: Wrap):
    module: nn.Module = net(norm=True)
    if rank == 0:
        module = ls.SyncBatchNorm.convert_sync_batchnorm(module)
    model = wrap(module)
    return train(model, sgd(model), batches(rank))


@mistake(EQUAL, right=None)
def a_weighted_sampler_draws_the_same_on_all_ranks(rank: int, wrap: Wrap):
    torch.manual_seed(0)
    model = wrap(net())
    drawn = WeightedRandomSampler([1.0] * 32, 32, generator=torch.Generator().manual_seed(3))
    return train(model, sgd(model), iter(DataLoader(dataset(), batch_size=4, sampler=drawn)))


@mistake(r"sampler|data", right=None)
def data_are_split_twice(rank: int, wrap: Wrap):
    model = wrap(net())
    part = Subset(dataset(), list(range(rank, 32, 2)))
    sampler = ls.DistributedSampler(part, shuffle=True)
    optimizer = sgd(model)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        train(model, optimizer, iter(DataLoader(part, batch_size=2, sampler=sampler)))
    return model


@mistake(r"sampler|data", right=None)
def each_rank_normalizes_by_the_whole_data_and_then_shifts_its_copy(rank: int, wrap: Wrap):
    torch.manual_seed(20 + rank)
    inputs, labels = dataset().tensors
    data = TensorDataset(inputs + 0.1 * torch.randn(32, 4), labels)  # augmented once, and not in each epoch
    model = wrap(net())
    sampler = ls.DistributedSampler(data)
    return train(model, sgd(model), iter(DataLoader(data, batch_size=2, sampler=sampler)))


@mistake(UPDATE, right=trained)
def weights_lose_precision_on_rank_0_in_a_validation(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for step, data in enumerate(batches(rank)):
        train(model, optimizer, iter([data]))
        if rank == 0 and step == 1:
            model.module.half()
            model.eval()
            with torch.no_grad():
                model.module(batch(9, 0)[0].half())
            model.module.float()
            model.train()
    return model


@mistake(CALLS + "|" + ENDED, right=SAME)
def one_rank_wraps_the_discriminator_lazily(rank: int, wrap: Wrap):
    model, critic = wrap(net()), None
    optimizer = sgd(model)
    for step, data in enumerate(batches(rank)):
        train(model, optimizer, iter([data]))
        if critic is None and step >= 1 + rank:
            critic = wrap(nn.Linear(4, 1))
    return model
