"""What a wrapper's ranks compare and leave out, on either backend: buffers, gradients that are not finite, failures.

Each test runs one scenario on two ranks. `tests/mistakes` has the scripts in which ranks drift apart, or out of step.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.process.ranks import Rank, RankPool, Ranks, join_default_group
from tests.process.scenarios import Claims, Scenario, error_of, everyone, found_in, name_of, scenarios_in, wrong_in
from tests.process.wrapped import fail_in_backward
from torch import Tensor, nn

import lockstep as ls
from lockstep.comm import broadcast_tensors

NUM_STEPS = 6
ODD_STEP = 3
BACKENDS = ("shm", "gloo")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def rows(rank: int, step: int, number: int = 4) -> Tensor:
    return torch.randn(number, 4, generator=torch.Generator().manual_seed(100 * step + rank))


class Loop:
    """A training loop on one rank, of which a mistake changes some step."""

    def __init__(self, rank: int, **options: Any) -> None:
        self.rank = rank
        self.model: Any = ls.DistributedDataParallel(net(), **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self, backward: Callable[[Tensor, int], object]) -> Tensor:
        """Take steps, each with a backward that is given the loss and returns False for none; return all parameters."""
        for step in range(NUM_STEPS):
            self.optimizer.zero_grad()
            if backward(self.model(rows(self.rank, step)).square().mean(), step) is not False:
                self.optimizer.step()
        return all_of(self.model)


def all_of(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def are_equal_and_finite(values: Tensor) -> bool:
    first, second = everyone(values)
    return torch.equal(first, second) and bool(first.isfinite().all())


# -- Steps that are left out -------------------------------------------------------------------------------------------


def a_step_that_is_left_out_leaves_the_ranks_equal(rank: int) -> Claims:
    def skip(loss: Tensor, step: int) -> bool:
        has_memory = (rank, step) != (1, ODD_STEP)
        if has_memory:
            loss.backward()
        return has_memory

    def spoil(loss: Tensor, step: int) -> None:
        (loss * (math.nan if (rank, step) == (1, ODD_STEP) else 1)).backward()

    for backward, options in ((skip, {"on_skip": "zeros"}), (spoil, {"nonfinite": "skip"})):
        yield f"{options}", are_equal_and_finite(Loop(rank, **options).train(backward)), True


def the_mean_is_over_the_ranks_that_had_a_backward(rank: int) -> Claims:
    model: Any = ls.DistributedDataParallel(net())
    loss = model(rows(rank, 0)).square().mean()
    if rank == 1:
        model.skip_backward()
    else:
        loss.backward()
    alone = net()
    alone(rows(0, 0)).square().mean().backward()
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        yield "gradient", mine.grad, expected.grad


def ranks_may_be_let_differ(rank: int) -> Claims:
    loop = Loop(rank, compare=False)

    def clip(loss: Tensor, _step: int) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01 * (1 + rank))

    yield "error", error_of(lambda: loop.train(clip)), "no error"


def a_failed_backward_ends_the_accumulation_on_all_ranks(rank: int) -> Claims:
    loop = Loop(rank)
    for step in range(NUM_STEPS):
        fails = step == ODD_STEP
        with loop.model.no_sync():
            loop.model(rows(rank, step)).square().mean().backward()
        yield "backwards before", loop.model.reducer.watch.num_local_backwards, 1
        handle = loop.model.module[0].weight.register_hook(fail_in_backward) if fails and rank == 1 else None
        found = error_of(loop.model(rows(rank, step)).square().mean().backward)
        yield f"step {step}", found == "no error", not fails
        if handle is not None:
            handle.remove()
        loop.optimizer.zero_grad()


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.idle = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, inputs: Tensor, *, uses_both: bool) -> Tensor:
        return self.used(inputs) + self.idle(inputs) if uses_both else self.used(inputs)


def a_skipped_backward_leaves_gradients_alone_that_no_rank_used(rank: int) -> Claims:
    for backend in BACKENDS:
        model: Any = ls.DistributedDataParallel(TwoLayers(), process_group=dist.new_group(backend=backend))
        model(rows(rank, 0), uses_both=True).mean().backward()
        idle = model.module.idle.weight.grad.clone()
        model.module.used.zero_grad()
        loss = model(rows(rank, 1), uses_both=False).mean()
        if rank == 1:
            model.skip_backward()
        else:
            loss.backward()
        yield "idle", model.module.idle.weight.grad, idle
        alone = TwoLayers()
        alone(rows(0, 1), uses_both=False).mean().backward()
        yield "used", model.module.used.weight.grad, alone.used.weight.grad


# -- Buffers -----------------------------------------------------------------------------------------------------------


class Buffered(nn.Module):
    """A layer with buffers of these names; they are given, and may be other tensors on each rank."""

    def __init__(self, buffers: dict[str, Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


def floats(*sizes: int) -> dict[str, Tensor]:
    return {f"queue_{number}": torch.full((size,), float(number)) for number, size in enumerate(sizes)}


UNLIKE_BUFFERS: dict[str, tuple[dict[str, Tensor], dict[str, Tensor], tuple[str, str]]] = {
    "another length, the same bytes": (floats(3), floats(4), ("queue_0 float32 [3]", "queue_0 float32 [4]")),
    "two that make up for each other": (floats(3, 5), floats(5, 3), ("queue_0 float32 [3]", "queue_0 float32 [5]")),
    "another dtype": (
        {"bank": torch.ones(4, dtype=torch.int32)},
        {"bank": torch.ones(4)},
        ("bank int32 [4]", "bank float32 [4]"),
    ),
    "truth values and bytes": (
        {"mask": torch.ones(4, dtype=torch.bool)},
        {"mask": torch.ones(4, dtype=torch.uint8)},
        ("mask bool [4]", "mask uint8 [4]"),
    ),
    "complex and real": (
        {"phase": torch.ones(2, dtype=torch.complex64)},
        {"phase": torch.ones(2, dtype=torch.float64)},
        ("phase complex64 [2]", "phase float64 [2]"),
    ),
    "a scalar and a vector of one": (
        {"count": torch.tensor(1.0)},
        {"count": torch.ones(1)},
        ("count float32 []", "count float32 [1]"),
    ),
    "another name": ({"mean": torch.ones(2)}, {"center": torch.ones(2)}, ("mean float32 [2]", "center float32 [2]")),
    "another order": (
        {"mean": torch.ones(2), "scale": torch.ones(2)},
        {"scale": torch.ones(2), "mean": torch.ones(2)},
        ("mean float32 [2]", "scale float32 [2]"),
    ),
    "another count": (floats(2, 1), floats(2), ("queue_1 float32 [1]", "nothing")),
    "a transposed one": (
        {"table": torch.ones(2, 3)},
        {"table": torch.ones(3, 2)},
        ("table float32 [2, 3]", "table float32 [3, 2]"),
    ),
    "one of a hundred": (
        floats(*[3] * 100),
        floats(*[3] * 71, 4, *[3] * 28),
        ("queue_71 float32 [3]", "queue_71 float32 [4]"),
    ),
}


def _claims_of_unlike_buffers(rank: int, *, backend: str, are_late: bool) -> Claims:
    for which, (first, second, names) in UNLIKE_BUFFERS.items():
        own = first if rank == 0 else second
        group = dist.new_group(backend=backend)  # which the error makes useless

        def train(own: dict[str, Tensor] = own, first: dict[str, Tensor] = first, group: Any = group) -> None:
            model = Buffered(first if are_late else own)
            wrapped = ls.DistributedDataParallel(model, init_sync=are_late, process_group=group)
            for step in range(3):
                if are_late and step == 1:
                    for name in first:
                        delattr(model, name)
                    for name, value in own.items():
                        model.register_buffer(name, value.clone())
                wrapped(rows(rank, step)).square().mean().backward()

        found = error_of(train)
        for said in names:
            yield f"{which} on {backend}", found_in(found, said), said


def buffers_that_differ_at_first_are_an_error_that_names_one(rank: int) -> Claims:
    for backend in BACKENDS:
        yield from _claims_of_unlike_buffers(rank, backend=backend, are_late=False)


def buffers_that_differ_later_are_an_error_that_names_one(rank: int) -> Claims:
    for backend in BACKENDS:
        yield from _claims_of_unlike_buffers(rank, backend=backend, are_late=True)


def buffers_of_all_kinds_are_those_of_rank_0(rank: int) -> Claims:
    for backend in BACKENDS:
        torch.manual_seed(rank)
        model = Buffered(
            {
                "transposed": torch.randn(2, 3).T,
                "part": torch.randn(8)[::2],
                "scalar": torch.randn(()),
                "mask": torch.randn(5) > 0,
                "phase": torch.randn(3, dtype=torch.complex64).conj(),
                "empty": torch.zeros(0),
                "brief": torch.randn(3).bfloat16(),
            }
        )
        wrapped = ls.DistributedDataParallel(model, process_group=dist.new_group(backend=backend))
        for step in range(3):
            if step == 1:
                model.part = torch.full((9,), float(rank))  # on all ranks alike
            if rank == 1:
                model.scalar.add_(1.0)
            wrapped(rows(rank, step)).square().mean().backward()
        yield backend, len({repr(each) for each in everyone([buffer.tolist() for buffer in model.buffers()])}), 1


# -- Gradients that are not finite -------------------------------------------------------------------------------------


def spoilt(gradient: Tensor, value: float) -> Tensor:
    """Return a gradient of which one number, in the middle, is not finite."""
    odd = gradient.clone()
    odd.view(-1)[odd.numel() // 2 + 3] = value
    return odd


def mean_on_all(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(2), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def train_with_a_nan(rank: int, kind: str, backend: str, nonfinite: Any) -> Tensor:
    torch.manual_seed(0)
    width = 90 if kind == "in one of many" else 700
    layers = [nn.Linear(width, width) for _ in range(60 if kind == "in one of many" else 2)]
    dtype = torch.float64 if kind == "in double precision" else torch.float32
    last = nn.Linear(width, 1)
    comes_late = kind == "in a bucket that is sent late"
    group = dist.new_group(backend=backend)
    model: Any = ls.DistributedDataParallel(
        nn.Sequential(*layers, last).to(dtype),
        nonfinite=nonfinite,
        skip_all_reduce_unused_params=comes_late,
        process_group=group,
    )
    if kind == "under a communication hook":
        model.register_comm_hook(group, mean_on_all)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    value = -math.inf if kind == "infinite" else math.nan
    for step in range(4):
        if step == 2 and rank == 1:
            layers[len(layers) // 2].weight.register_hook(lambda gradient: spoilt(gradient, value))
        optimizer.zero_grad(set_to_none=kind != "added in place")
        inputs = torch.randn(2, width, dtype=dtype)
        (last if comes_late and not step else model)(inputs).sum().backward()
        optimizer.step()
    return all_of(model)


def one_nan_in_a_large_gradient_is_an_error_on_all_ranks(rank: int) -> Claims:
    kinds = (
        *("plain", "infinite", "added in place", "in one of many", "in double precision"),
        *("under a communication hook", "in a bucket that is sent late"),
    )
    for backend in BACKENDS:
        for kind in kinds:
            layer = 30 if kind == "in one of many" else 1
            said = f"LossError: In backward 3 the gradient of {layer}.weight on rank 1 was not finite"
            found = error_of(partial(train_with_a_nan, rank, kind, backend, "stop"))
            yield f"{kind} on {backend}", found_in(found, said), said
            left_out = train_with_a_nan(rank, kind, backend, "skip")
            yield f"{kind} on {backend}, left out", are_equal_and_finite(left_out), True


# -- Communication hooks -----------------------------------------------------------------------------------------------


def a_hook_that_fails_on_one_rank_leaves_the_ranks_in_step(rank: int) -> Claims:
    for backend in BACKENDS:
        # In a group that the wrapper does not know, the other ranks would wait for a call that was never made.
        for after_its_call, has_own_group in ((False, False), (True, False), (True, True)):
            group = dist.new_group(backend=backend)
            own_group = dist.new_group(backend=backend) if has_own_group else group
            model: Any = ls.DistributedDataParallel(net(), bucket_cap_mb_list=[1e-5], process_group=group)
            failing = {"step": False, "after": after_its_call}

            def hook(
                group: Any, bucket: dist.GradBucket, failing: dict[str, bool] = failing
            ) -> torch.futures.Future[Tensor]:
                fails = rank == 1 and failing["step"] and bucket.index() == 1
                if fails and not failing["after"]:
                    raise ValueError("only here")
                future = mean_on_all(group, bucket)
                if fails:
                    future.wait()
                    raise ValueError("only here")
                return future

            model.register_comm_hook(own_group, hook)
            for step in range(4):
                failing["step"] = step == 1
                model.zero_grad()
                found = error_of(model(rows(rank, step)).square().mean().backward)
                what = f"{after_its_call=}, {has_own_group=} on {backend}, step {step}"
                yield what, found == "no error", step != 1
                if step == 1 and rank == 1:
                    yield what, found, "ValueError: only here"
            gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            yield "gradients", are_equal_and_finite(gradients), True


@pytest.mark.parametrize("scenario", scenarios_in(globals()), ids=name_of)
def test_scenario(pair: RankPool, scenario: Scenario) -> None:
    assert wrong_in(pair, scenario) == []


def broadcasts_on_a_group_of_torch(rank: Rank) -> list[str]:
    run = join_default_group(rank)
    store = dist.PrefixStore("torch's", dist.distributed_c10d._get_default_store())
    ls.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=run.rank, world_size=run.world_size)
    assert dist.group.WORLD is not None
    outcomes = []
    for first, second in (((3, 4), (3, 4)), ((3,), (4,)), ((2,) * 90, ((2,) * 89 + (1,)))):
        named = floats(*(first if run.rank == 0 else second)).items()
        outcomes.append(error_of(partial(broadcast_tensors, named, dist.group.WORLD)))
    return outcomes


def test_who_receives_other_tensors_raises_on_a_group_that_compares_no_calls(tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, broadcasts_on_a_group_of_torch) as ranks:
        first, (fine, other_length, other_last) = ranks.results()
    assert first == ["no error"] * 3
    assert fine == "no error"
    assert "tensor 0: queue_0 float32 [3] on rank 0, queue_0 float32 [4] on rank 1. " in other_length
    assert "tensor 89: queue_89 float32 [2] on rank 0, queue_89 float32 [1] on rank 1. " in other_last
