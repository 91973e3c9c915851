"""Collectives that the ranks call in another order, with other arguments, or not at all."""

import torch
import torch.distributed as dist
from tests.mistakes.script import Wrap, batches, mistake, net, sgd, train

ENDED = r"rank \d.*(exit|ended|left|finished|lost|gone|closed)|connection (closed|reset)"
CALLS = r"rank \d.*(all_reduce|all_gather|barrier|broadcast|gather|reduce|backward|forward)|mismatch|" + ENDED
SHAPES = r"shape|size|numel|elements|length|\[\d"


@mistake(CALLS)
def rank_0_alone_averages_the_loss_for_its_log(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for step, data in enumerate(batches(rank)):
        train(model, optimizer, iter([data]))
        if rank == 0 and step % 2 == 1:
            loss = torch.ones(())
            dist.all_reduce(loss)
            print("loss", loss / 2)
    return model


@mistake(CALLS)
def a_barrier_is_inside_the_branch_of_rank_0(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for epoch in range(2):
        train(model, optimizer, batches(rank, 3))
        if rank == 0:
            print("saved", epoch)
            dist.barrier()
    return model


@mistake(CALLS)
def a_metric_is_gathered_on_rank_0_only(rank: int, wrap: Wrap):
    model = wrap(net())
    train(model, sgd(model), batches(rank, 3))
    if rank == 0:
        answers = [None, None]
        dist.all_gather_object(answers, {"accuracy": 0.5})
    train(model, sgd(model), batches(rank, 3))
    return model


@mistake(CALLS + "|" + SHAPES, right=None)
def metrics_are_reduced_in_the_order_of_a_set(rank: int, wrap: Wrap):
    metrics = {"loss": torch.full((1,), 1.0), "confusion": torch.eye(3)}
    for name in ("loss", "confusion") if rank == 0 else ("confusion", "loss"):
        dist.all_reduce(metrics[name])
    return metrics["loss"]


@mistake(SHAPES + "|" + CALLS, right=None)
def predictions_of_different_length_are_gathered(rank: int, wrap: Wrap):
    mine = torch.arange(5.0 - rank)
    gathered = [torch.zeros_like(mine) for _ in range(2)]
    dist.all_gather(gathered, mine)
    return torch.cat(gathered)


@mistake(r"dtype|int64|float", right=None)
def a_counter_has_another_dtype(rank: int, wrap: Wrap):
    total = torch.zeros(2) if rank == 0 else torch.zeros(2, dtype=torch.int64)
    total += 3
    dist.all_reduce(total)
    return total.float()


@mistake(r"\b(op|sum|max|avg)\b|reduceop", right=None)
def reductions_have_other_operations(rank: int, wrap: Wrap):
    value = torch.full((3,), 1.0 + rank)
    dist.all_reduce(value, op=dist.ReduceOp.SUM if rank == 0 else dist.ReduceOp.MAX)
    return value


@mistake(r"src|root|source|rank", right=None)
def every_rank_broadcasts_from_itself(rank: int, wrap: Wrap):
    seed = torch.full((1,), 17.0 + rank)
    dist.broadcast(seed, src=rank)
    return seed


@mistake(r"new_group|group|" + ENDED, right=None)
def one_rank_makes_a_group(rank: int, wrap: Wrap):
    model = wrap(net())
    if rank == 0:
        dist.new_group([0])
    train(model, sgd(model), batches(rank, 3))
    extra = dist.new_group([0, 1])
    value = torch.ones(1)
    dist.all_reduce(value, group=extra)
    return value


@mistake(r"new_group|group|" + ENDED, right=None, ends_early=True)
def one_rank_makes_a_group_of_both(rank: int, wrap: Wrap):
    if rank == 0:
        group = dist.new_group([0, 1])
        dist.barrier(group=group)
    return torch.zeros(1)


@mistake(r"recv|irecv|message|" + ENDED, right=None, ends_early=True)
def a_message_is_expected_that_nobody_sends(rank: int, wrap: Wrap):
    value = torch.zeros(1)
    if rank == 0:
        dist.recv(value, src=1)
    return value


@mistake(ENDED + r"|timeout|barrier", right=None)
def one_rank_calls_one_barrier_more(rank: int, wrap: Wrap):
    model = wrap(net())
    if rank != 0:
        dist.barrier()  # rank 0 downloads first
    print("downloaded")
    dist.barrier()
    return train(model, sgd(model), batches(rank))


@mistake(CALLS)
def evaluation_on_rank_0_reduces_inside(rank: int, wrap: Wrap):
    model = wrap(net(norm=True))
    optimizer = sgd(model)
    train(model, optimizer, batches(rank, 3))
    if rank == 0:
        model.eval()
        for inputs, _labels in batches(rank, 2):
            accuracy = model(inputs).mean().detach()
            dist.all_reduce(accuracy)
        model.train()
    return train(model, optimizer, batches(rank, 3))


@mistake(CALLS)
def a_collective_is_between_forward_and_backward_on_one_rank(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for step, (inputs, labels) in enumerate(batches(rank)):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        if rank == 1 and step == 2:
            dist.all_reduce(loss.detach().clone())
        loss.backward()
        optimizer.step()
    return model


@mistake(SHAPES + "|" + CALLS, right=None)
def a_vocabulary_is_as_long_as_the_local_data(rank: int, wrap: Wrap):
    counts = torch.ones(1000 + 5 * rank)
    dist.all_reduce(counts)
    return counts


@mistake(r"one tensor several times", right=None)
def all_ranks_are_gathered_into_one_tensor(rank: int, wrap: Wrap):
    model = wrap(net())
    train(model, sgd(model), batches(rank))
    gathered = [torch.zeros(2)] * 2
    dist.all_gather(gathered, torch.full((2,), float(rank)))
    return gathered
