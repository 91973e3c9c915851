"""Mistakes in what a rank is told: options of the wrapper or optimizer that differ, and changes after wrapping."""

import pickle

import torch
import torch.distributed as dist
from tests.mistakes.collectives import CALLS
from tests.mistakes.models import BUCKETS, DIFFERS, OUTSIDE
from tests.mistakes.out_of_step import BEHIND, TURN
from tests.mistakes.replicas import GRADIENT, OPTION, STATE, UPDATE, WEIGHTS
from tests.mistakes.script import (
    SAME,
    WORLD_SIZE,
    Wrap,
    batch,
    batches,
    loss_of,
    mistake,
    net,
    sgd,
    train,
    trained,
    whole,
)
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.nn.utils.parametrizations import weight_norm

SETTING = r"(option|argument|setting|compare|nonfinite|on_skip|mixed|find_unused|skip_all).*(rank|differ)|" + BUCKETS


@mistake(SETTING + "|" + OPTION)
def comparing_is_off_on_one_rank_and_the_learning_rate_differs(rank: int, wrap: Wrap):
    options = {} if wrap.__module__.startswith("torch") else {"compare": rank == 0}
    model = wrap(net(), **options)
    return train(model, sgd(model, lr=0.1 * (1 + rank)), batches(rank))


@mistake(SETTING, right=None)
def steps_that_are_not_finite_are_left_out_on_one_rank(rank: int, wrap: Wrap):
    options = {} if wrap.__module__.startswith("torch") else {"nonfinite": "skip" if rank == 0 else "stop"}
    model = wrap(net(), **options)
    return train(model, sgd(model), batches(rank))


@mistake(SETTING, right=None)
def mixed_precision_is_on_on_one_rank(rank: int, wrap: Wrap):
    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if rank else None
    model = wrap(net(), mixed_precision=precision)
    return train(model, sgd(model), batches(rank))


@mistake(SETTING + "|" + CALLS, right=trained)
def unused_parameters_are_looked_for_on_one_rank(rank: int, wrap: Wrap):
    model = wrap(net(), find_unused_parameters=rank == 1)
    return train(model, sgd(model), batches(rank))


@mistake(SETTING + "|" + CALLS, right=trained)
def buckets_without_gradients_are_left_out_on_one_rank(rank: int, wrap: Wrap):
    model = wrap(net(), skip_all_reduce_unused_params=rank == 1)
    return train(model, sgd(model), batches(rank))


@mistake(SETTING + "|" + BEHIND)
def skipped_batches_are_zeros_on_one_rank_only(rank: int, wrap: Wrap):
    options = {} if wrap.__module__.startswith("torch") else {"on_skip": "zeros" if rank else "error"}
    model = wrap(net(), **options)
    optimizer = sgd(model)
    for step, data in enumerate(batches(rank)):
        loss = loss_of(model, data)
        if rank == 0 and step == 2:
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@mistake(OPTION + "|" + UPDATE)
def optimizers_are_of_another_kind_on_one_rank(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model) if rank == 0 else torch.optim.RMSprop(model.parameters(), lr=0.1)
    return train(model, optimizer, batches(rank))


@mistake(r"momentum.*(differ|rank)|" + OPTION)
def momentum_is_cycled_on_one_rank(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model, momentum=0.9)
    for step, data in enumerate(batches(rank)):
        if rank == 1:
            optimizer.param_groups[0]["momentum"] = 0.9 - 0.01 * step
        train(model, optimizer, iter([data]))
    return model


@mistake(UPDATE)
def a_parameter_leaves_the_optimizer_on_one_rank(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for step, data in enumerate(batches(rank, 12)):
        if rank == 1 and step == 3:
            optimizer.param_groups[0]["params"].pop()
        train(model, optimizer, iter([data]))
    return model


@mistake(STATE)
def the_state_of_the_optimizer_is_cleared_on_one_rank(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model, momentum=0.9)
    for step, data in enumerate(batches(rank, 12)):
        if rank == 1 and step == 4:
            optimizer.state.clear()
        train(model, optimizer, iter([data]))
    return model


@mistake(r"frozen|unfrozen|" + DIFFERS + "|" + WEIGHTS)
def a_layer_is_frozen_between_forward_and_backward_on_one_rank(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for step, data in enumerate(batches(rank, 8)):
        loss = loss_of(model, data)
        if rank == 1 and step == 3:
            model.module[0].requires_grad_(False)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@mistake(TURN + "|" + OUTSIDE + r"|in no optimizer|copy")
def rank_0_reloads_the_whole_wrapper(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for step, data in enumerate(batches(rank, 12)):
        if rank == 0 and step == 4:
            model = pickle.loads(pickle.dumps(model))
        train(model, optimizer, iter([data]))
    return model


@mistake(OUTSIDE + r"|copy|replaced|no gradients", right=None)
def weights_are_normalized_after_the_optimizer_was_made(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    weight_norm(model.module[0])
    return train(model, optimizer, batches(rank, 8))


@mistake(DIFFERS + "|" + WEIGHTS)
def weights_are_normalized_on_one_rank(rank: int, wrap: Wrap):
    model = wrap(net())
    if rank == 1:
        weight_norm(model.module[0])
    return train(model, sgd(model), batches(rank))


@mistake(WEIGHTS)
def weights_are_clamped_through_data_on_one_rank(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for data in batches(rank, 12):
        train(model, optimizer, iter([data]))
        if rank == 1:
            for parameter in model.parameters():
                parameter.data.clamp_(-0.2, 0.2)
    return model


class Unused(nn.Module):
    """A model with a layer that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = net(), net(seed=3)

    def forward(self, inputs):
        return self.used(inputs)


@mistake(GRADIENT + "|" + UPDATE)
def unused_parameters_have_zeros_on_one_rank(rank: int, wrap: Wrap):
    model = wrap(Unused(), find_unused_parameters=True)
    optimizer = sgd(model, weight_decay=0.1)
    if rank == 1:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    for data in batches(rank, 12):
        optimizer.zero_grad(set_to_none=rank == 0)
        loss_of(model, data).backward()
        optimizer.step()
    return model


@mistake(r"buffer|" + DIFFERS + "|" + CALLS)
def a_buffer_is_added_on_one_rank_after_wrapping(rank: int, wrap: Wrap):
    model = wrap(net(norm=True))
    if rank == 1:
        model.module.register_buffer("seen", torch.zeros(5))
    return train(model, sgd(model), batches(rank))


@mistake(r"buffer|" + DIFFERS + "|" + CALLS)
def a_buffer_is_wider_on_one_rank_after_wrapping(rank: int, wrap: Wrap):
    module = net()
    module.register_buffer("queue", torch.zeros(8, 2))
    model = wrap(module)
    if rank == 1:
        model.module.queue = torch.zeros(8, 3)
    return train(model, sgd(model), batches(rank))


@mistake(r"autograd|gradient.*all_reduce|all_reduce.*gradient", right=trained)
def the_averaged_loss_is_backed(rank: int, wrap: Wrap):
    def averaged(model, data):
        loss = loss_of(model, data)
        dist.all_reduce(loss)
        return loss / WORLD_SIZE

    model = wrap(net())
    return train(model, sgd(model), batches(rank), averaged)


@mistake(DIFFERS + "|" + WEIGHTS)
def another_part_of_the_model_is_wrapped_on_one_rank(rank: int, wrap: Wrap):
    module = net()
    if rank == 0:
        model = wrap(module)
    else:
        module[0] = wrap(module[0])
        model = module
    return train(model, sgd(model), batches(rank))


@mistake(BEHIND)
def one_rank_warms_up_before_the_loop(rank: int, wrap: Wrap):
    model = wrap(net())
    if rank == 1:
        loss_of(model, batch(70, rank)).backward()
        model.zero_grad()
    return train(model, sgd(model), batches(rank))


def clamped():
    model = net()
    optimizer = sgd(model)
    for data in whole():
        optimizer.zero_grad()
        loss_of(model, data).backward()
        for parameter in model.parameters():
            parameter.grad.clamp_(-0.02, 0.02)
        optimizer.step()
    return model


@mistake(r"hook", right=clamped)
def a_hook_clamps_the_gradients_of_each_rank(rank: int, wrap: Wrap):
    model = wrap(net())
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    return train(model, sgd(model), batches(rank))


@mistake(SETTING, right=SAME)
def buffers_are_sent_at_the_start_on_one_rank(rank: int, wrap: Wrap):
    model = wrap(net(norm=True), init_sync=rank == 0)
    return train(model, sgd(model), batches(rank))
