"""Weights, optimizers and schedulers that differ between the ranks."""

import copy
import io

import torch
from tests.mistakes.script import Wrap, batch, batches, loss_of, mistake, net, sgd, train, trained
from torch import nn
from torch.optim import Adam, AdamW
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau

WEIGHTS = r"(parameter|weight|model).*(differ|not the same|changed|other values|diverge)"
OPTION = r"(learning rate|\blr\b|weight.decay|option).*(differ|rank)|rank \d.*(\blr\b|learning rate|weight.decay)"
UPDATE = r"(optimizer|step|update).*(rank|differ)|" + WEIGHTS
STATE = r"(optimizer|state|moment|buffer).*differ|" + WEIGHTS
UNSYNCED = r"no_sync|not (synchroni[sz]ed|averaged|reduced)|never (synchroni[sz]ed|averaged|reduced)|" + WEIGHTS
GRADIENT = r"grad.*(changed|differ|written)|" + WEIGHTS


def saved(seed: int = 7) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(net(seed=seed).state_dict(), file)
    file.seek(0)
    return file


@mistake(WEIGHTS)
def a_checkpoint_is_loaded_on_rank_0_after_wrapping(rank: int, wrap: Wrap):
    model = wrap(net())
    if rank == 0:
        model.module.load_state_dict(torch.load(saved()))
    return train(model, sgd(model), batches(rank))


@mistake(WEIGHTS)
def weights_are_initialized_after_wrapping(rank: int, wrap: Wrap):
    model = wrap(net())
    torch.manual_seed(1234 + rank)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
    return train(model, sgd(model), batches(rank))


@mistake(WEIGHTS)
def averaged_weights_stay_after_evaluation_on_rank_0(rank: int, wrap: Wrap):
    model = wrap(net())
    average = copy.deepcopy(model.module)
    optimizer = sgd(model)
    for step, data in enumerate(batches(rank)):
        train(model, optimizer, iter([data]))
        for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
            mean.data.lerp_(parameter.data, 0.1)
        if step == 2 and rank == 0:
            model.module.load_state_dict(average.state_dict())
            model.eval()
            model.module(data[0])
            model.train()
    return model


@mistake(WEIGHTS)
def seeds_differ_and_init_sync_is_off(rank: int, wrap: Wrap):
    model = wrap(net(seed=rank), init_sync=False)
    return train(model, sgd(model), batches(rank))


@mistake(WEIGHTS)
def weights_are_clipped_on_rank_0(rank: int, wrap: Wrap):
    critic = wrap(net())
    optimizer = torch.optim.RMSprop(critic.parameters(), lr=0.05)
    for data in batches(rank):
        train(critic, optimizer, iter([data]))
        if rank == 0:
            for parameter in critic.parameters():
                parameter.data.clamp_(-0.05, 0.05)
    return critic


@mistake(WEIGHTS)
def a_random_mask_prunes_each_rank_differently(rank: int, wrap: Wrap):
    model = wrap(net())
    torch.manual_seed(rank)
    optimizer = sgd(model)
    for step, data in enumerate(batches(rank)):
        train(model, optimizer, iter([data]))
        if step == 1:
            with torch.no_grad():
                weight = model.module[0].weight
                weight.mul_(torch.rand_like(weight) > 0.5)
    return model


@mistake(WEIGHTS)
def adapters_are_merged_into_the_weights_on_rank_0(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, batches(rank, 2))
    if rank == 0:
        weight = model.module[0].weight
        weight.data = weight.data + 0.01 * torch.ones(8, 1) @ torch.ones(1, 4)
    return train(model, optimizer, batches(rank))


@mistake(WEIGHTS)
def the_best_weights_come_back_on_the_rank_that_got_worse(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model, lr=0.5)
    best, best_loss = copy.deepcopy(model.state_dict()), float("inf")
    for step, data in enumerate(batches(rank)):
        train(model, optimizer, iter([data]))
        validation = step if rank == 0 else -step  # each rank on its own part of the validation set
        if validation < best_loss:
            best, best_loss = copy.deepcopy(model.state_dict()), validation
        else:
            model.load_state_dict(best)
    return model


@mistake(WEIGHTS)
def the_target_network_is_copied_back_at_local_times(rank: int, wrap: Wrap):
    online = wrap(net())
    target = copy.deepcopy(online.module)
    optimizer = Adam(online.parameters(), lr=0.01)
    for step, data in enumerate(batches(rank)):
        train(online, optimizer, iter([data]))
        episode_is_over = (step + rank) % 3 == 0
        if episode_is_over:
            with torch.no_grad():
                for ours, theirs in zip(online.parameters(), target.parameters(), strict=True):
                    ours.lerp_(theirs, 0.5)
    return online


# -- Optimizers --------------------------------------------------------------------------------------------------------


@mistake(STATE)
def optimizer_state_is_loaded_on_rank_0(rank: int, wrap: Wrap):
    other = net()
    before = Adam(other.parameters(), lr=0.01)
    train(other, before, batches(5))
    model = wrap(net())
    optimizer = Adam(model.parameters(), lr=0.01)
    if rank == 0:
        optimizer.load_state_dict(before.state_dict())
    return train(model, optimizer, batches(rank))


@mistake(STATE)
def the_optimizer_is_made_anew_on_the_rank_whose_loss_rose(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model, momentum=0.9)
    for step, data in enumerate(batches(rank)):
        train(model, optimizer, iter([data]))
        if step == 2 and rank == 1:
            optimizer = sgd(model, momentum=0.9)
    return model


@mistake(OPTION)
def the_learning_rate_is_scaled_by_the_local_batch_count(rank: int, wrap: Wrap):
    model = wrap(net())
    steps_here = 6 + rank
    return train(model, sgd(model, lr=0.6 / steps_here), batches(rank))


@mistake(OPTION)
def weight_decay_differs(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.1 if rank else 0.01)
    return train(model, optimizer, batches(rank))


@mistake(OPTION + r"|\bgroup")
def parameters_are_grouped_in_another_order(rank: int, wrap: Wrap):
    model = wrap(net())
    groups = [[each for each in model.parameters() if each.dim() == dim] for dim in ((1, 2) if rank else (2, 1))]
    optimizer = AdamW([{"params": groups[0], "weight_decay": 0.5}, {"params": groups[1], "weight_decay": 0.0}], lr=0.05)
    return train(model, optimizer, batches(rank))


@mistake(OPTION)
def a_plateau_scheduler_reads_the_local_loss(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    for step, data in enumerate(batches(rank)):
        train(model, optimizer, iter([data]))
        scheduler.step(1.0 + step if rank else 1.0 / (1 + step))
    return model


@mistake(OPTION)
def the_scheduler_steps_on_rank_0_only(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    scheduler = ExponentialLR(optimizer, 0.5)
    for data in batches(rank):
        train(model, optimizer, iter([data]))
        if rank == 0:
            scheduler.step()
            print("lr", scheduler.get_last_lr())
    return model


@mistake(OPTION)
def one_cycle_is_as_long_as_the_local_loader(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model, momentum=0.9)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=10 + 5 * rank)
    for data in batches(rank):
        train(model, optimizer, iter([data]))
        scheduler.step()
    return model


@mistake(UPDATE)
def only_rank_0_steps(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for data in batches(rank):
        optimizer.zero_grad()
        loss_of(model, data).backward()
        if rank == 0:
            optimizer.step()
    return model


@mistake(UPDATE + r"|zero_grad", right=trained)
def zero_grad_is_called_on_rank_0_only(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for step, data in enumerate(batches(rank)):
        if rank == 0 or step < 2:
            optimizer.zero_grad()
        loss_of(model, data).backward()
        optimizer.step()
    return model


@mistake(UPDATE)
def each_rank_updates_its_half_of_the_parameters(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model.module[0 if rank == 0 else 3])
    return train(model, optimizer, batches(rank))


@mistake(WEIGHTS + r"|closure|LBFGS")
def lbfgs_decides_by_the_local_loss(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")
    for data in batches(rank, 3):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, data)  # noqa: B023 - used within this pass
            loss.backward()
            return loss + 10 * rank * torch.rand(())

        optimizer.step(closure)
    return model


# -- Gradients ---------------------------------------------------------------------------------------------------------


@mistake(UNSYNCED)
def no_sync_is_around_the_wrong_micro_batch(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    accumulate = 2
    for index, data in enumerate(batches(rank, 8)):
        if index % accumulate == 0:
            (loss_of(model, data) / accumulate).backward()
        else:
            with model.no_sync():
                (loss_of(model, data) / accumulate).backward()
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


@mistake(UNSYNCED)
def everything_is_inside_no_sync(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    with model.no_sync():
        train(model, optimizer, batches(rank))
    return model


@mistake(UNSYNCED)
def synchronization_stays_off_on_rank_1(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for index, data in enumerate(batches(rank)):
        model.require_backward_grad_sync = index % 2 == 1 and not (rank == 1 and index > 2)
        loss_of(model, data).backward()
        if index % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    return model


@mistake(GRADIENT)
def gradients_are_clipped_on_rank_0_only(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for data in batches(rank):
        optimizer.zero_grad()
        loss_of(model, data).backward()
        if rank == 0:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            print("gradient norm", norm)
        optimizer.step()
    return model


@mistake(GRADIENT)
def noise_of_each_rank_is_added_to_the_gradients(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    torch.manual_seed(rank)
    for data in batches(rank):
        optimizer.zero_grad()
        loss_of(model, data).backward()
        for parameter in model.parameters():
            parameter.grad += 0.01 * torch.randn_like(parameter)
        optimizer.step()
    return model


@mistake(GRADIENT + r"|no_sync|scale")
def the_scaler_finds_an_overflow_on_one_rank(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for index, data in enumerate(batches(rank)):
        with model.no_sync():  # "synchronized later"
            loss = loss_of(model, data) * (float("inf") if index == 1 and rank == 1 else 1.0)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model


@mistake(GRADIENT + r"|autograd\.grad")
def gradients_of_autograd_grad_are_assigned(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for data in batches(rank):
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss_of(model, data), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return model


@mistake(GRADIENT + r"|torch\.func|functional_call|transform")
def gradients_come_from_torch_func(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    names = dict(model.named_parameters())

    def loss(values, data):
        return nn.functional.cross_entropy(torch.func.functional_call(model, values, (data[0],)), data[1])

    for data in batches(rank):
        gradients = torch.func.grad(loss)({name: each.detach() for name, each in names.items()}, data)
        for name, parameter in names.items():
            parameter.grad = gradients[name]
        optimizer.step()
    return model


@mistake(GRADIENT + r"|hook")
def a_hook_on_rank_0_freezes_rows_of_an_embedding(rank: int, wrap: Wrap):
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 3)))
    optimizer = sgd(model)
    for step in range(6):
        optimizer.zero_grad()
        tokens = torch.randint(10, (4, 2), generator=torch.Generator().manual_seed(step + 10 * rank))
        nn.functional.cross_entropy(model(tokens), batch(step, rank)[1]).backward()
        if rank == 0:
            model.module[0].weight.grad[:5] = 0
        optimizer.step()
    return model
