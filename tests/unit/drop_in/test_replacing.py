"""Torch's names are ours after `apply`, and torch's again after `undo`, wherever somebody holds them."""

import copy
import importlib
import io
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.threaded_ranks import run_ranks
from torch import nn

import lockstep as ls
from lockstep.comm import World
from lockstep.engine.arguments import check_batchnorm
from lockstep.launch.environment import STARTUP_FOLDER
from lockstep.parallel.replicas.copies import check_no_sync_batchnorm

PLACES = {
    ls.DistributedDataParallel: (
        "torch.nn.parallel.DistributedDataParallel",
        "torch.nn.parallel.distributed.DistributedDataParallel",
    ),
    ls.DataParallel: ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel"),
    ls.DistributedSampler: (
        "torch.utils.data.DistributedSampler",
        "torch.utils.data.distributed.DistributedSampler",
    ),
    ls.SyncBatchNorm: (
        "torch.nn.SyncBatchNorm",
        "torch.nn.modules.SyncBatchNorm",
        "torch.nn.modules.batchnorm.SyncBatchNorm",
    ),
    ls.init_process_group: (
        "torch.distributed.init_process_group",
        "torch.distributed.distributed_c10d.init_process_group",
    ),
}
ALL_PLACES = [place for places in PLACES.values() for place in places]


def find(place: str) -> Any:
    module, _, name = place.rpartition(".")
    return getattr(importlib.import_module(module), name)


TORCHS = {place: find(place) for place in ALL_PLACES}


@pytest.fixture
def drop_in() -> Iterator[ModuleType]:
    """`lockstep.drop_in`, applied; objects of torch's that other tests have left are none of this test's business."""
    with warnings.catch_warnings(action="ignore"):
        module = importlib.import_module("lockstep.drop_in")
        module.apply()
        yield module
        module.undo()


def test_layers_that_were_made_before_are_refused_where_torchs_are() -> None:
    theirs = nn.Sequential(nn.Linear(2, 3), nn.SyncBatchNorm(3))

    def use(world: World) -> None:
        with pytest.raises(ValueError, match="LS331"):
            ls.DistributedDataParallel(theirs)
        with pytest.raises(ValueError, match="LS355"):
            check_no_sync_batchnorm(theirs)
        with pytest.raises(ValueError, match="LS510"):
            check_batchnorm(theirs, world, num_shards=3)

    with warnings.catch_warnings(action="ignore"):
        drop_in = importlib.import_module("lockstep.drop_in")
        drop_in.apply()
        try:
            run_ranks(2, use, has_default_group=True)
        finally:
            drop_in.undo()


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Return a function that writes a user's module and imports it."""
    monkeypatch.syspath_prepend(tmp_path)
    names: list[str] = []

    def write_and_import(name: str, source: str) -> ModuleType:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        names.append(name)
        return importlib.import_module(name)

    yield write_and_import
    for name in names:
        del sys.modules[name]


@pytest.mark.parametrize("place", ALL_PLACES)
def test_a_name_is_ours_and_then_torchs_again(place: str, drop_in: ModuleType) -> None:
    ours = next(ours for ours, places in PLACES.items() if place in places)
    assert find(place) is ours
    drop_in.undo()
    assert find(place) is TORCHS[place]
    drop_in.apply()
    assert find(place) is ours


BEFORE = """
    import functools
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DistributedSampler
    from lockstep import SyncBatchNorm as OurBatchNorm

    CHOICES = {"ddp": DDP, "sampler": DistributedSampler}
    make_sampler = functools.partial(DistributedSampler, num_replicas=2, rank=0)

    class Wrapper(DDP):
        def __init__(self, *args):
            super().__init__(*args)
            self.is_users = True

    class Sampler(DistributedSampler):
        pass
"""


def test_code_that_was_imported_before_gets_ours(drop_in: ModuleType, user_module: Callable[..., Any]) -> None:
    drop_in.undo()
    user = user_module("imported_before", BEFORE)
    torchs = user.DDP
    drop_in.apply()

    def wrap(world: World) -> None:
        assert type(user.CHOICES["ddp"](nn.Linear(2, 1))) is ls.DistributedDataParallel
        wrapped = user.Wrapper(nn.Linear(2, 1))
        assert isinstance(wrapped, ls.DistributedDataParallel)
        assert wrapped.is_users
        wrapped(torch.full((1, 2), float(world.rank))).sum().backward()
        assert wrapped.module.weight.grad.tolist() == [[0.5, 0.5]]

    assert user.DDP is ls.DistributedDataParallel
    run_ranks(2, wrap, has_default_group=True)
    assert type(user.make_sampler(range(4))) is ls.DistributedSampler
    assert isinstance(user.Sampler(range(4), 2, 0), ls.DistributedSampler)
    drop_in.undo()
    assert user.DDP is torchs
    assert not isinstance(user.Sampler(range(4), 2, 0), ls.DistributedSampler)
    assert type(user.make_sampler(range(4))) is TORCHS["torch.utils.data.DistributedSampler"]
    assert user.OurBatchNorm is ls.SyncBatchNorm


def test_undo_restores_what_was_imported_meanwhile_but_not_what_came_from_lockstep(
    drop_in: ModuleType, user_module: Callable[..., Any]
) -> None:
    from_torch = user_module("from_torch", "from torch.nn import SyncBatchNorm")
    from_lockstep = user_module("from_lockstep", "from lockstep import SyncBatchNorm")
    assert from_torch.SyncBatchNorm is from_lockstep.SyncBatchNorm is ls.SyncBatchNorm
    drop_in.undo()
    assert from_torch.SyncBatchNorm is TORCHS["torch.nn.SyncBatchNorm"]
    assert from_lockstep.SyncBatchNorm is ls.SyncBatchNorm


def test_generic_subclasses_can_be_defined(drop_in: ModuleType) -> None:
    class Sampler(torch.utils.data.DistributedSampler[int]):
        pass

    assert isinstance(Sampler(range(4), 2, 0), ls.DistributedSampler)
    assert torch.nn.DataParallel[nn.Linear] is ls.DataParallel
    assert issubclass(
        importlib.import_module("torch.distributed.elastic.utils.data").ElasticDistributedSampler,
        TORCHS["torch.utils.data.DistributedSampler"],
    )


def test_what_torch_has_pickled_is_loaded_as_ours(drop_in: ModuleType) -> None:
    def load(world: World) -> None:
        wrapped, layer = torch.load(io.BytesIO(pickled), weights_only=False)
        assert type(wrapped) is ls.DistributedDataParallel
        assert type(layer) is ls.SyncBatchNorm
        assert not wrapped.training
        wrapped(torch.full((1, 2), float(world.rank))).sum().backward()
        assert wrapped.module.weight.grad.tolist() == [[0.5, 0.5]]

    drop_in.undo()
    pickled = pickle_with_torchs_classes()
    drop_in.apply()
    run_ranks(2, load, has_default_group=True)


def pickle_with_torchs_classes() -> bytes:
    """Return a wrapper and a layer as torch pickles them."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1)).eval()
        file = io.BytesIO()
        torch.save((model, torch.nn.SyncBatchNorm(3)), file)
    finally:
        dist.destroy_process_group()
    return file.getvalue()


def test_our_objects_are_copied_and_pickled(drop_in: ModuleType) -> None:
    layer = torch.nn.SyncBatchNorm(2)
    file = io.BytesIO()
    torch.save(layer, file)
    drop_in.undo()
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is type(copy.deepcopy(layer)) is ls.SyncBatchNorm


def test_layers_that_torch_made_before_are_converted(drop_in: ModuleType) -> None:
    drop_in.undo()
    layer = nn.SyncBatchNorm(3)
    drop_in.apply()
    assert type(torch.nn.SyncBatchNorm.convert_sync_batchnorm(layer)) is ls.SyncBatchNorm


def test_objects_that_were_made_before_are_warned_of(drop_in: ModuleType) -> None:
    drop_in.undo()
    layer = nn.SyncBatchNorm(3)
    expected = r"had objects of torch's classes already \(.*SyncBatchNorm.*first line"
    with pytest.warns(UserWarning, match=expected) as seen:
        drop_in.apply()
    assert [warning.filename for warning in seen] == [__file__]
    assert not isinstance(layer, ls.SyncBatchNorm)


def test_the_processes_that_are_started_inherit_it(drop_in: ModuleType) -> None:
    assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == STARTUP_FOLDER
    assert drop_in.is_active()
    drop_in.undo()
    assert STARTUP_FOLDER not in os.environ.get("PYTHONPATH", "")
    assert not drop_in.is_active()


def test_torchs_replicate_and_compile_work_with_ours(drop_in: ModuleType) -> None:
    replicate = importlib.import_module("torch.distributed._composable.replicate").replicate

    def train(world: World) -> list[Any]:
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)) for _ in range(2)]
        wrapped = [replicate(models[0]), torch.compile(nn.parallel.DistributedDataParallel(models[1]), backend="eager")]
        for model in wrapped:
            model(torch.full((1, 2), float(world.rank))).sum().backward()
        return [parameter.grad for model in models for parameter in model.parameters()]

    one, other = run_ranks(2, train, has_default_group=True)
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_torchs_function_makes_the_group(drop_in: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.get_backend() == "gloo"
        with pytest.raises(ls.GroupError, match="process group already"):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    finally:
        dist.destroy_process_group()


def test_an_attribute_of_torchs_reducer_is_explained() -> None:
    def ask(world: World) -> None:
        wrapped = ls.DistributedDataParallel(nn.Linear(1, 1))
        assert not wrapped.reducer._rebuild_buckets()
        with pytest.raises(AttributeError, match=r"no '_get_local_used_map', which torch's C\+\+ reducer has"):
            wrapped.reducer._get_local_used_map()

    run_ranks(1, ask, has_default_group=True)
