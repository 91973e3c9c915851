"""Reducers of ranks that are threads."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm import World
from lockstep.reduce import BucketLimits, MeanReduction, Reducer, ReducerOptions, TrainedModel

Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]


def reducer_of(
    model: nn.Module, world: World, *sizes_bytes: int, is_asynchronous: bool | None = None, **chosen: Any
) -> Reducer:
    """Return a reducer with buckets of these sizes, of a device that is asynchronous, or not, whatever it is."""
    if is_asynchronous is not None:
        chosen["is_asynchronous"] = lambda _device: is_asynchronous
    limits = BucketLimits(sizes_bytes=sizes_bytes) if sizes_bytes else BucketLimits()
    mean = MeanReduction(world)
    options = ReducerOptions(purpose="a test", limits=limits, local_mean=mean, **chosen)
    return Reducer(TrainedModel(model), world, options, mean)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def mean_hook(world: World) -> Hook:
    def hook(_state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        work = dist.all_reduce(bucket.buffer() / world.world_size, group=world.group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    return hook
