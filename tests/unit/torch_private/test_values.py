"""What we rely on of nested values, modes and the default device; each assertion says what breaks without it."""

import threading
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.torch_private.modules import (
    TorchDispatchMode,
    default_device_of_thread,
    has_kernel,
    num_stored_elements,
    tree_leaves,
    tree_map_only,
)

Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - torch's walk asks for `_fields`
BATCHES = "batches of nested values: counting samples, casting inputs, moving to a device"


def test_the_walk_finds_tensors_in_every_container() -> None:
    one, two, three = torch.zeros(1), torch.ones(1), torch.ones(2)
    value = {"a": [one, (two, "text")], "b": OrderedDict(c=Pair(three, None))}
    leaves = tree_leaves(value)
    assert [leaf for leaf in leaves if isinstance(leaf, Tensor)] == [one, two, three], BATCHES
    assert "text" in leaves, BATCHES


def test_the_walk_keeps_containers_and_what_is_no_tensor() -> None:
    value: dict[str, Any] = {"a": [torch.zeros(1), "text"], "b": Pair(torch.ones(1), 3)}
    doubled = tree_map_only(Tensor, lambda tensor: tensor * 2, value)
    assert doubled == {"a": [torch.zeros(1), "text"], "b": Pair(torch.ones(1) * 2, 3)}, BATCHES
    assert type(doubled["b"]) is Pair, BATCHES
    assert value["b"].left.item() == 1.0


class NoCopies(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.copy_.default else func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_copies_of_load_state_dict() -> None:
    net = nn.Linear(2, 2)
    state = {name: torch.full_like(value, 7.0) for name, value in net.state_dict().items()}
    with NoCopies():  # type: ignore[no-untyped-call]
        found = net.load_state_dict({**state, "more": torch.zeros(1)}, strict=False)
    assert found.unexpected_keys == ["more"]
    assert 7.0 not in net.weight, "load_weights: a file that is refused would be half loaded"
    net.load_state_dict(state)
    assert net.weight.eq(7.0).all()


def test_the_default_device_is_told_as_it_was_given() -> None:
    assert default_device_of_thread() is None
    with torch.device("meta"):
        assert default_device_of_thread() == torch.device("meta"), "DataParallel: tensors made on another device"
        with torch.device("cpu"):
            assert default_device_of_thread() == torch.device("cpu"), "the innermost counts"
    assert default_device_of_thread() is None
    torch.set_default_device("cpu")
    try:
        assert default_device_of_thread() == torch.device("cpu")
        with torch.device("meta"):
            assert default_device_of_thread() == torch.zeros(1).device == torch.device("meta")
    finally:
        torch.set_default_device(None)


def test_the_default_device_belongs_to_a_thread() -> None:
    found: list[torch.device | None] = []
    with torch.device("meta"):
        thread = threading.Thread(target=lambda: found.append(default_device_of_thread()))
        thread.start()
        thread.join()
    assert found == [None], "DataParallel: it need not be set in replicas' threads any more"


def test_the_kernels_of_a_device_are_known() -> None:
    synced = "SyncBatchNorm: the slow way on a GPU, or a kernel that is not there on another device"
    assert has_kernel("aten::native_batch_norm", "cpu"), synced
    assert not has_kernel("aten::batch_norm_stats", "cpu"), synced
    assert not has_kernel("aten::batch_norm_stats", "privateuseone"), synced
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("batch_norm_elemt", lambda *_: None, "PrivateUse1")
        assert has_kernel("aten::batch_norm_elemt", "privateuseone"), synced
    has_kernel.cache_clear()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_the_kernels_of_a_synchronized_batch_normalisation() -> None:
    assert has_kernel("aten::batch_norm_stats", "cuda"), "SyncBatchNorm: the slow way on a GPU"


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_stored_elements_are_counted(layout: torch.layout) -> None:
    tensor = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse(layout=layout)
    assert num_stored_elements(tensor) == 2, "lockstep convert: sizes of shards"


def test_stored_elements_that_are_there_twice_count_twice() -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True)
    assert num_stored_elements(tensor) == 2
