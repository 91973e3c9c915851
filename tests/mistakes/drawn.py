"""What ranks draw: random numbers, orders and parts of the data; and states that they load before wrapping."""

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tests.mistakes.script import SAME, WORLD_SIZE, Wrap, batches, correct, dataset, loss_of, mistake, net, sgd, train
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

import lockstep as ls

RANDOM = r"same random numbers"
EPOCH = r"set_epoch"
PARTS = r"overlap"
LOADED = r"Nothing of the checkpoint"


def noisy_loss(model: Any, data: tuple[Tensor, Tensor]) -> Tensor:
    return loss_of(model, (data[0] + 0.1 * torch.randn_like(data[0]), data[1]))


@mistake(RANDOM, right=None)
def all_ranks_draw_the_same_noise(rank: int, wrap: Wrap):
    torch.manual_seed(0)
    model = wrap(net())
    return train(model, sgd(model), batches(rank, 10), noisy_loss)


@correct(SAME)
def each_rank_draws_noise_of_its_own(rank: int, wrap: Wrap):
    torch.manual_seed(0)
    model = wrap(net())
    torch.manual_seed(rank)
    return train(model, sgd(model), batches(rank, 10), noisy_loss)


@mistake(RANDOM, right=None)
def masks_of_dropout_are_the_same_on_all_ranks(rank: int, wrap: Wrap):
    torch.manual_seed(0)
    model = wrap(net(dropout=0.5))
    return train(model, sgd(model), batches(rank, 10))


@mistake(RANDOM, right=None)
def numpy_draws_the_same_noise_on_all_ranks(rank: int, wrap: Wrap):
    np.random.seed(0)  # noqa: NPY002 - as people write it
    model = wrap(net())
    data = (
        (inputs + torch.from_numpy(np.random.normal(size=inputs.shape)).float(), labels)  # noqa: NPY002 - likewise
        for inputs, labels in batches(rank, 12)
    )
    return train(model, sgd(model), data)


@correct(SAME)
def ranks_agree_by_their_seed_on_a_number_for_each_step(rank: int, wrap: Wrap):
    random.seed(0)
    torch.manual_seed(0)
    model = wrap(net())
    return train(model, sgd(model), ((x * random.choice([1, 2]) + torch.rand(1), y) for x, y in batches(rank, 12)))


def skipping_loss(model: Any, data: tuple[Tensor, Tensor]) -> Tensor:
    kept = sum(torch.rand([]) < 0.5 for _ in range(8))  # layers that this step has
    return loss_of(model, data) * (1 + kept)


@correct(SAME)
def ranks_agree_by_their_seed_on_layers_that_a_step_leaves_out(rank: int, wrap: Wrap):
    torch.manual_seed(0)
    model = wrap(net())
    return train(model, sgd(model), batches(rank, 12), skipping_loss)


@correct(SAME)
def ranks_seed_each_step_alike_to_agree_on_a_few_numbers(rank: int, wrap: Wrap):
    def scaled() -> Iterator[tuple[Tensor, Tensor]]:
        for step, (inputs, labels) in enumerate(batches(rank, 12)):
            random.seed(step)
            np.random.seed(step)  # noqa: NPY002 - as people write it
            yield inputs * random.choice([1, 2]) * int(np.random.choice([1, 2])), labels  # noqa: NPY002 - likewise

    model = wrap(net())
    return train(model, sgd(model), scaled())


@correct(SAME)
def ranks_draw_the_samples_of_the_whole_batch_and_take_their_parts(rank: int, wrap: Wrap):
    torch.manual_seed(0)
    data = dataset(64)

    def drawn() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(12):
            inputs, labels = data[torch.randint(64, (16,))[rank::WORLD_SIZE]]
            yield inputs, labels

    model = wrap(net())
    return train(model, sgd(model), drawn())


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.data = dataset(64)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, label = self.data[index]
        return inputs * random.uniform(0.9, 1.1), label


def epochs(wrap: Wrap, loader: Any, sampler: Any = None, numbers: Any = range(3)) -> nn.Module:
    model = wrap(net())
    optimizer = sgd(model)
    for number in numbers:
        if sampler is not None:
            sampler.set_epoch(number)
        train(model, optimizer, iter(loader))
    return model


def of_rank(data: Any, **options: Any) -> DataLoader[Any]:
    sampler: DistributedSampler[Any] = ls.DistributedSampler(data)
    return DataLoader(data, batch_size=4, sampler=sampler, **options)


@mistake(RANDOM, right=None)
def loading_processes_augment_alike_on_all_ranks(rank: int, wrap: Wrap):
    torch.manual_seed(0)
    loader = of_rank(Augmented(), num_workers=1, multiprocessing_context="fork")
    return epochs(wrap, loader, loader.sampler)


@correct(SAME)
def loading_processes_augment_by_the_seed_of_the_rank(rank: int, wrap: Wrap):
    torch.manual_seed(rank)
    loader = of_rank(Augmented(), num_workers=1, multiprocessing_context="fork")
    return epochs(wrap, loader, loader.sampler)


def seed_process(number: int, rank: int) -> None:
    random.seed(100 * rank + number)


@correct(SAME)
def loading_processes_get_the_seed_of_the_rank_from_worker_init_fn(rank: int, wrap: Wrap):
    torch.manual_seed(0)
    begin = partial(seed_process, rank=rank)
    loader = of_rank(Augmented(), num_workers=1, multiprocessing_context="fork", worker_init_fn=begin)
    return epochs(wrap, loader, loader.sampler)


def seed_process_by_both(number: int, rank: int) -> None:
    random.seed(torch.initial_seed() + 100 * rank + number)


@correct(SAME)
def loading_processes_get_seeds_of_torch_and_the_rank(rank: int, wrap: Wrap):
    torch.manual_seed(0)
    begin = partial(seed_process_by_both, rank=rank)
    loader = of_rank(Augmented(), num_workers=1, multiprocessing_context="fork", worker_init_fn=begin)
    return epochs(wrap, loader, loader.sampler)


@correct(SAME)
def loading_processes_have_one_seed_and_draw_nothing(rank: int, wrap: Wrap):
    torch.manual_seed(0)
    loader = of_rank(dataset(64), num_workers=1, multiprocessing_context="fork")
    return epochs(wrap, loader, loader.sampler)


class Buckets(Sampler[list[int]]):
    """Batches of a rank, by seed and epoch."""

    def __init__(self, rank: int, *, counts: bool = False) -> None:
        self.rank, self.epoch, self.counts = rank, 0, counts

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(64, generator=torch.Generator().manual_seed(self.epoch))[self.rank :: WORLD_SIZE]
        self.epoch += self.counts
        yield from order.view(-1, 4).tolist()


@mistake(EPOCH, right=None)
def nobody_calls_set_epoch_of_a_batch_sampler(rank: int, wrap: Wrap):
    return epochs(wrap, DataLoader(dataset(64), batch_sampler=Buckets(rank)))


@mistake(EPOCH, right=None)
def set_epoch_of_a_batch_sampler_gets_the_same_number(rank: int, wrap: Wrap):
    sampler = Buckets(rank)
    return epochs(wrap, DataLoader(dataset(64), batch_sampler=sampler), sampler, [7, 7, 7])


@correct(SAME)
def a_second_phase_counts_its_epochs_anew(rank: int, wrap: Wrap):
    loader = of_rank(dataset(64))
    return epochs(wrap, loader, loader.sampler, [0, 0, 1, 2])


@correct(SAME)
def a_batch_sampler_is_told_its_epochs(rank: int, wrap: Wrap):
    sampler = Buckets(rank)
    return epochs(wrap, DataLoader(dataset(64), batch_sampler=sampler), sampler)


@correct(SAME)
def a_batch_sampler_counts_its_epochs_by_itself(rank: int, wrap: Wrap):
    return epochs(wrap, DataLoader(dataset(64), batch_sampler=Buckets(rank, counts=True)))


@mistake(EPOCH, right=None)
def set_epoch_is_forgotten_after_a_resume(rank: int, wrap: Wrap):
    loader = of_rank(dataset(64))
    model = wrap(net())
    optimizer = sgd(model)
    for epoch in range(4, 7):
        train(model, optimizer, iter(loader))
        loader.sampler.set_epoch(epoch + 1)  # type: ignore[attr-defined]
    return model


@correct(SAME)
def a_run_goes_on_with_the_number_of_its_epoch(rank: int, wrap: Wrap):
    loader = of_rank(dataset(64))
    return epochs(wrap, loader, loader.sampler, range(4, 7))


@correct(SAME)
def epochs_from_1_on_are_set_at_their_ends(rank: int, wrap: Wrap):
    loader = of_rank(dataset(64))
    model = wrap(net())
    optimizer = sgd(model)
    for epoch in range(1, 4):
        train(model, optimizer, iter(loader))
        loader.sampler.set_epoch(epoch + 1)  # type: ignore[attr-defined]
    return model


def drawn(rank: int, seed: int) -> Tensor:
    return torch.randperm(64, generator=torch.Generator().manual_seed(seed))[rank::WORLD_SIZE]


@mistake(PARTS, right=None)
def each_rank_splits_an_order_that_it_has_drawn(rank: int, wrap: Wrap):
    return epochs(wrap, DataLoader(Subset(dataset(64), drawn(rank, rank).tolist()), batch_size=4, shuffle=True))


@mistake(PARTS, right=None)
def each_rank_samples_from_an_order_that_it_has_drawn(rank: int, wrap: Wrap):
    return epochs(wrap, DataLoader(dataset(64), batch_size=4, sampler=SubsetRandomSampler(drawn(rank, rank).tolist())))


@mistake(PARTS, right=None)
def each_rank_takes_rows_by_an_order_that_it_has_drawn(rank: int, wrap: Wrap):
    rows = (each[drawn(rank, rank)] for each in dataset(64).tensors)
    return epochs(wrap, DataLoader(TensorDataset(*rows), batch_size=4, shuffle=True))


@mistake(r"different parts of the data", right=None)
def each_rank_divides_an_array_into_training_and_validation(rank: int, wrap: Wrap):
    order = np.random.default_rng(rank).permutation(64)
    loader = of_rank(Subset(dataset(64), order[:48]))
    return epochs(wrap, loader, loader.sampler)


@correct(SAME)
def ranks_split_one_order(rank: int, wrap: Wrap):
    return epochs(wrap, DataLoader(Subset(dataset(64), drawn(rank, 3).tolist()), batch_size=4, shuffle=True))


@correct(SAME)
def ranks_draw_from_the_same_part_in_their_own_orders(rank: int, wrap: Wrap):
    return epochs(wrap, DataLoader(Subset(dataset(64), range(48)), batch_size=4, shuffle=True))


@mistake(LOADED, right=None)
def a_checkpoint_with_the_prefix_is_loaded_before_wrapping(rank: int, wrap: Wrap):
    model = net()
    model.load_state_dict({f"module.{name}": value for name, value in net(seed=3).state_dict().items()}, strict=False)
    model = wrap(model)
    return train(model, sgd(model), batches(rank))


@correct(SAME)
def a_checkpoint_is_tried_and_its_prefix_taken_off(rank: int, wrap: Wrap):
    model, saved = net(), {f"module.{name}": value for name, value in net(seed=3).state_dict().items()}
    if model.load_state_dict(saved, strict=False).missing_keys:
        model.load_state_dict({name.removeprefix("module."): value for name, value in saved.items()})
    model = wrap(model)
    return train(model, sgd(model), batches(rank))


@correct(SAME)
def a_head_is_not_in_the_checkpoint(rank: int, wrap: Wrap):
    model = nn.Sequential(net(), nn.Linear(3, 3))
    nn.init.eye_(model[1].weight)
    nn.init.zeros_(model[1].bias)
    saved = {f"0.{name}": value for name, value in net(seed=3).state_dict().items()}
    model.load_state_dict({**saved, "2.weight": torch.zeros(1)}, strict=False)
    wrapped = wrap(model)
    return train(wrapped, sgd(wrapped), batches(rank))


@mistake(r"GradScaler", right=None)
def a_scaler_has_a_scale_of_its_own_on_each_rank(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0 * (1 + rank))
    for data in batches(rank):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, data)).backward()
        scaler.step(optimizer)
        scaler.update()
    return model


@mistake(r"gradients with which rank 1 stepped", right=None)
def a_hook_of_the_optimizer_divides_by_the_local_scale(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)

    def divide(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        for parameter in model.parameters():
            parameter.grad /= 1.0 + rank

    optimizer.register_step_pre_hook(divide)
    return train(model, optimizer, batches(rank))


@mistake(r"added up over the ranks once more", right=None)
def averaged_gradients_are_summed_again(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for data in batches(rank):
        optimizer.zero_grad()
        loss_of(model, data).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    return model


@correct(SAME)
def averaged_gradients_are_multiplied_for_a_sum(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for data in batches(rank):
        optimizer.zero_grad()
        loss = loss_of(model, data) / 2
        loss.backward()
        for parameter in model.parameters():
            parameter.grad *= 2  # for the loss of a global sum
        optimizer.step()
    return model


@correct(SAME)
def averaged_gradients_are_multiplied_for_a_sum_after_a_log(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for data in batches(rank):
        optimizer.zero_grad()
        loss = loss_of(model, data) / 2
        loss.backward()
        dist.all_reduce(loss.detach().clone())
        for parameter in model.parameters():
            parameter.grad.mul_(WORLD_SIZE)
        optimizer.step()
    return model


@mistake(r"added up over the ranks once more", right=None)
def averaged_gradients_are_summed_again_and_clipped(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for data in batches(rank):
        optimizer.zero_grad()
        loss_of(model, data).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
    return model


@correct(SAME)
def a_loss_is_logged_before_the_step(rank: int, wrap: Wrap):
    model = wrap(net())
    optimizer = sgd(model)
    for data in batches(rank):
        optimizer.zero_grad()
        loss = loss_of(model, data)
        loss.backward()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model
