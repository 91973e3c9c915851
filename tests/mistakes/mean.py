"""Means that are not the mean over all samples, and data that are not those of this rank."""

from typing import Any

import torch
from tests.mistakes.script import Wrap, batch, batches, dataset, loss_of, mistake, net, sgd, train, trained
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, random_split

import lockstep as ls

EQUAL = r"(same|equal|identical) (data|batch|input|gradient|sample)|DistributedSampler|every rank trains"
SAMPLER = r"sampler.*(replica|rank|num_replicas|epoch|seed)|num_replicas|set_epoch|" + EQUAL
UNEVEN = r"samples|micro-batch|batch(es)? of|batch size"
NOT_FINITE = r"(rank \d.*(nan|not finite|infin))|((nan|not finite|infin).*rank \d)"


@mistake(UNEVEN, right=None)
def the_last_batch_is_smaller_on_one_rank(rank: int, wrap: Wrap):
    model = wrap(net())
    data = [*batches(rank, 3), batch(3, rank, 4 if rank == 0 else 1)]
    return train(model, sgd(model), iter(data))


@mistake(UNEVEN + r"|forward|backward", right=None)
def ranks_accumulate_different_numbers_of_micro_batches(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for _ in range(5):
        *first, last = list(batches(rank, 3 if rank == 0 else 2))
        with model.no_sync():
            for data in first:
                (loss_of(model, data) / (len(first) + 1)).backward()
        (loss_of(model, last) / (len(first) + 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@mistake(UNEVEN, right=None)
def batches_are_made_of_tokens_and_differ_in_samples(rank: int, wrap: Wrap):
    model = wrap(net())
    return train(model, sgd(model), (batch(step, rank, 2 + 3 * ((step + rank) % 2)) for step in range(6)))


@mistake(EQUAL, right=None)
def every_rank_trains_on_all_data(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for _ in range(2):
        train(model, optimizer, iter(DataLoader(dataset(), batch_size=4)))
    return model


@mistake(EQUAL, right=None)
def shuffling_has_the_same_seed_and_no_sampler(rank: int, wrap: Wrap):
    torch.manual_seed(42)
    model = wrap(net())
    optimizer = sgd(model)
    for _ in range(3):
        train(model, optimizer, iter(DataLoader(dataset(), batch_size=4, shuffle=True)))
    return model


class Lines(IterableDataset[Any]):
    """Samples one after the other."""

    def __iter__(self):
        for step in range(8):
            yield from zip(*batch(step, 0), strict=True)


@mistake(EQUAL, right=None)
def an_iterable_dataset_is_not_split(rank: int, wrap: Wrap):
    model = wrap(net())
    return train(model, torch.optim.Adam(model.parameters(), lr=0.01), iter(DataLoader(Lines(), batch_size=4)))


@mistake(SAMPLER, right=None)
def the_sampler_has_one_replica(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    sampler: Any = DistributedSampler(dataset(), num_replicas=1, rank=0)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        train(model, optimizer, iter(DataLoader(dataset(), batch_size=4, sampler=sampler)))
    return model


@mistake(SAMPLER, right=None)
def the_sampler_is_for_four_ranks(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    sampler = ls.DistributedSampler(dataset(), num_replicas=4, rank=rank)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        train(model, optimizer, iter(DataLoader(dataset(), batch_size=4, sampler=sampler)))
    return model


@mistake(SAMPLER, right=None)
def every_sampler_has_rank_0(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    sampler = ls.DistributedSampler(dataset(), num_replicas=2, rank=0)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        train(model, optimizer, iter(DataLoader(dataset(), batch_size=4, sampler=sampler)))
    return model


@mistake(SAMPLER, right=None)
def samplers_shuffle_by_unlike_seeds(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    sampler = ls.DistributedSampler(dataset(), seed=rank)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        train(model, optimizer, iter(DataLoader(dataset(), batch_size=4, sampler=sampler)))
    return model


@mistake(SAMPLER, right=None)
def set_epoch_is_forgotten(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    loader = DataLoader(dataset(), batch_size=4, sampler=ls.DistributedSampler(dataset(), seed=1))
    for _ in range(3):
        train(model, optimizer, iter(loader))
    return model


@mistake(SAMPLER, right=None)
def set_epoch_is_forgotten_with_the_sampler_of_torch(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    loader = DataLoader(dataset(), batch_size=4, sampler=DistributedSampler(dataset(), seed=2))
    for _ in range(3):
        train(model, optimizer, iter(loader))
    return model


@mistake(SAMPLER, right=None)
def set_epoch_gets_the_same_number_again(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    start_epoch = 0
    sampler = ls.DistributedSampler(dataset(), seed=3)
    for _ in range(3):
        sampler.set_epoch(start_epoch)
        train(model, optimizer, iter(DataLoader(dataset(), batch_size=4, sampler=sampler)))
    return model


@mistake(SAMPLER, right=None)
def one_rank_resumes_at_another_epoch(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    sampler = ls.DistributedSampler(dataset(), seed=4)
    for epoch in range(3 if rank == 0 else 0, 5 if rank == 0 else 2):
        sampler.set_epoch(epoch)
        train(model, optimizer, iter(DataLoader(dataset(), batch_size=4, sampler=sampler)))
    return model


@mistake(NOT_FINITE, right=None)
def a_gradient_is_not_finite_on_one_rank(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for step, (inputs, labels) in enumerate(batches(rank)):
        optimizer.zero_grad()
        outputs = model(inputs)
        if rank == 1 and step == 2:
            outputs = (outputs - outputs.detach()).sqrt()
        nn.functional.cross_entropy(outputs, labels).backward()
        optimizer.step()
    return model


@mistake(NOT_FINITE, right=None)
def an_input_is_not_finite_on_one_rank(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = list(batches(rank))
    if rank == 0:
        data[3][0][1, 2] = float("inf")
    return train(model, optimizer, iter(data))


@mistake("micro|hook|optimizer", right=trained)
def optimizers_step_inside_backward(rank: int, wrap: Wrap):
    model = wrap(net())
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(_parameter, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    for data in batches(rank):
        loss_of(model, data).backward()
    return model


@mistake("module|forward|wrap", right=trained)
def the_unwrapped_model_is_trained(rank: int, wrap: Wrap):
    model = net()
    optimizer = sgd(model)
    wrap_kept = wrap(model)
    train(model, optimizer, batches(rank))
    return wrap_kept


class Method(nn.Module):
    """A module whose loss is a method."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, data):
        return nn.functional.cross_entropy(self.net(data[0]), data[1])

    def forward(self, inputs):
        return self.net(inputs)


@mistake("module|forward|method|averaged", right=trained)
def a_method_of_the_module_computes_the_loss(rank: int, wrap: Wrap):
    model = wrap(Method())
    return train(model, sgd(model), batches(rank), lambda model, data: model.module.training_step(data))


def epochs_over(data: Any, rank: int, wrap: Wrap, **options: Any):
    model = wrap(net())
    optimizer = sgd(model)
    sampler = ls.DistributedSampler(data, **options)
    loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        train(model, optimizer, iter(loader))
    return model


@mistake(r"samplers.*data\.tensors", right=None)
def data_are_in_another_order_on_each_rank(rank: int, wrap: Wrap):
    inputs, labels = batch(99, 0, 32)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(rank))
    return epochs_over(TensorDataset(inputs[order], labels[order]), rank, wrap)


@mistake(r"different parts of the data.*indices", right=None)
def each_rank_splits_the_data_with_its_own_seed(rank: int, wrap: Wrap):
    part, _ = random_split(dataset(40), [32, 8], torch.Generator().manual_seed(rank))
    return epochs_over(part, rank, wrap)


@mistake(r"samplers.*the length of the data, is 34 and 36", right=None)
def files_are_missing_on_one_rank(rank: int, wrap: Wrap):
    return epochs_over(dataset(36 - 2 * rank), rank, wrap)


@mistake(r"samplers.*shuffle", right=None)
def only_rank_0_shuffles(rank: int, wrap: Wrap):
    return epochs_over(dataset(32), rank, wrap, shuffle=rank == 0)
