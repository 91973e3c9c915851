"""`SyncBatchNorm` where one process is enough: conversion, and what it does alone."""

import copy
import pickle
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lockstep.parallel import sync_batchnorm
from lockstep.parallel.sync_batchnorm import SyncBatchNorm, combine, local_moments


class Net(nn.Module):
    """One layer in two places, one under two names, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3))
        self.second = nn.Sequential(nn.Conv2d(3, 3, 3), self.first[1])
        self.volume = nn.BatchNorm3d(2)
        self.row = nn.BatchNorm1d(4, affine=False, track_running_stats=False, momentum=None)
        self.same_row = self.row
        self.instance = nn.InstanceNorm2d(3)
        self.theirs = nn.SyncBatchNorm(5, eps=0.1)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (2, 3, 4, 4), (2, 3, 2, 2, 2)])
@pytest.mark.parametrize("training", [True, False])
def test_alone_it_is_batchnorm_bit_for_bit(shape: tuple[int, ...], training: bool) -> None:
    ours = SyncBatchNorm(3).train(training)
    theirs = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)](3).train(training)
    inputs = torch.randn(shape)
    found = []
    for layer in (ours, theirs):
        leaf = inputs.clone().requires_grad_()
        output = layer(leaf)
        output.square().mean().backward()
        found.append((output, leaf.grad, layer.weight.grad, layer.running_mean, layer.running_var))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_every_batchnorm_is_converted_with_its_parameters_and_buffers() -> None:
    net = Net()
    net.volume.weight.requires_grad_(False)
    before = dict(net.state_dict(keep_vars=True))
    assert SyncBatchNorm.convert_sync_batchnorm(net) is net
    layers = {name for name, layer in net.named_modules(remove_duplicate=False) if isinstance(layer, SyncBatchNorm)}
    assert layers == {"first.1", "second.1", "volume", "row", "same_row", "theirs"}
    assert type(net.instance) is nn.InstanceNorm2d
    assert net.first[1] is net.second[1]
    assert net.row is net.same_row
    after = dict(net.state_dict(keep_vars=True))
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert [net.volume.weight.requires_grad, net.volume.bias.requires_grad] == [False, True]


def test_everything_else_is_taken_over() -> None:
    layer = nn.BatchNorm2d(3, eps=0.25, momentum=None).eval()
    layer.__dict__["qconfig"] = "a config"
    seen: list[nn.Module] = []
    handle = layer.register_forward_hook(lambda module, _inputs, _output: seen.append(module))
    group: Any = object()
    converted: Any = SyncBatchNorm.convert_sync_batchnorm(layer, group)
    assert (converted.num_features, converted.eps, converted.momentum) == (3, 0.25, None)
    assert (converted.training, converted.qconfig, converted.process_group) == (False, "a config", group)
    converted(torch.randn(2, 3, 2, 2))
    handle.remove()
    converted(torch.randn(2, 3, 2, 2))
    assert seen == [converted]


def test_the_layer_that_was_converted_is_left_alone() -> None:
    layer = nn.BatchNorm2d(3)
    converted = SyncBatchNorm.convert_sync_batchnorm(layer)
    converted.weight = nn.Parameter(torch.zeros(3))
    assert layer.weight.tolist() == [1.0] * 3
    assert type(layer) is nn.BatchNorm2d


def test_a_lazy_layer_is_named_and_nothing_converted() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.LazyBatchNorm1d()))
    with pytest.raises(ValueError, match=r"^1\.0 is a LazyBatchNorm1d that has seen no input yet"):
        SyncBatchNorm.convert_sync_batchnorm(net)
    assert type(net[0]) is nn.BatchNorm1d
    net[1](torch.randn(2, 5))
    SyncBatchNorm.convert_sync_batchnorm(net)
    assert isinstance(net[1][0], SyncBatchNorm)
    assert net[1][0].num_features == 5


class BatchNormReLU(nn.BatchNorm1d):
    """torch converts it, and the activation is gone without a word."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).relu()


def with_a_forward_set() -> nn.Module:
    """Once it was taken over, and ran the old layer: nothing was synchronised."""
    layer = nn.BatchNorm1d(3)
    layer.forward = MethodType(nn.BatchNorm1d.forward, layer)  # type: ignore[method-assign]
    return layer


def parametrized() -> nn.Module:
    net = nn.Sequential(nn.BatchNorm1d(3))
    parametrize.register_parametrization(net[0], "weight", nn.Softplus())
    return net


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: BatchNormReLU(3), "The module is a BatchNormReLU, whose forward is its own and would be lost"),
        (with_a_forward_set, "The module is a BatchNorm1d, whose forward is its own and would be lost"),
        (parametrized, "0 is a ParametrizedBatchNorm1d with parametrizations, which would be lost"),
    ],
)
def test_what_would_be_lost_is_an_error(make: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SyncBatchNorm.convert_sync_batchnorm(make())


def test_what_compiling_the_layer_left_is_not_taken_over() -> None:
    # It ran the old layer, and nothing was synchronised.
    layer = nn.BatchNorm1d(3)
    layer.compile(backend="eager")
    converted = SyncBatchNorm.convert_sync_batchnorm(layer)
    converted(torch.randn(4, 3))
    assert converted._compiled_call_impl is None
    compiled: Any = torch.compile(nn.BatchNorm1d(3), backend="eager")
    with pytest.raises(ValueError, match=r"0 is what torch.compile made of a BatchNorm.*Convert before compiling"):
        SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(compiled))
    net = nn.Sequential(nn.BatchNorm1d(3))
    whole: Any = torch.compile(net, backend="eager")
    SyncBatchNorm.convert_sync_batchnorm(whole)
    assert type(net[0]) is SyncBatchNorm


def test_it_is_torchs_to_whoever_asks() -> None:
    layer = SyncBatchNorm(3, 0.1, None, True, False, None, "cpu", torch.float64)
    assert isinstance(layer, nn.SyncBatchNorm)
    assert layer.weight.dtype == torch.float64
    assert [layer.eps, layer.momentum, layer.running_mean] == [0.1, None, None]


def test_a_weight_may_come_without_a_bias() -> None:
    layer = SyncBatchNorm(3, bias=False)
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    assert layer(torch.randn(4, 3)).shape == (4, 3)


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_are_on_their_own(twin_of: Any) -> None:
    layer = SyncBatchNorm(3)
    twin = twin_of(layer)
    assert type(twin) is SyncBatchNorm
    twin(torch.randn(4, 3))
    assert [int(layer.num_batches_tracked), int(twin.num_batches_tracked)] == [0, 1]
    assert twin.weight is not layer.weight


SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) > 0)


@settings(deadline=None)  # the first use of an operator is slow
@given(sizes=SIZES, mean=st.sampled_from([0.0, 1.0, -1e6]), seed=st.integers(0, 100))
def test_parts_combine_to_the_whole(sizes: list[int], mean: float, seed: int) -> None:
    whole = torch.randn(sum(sizes), 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + mean
    rows = []
    for part in whole.split(sizes):
        moments = torch.cat(local_moments(part, 1e-5))
        rows.append(torch.cat([moments, moments.new_tensor([part.numel() // 2, len(part) > 0])]))
    found = combine(torch.stack(rows))
    torch.testing.assert_close(found.mean, whole.mean((0, 2)), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.var, whole.var((0, 2), correction=0), rtol=1e-8, atol=1e-14)
    assert float(found.count) == whole.numel() / 2
    assert found.records.tolist() == [float(size > 0) for size in sizes]


def test_a_device_that_has_torchs_kernels_uses_them_whatever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    # Only CUDA did: on an XPU or an NPU the statistics were plain sums of float32.
    def stats(inputs: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        mean, var = inputs.mean((0, 2)), inputs.var((0, 2), correction=0)
        return mean, (var + eps).rsqrt()

    inputs = torch.randn(4, 3, 5)
    expected = local_moments(inputs, 1e-5)
    asked: list[tuple[str, str]] = []

    def has_kernel(operator: str, device_type: str) -> bool:
        asked.append((operator, device_type))
        return True

    monkeypatch.setattr(sync_batchnorm, "has_kernel", has_kernel)
    monkeypatch.setattr(torch, "batch_norm_stats", stats)
    torch.testing.assert_close(local_moments(inputs, 1e-5), expected)
    assert ("aten::batch_norm_stats", "cpu") in asked
