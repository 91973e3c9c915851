"""What PyTorch builds on process groups, unchanged, on the backend "shm": it works, with the numbers of Gloo.

Each test runs one scenario, on ranks that stay from one to the next and have "cpu:shm" as the default group.
"""

import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from tests.process.scenarios import Claims, ShmScenario, ShmScenarios, name_of
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from lockstep.comm.shm.group import ShmProcessGroup

SMALL_BUCKETS_MB = 0.001
NUM_STEPS = 4


class Net(nn.Module):
    """Convolutions, buffers, and two branches of which a forward may leave out one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(24, 3) for _ in range(2))

    def forward(self, images: Tensor, both: bool = True) -> Tensor:
        found = self.features(images).flatten(1)
        return self.heads[0](found) + self.heads[1](found) if both else self.heads[0](found)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def train(
    rank: int, group: Any, *, leave_out: bool = False, accumulate: bool = False, hook: Any = None, **options: Any
) -> list[Tensor]:
    """Return the losses, and then all parameters, gradients and buffers after some steps under torch's wrapper."""
    model = DistributedDataParallel(Net(), process_group=group, bucket_cap_mb=SMALL_BUCKETS_MB, **options)
    if hook is not None:
        model.register_comm_hook(group, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        if accumulate:
            with model.no_sync():
                model(numbers(100 + 10 * step + rank, 4, 1, 6, 6)).square().mean().backward()
        loss = model(numbers(10 * step + rank, 4, 1, 6, 6), not leave_out).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    tensors = dict(model.module.named_parameters())
    gradients = [parameter.grad for parameter in tensors.values() if parameter.grad is not None]
    return [torch.stack(losses), *(tensor.detach() for tensor in tensors.values()), *gradients, *model.module.buffers()]


def ddp_trains_as_on_gloo(rank: int, size: int, group: Any) -> Claims:
    gloo = dist.new_group(backend="gloo")
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "accumulating": {"accumulate": True},
        "unused parameters": {"find_unused_parameters": True, "leave_out": True},
        "static graph": {"static_graph": True, "leave_out": True},
        "views": {"gradient_as_bucket_view": True},
        "hook": {"hook": default_hooks.allreduce_hook},
        "half precision": {"hook": default_hooks.fp16_compress_hook},
        "wrapped hook": {"hook": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)},
    }
    for name, options in variants.items():
        # Two ranks: whatever the order of addition, the sum has the same bits.
        yield name, train(rank, group, **options), train(rank, gloo, **options)


def ddp_compresses_gradients(rank: int, size: int, group: Any) -> Claims:
    """By a hook that waits for an all-reduce in what follows another."""
    found = []
    for one in (group, dist.new_group(backend="gloo")):
        model = DistributedDataParallel(Layers(), process_group=one)
        state = powerSGD_hook.PowerSGDState(one, 2, start_powerSGD_iter=2, min_compression_rate=1)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        for step in range(NUM_STEPS):
            model(numbers(10 * step + rank, 5, 8)).square().mean().backward()
        yield "compressed", state.compression_stats()[0] > 1, True
        found.append([parameter.grad for parameter in model.parameters()])
    yield "gradients", found[0], found[1]


def compiled_ddp_trains_as_uncompiled(rank: int, size: int, group: Any) -> Claims:
    """While a compiled function runs, the compiler looked into every method of the group that C++ called."""

    def parameters_after_training(is_compiled: bool) -> list[Tensor]:
        model = DistributedDataParallel(Net(), process_group=group)  # the compiler wants buckets of 1 MB or more
        forward = torch.compile(model, backend="eager") if is_compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            forward(numbers(10 * step + rank, 4, 1, 6, 6)).square().mean().backward()
            optimizer.step()
        return [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]

    yield "trained", parameters_after_training(is_compiled=True), parameters_after_training(is_compiled=False)


def ddp_joins_uneven_inputs(rank: int, size: int, group: Any) -> Claims:
    found = []
    for one in (group, dist.new_group(backend="gloo")):
        model = DistributedDataParallel(Layers(), process_group=one)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for step in range(2 + 3 * rank):
                optimizer.zero_grad()
                model(numbers(10 * step + rank, 5, 8)).square().mean().backward()
                optimizer.step()
        found.append([parameter.detach() for parameter in model.parameters()])
    yield "parameters", found[0], found[1]


def ddp_works_under_debugging(rank: int, size: int, group: Any) -> Claims:
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        detailed = dist.new_group(backend="shm")
        found = train(rank, detailed)
    finally:
        dist.set_debug_level(before)
    yield "as without", found, train(rank, group)
    yield "class", type(detailed), ShmProcessGroup


def zero_trains_as_a_plain_optimizer(rank: int, size: int, group: Any) -> Claims:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns, which is an error in the tests' own process

    plain, sharded = Layers(), Layers()
    models = [DistributedDataParallel(model, process_group=group) for model in (plain, sharded)]
    optimizers = [
        torch.optim.Adam(plain.parameters(), lr=0.01),
        ZeroRedundancyOptimizer(sharded.parameters(), torch.optim.Adam, process_group=group, lr=0.01),
    ]
    for step in range(NUM_STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(numbers(10 * step + rank, 5, 8)).square().mean().backward()
            optimizer.step()
    yield "parameters", list(sharded.state_dict().values()), list(plain.state_dict().values())
    optimizers[1].consolidate_state_dict(to=0)  # type: ignore[attr-defined]
    if rank == 0:
        kept = optimizers[1].state_dict()["state"]
        expected = optimizers[0].state_dict()["state"]
        averages = [kept[index]["exp_avg"] for index in sorted(kept)]
        yield "state", averages, [expected[index]["exp_avg"] for index in sorted(expected)]


def whole_of(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().detach()


def train_sharded(rank: int, **options: Any) -> list[Tensor]:
    model = Layers()
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        model(numbers(10 * step + rank, 5, 8)).square().mean().backward()
        optimizer.step()
    return [whole_of(parameter) for parameter in model.parameters()]


def trained_alone(size: int) -> list[Tensor]:
    model = Layers()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        losses = [model(numbers(10 * step + rank, 5, 8)).square().mean() for rank in range(size)]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def fsdp_trains_as_on_gloo(rank: int, size: int, group: Any) -> Claims:
    mesh = init_device_mesh("cpu", (size,))
    found = train_sharded(rank, mesh=mesh)
    gloo = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    yield "as on Gloo", found, train_sharded(rank, mesh=gloo)
    alone = trained_alone(size)
    yield "as one process", all(map(torch.allclose, found, alone)), True
    from_group = DeviceMesh.from_group(group, "cpu")
    yield "on a group", train_sharded(rank, mesh=from_group, reshard_after_forward=False), found


def functional_collectives_work(rank: int, size: int, group: Any) -> Claims:
    mine = torch.full((size, 2), float(rank))
    total = float(sum(range(size)))

    def calls(tensor: Tensor) -> tuple[Tensor, ...]:
        return (
            functional.all_reduce(tensor, "sum", group),
            functional.all_reduce(tensor, "max", group),
            functional.all_gather_single(tensor, 0, group),
            functional.all_gather_single(tensor, 1, group),
            functional.reduce_scatter_single(tensor, "avg", 0, group),
            functional.all_to_all_single(tensor + torch.arange(float(size))[:, None] * 10, None, None, group),
            functional.broadcast(tensor, 1, group),
            *functional.all_reduce_coalesced([tensor, tensor + 1], "sum", group),
            functional.all_reduce(functional.all_reduce(tensor, "sum", group) + 1, "sum", group),
        )

    expected = (
        torch.full((size, 2), total),
        torch.full((size, 2), size - 1.0),
        torch.arange(float(size)).repeat_interleave(size)[:, None].expand(-1, 2),
        torch.arange(float(size)).repeat_interleave(2).expand(size, -1),
        torch.full((1, 2), total / size),
        (torch.arange(float(size)) + 10 * rank)[:, None].expand(-1, 2),
        torch.ones(size, 2),
        torch.full((size, 2), total),
        torch.full((size, 2), total + size),
        torch.full((size, 2), (total + 1) * size),
    )
    yield "eager", calls(mine), expected
    yield "the input stays", mine, torch.full((size, 2), float(rank))
    compiled = torch.compile(calls, backend="aot_eager", fullgraph=True)
    yield "compiled", compiled(mine), expected
    yield "compiled, again", compiled(mine), expected


def dtensors_are_redistributed(rank: int, size: int, group: Any) -> Claims:
    mesh = init_device_mesh("cpu", (size,))
    whole = numbers(5, 7, 6)  # 7 rows do not divide evenly
    placements: list[Placement] = [Shard(0), Shard(1), Replicate()]
    for source in placements:
        for target in placements:
            tensor = distribute_tensor(whole, mesh, [source]).redistribute(mesh, [target])
            yield f"{source} to {target}", tensor.full_tensor(), whole
    product: Any = distribute_tensor(whole, mesh, [Shard(1)]) @ distribute_tensor(
        whole.T.contiguous(), mesh, [Shard(0)]
    )
    yield "a partial product", product.placements, (Partial(),)
    for target in placements:
        found = product.redistribute(mesh, [target]).full_tensor()
        yield f"close after {target}", torch.allclose(found, whole @ whole.T, atol=1e-6), True


def checkpoints_are_saved_and_loaded(rank: int, size: int, group: Any) -> Claims:
    given = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(given, 0)
    folder = Path(given[0])
    model = Layers()
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    saved = [whole_of(tensor) for tensor in model.state_dict().values()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict(), "step": torch.tensor(7)}, checkpoint_id=folder / "saved")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0)
        state: dict[str, Any] = {"model": model.state_dict(), "step": torch.tensor(0)}
        dcp.load(state, checkpoint_id=folder / "saved")
    yield "parameters", [whole_of(tensor) for tensor in model.state_dict().values()], saved
    yield "step", state["step"], torch.tensor(7)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)


def the_default_group_is_ours(rank: int, size: int, group: Any) -> Claims:
    world = dist.group.WORLD
    yield "class", type(world), ShmProcessGroup
    yield "backends", (dist.get_backend(group), dist.get_backend_config()), ("shm", "cpu:shm")
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    yield "sum", tensor, torch.full((3,), float(size))
    same = dist.new_group()
    yield "a new group is like it", type(same), ShmProcessGroup
    for backend in ("shm", "gloo"):
        yield backend, dist.get_backend(dist.new_group(backend=backend)), backend
    yield "ranks", dist.get_process_group_ranks(group), list(range(size))
    # This torch may lack NCCL: the group is made all the same, and says so when it meets a tensor on a GPU.
    both = dist.new_group(backend="cpu:shm,cuda:nccl")
    dist.all_reduce(tensor, group=both)
    yield "beside NCCL", tensor, torch.full((3,), float(size**2))


def a_mesh_has_two_dimensions(rank: int, size: int, group: Any) -> Claims:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for name, partner in (("outer", (rank + 2) % 4), ("inner", rank ^ 1)):
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=mesh.get_group(name))
        yield name, tensor.item(), float(rank + partner)
        yield f"class of {name}", type(mesh.get_group(name)), ShmProcessGroup
    flat = mesh["outer", "inner"]._flatten("both")
    yield "flat", functional.all_reduce(torch.ones(1), "sum", flat.get_group()).item(), 4.0
    whole = numbers(5, 8, 12)
    for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate(), Shard(0)]):
        tensor = distribute_tensor(whole, mesh, placements)
        yield f"{placements}", tensor.full_tensor(), whole
        yield f"{placements} swapped", tensor.redistribute(mesh, placements[::-1]).full_tensor(), whole


def fsdp_replicates_and_shards(rank: int, size: int, group: Any) -> Claims:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = train_sharded(rank, mesh=mesh)
    yield "as one process", all(map(torch.allclose, found, trained_alone(size))), True
    with torch.no_grad():
        digest = torch.stack([tensor.double().sum() for tensor in found])
    everyone = [torch.empty_like(digest) for _ in range(size)]
    dist.all_gather(everyone, digest, group)
    yield "the same everywhere", everyone, [digest] * size


IN_TWO = (
    the_default_group_is_ours,
    ddp_trains_as_on_gloo,
    ddp_joins_uneven_inputs,
    ddp_works_under_debugging,
    zero_trains_as_a_plain_optimizer,
    fsdp_trains_as_on_gloo,
    functional_collectives_work,
    dtensors_are_redistributed,
    checkpoints_are_saved_and_loaded,
    compiled_ddp_trains_as_uncompiled,
)
IN_FOUR = (a_mesh_has_two_dimensions, fsdp_replicates_and_shards, dtensors_are_redistributed)


def test_hooks_may_wait_for_a_collective_in_a_callback(shm_scenarios: ShmScenarios) -> None:
    assert shm_scenarios.wrong_in(ddp_compresses_gradients, 2) == []


@pytest.mark.parametrize("scenario", IN_TWO, ids=name_of)
def test_in_two_processes(shm_scenarios: ShmScenarios, scenario: ShmScenario) -> None:
    assert shm_scenarios.wrong_in(scenario, 2, "cpu:shm") == []


@pytest.mark.parametrize("scenario", IN_FOUR, ids=name_of)
def test_in_four_processes(shm_scenarios: ShmScenarios, scenario: ShmScenario) -> None:
    assert shm_scenarios.wrong_in(scenario, 4, "cpu:shm") == []
