"""What we rely on of nested values, modes and the default device; each assertion says what breaks without it."""

import io
import pickle
from collections import OrderedDict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.utils.data import DataLoader

from lockstep.torch_private.loaders import LoaderIterator, num_yielded
from lockstep.torch_private.modules import (
    TorchDispatchMode,
    default_device_of_thread,
    has_kernel,
    num_stored_elements,
    tree_leaves,
    tree_map_only,
)
from lockstep.torch_private.sharded_checkpoints import MemoryFormatEncoding, StorageInfo, get_layout

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
    with torch.device("meta"), ThreadPoolExecutor() as pool:
        found = pool.submit(default_device_of_thread).result()
    assert found is None, "DataParallel: it need not be set in replicas' threads any more"


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


# -- What we rely on of a DataLoader; the assertion says what breaks without it ----------------------------------------


PEEK = "the sampler's warning: somebody who looks at one batch would be warned of a repeated epoch"


def test_the_iterator_of_a_loader_counts_its_batches() -> None:
    iterator = iter(DataLoader(range(5), batch_size=2))
    assert isinstance(iterator, LoaderIterator), "DistributedDataParallel: a batch skipped on one rank is not found"
    assert num_yielded(iterator) == 0
    assert [num_yielded(iterator) for _ in iterator] == [1, 2, 3]


# -- What torch.distributed.checkpoint writes into `.metadata`: an unpickler that knows nothing else reads it ----------


OURS = {(kind.__module__, kind.__qualname__) for kind in (MemoryFormatEncoding, StorageInfo)} | {
    (get_layout.__module__, get_layout.__qualname__)
}


@pytest.fixture
def metadata_bytes(tmp_path: Path) -> bytes:
    with pytest.warns(UserWarning, match="single process"):
        checkpoint.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    return (tmp_path / ".metadata").read_bytes()


class Recorder(pickle.Unpickler):
    """Notes the modules and names that a pickle names."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.found: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.found.add((module, name))
        return super().find_class(module, name)


def test_metadata_names_them(metadata_bytes: bytes) -> None:
    recorder = Recorder(metadata_bytes)
    recorder.load()
    assert recorder.found >= OURS, "load_weights: folders of torch.distributed.checkpoint would be refused"


def test_a_storage_info_says_where_a_piece_lies(metadata_bytes: bytes) -> None:
    metadata = pickle.loads(metadata_bytes)
    (info,) = metadata.storage_data.values()
    assert isinstance(info, StorageInfo)
    assert info.relative_path == "__0_0.distcp"
    assert info.offset == 0
    assert info.length > 0


def test_a_layout_is_found_by_its_name() -> None:
    named: Any = get_layout
    assert named("torch.strided") is torch.strided
    assert named("torch.sparse_coo") is torch.sparse_coo
