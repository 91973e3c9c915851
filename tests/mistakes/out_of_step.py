"""Ranks that do not take the same steps, or not in the same order."""

import random
import sys

import torch
import torch.distributed as dist
from tests.mistakes.script import Wrap, batch, batches, dataset, loss_of, mistake, net, sgd, train
from torch import nn
from torch.utils.data import DataLoader

import lockstep as ls

BEHIND = r"rank \d.*(skip|behind|fewer|more|once|times|number of|backward|forward|step)|forward.*rank|did not reach"
ENDED = r"rank \d.*(exit|ended|left|finished|lost|gone|closed|fewer|behind)|connection (closed|reset)"
TURN = r"(another|other|different|wrong).*(order|model|wrapper)|order|model \d|wrapper \d"


class OutOfMemoryError(RuntimeError):
    """What an allocator raises."""


def forward_of(model, data, *, fits: bool):
    if not fits:
        raise OutOfMemoryError("out of memory: tried to allocate 2.00 GiB")
    return loss_of(model, data)


@mistake(BEHIND)
def a_batch_without_memory_is_skipped(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for step, data in enumerate(batches(rank, 8)):
        try:
            loss = forward_of(model, data, fits=not (rank == 1 and step == 2))
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            optimizer.zero_grad()
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@mistake(BEHIND)
def a_loss_that_is_not_finite_is_skipped(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for step, data in enumerate(batches(rank, 8)):
        loss = loss_of(model, data)
        if rank == 0 and step == 3:
            loss = loss * float("nan")
        if not torch.isfinite(loss):
            print("loss is", loss.item(), "- skipping this batch")
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@mistake(BEHIND)
def a_batch_without_positives_has_a_constant_loss(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for step, data in enumerate(batches(rank, 8)):
        optimizer.zero_grad()
        has_positives = not (rank == 1 and step in {2, 5})
        loss = loss_of(model, data) if has_positives else torch.zeros((), requires_grad=True)
        loss.backward()
        optimizer.step()
    return model


@mistake(BEHIND)
def an_error_of_a_batch_is_logged_and_the_loop_goes_on(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    skipped = 0
    for step, (inputs, labels) in enumerate(batches(rank, 8)):
        try:
            if rank == 1 and step == 1:
                labels = labels.add(5)  # noqa: PLW2901 - a label that does not exist
            optimizer.zero_grad()
            loss_of(model, (inputs, labels)).backward()
            optimizer.step()
        except IndexError:
            skipped += 1
    return model


@mistake(BEHIND)
def a_second_backward_on_rank_0_logs_the_gradient_norm(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for step, data in enumerate(batches(rank)):
        optimizer.zero_grad()
        loss = loss_of(model, data)
        if rank == 0 and step == 1:
            loss.backward(retain_graph=True)
            print("gradient", model.module[0].weight.grad.norm())
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@mistake(BEHIND)
def rank_0_takes_the_rest_of_the_accumulation(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    mine = list(batches(rank, 5 if rank == 0 else 4))
    for index, data in enumerate(mine):
        is_last = index == len(mine) - 1
        if (index + 1) % 2 == 0 or is_last:
            loss_of(model, data).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with model.no_sync():
                loss_of(model, data).backward()
    dist.barrier()
    return model


@mistake(BEHIND + "|" + ENDED)
def each_rank_updates_as_often_as_its_replay_buffer_is_full(rank: int, wrap: Wrap):
    policy = wrap(net())
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    for episode in range(4):
        num_updates = 2 if rank == 0 or episode != 1 else 3
        for update in range(num_updates):
            train(policy, optimizer, iter([batch(10 * episode + update, rank)]))
        total = torch.ones(1)
        dist.all_reduce(total)
    return policy


@mistake(ENDED + "|" + BEHIND, ends_early=True)
def one_rank_stops_early(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    best, waited = float("inf"), 0
    for epoch in range(6):
        train(model, optimizer, batches(rank, 2))
        validation = 1.0 if rank == 1 else 1.0 / (epoch + 1)
        best, waited = (validation, 0) if validation < best else (best, waited + 1)
        if waited == 2:
            break
    return model


@mistake(ENDED + "|" + BEHIND, ends_early=True)
def one_rank_has_fewer_batches(rank: int, wrap: Wrap):
    model = wrap(net())
    return train(model, sgd(model), batches(rank, 6 - 2 * rank))


@mistake(ENDED + "|" + BEHIND)
def one_rank_has_fewer_batches_and_then_averages_a_metric(rank: int, wrap: Wrap):
    model = wrap(net())
    train(model, sgd(model), batches(rank, 5 - rank))
    correct = torch.tensor(float(rank))
    dist.all_reduce(correct)
    return model


@mistake(ENDED + "|" + BEHIND)
def one_rank_has_fewer_batches_in_each_of_two_epochs(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for _ in range(2):
        train(model, optimizer, batches(rank, 4 - rank))
    return model


@mistake(ENDED, ends_early=True)
def a_rank_without_data_leaves_with_exit_code_0(rank: int, wrap: Wrap):
    model = wrap(net())
    files = ["a"] if rank == 0 else []
    if not files:
        sys.exit(0)
    return train(model, sgd(model), batches(rank))


@mistake(r"rank 1.*KeyError|KeyError|" + ENDED)
def a_rank_fails_while_it_loads_data(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for step, data in enumerate(batches(rank)):
        if rank == 1 and step == 2:
            raise KeyError("image_0042.png")
        train(model, optimizer, iter([data]))
    return model


@mistake(TURN + "|" + BEHIND)
def two_losses_are_backed_in_random_order(rank: int, wrap: Wrap):
    first, second = wrap(net(seed=1)), wrap(net(seed=2))
    optimizers = [sgd(first), sgd(second)]
    draw = random.Random(rank)
    for data in batches(rank):
        losses = [loss_of(first, data), loss_of(second, data)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        for loss in draw.sample(losses, 2):
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return nn.ModuleList([first, second])


@mistake(TURN + "|" + BEHIND)
def the_discriminator_trains_at_random(rank: int, wrap: Wrap):
    torch.manual_seed(0)
    generator, discriminator = wrap(nn.Linear(4, 4)), wrap(nn.Linear(4, 1))
    optimizers = sgd(generator), sgd(discriminator)
    draw = random.Random(rank)
    for inputs, _labels in batches(rank, 8):
        if draw.random() < 0.5:
            optimizers[1].zero_grad()
            nn.functional.softplus(discriminator(generator(inputs).detach())).mean().backward()
            optimizers[1].step()
        optimizers[0].zero_grad()
        nn.functional.softplus(-discriminator(generator(inputs))).mean().backward()
        optimizers[0].step()
    return nn.ModuleList([generator, discriminator])


@mistake(TURN + r"|parameter")
def models_are_wrapped_in_the_order_of_a_set(rank: int, wrap: Wrap):
    names = ["encoder", "decoder"] if rank == 0 else ["decoder", "encoder"]  # as a set of str may have it
    nets = {name: net(seed=len(name)) for name in ("encoder", "decoder")}
    torch.nn.init.ones_(nets["decoder"][0].weight)
    models = {name: wrap(nets[name]) for name in names}
    both = nn.ModuleList([models["encoder"], models["decoder"]])
    optimizer = sgd(both)
    for data in batches(rank):
        optimizer.zero_grad()
        sum(loss_of(models[name], data) for name in names).backward()
        optimizer.step()
    return both


@mistake(TURN + r"|parameter")
def models_of_equal_values_are_wrapped_in_the_order_of_a_set(rank: int, wrap: Wrap):
    names = ["encoder", "decoder"] if rank == 0 else ["decoder", "encoder"]  # as a set of str may have it
    models = {name: wrap(net()) for name in names}
    optimizers = [sgd(models[name]) for name in sorted(models)]
    signs = {"encoder": 1.0, "decoder": -0.1}
    for data in batches(rank):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(signs[name] * loss_of(models[name], data) for name in models).backward()
        for optimizer in optimizers:
            optimizer.step()
    return nn.ModuleList([models["encoder"], models["decoder"]])


@mistake(r"eval|train\(\)|mode|buffer|" + BEHIND)
def train_mode_is_forgotten_on_rank_0_after_validation(rank: int, wrap: Wrap):
    model = wrap(net(norm=True))
    optimizer = sgd(model)
    for step, data in enumerate(batches(rank)):
        train(model, optimizer, iter([data]))
        if step == 2 and rank == 0:
            model.eval()
            with torch.no_grad():
                model(data[0])
    return model


@mistake(r"forward|buffer|train|mode|" + BEHIND)
def rank_0_runs_one_more_forward_for_the_graph_of_the_model(rank: int, wrap: Wrap):
    model = wrap(net(norm=True))
    optimizer = sgd(model)
    for step, data in enumerate(batches(rank)):
        if step == 1 and rank == 0:
            model(data[0])  # writer.add_graph(model, inputs)
        train(model, optimizer, iter([data]))
    return model


@mistake(r"join|" + BEHIND + "|" + ENDED)
def only_the_rank_with_less_data_joins(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    if rank == 1:
        with model.join():
            train(model, optimizer, batches(rank, 3))
    else:
        train(model, optimizer, batches(rank, 5))
    return model


@mistake(BEHIND + "|no_sync")
def no_sync_is_entered_on_the_rank_with_long_batches(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for step, data in enumerate(batches(rank, 8)):
        is_long = rank == 0 and step % 3 == 0
        if is_long:
            with model.no_sync():
                loss_of(model, data).backward()
            continue
        loss_of(model, data).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@mistake(BEHIND)
def a_broken_batch_of_a_loader_is_left_out(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    data = dataset(64)
    loader = DataLoader(data, batch_size=2, sampler=ls.DistributedSampler(data, shuffle=False))
    for step, each in enumerate(loader):
        if rank == 1 and step == 4:
            print("cannot decode this batch")
            continue
        train(model, optimizer, iter([each]))
    return model


@mistake(r"layer 1 \(BatchNorm1d\).*evaluation mode", right=None)
def batch_norm_is_frozen_on_one_rank(rank: int, wrap: Wrap):
    model = wrap(net(norm=True))
    if rank == 1:
        model.module[1].eval()
    return train(model, sgd(model), batches(rank))


@mistake(r"autocast was on", right=None)
def autocast_is_on_on_one_rank(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for data in batches(rank):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=rank == 1):
            loss = loss_of(model, data)
        loss.backward()
        optimizer.step()
    return model


@mistake(r"depend on the parameters|rank 1", right=None)
def the_output_is_detached_on_one_rank(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for inputs, labels in batches(rank):
        outputs = model(inputs)
        if rank == 1:
            outputs = outputs.detach().requires_grad_()
        optimizer.zero_grad()
        nn.functional.cross_entropy(outputs, labels).backward()
        optimizer.step()
    return model
