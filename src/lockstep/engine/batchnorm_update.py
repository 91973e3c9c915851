"""Statistics of BatchNorm for averaged weights, with the same bits on any number of workers.

A layer's statistics are those of its inputs, which are others with averaged weights. They are computed anew in one pass
over the data: the mean of what each slice would have added to them in training, weighted by the slice's samples.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm import World
from lockstep.data import ShardedLoader
from lockstep.engine.averaging import weights_in_place
from lockstep.engine.batches import check_world, gather_results
from lockstep.engine.evaluation import SliceCalls, check_same_data, evaluation_mode
from lockstep.engine.run_state import RunState
from lockstep.processes.reproducibility import reseed_generators
from lockstep.shards import derive_seed
from lockstep.torch_private.modules import TorchsSyncBatchNorm

Forward = Callable[[nn.Module, Any], object]
Sums = dict[str, Tensor]
_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, TorchsSyncBatchNorm)
_PURPOSE = "Trainer.update_batchnorm"


def has_batchnorm(model: nn.Module) -> bool:
    return any(True for _ in _layers(model))


@torch.no_grad()
def compute_statistics(
    state: RunState, world: World, loader: ShardedLoader, weights: Mapping[str, Tensor], forward: Forward
) -> dict[str, Tensor]:
    """Return running means and variances by the names of the model's buffers (collective); nothing is changed."""
    model = state.model

    def compute() -> tuple[str, int, dict[int, Sums]]:
        sums: dict[int, Sums] = {}
        content = 0
        with SliceCalls(state, forward, is_training=True).changing_nothing() as calls:
            for batch in loader.fixed_assignment_epoch(each_once=False):
                check_world(batch, world)
                content = batch.identity
                for part in batch.slices:
                    with _added_to(sums.setdefault(part.shard, {}), model):
                        calls(batch, part)
        return loader.source, content, sums

    try:
        with evaluation_mode(model), weights_in_place(model, weights):
            found = gather_results(world, compute, _PURPOSE)
    finally:
        reseed_generators(derive_seed("evaluated", state.seed, state.cursor.epoch, state.cursor.step))
    check_same_data([source for source, _, _ in found], [content for _, content, _ in found])
    by_shard = {shard: sums for _, _, gathered in found for shard, sums in gathered.items()}
    total: Sums = {}
    for shard in sorted(by_shard):
        for name, value in by_shard[shard].items():
            total[name] = total[name] + value if name in total else value
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return {
        name: (value / total[f"{name.rpartition('.')[0]} weight"]).to(buffers[name])
        for name, value in total.items()
        if name in buffers
    }


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules(remove_duplicate=False):  # an average has all names of a layer
        if isinstance(module, _KINDS) and module.track_running_stats and module.running_mean is not None:
            yield name, module


@contextmanager
def _added_to(sums: Sums, model: nn.Module) -> Iterator[None]:
    """Add the statistics of what goes into each layer meanwhile."""

    def add(name: str, value: Tensor) -> None:
        sums[name] = sums[name] + value.cpu() if name in sums else value.cpu()

    def look(prefix: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            values = inputs[0].detach().double()
            dims = [dim for dim in range(values.ndim) if dim != 1]
            count = values.numel() // values.shape[1]
            add(f"{prefix}running_mean", values.mean(dims) * len(values))
            add(f"{prefix}running_var", values.var(dims, unbiased=count > 1) * len(values))
            add(f"{prefix.removesuffix('.')} weight", torch.tensor(float(len(values)), dtype=torch.float64))

        return hook

    handles = [module.register_forward_pre_hook(look(f"{name}." if name else "")) for name, module in _layers(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
