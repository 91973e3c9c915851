"""Scripts without a mistake that change much after wrapping: they must be right, and nothing may be reported."""

import copy
import io

import torch
import torch.distributed as dist
from tests.mistakes.script import SAME, Wrap, batch, batches, correct, loss_of, net, sgd, train, trained
from tests.mistakes.settings import Unused
from torch import nn
from torch.utils.checkpoint import checkpoint


@correct(trained)
def rank_0_looks_at_the_gradients_of_inputs(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for data in batches(rank):
        train(model, optimizer, iter([data]))
        if rank == 0:
            model.eval()
            inputs = batch(60, 0)[0].requires_grad_()
            torch.autograd.grad(model(inputs).max(1).values.sum(), inputs)
            model.train()
    return model


class Tied(nn.Module):
    """A model whose last layer can share the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(4, 3)

    def forward(self, inputs):
        return self.middle(torch.tanh(self.first(inputs))) + self.last(inputs)


@correct(SAME)
def weights_are_tied_on_all_ranks_after_wrapping(rank: int, wrap: Wrap):
    model = wrap(Tied())
    train(model, sgd(model), batches(rank, 3))
    model.module.last.weight = model.module.first.weight
    return train(model, sgd(model), batches(rank, 5))


@correct(SAME)
def the_model_becomes_double_on_all_ranks(rank: int, wrap: Wrap):
    model = wrap(net())
    train(model, sgd(model), batches(rank, 3))
    model.double()
    return train(model, sgd(model), ((inputs.double(), labels) for inputs, labels in batches(rank, 5)))


@correct(SAME)
def rates_differ_by_layer_and_momentum_is_cycled(rank: int, wrap: Wrap):
    model = wrap(net())
    groups = [{"params": model.module[place].parameters(), "lr": 0.1 / (1 + place)} for place in (0, 3)]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    for data in batches(rank, 8):
        train(model, optimizer, iter([data]))
        scheduler.step()
    return model


class Checkpointed(nn.Module):
    """A model that computes its middle anew in the backward, inside another backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, inputs):
        return self.last(
            checkpoint(lambda hidden: torch.tanh(self.middle(hidden)), self.first(inputs), use_reentrant=True)
        )


@correct(SAME)
def reentrant_checkpointing_with_accumulation(rank: int, wrap: Wrap):
    model = wrap(Checkpointed())
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, batch(2 * step, rank)).backward()
        loss_of(model, batch(2 * step + 1, rank)).backward()
        optimizer.step()
    return model


@correct(SAME)
def rank_0_saves_and_every_rank_loads(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model, momentum=0.9)
    train(model, optimizer, batches(rank, 3))
    sent: list[bytes] = [b""]
    if rank == 0:
        stream = io.BytesIO()
        torch.save(
            {"model": {**model.state_dict(), "module.extra": torch.ones(1)}, "optimizer": optimizer.state_dict()},
            stream,
        )
        sent = [stream.getvalue()]
    dist.broadcast_object_list(sent, 0)
    state = torch.load(io.BytesIO(sent[0]))
    model.load_state_dict(state["model"], strict=False)
    optimizer.load_state_dict(state["optimizer"])
    return train(model, optimizer, batches(rank, 5))


@correct(SAME)
def layers_are_unfrozen_one_by_one(rank: int, wrap: Wrap):
    model = wrap(net())
    model.module[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.module[3].parameters(), 0.1)
    train(model, optimizer, batches(rank, 3))
    model.module[0].requires_grad_(True)
    optimizer.add_param_group({"params": model.module[0].parameters(), "lr": 0.01})
    return train(model, optimizer, batches(rank, 6))


@correct(SAME)
def dropout_has_another_seed_on_each_rank(rank: int, wrap: Wrap):
    model = wrap(net(dropout=0.5))
    torch.manual_seed(100 + rank)
    return train(model, sgd(model), batches(rank, 8))


@correct(SAME)
def unused_parameters_decay_on_all_ranks(rank: int, wrap: Wrap):
    model = wrap(Unused(), find_unused_parameters=True)
    optimizer = sgd(model, weight_decay=0.1)
    for data in batches(rank, 6):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, data).backward()
        optimizer.step()
    return model


@correct(trained)
def the_copy_that_is_evaluated_is_thrown_away(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for data in batches(rank):
        train(model, optimizer, iter([data]))
        kept = copy.deepcopy(model.module).eval()
        with torch.no_grad():
            loss_of(kept, batch(60, rank))
    return model


@correct(SAME)
def scores_are_gathered_as_objects_in_each_epoch(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for epoch in range(3):
        train(model, optimizer, (batch(3 * epoch + step, rank) for step in range(3)))
        with torch.no_grad():
            score = loss_of(model.eval(), batch(80 + epoch, rank)).item()
        model.train()
        scores = [0.0, 0.0]
        dist.all_gather_object(scores, score)
        scheduler.step(sum(scores))
    return model
