"""Scripts without a mistake: they must be right, and nothing may be reported."""

import copy
import warnings

import torch
import torch.distributed as dist
from tests.mistakes.script import (
    SAME,
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
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lockstep as ls


@correct(trained)
def plain_training(rank: int, wrap: Wrap):
    model = wrap(net())
    return train(model, sgd(model), batches(rank))


def accumulated():
    model = net()
    optimizer = sgd(model)
    for index, data in enumerate(whole(8)):
        (loss_of(model, data) / 4).backward()
        if index % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    return model


@correct(accumulated)
def accumulation_with_no_sync(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for index, data in enumerate(batches(rank, 8)):
        if index % 4 < 3:
            with model.no_sync():
                (loss_of(model, data) / 4).backward()
        else:
            (loss_of(model, data) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def clipped():
    model = net()
    optimizer = sgd(model)
    for data in whole():
        optimizer.zero_grad()
        loss_of(model, data).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return model


@correct(clipped)
def clipping_and_a_scaler(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for data in batches(rank):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, data)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    return model


@correct(SAME)
def an_average_of_weights_on_all_ranks_and_warm_up(rank: int, wrap: Wrap):
    model = wrap(net(dropout=0.2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    warm_up, decay = LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, 4)
    scheduler = SequentialLR(optimizer, [warm_up, decay], [2])
    for data in batches(rank):
        train(model, optimizer, iter([data]))
        scheduler.step()
        average.update_parameters(model.module)
    backup = copy.deepcopy(model.module.state_dict())
    model.module.load_state_dict(average.module.state_dict())
    model.eval()
    with torch.no_grad():
        model(batch(0, rank)[0])
    model.module.load_state_dict(backup)
    model.train()
    train(model, optimizer, batches(rank, 2))
    return nn.ModuleList([model, average])


@correct(SAME)
def a_generator_and_a_discriminator(rank: int, wrap: Wrap):
    torch.manual_seed(0)
    generator, discriminator = wrap(nn.Linear(4, 4)), wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizers = torch.optim.Adam(generator.parameters()), torch.optim.Adam(discriminator.parameters())
    for inputs, _labels in batches(rank):
        real, fake = inputs, generator(inputs)
        optimizers[1].zero_grad()
        score = nn.functional.softplus(-discriminator(real)) + nn.functional.softplus(discriminator(fake.detach()))
        score.mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        nn.functional.softplus(-discriminator(fake)).mean().backward()
        optimizers[0].step()
    return nn.ModuleList([generator, discriminator])


@correct(SAME)
def a_gradient_penalty(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for inputs, labels in batches(rank):
        inputs.requires_grad_()
        outputs = model(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        optimizer.zero_grad()
        (nn.functional.cross_entropy(outputs, labels) + slope.square().mean()).backward()
        optimizer.step()
    return model


@correct(SAME)
def meta_learning_with_create_graph(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for (inputs, labels), (later, answers) in zip(batches(rank), batches(rank + 10), strict=True):
        optimizer.zero_grad()
        names = [name for name, _ in model.named_parameters()]
        parameters = list(model.parameters())
        inner = nn.functional.cross_entropy(model(inputs), labels)
        slopes = torch.autograd.grad(inner, parameters, create_graph=True)
        adapted = {name: each - 0.1 * slope for name, each, slope in zip(names, parameters, slopes, strict=True)}
        outputs = torch.func.functional_call(model, adapted, (later,))
        nn.functional.cross_entropy(outputs, answers).backward()
        optimizer.step()
    return model


class Checkpointed(nn.Module):
    """A model that computes its first half again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, inputs):
        return self.net[2:](checkpoint(self.net[:2], inputs, use_reentrant=False))


@correct(lambda: [*trained().parameters()])
def gradient_checkpointing(rank: int, wrap: Wrap):
    model = wrap(Checkpointed())
    return [*train(model, sgd(model), batches(rank)).parameters()]


@correct(SAME)
def freezing_and_unfreezing(rank: int, wrap: Wrap):
    model = wrap(net())
    model.module[0].requires_grad_(False)
    train(model, sgd(model), batches(rank, 3))
    model.module[0].requires_grad_(True)
    return train(model, sgd(model, lr=0.01), batches(rank, 3))


@correct(SAME)
def uneven_data_within_join(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    with model.join():
        train(model, optimizer, batches(rank, 5 - 2 * rank))
    return model


class Packed(nn.Module):
    """A model of tokens that are packed into one row; lengths of sequences come beside them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)

    def forward(self, tokens, lengths):
        parts = self.embedding(tokens).split(lengths.tolist())
        return self.head(torch.cat([part.cumsum(0) for part in parts]))


@correct(SAME)
def packed_tokens_weighted_by_their_number(rank: int, wrap: Wrap):
    model = wrap(Packed())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(5):
        lengths = torch.tensor([3, 4 + rank] if step % 2 else [7])
        tokens = torch.randint(11, (int(lengths.sum()),), generator=torch.Generator().manual_seed(step + 10 * rank))
        total = lengths.sum().float()
        dist.all_reduce(total)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens, lengths), tokens, reduction="sum")
        (loss * 2 / total).backward()
        optimizer.step()
    return model


def synced():
    model = net(norm=True)
    return train(model, sgd(model), whole())


@correct(synced)
def synchronized_batch_norm(rank: int, wrap: Wrap):
    model = net(norm=True)
    model[1] = ls.SyncBatchNorm.convert_sync_batchnorm(model[1])
    model = wrap(model)
    return train(model, sgd(model), batches(rank))


@correct(SAME)
def epochs_with_sampler_and_evaluation_on_every_rank(rank: int, wrap: Wrap):
    model = wrap(net(norm=True, dropout=0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = ls.DistributedSampler(dataset(), seed=5)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        train(model, optimizer, iter(DataLoader(dataset(), batch_size=4, sampler=sampler)))
        model.eval()
        correct_and_all = torch.zeros(2)
        with torch.no_grad():
            for inputs, labels in DataLoader(
                dataset(13), batch_size=4, sampler=ls.DistributedSampler(dataset(13), pad=False, shuffle=False)
            ):
                correct_and_all += torch.tensor([(model(inputs).argmax(1) == labels).sum(), len(labels)])
        dist.all_reduce(correct_and_all)
        model.train()
        if rank == 0:
            torch.save(model.module.state_dict(), "/dev/null")
        dist.barrier()
    return model


@correct(SAME)
def rank_0_evaluates_alone(rank: int, wrap: Wrap):
    model = wrap(net(norm=True))
    optimizer = sgd(model, momentum=0.9)
    for _ in range(2):
        train(model, optimizer, batches(rank, 3))
        if rank == 0:
            model.eval()
            with torch.no_grad():
                model.module(batch(50, 0)[0])
            model.train()
        dist.barrier()
    return model


@correct(SAME)
def a_learning_rate_that_rank_0_sends_and_a_shared_decision_to_stop(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for step, data in enumerate(batches(rank)):
        train(model, optimizer, iter([data]))
        rate = [0.1 / (step + 1)] if rank == 0 else [None]
        dist.broadcast_object_list(rate, src=0)
        optimizer.param_groups[0]["lr"] = rate[0]
        stops = torch.tensor(float(step == 4 and rank == 1))
        dist.all_reduce(stops, op=dist.ReduceOp.MAX)
        if stops:
            break
    return model


@correct(SAME)
def ranks_use_different_experts(rank: int, wrap: Wrap):
    torch.manual_seed(0)
    experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))
    model = wrap(Routed(experts), find_unused_parameters=True)
    return train(model, torch.optim.Adam(model.parameters(), lr=0.01), batches(rank))


class Routed(nn.Module):
    """A model that uses another expert in each forward."""

    def __init__(self, experts: nn.ModuleList) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, inputs):
        return self.experts[int(inputs.sum().abs() * 10) % 3](inputs)


@correct(trained)
def a_model_that_is_compiled(rank: int, wrap: Wrap):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = wrap(net())
        compiled = torch.compile(model, backend="eager")
        train(compiled, sgd(model), batches(rank))
    return model


@correct(SAME)
def a_checkpoint_is_loaded_on_every_rank(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, batches(rank, 3))
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, batches(rank, 3))
    model.load_state_dict(state[0])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer.load_state_dict(state[1])
    return train(model, optimizer, batches(rank, 3))


@correct(trained)
def gradients_are_averaged_by_hand(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for data in batches(rank):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, data).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        optimizer.step()
    return model


@correct(SAME)
def scalars_are_reduced_in_their_shapes(rank: int, wrap: Wrap):
    model = train(wrap(net()), torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1), iter(()))
    total = torch.ones(()) if rank == 0 else torch.ones(1)
    dist.all_reduce(total)
    return [*model.parameters(), total.reshape(1)]
