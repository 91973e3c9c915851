"""What is no weights, or could run code: one message each, and nothing runs."""

import os
import pathlib
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.checkpoint import save as save_sharded
from torch.distributed.tensor import Shard, distribute_tensor

from lockstep.checkpoint.interop.pickled import named_globals
from lockstep.checkpoint.interop.weights import load_weights
from lockstep.errors import CheckpointError


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def bomb(tmp_path: Path) -> Any:
    """Yield what runs a command when it is unpickled, and check that it did not."""
    marker = tmp_path / "was-run"
    yield Malicious(marker)
    assert not marker.exists()


def refuse(path: Path, *parts: str) -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError) as caught:
        load_weights(path, model, strict=False)
    message = str(caught.value)
    assert all(part in message for part in (str(path), *parts)), message
    assert "\n" not in message
    assert torch.equal(model.weight, before)


def write_newer_protocol(content: Any, path: Path) -> None:
    torch.save(content, path, pickle_protocol=4)


def write_pickle(content: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(content))


def test_the_bomb_would_go_off(tmp_path: Path) -> None:
    torch.save(Malicious(tmp_path / "was-run"), tmp_path / "a.pt")
    torch.load(tmp_path / "a.pt", weights_only=False)
    assert (tmp_path / "was-run").exists()


@pytest.mark.parametrize("write", [torch.save, write_newer_protocol, write_pickle])
@pytest.mark.parametrize("depth", [0, 3])
def test_a_malicious_pickle_is_named_and_not_run(
    tmp_path: Path, bomb: Malicious, write: Callable[[Any, Path], None], depth: int
) -> None:
    content: Any = bomb
    for _ in range(depth):
        content = {"state_dict": {"weight": torch.ones(2, 3)}, "inner": [content]}
    write(content, tmp_path / "a.pt")
    refuse(tmp_path / "a.pt", "posix.system", "could run any code, so it was not read", "do not open this file")


def test_forms_of_torch_before_zip_archives_are_refused_with_what_to_do(tmp_path: Path, bomb: Malicious) -> None:
    for content in (bomb, nn.Linear(3, 2).state_dict()):
        torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
        refuse(tmp_path / "a.pt", "torch.save before torch 1.6", "weights_only=True")
    with tarfile.open(tmp_path / "b.pt", "w") as tar:
        tar.add(tmp_path / "a.pt", "pickle")
    refuse(tmp_path / "b.pt", "is a tar archive: unpack it")


def test_a_malicious_value_beside_the_weights_is_not_run_in_a_sharded_folder(tmp_path: Path, bomb: Malicious) -> None:
    with pytest.warns(UserWarning, match="single process"):
        save_sharded({"weight": torch.ones(2, 3), "_extra_state": bomb}, checkpoint_id=tmp_path / "a", no_dist=True)
    with pytest.raises(CheckpointError, match="_extra_state is not a tensor and needs pickle"):
        load_weights(tmp_path / "a", nn.Linear(3, 2, bias=False))


@pytest.mark.parametrize("wrapped", [True, False])
def test_malicious_metadata_of_a_sharded_folder_is_not_run(tmp_path: Path, bomb: Malicious, wrapped: bool) -> None:
    sharded(tmp_path / "a")
    metadata = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    metadata.planner_data = {"x": [bomb]}
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata if wrapped else bomb))
    refuse(tmp_path / "a", "names posix.system", "was not read")


def test_metadata_reaches_nothing_through_an_allowed_class(tmp_path: Path) -> None:
    # Protocol 4 lets a pickle ask for attributes of what it may name.
    sharded(tmp_path / "a")
    module, name = b"torch.distributed.checkpoint.metadata", b"Metadata.__init__.__globals__"
    texts = b"".join(b"\x8c" + bytes([len(text)]) + text for text in (module, name))
    (tmp_path / "a" / ".metadata").write_bytes(b"\x80\x04" + texts + b"\x93.")
    refuse(tmp_path / "a", "names torch.distributed.checkpoint.metadata.Metadata.__init__")


@pytest.mark.parametrize("kind", ["pathlib PosixPath", "torch.serialization _get_layout"])
def test_metadata_changes_no_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    # A pickle may set attributes of what it names: it made every path of the process be called "x", which is
    # also how a folder's files were found to lie in it.
    sharded(tmp_path / "a")
    path = tmp_path / "a" / ".metadata"
    build = f"c{kind}\n".replace(" ", "\n").encode() + b"N}Vname\nVx\nsV__kwdefaults__\nNs\x86b0"
    path.write_bytes(build + path.read_bytes())
    monkeypatch.setattr(pathlib.PurePosixPath, "name", pathlib.PurePath.name)  # which is put back
    refuse(tmp_path / "a", f"names {kind.split(maxsplit=1)[0]}")
    assert pathlib.PurePosixPath("here").name == "here"


def test_pieces_that_do_not_make_the_tensor_are_refused(tmp_path: Path) -> None:
    # As many numbers as the tensor has, but not in their places: what was in the memory before was loaded.
    sharded(tmp_path / "a")
    path = tmp_path / "a" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    entry = metadata.state_dict_metadata["weight"]
    entry.chunks[0].offsets = torch.Size([5, 5])
    path.write_bytes(pickle.dumps(metadata))
    refuse(tmp_path / "a", "a chunk of weight lies outside the tensor")
    entry.size, entry.chunks[0].offsets = torch.Size([4, 3]), torch.Size([0, 0])
    entry.chunks.append(entry.chunks[0])
    path.write_bytes(pickle.dumps(metadata))
    refuse(tmp_path / "a", "two chunks of weight overlap")


def test_a_pipe_in_a_sharded_folder_is_not_waited_for(tmp_path: Path) -> None:
    sharded(tmp_path / "a")
    (tmp_path / "a" / "__0_0.distcp").unlink()
    os.mkfifo(tmp_path / "a" / "__0_0.distcp")
    refuse(tmp_path / "a", "__0_0.distcp is not a regular file")


def write_entries(path: Path, content: bytes, **others: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", content)
        for name, data in others.items():
            archive.writestr(f"a/{name}", data)


def test_a_decompression_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_entries(tmp_path / "a.pt", b"\x80\x02" + b"N0" * (1 << 23) + b"}.")  # minutes of looking through it
    refuse(tmp_path / "a.pt", "would take 16,777,220 bytes when unpacked")
    monkeypatch.setattr("lockstep.checkpoint.interop.pickled._MAX_UNPACKED_BYTES", 100_000)
    write_entries(tmp_path / "a.pt", b"\x80\x02}.", data=bytes(200_000))
    refuse(tmp_path / "a.pt", "bytes when unpacked")


def test_no_pickle_makes_tensors_on_a_gpu(tmp_path: Path) -> None:
    # torch allows it, and map_location does not hold for what is made so.
    write_entries(tmp_path / "a.pt", b"\x80\x02}X\x01\x00\x00\x00wctorch.cuda\nFloatTensor\nK\x06\x85Rs.")
    refuse(tmp_path / "a.pt", "creates a torch.cuda.FloatTensor", "belong to another worker")


def test_a_dictionary_with_attributes_of_its_own_is_refused(tmp_path: Path) -> None:
    write_entries(
        tmp_path / "a.pt", b"\x80\x02ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsK\x05sb.", version=b"3"
    )
    refuse(tmp_path / "a.pt", "'int' object is not callable")


def test_an_index_of_any_depth_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    refuse(tmp_path, "is not a valid index of shards")


@pytest.mark.parametrize("name", ["../secret", "..", "/etc/hosts"])
def test_metadata_that_points_outside_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    sharded(tmp_path / "a")
    metadata = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    refuse(tmp_path / "a", "outside its folder")


def test_a_sharded_folder_without_a_ranks_part_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path / "a")
    metadata = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    metadata.state_dict_metadata["weight"].size = torch.Size([4, 3])
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    refuse(tmp_path / "a", "only 6 of the 12 elements of weight")


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("kept", [0, 100, -40])
def test_a_truncated_sharded_folder_is_refused(tmp_path: Path, name: str, kept: int) -> None:
    sharded(tmp_path / "a")
    path = tmp_path / "a" / name
    path.write_bytes(path.read_bytes()[:kept])
    refuse(tmp_path / "a", "again")


def test_a_sharded_folder_without_its_files_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path / "a")
    (tmp_path / "a" / "__0_0.distcp").unlink()
    refuse(tmp_path / "a", "No such file", "every *.distcp file")


def sharded(folder: Path) -> None:
    with pytest.warns(UserWarning, match="single process"):
        save_sharded(nn.Linear(3, 2).state_dict(), checkpoint_id=folder, no_dist=True)


def test_a_whole_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    torch.save(nn.Linear(3, 2), tmp_path / "a.pt")
    refuse(tmp_path / "a.pt", "torch.nn.modules.linear.Linear", "torch.save(model.state_dict(), 'weights.pt')")


def test_what_is_no_tensor_beside_the_weights_is_named(tmp_path: Path) -> None:
    torch.save({"state_dict": nn.Linear(3, 2).state_dict(), "when": Path("x")}, tmp_path / "a.pt")
    refuse(tmp_path / "a.pt", "pathlib.PosixPath", "weights_only=False")


@pytest.mark.usefixtures("alone_in_a_group")
def test_one_ranks_pieces_of_sharded_tensors_are_refused(tmp_path: Path) -> None:
    tensor = distribute_tensor(torch.ones(2, 3), init_device_mesh("cpu", (1,)), [Shard(0)])
    torch.save({"weight": tensor}, tmp_path / "a.pt")
    refuse(tmp_path / "a.pt", "one rank's part of sharded tensors", "full_state_dict=True")


def test_a_torchscript_program_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", b"")
        archive.writestr("a/constants.pkl", b"")
    refuse(tmp_path / "a.pt", "TorchScript", "torch.jit.load(FILE).state_dict()")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\n<!DOCTYPE html><html><body>Sign in", "is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "git lfs pull"),
        (b'{"weight_map": {}}', "is JSON"),
        (b"\x1f\x8b\x08\x00rest", "gzip"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"PK\x03\x04 and no archive", "damaged or truncated"),
        (b"weights? what weights?", "has no known checkpoint format"),
        (b"\x10\x00\x00\x00\x00\x00\x00\x00{'a'", "truncated"),
        (b"\x80\x04}.", "plain pickle"),
        (b"\x80\x02", "a plain pickle"),
    ],
)
def test_other_formats_are_named(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "a.pt").write_bytes(content)
    refuse(tmp_path / "a.pt", said)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([torch.ones(2)], "found a list"),
        (torch.ones(2), "a single tensor without a name"),
        ({}, "an empty dictionary"),
        ({"optimizer": {"state": {}}, "epoch": 3}, "a dictionary with 'optimizer', 'epoch'"),
        ({"weight": torch.ones(2, 3, device="meta")}, "on the meta device"),
    ],
)
def test_content_without_weights_is_described(tmp_path: Path, content: Any, said: str) -> None:
    torch.save(content, tmp_path / "a.pt")
    if "meta" in said:
        with pytest.raises(CheckpointError, match=said):
            load_weights(tmp_path / "a.pt", nn.Linear(3, 2))
    else:
        refuse(tmp_path / "a.pt", said)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"1 nested tensors, for example weight|holds a nested tensor"):
        load_weights(tmp_path / "a.pt", nn.Linear(3, 2))


def test_a_function_that_the_installed_torch_does_not_know_is_no_damage(tmp_path: Path) -> None:
    # As of a newer torch: "is damaged or truncated ... Copy or download it again" was said of a sound file.
    names = b"rebuild_tensor_v2", b"rebuild_tensor_v9"
    torch.save({"weight": torch.ones(2)}, tmp_path / "old.pt")
    with zipfile.ZipFile(tmp_path / "old.pt") as old, zipfile.ZipFile(tmp_path / "a.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name.replace("old/", "a/"), old.read(name).replace(*names))
    refuse(tmp_path / "a.pt", "holds what torch._utils._rebuild_tensor_v9 makes", "does not read safely")


def test_a_dictionary_that_holds_itself_ends(tmp_path: Path) -> None:
    content: dict[str, Any] = {}
    content["state_dict"] = content
    torch.save(content, tmp_path / "a.pt")
    refuse(tmp_path / "a.pt", "holds no weights")


@pytest.mark.parametrize("write", [torch.save, save_file])
@pytest.mark.parametrize("kept", [9, 60, 300, -3])
def test_a_truncated_file_is_refused(tmp_path: Path, write: Callable[[Any, Path], None], kept: int) -> None:
    write(nn.Linear(3, 2).state_dict(), tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(data[: min(kept, len(data) - 1)])
    refuse(tmp_path / "a.pt", "again")


@pytest.mark.parametrize("write", [torch.save, save_file])
def test_a_damaged_file_is_read_or_refused_and_never_anything_else(
    tmp_path: Path, write: Callable[[Any, Path], None]
) -> None:
    write(nn.Linear(3, 2).state_dict(), tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    refused = 0
    for place in range(0, len(data), 29):
        for value in (0, 46, 255):
            (tmp_path / "b.pt").write_bytes(data[:place] + bytes([value]) + data[place + 1 :])
            try:
                load_weights(tmp_path / "b.pt", nn.Linear(3, 2), strict=False)
            except CheckpointError:
                refused += 1
    assert refused


def test_folders_and_other_things_without_weights(tmp_path: Path) -> None:
    refuse(tmp_path / "gone.pt", "does not exist")
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", "a folder without weights: it holds no files")
    (tmp_path / "two").mkdir()
    for name in ("a.pt", "b.pt"):
        torch.save({"weight": torch.ones(1)}, tmp_path / "two" / name)
    refuse(tmp_path / "two", "2 weight files and no index: a.pt, b.pt")
    os.mkfifo(tmp_path / "pipe")
    refuse(tmp_path / "pipe", "neither a file nor a folder")


@pytest.mark.parametrize("protocol", range(6))
def test_what_a_pickle_names_is_found_in_any_protocol(tmp_path: Path, bomb: Malicious, protocol: int) -> None:
    # The second time a module is named, it comes from the pickle's memo.
    content = {"weight": 1, "items": [Path, bomb, os.getcwd, bomb]}
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(content, protocol))
    assert named_globals(tmp_path / "a.pkl") >= {"pathlib.Path", "posix.system", "posix.getcwd"}
