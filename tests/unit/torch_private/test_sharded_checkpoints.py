"""What torch.distributed.checkpoint writes into `.metadata`: an unpickler that knows nothing else reads it."""

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint

from lockstep.torch_private.sharded_checkpoints import MemoryFormatEncoding, StorageInfo, get_layout

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
