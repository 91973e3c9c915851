"""Models that torch.compile compiles, with a backend that needs no C++ compiler."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.comm import World
from lockstep.data import ShardedLoader
from lockstep.engine.user_function import EXPLAINED_ERRORS
from lockstep.errors import LossError

ALONE = World(rank=0, world_size=1, group=None)


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    yield
    torch.compiler.reset()


class Broken(nn.Linear):
    """A forward that is two graphs."""

    def forward(self, inputs: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(inputs)


def make(model: nn.Module, **options: Any) -> tuple[ls.Trainer, ShardedLoader]:
    data = TensorDataset(torch.arange(40.0).reshape(10, 4) / 40, torch.arange(10.0).reshape(10, 1))
    loader = ShardedLoader(data, batch_size=6, num_shards=2, world=ALONE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = ls.Trainer(model, optimizer, loss=loss_of, num_shards=2, world=ALONE, **options)
    return trainer, loader


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1))


def test_a_compiled_run_ends_in_the_bits_of_one_that_was_resumed_in_an_epoch(tmp_path: Path) -> None:
    whole, loader = make(small(), compile="aot_eager")
    batches = [batch for epoch in range(2) for batch in loader.epoch(epoch)]  # slices of 3, and of 2
    for batch in batches:
        whole.step(batch)
    first, _ = make(small(), compile="aot_eager")
    for batch in batches[:3]:
        first.step(batch)
    first.save(tmp_path / "middle.ckpt")
    second, _ = make(small(), compile="aot_eager")
    second.load(tmp_path / "middle.ckpt")
    for batch in batches[3:]:
        second.step(batch)
    assert second.digest() == whole.digest()
    assert not [name for name in whole.model.state_dict() if "_orig_mod" in name]


def test_the_graph_of_a_size_does_not_depend_on_the_sizes_before_it() -> None:
    # With torch's default the second size would make a graph for all sizes, and the first size would get it too.
    sizes: list[Any] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        sizes.append([tuple(each.shape) for each in inputs if isinstance(each, Tensor) and each.ndim == 2])
        assert not any(isinstance(each, torch.SymInt) for each in inputs), "a graph for all sizes"
        return graph.forward

    torch._dynamo.register_backend(backend, name="noting_sizes")
    trainer, loader = make(nn.Linear(4, 1), compile="noting_sizes")
    for epoch in range(2):
        for batch in loader.epoch(epoch):
            trainer.step(batch)
    assert sorted(size for each in sizes for size in each if size[1] == 4 and size[0] > 1) == [(2, 4), (3, 4)]


def test_a_fingerprint_says_that_a_model_is_compiled() -> None:
    plain, compiled = make(small())[0].fingerprint(), make(small(), compile="aot_eager")[0].fingerprint()
    assert plain.differences(compiled) == ["compiled is False and True"]
    assert "compiled True" in str(compiled)
    assert "compiled" not in str(plain)


def test_a_run_that_is_resumed_without_compiling_names_the_difference(tmp_path: Path) -> None:
    compiled, loader = make(small(), compile="aot_eager")
    compiled.step(next(loader.epoch(0)))
    compiled.save(tmp_path / "one.ckpt")
    with warnings.catch_warnings(record=True, action="always") as found:
        make(small())[0].load(tmp_path / "one.ckpt")
    assert any("compiled is True and False" in str(each.message) for each in found)


def test_a_forward_that_is_not_one_graph_is_an_error_with_what_to_do() -> None:
    trainer, loader = make(Broken(4, 1), compile="aot_eager")
    with pytest.raises(LossError, match="cannot make one graph of the model's forward"):
        trainer.step(next(loader.epoch(0)))


def test_without_a_compiler_the_error_says_what_to_install() -> None:
    # torch's own words; a real one takes ten seconds of imports.
    with pytest.raises(LossError, match="compiler that works"), EXPLAINED_ERRORS:
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config.cpp.cxx: ()")


def test_compile_is_a_truth_value_or_the_name_of_a_backend() -> None:
    with pytest.raises(TypeError, match="compile is 1, expected True, False or a backend"):
        make(small(), compile=1)
