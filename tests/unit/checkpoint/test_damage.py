"""Files that are not as written (flipped bits, truncated files, other formats), and the errors that say so."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.manifests import manifest
from torch import nn
from typer.testing import CliRunner

from lockstep.checkpoint.file import load_checkpoint, read_header, save_checkpoint, state_digest
from lockstep.checkpoint.header import assign_offsets, decode_header, encode_header
from lockstep.checkpoint.inspection import verify_checkpoint
from lockstep.checkpoint.interop.weights import load_weights
from lockstep.checkpoint.manifest import Checkpoint, Manifest
from lockstep.cli.main import app
from lockstep.errors import CheckpointError

GOLDEN = Path(__file__).parent / "golden"
DOCS = Path(__file__).parent.parent.parent.parent / "docs" / "checkpoint-format.md"
GOLDEN_DIGEST = "bfcc1e7ffd8fb2564145613ff1b09e649eabdea691220f0ede4da773773fbb51"


def write(path: Path, **changes: Any) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).state_dict()
    changes = {"digest": state_digest(model), "optimizer": {"lr": 0.125}} | changes
    optimizer = {"optimizer/state/0/exp_avg": torch.ones(4, 3)}
    save_checkpoint(path, Checkpoint(model=model, optimizer=optimizer, manifest=manifest(**changes)))
    return path


def flip(path: Path, data: bytes, byte: int, bit: int) -> None:
    path.write_bytes(data[:byte] + bytes([data[byte] ^ 1 << bit]) + data[byte + 1 :])


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.mark.parametrize("version", [3, 4])
def test_every_format_is_read(version: int) -> None:
    path = GOLDEN / f"format-{version}.ckpt"
    read = load_checkpoint(path)
    assert read.manifest.format_version == version
    assert (read.manifest.epoch, read.manifest.step, read.manifest.global_step) == (1, 0, 2)
    assert read.manifest.digest == state_digest(read.model) == GOLDEN_DIGEST
    assert len(read.optimizer) == (19 if version == 4 else 18)
    assert read.manifest.parts is None
    assert read.manifest.checksums
    assert read.manifest.classes["optimizer"] == "Adam"
    assert verify_checkpoint(path).is_intact


def test_the_lines_in_the_docs_read_the_weights(model: nn.Module) -> None:
    [lines] = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert len([line for line in lines.splitlines() if line]) == 3
    exec(lines.replace("step-00000240.ckpt", str(GOLDEN / "format-3.ckpt")), {"model": model})
    assert state_digest(model.state_dict()) == GOLDEN_DIGEST


def test_the_docs_name_every_key_of_the_manifest() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert all(f"`{key}`" in text for key in Manifest.__dataclass_fields__)
    assert all(f'"{key}"' in text for key in Manifest.__dataclass_fields__)  # in the example


def test_a_flipped_bit_anywhere_is_noticed_and_the_tensor_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ckpt")
    data = path.read_bytes()
    header, _ = read_header(path)
    for byte in range(0, len(data), 3):
        flip(path, data, byte, bit=byte % 8)
        with pytest.raises(CheckpointError, match=r"damaged|cannot be read") as refused:
            load_checkpoint(path)
        result = verify_checkpoint(path)
        assert not result.is_intact, byte
        if byte >= header.num_bytes:
            at = byte - header.num_bytes
            [info] = [info for info in header.tensors if info.begin <= at < info.end]
            assert repr(info.name) in str(refused.value)
            assert result.damaged == (info.name,)


@pytest.mark.parametrize("version", [3, 4])
def test_a_cut_off_file_is_noticed_wherever_the_cut_is(tmp_path: Path, version: int) -> None:
    path = tmp_path / "a.ckpt"
    data = (GOLDEN / f"format-{version}.ckpt").read_bytes()
    for kept in (0, 1, 7, 8, 9, *range(20, len(data), 97), len(data) - 1):
        path.write_bytes(data[:kept])
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_checkpoint(path)
        assert not verify_checkpoint(path).is_intact
    path.write_bytes(data + b"\0")
    assert not verify_checkpoint(path).is_intact


def test_what_was_read_stays_when_the_file_goes(tmp_path: Path) -> None:
    # The tensors were the mapped file: an optimizer took them as its state, and the first step after a mount was lost
    # or a file cut short ended the process with SIGBUS.
    path = write(tmp_path / "a.ckpt")
    read = load_checkpoint(path)
    assert str(path) not in Path("/proc/self/maps").read_text()
    os.truncate(path, 0)
    assert state_digest(read.model) == read.manifest.digest


def test_a_file_that_is_truncated_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.ckpt")
    kept = read_header(path)[0].num_bytes + 8  # the first tensor's
    monkeypatch.setattr("lockstep.checkpoint.file.checksum", lambda *_: os.truncate(path, kept))
    with pytest.raises(CheckpointError, match="it was truncated while it was read"):
        load_checkpoint(path)


def test_what_is_cut_off_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ckpt")
    path.write_bytes(path.read_bytes()[:-4])
    last = read_header(path)[0].tensors[-1].name
    assert verify_checkpoint(path).damaged == (last,)


def test_a_header_that_promises_more_than_there_is_takes_no_memory(tmp_path: Path) -> None:
    place = {"dtype": "U8", "shape": [1 << 50], "data_offsets": [4, 4 + (1 << 50)]}
    (tmp_path / "a.ckpt").write_bytes(sealed("{}", z=place))
    result = verify_checkpoint(tmp_path / "a.ckpt")
    assert result.damaged == ("z",)


def test_weights_of_another_digest_are_noticed(tmp_path: Path) -> None:
    # As a program would leave it that writes tensors and their checksums, but not the digest.
    result = verify_checkpoint(write(tmp_path / "a.ckpt", digest="0" * 64))
    assert "the parameters and buffers do not match the digest" in result.problems


def test_a_later_format_and_a_foreign_file_are_not_called_damaged(tmp_path: Path) -> None:
    write(tmp_path / "later.ckpt", format_version=6)
    save_file({"weight": torch.ones(2)}, tmp_path / "a.safetensors")
    for read in (load_checkpoint, verify_checkpoint):
        with pytest.raises(CheckpointError, match=r"has format 6, but .* only formats up to 5.*Update Lockstep"):
            read(tmp_path / "later.ckpt")
        with pytest.raises(CheckpointError, match="without a Lockstep manifest"):
            read(tmp_path / "a.safetensors")


@pytest.mark.parametrize("header", [b"[]", b"{", b'{"a":1}', b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}'])
def test_nonsense_is_refused_with_a_message(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match="its header"):
        load_checkpoint(path)
    path.write_bytes((1 << 60).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="does not begin with a safetensors header"):
        load_checkpoint(path)


def sealed(text: str, **entries: Any) -> bytes:
    """Return a file whose checksums hold and whose content somebody made up."""
    header = encode_header(assign_offsets({"w": (torch.float32, (1,))}), {"lockstep": text})
    if entries:
        values = {**json.loads(header[8:]), **entries}
        header = len(json.dumps(values)).to_bytes(8, "little") + json.dumps(values).encode()
    return header + bytes(4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("checksums", 5), ("metrics", [1]), ("metrics", {"a": "b"}), ("fingerprint", "s"), ("config", [1])),
        *(("versions", None), ("digest", 3), ("classes", {"optimizer": 1}), ("loader", [1]), ("global_step", "x")),
        *(("epoch", None), ("seed", True)),
        *(("model_extra", {"$tensor": "gone"}), ("model_extra", {"$tuple": [1]}), ("format_version", "2")),
        *(("model_extra", {"$dict": [[{}, 1]]}), ("optimizer", json.loads("[" * 150 + "]" * 150)), ("later", 1)),
    ],
)
def test_a_manifest_of_other_kinds_is_refused_with_a_message(tmp_path: Path, key: str, value: Any) -> None:
    # Each ended in a traceback of `show`, `verify` or `load_weights`.
    path = write(tmp_path / "a.ckpt")
    written = json.loads(read_header(path)[0].metadata["lockstep"])
    path.write_bytes(sealed(json.dumps({**written, "checksums": {"w": "2144df1c"}, key: value})))
    with pytest.raises(CheckpointError, match=r"cannot be (parsed|decoded)|model_extra is not a dictionary"):
        load_weights(path, nn.Linear(1, 1))
    for name in ("show", "verify"):
        code, output = command(name, str(path))
        assert code in {0, 1, 2}, output


def test_nonsense_of_any_depth_or_size_is_refused_soon(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    place = {"dtype": "F32", "data_offsets": [0, 4]}
    contents = [sealed("[" * 100_000), sealed("{}", w={**place, "shape": [1 << 40] * 200_000})]
    contents.append(sealed("{}", w={**place, "shape": [1 << 62, 1 << 62, 0], "data_offsets": [0, 0]}))
    twice = json.dumps({"w": {**place, "shape": [1]}})[:-1] + "," + json.dumps({"w": {**place, "shape": [1, 1]}})[1:]
    contents.append(len(twice).to_bytes(8, "little") + twice.encode() + bytes(4))
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="cannot be"):
            load_checkpoint(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="it is not a regular file"):
        load_checkpoint(path)


def test_state_too_deep_to_be_read_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nested more than 100 levels deep"):
        write(tmp_path / "a.ckpt", optimizer=json.loads("[" * 150 + "]" * 150))


def test_a_terminal_obeys_nothing_in_a_file(tmp_path: Path) -> None:
    code, output = command("show", str(write(tmp_path / "a.ckpt", loader="\x1b]0;title\x07")))
    assert (code, "\x1b" in output, "\\x1b]0;title\\x07" in output) == (0, False, True)


def test_a_header_that_readers_would_refuse_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.checkpoint.header.MAX_HEADER_BYTES", 500)
    with pytest.raises(CheckpointError, match=r"too many for one file"):
        write(tmp_path / "a.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_every_dtype_is_read_by_safetensors(tmp_path: Path) -> None:
    names = ["float64", "float32", "float16", "bfloat16", "complex64", "int64", "int32", "int16", "int8", "uint64"]
    names += ["uint32", "uint16", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"]
    tensors = {name: torch.arange(3).to(getattr(torch, name)) for name in names}
    tensors |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5), "turned": torch.arange(6.0).view(2, 3).t()}
    digest = state_digest(tensors)
    save_checkpoint(tmp_path / "a.ckpt", Checkpoint(model=tensors, optimizer={}, manifest=manifest(digest=digest)))
    assert state_digest(load_file(tmp_path / "a.ckpt")) == digest
    assert state_digest(load_checkpoint(tmp_path / "a.ckpt").model) == digest
    assert verify_checkpoint(tmp_path / "a.ckpt").is_intact


def test_a_header_is_read_as_it_was_written() -> None:
    tensors = assign_offsets({"b": (torch.bool, (3,)), 'a"lockstep_checksum":"': (torch.float32, (2, 2))})
    header = decode_header(encode_header(tensors, {"lockstep": '{"lockstep_checksum":"12345678"}'}))
    assert header.is_intact
    assert header.tensors == tensors
    assert header.file_bytes == header.num_bytes + 19


def command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoint", *arguments])
    return result.exit_code, result.output


def test_show_tells_what_is_in_a_file() -> None:
    code, output = command("show", str(GOLDEN / "format-3.ckpt"))
    assert code == 0
    said = ("2 updates done; next is epoch 1, step 0", GOLDEN_DIGEST, "exp_avg_sq", "batch_size 8", "seed 0", "torch 2")
    assert all(text in output for text in said)
    document = json.loads(command("show", "--json", str(GOLDEN / "format-3.ckpt"))[1])
    assert (document["global_step"], document["digest"]) == (2, GOLDEN_DIGEST)
    assert sum(group["num_tensors"] for group in document["groups"]) == 27


def test_verify_says_what_is_damaged_of_a_file_and_of_a_run(tmp_path: Path) -> None:
    whole, damaged = write(tmp_path / "step-00000001.ckpt"), write(tmp_path / "step-00000002.ckpt")
    data = damaged.read_bytes()
    flip(damaged, data, len(data) - 1, bit=3)
    assert command("verify", str(whole))[0] == 0
    code, output = command("verify", str(tmp_path))
    assert code == 1
    assert "step-00000001.ckpt: intact, 8 checksums and the digest match" in output
    assert "DAMAGED" in output
    code, output = command("verify", "--json", str(tmp_path))
    assert code == 1
    assert [entry["is_whole"] for entry in json.loads(output)["checkpoints"]] == [False, True]


def test_show_names_what_the_later_formats_hold() -> None:
    for arguments in ((), ("--json",)):
        output = command("show", *arguments, str(GOLDEN / "format-4.ckpt"))[1]
        assert "EMA" in output
    assert json.loads(output)["callbacks"] == ["EMA"]


def test_a_file_that_is_no_checkpoint_may_be_a_damaged_one(tmp_path: Path) -> None:
    (tmp_path / "step-00000001.ckpt").write_text("not a checkpoint")
    assert command("verify", str(tmp_path))[0] == 1
    save_file({"w": torch.ones(2)}, tmp_path / "other.safetensors")
    assert command("verify", str(tmp_path / "other.safetensors"))[0] == 2


def test_what_is_not_there_is_bad_input(tmp_path: Path) -> None:
    for arguments in (("show", str(tmp_path)), ("verify", str(tmp_path / "gone.ckpt"))):
        code, output = command(*arguments)
        assert code == 2
        assert "holds no checkpoint" in output or "There is no checkpoint" in output


def test_a_file_of_a_later_format_hides_no_others(tmp_path: Path) -> None:
    write(tmp_path / "step-00000003.ckpt", format_version=99)
    whole = write(tmp_path / "step-00000002.ckpt")
    write(tmp_path / "step-00000001.ckpt", digest="0" * 64)
    code, output = command("verify", str(tmp_path))
    assert code == 2
    assert f"{whole}: intact" in output
    assert "step-00000001.ckpt: DAMAGED" in output
    assert "step-00000003.ckpt" in output
