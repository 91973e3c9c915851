import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_model
from tests.unit.checkpoint.interop.test_foreign import Counting, Tied, lightning, net
from tests.unit.checkpoint.test_checkpoint import checkpoint
from torch import nn
from torch.distributed.checkpoint import load as load_sharded
from typer.testing import CliRunner

from lockstep.checkpoint.file import save_checkpoint, state_digest
from lockstep.checkpoint.interop.convert import Form, convert_weights
from lockstep.checkpoint.interop.weights import load_weights
from lockstep.cli.main import app
from lockstep.errors import CheckpointError

FORMS: tuple[Form, ...] = ("pt", "safetensors", "dcp")


def read(path: Path, form: Form) -> Any:
    """Read what was written as its own library does."""
    if form == "pt":
        return torch.load(path, weights_only=True)
    if form == "safetensors":
        return load_file(path)
    state = {name: torch.zeros_like(value) for name, value in net().state_dict().items()}
    with pytest.warns(UserWarning, match="single process"):
        load_sharded(state, checkpoint_id=path, no_dist=True)
    return state


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_read_by_its_own_library(tmp_path: Path, form: Form) -> None:
    torch.save({"model": nn.DataParallel(net()).state_dict(), "epoch": 3}, tmp_path / "a.pt")
    target = tmp_path / f"b.{form}"
    done = convert_weights(tmp_path / "a.pt", target)
    assert (done.form, done.num_tensors, done.num_bytes) == (form, 9, 176)
    assert "'module.' dropped from 9 names" in done.recognised
    assert state_digest(read(target, form)) == state_digest(net().state_dict())
    assert {path.name for path in tmp_path.iterdir()} == {"a.pt", target.name}


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
def test_forms_turn_into_each_other(tmp_path: Path, first: Form, second: Form) -> None:
    save_checkpoint(tmp_path / "a.ckpt", checkpoint(net()))
    convert_weights(tmp_path / "a.ckpt", tmp_path / "b", first)
    convert_weights(tmp_path / "b", tmp_path / "c", second)
    model = net(seed=1)
    assert load_weights(tmp_path / "c", model).fits
    assert state_digest(model.state_dict()) == state_digest(net().state_dict())


@pytest.mark.parametrize("form", FORMS)
def test_a_target_is_written_over_only_by_force(tmp_path: Path, form: Form) -> None:
    torch.save(net().state_dict(), tmp_path / "a.pt")
    torch.save(net(seed=1).state_dict(), tmp_path / "b.pt")
    target = tmp_path / f"c.{form}"
    convert_weights(tmp_path / "a.pt", target)
    with pytest.raises(CheckpointError, match="exists already"):
        convert_weights(tmp_path / "b.pt", target)
    assert state_digest(read(target, form)) == state_digest(net().state_dict())
    convert_weights(tmp_path / "b.pt", target, force=True)
    assert state_digest(read(target, form)) == state_digest(net(seed=1).state_dict())
    assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_of_other_files_is_never_written_over(tmp_path: Path) -> None:
    torch.save(net().state_dict(), tmp_path / "a.pt")
    (tmp_path / "home.dcp").mkdir()
    (tmp_path / "home.dcp" / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="folder of other files"):
        convert_weights(tmp_path / "a.pt", tmp_path / "home.dcp", force=True)
    assert (tmp_path / "home.dcp" / "thesis.tex").exists()


def test_a_failed_write_leaves_what_was_there_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(net().state_dict(), tmp_path / "a.pt")
    convert_weights(tmp_path / "a.pt", tmp_path / "b.dcp")

    def fail(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        convert_weights(tmp_path / "a.pt", tmp_path / "b.dcp", force=True)
    assert state_digest(read(tmp_path / "b.dcp", "dcp")) == state_digest(net().state_dict())
    assert {path.name for path in tmp_path.iterdir()} == {"a.pt", "b.dcp"}


def test_tied_tensors_and_views_are_written_once_and_without_the_rest(tmp_path: Path) -> None:
    state = dict(Tied().state_dict())
    state["first.weight"] = torch.arange(9000.0)[:9].view(3, 3)
    torch.save(state, tmp_path / "a.pt")
    assert convert_weights(tmp_path / "a.pt", tmp_path / "b.pt").num_bytes == 72
    assert (tmp_path / "b.pt").stat().st_size < 9000
    written = torch.load(tmp_path / "b.pt")
    assert written["second.weight"].data_ptr() == written["third.weight"].data_ptr()
    convert_weights(tmp_path / "a.pt", tmp_path / "b.safetensors")
    Tied().load_state_dict(load_file(tmp_path / "b.safetensors"))
    save_model(Tied(), str(tmp_path / "c.safetensors"))  # keeps one name of the two
    convert_weights(tmp_path / "c.safetensors", tmp_path / "d.pt")
    assert set(torch.load(tmp_path / "d.pt")) == set(state)


@pytest.mark.parametrize("form", FORMS)
def test_a_conjugate_that_is_only_marked_as_one_keeps_its_values(tmp_path: Path, form: Form) -> None:
    # safetensors wrote the memory and lost the mark: every imaginary part had the other sign.
    plain = torch.tensor([1 + 2j, 3 - 4j])
    torch.save({"a": plain.conj(), "b": plain.clone().conj().imag}, tmp_path / "a.pt")
    convert_weights(tmp_path / "a.pt", tmp_path / "b", form)
    convert_weights(tmp_path / "b", tmp_path / "c.pt")
    read = torch.load(tmp_path / "c.pt", weights_only=True)
    assert read["a"].tolist() == [1 - 2j, 3 + 4j]
    assert read["b"].tolist() == [-2, 4]


def test_a_sparse_tensor_is_read_and_written_where_it_can_be(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("a", torch.zeros(3, 3).to_sparse())
    torch.save({"a": torch.eye(3).to_sparse()}, tmp_path / "a.pt")
    assert convert_weights(tmp_path / "a.pt", tmp_path / "b.pt").num_bytes == 12
    assert load_weights(tmp_path / "b.pt", model).fits
    assert torch.equal(model.get_buffer("a").to_dense(), torch.eye(3))
    with pytest.raises(CheckpointError, match="could not be written"):
        convert_weights(tmp_path / "a.pt", tmp_path / "b.safetensors")


def test_extra_state_goes_along_where_it_can(tmp_path: Path) -> None:
    model = nn.Sequential(Counting(2, 2))
    torch.save(model.state_dict(), tmp_path / "a.pt")
    for form in ("pt", "dcp"):
        convert_weights(tmp_path / "a.pt", tmp_path / f"b.{form}")
        assert load_weights(tmp_path / f"b.{form}", nn.Sequential(Counting(2, 2))).fits
    assert "left out, because safetensors can hold only tensors: 0._extra_state" in (
        convert_weights(tmp_path / "a.pt", tmp_path / "b.safetensors").recognised
    )


def test_a_target_whose_name_says_another_form_is_refused(tmp_path: Path) -> None:
    torch.save(net().state_dict(), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="has the suffix of format safetensors"):
        convert_weights(tmp_path / "a.pt", tmp_path / "b.safetensors", "pt")
    with pytest.raises(CheckpointError, match="is not known from its suffix"):
        convert_weights(tmp_path / "a.pt", tmp_path / "b.xyz")
    with pytest.raises(CheckpointError, match="there is no folder"):
        convert_weights(tmp_path / "a.pt", tmp_path / "gone" / "b.safetensors")


@pytest.mark.parametrize("form", FORMS)
def test_a_full_disk_leaves_nothing_half(tmp_path: Path, form: Form) -> None:
    torch.save(net().state_dict(), tmp_path / "a.pt")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # fails writes as a full disk does
    try:
        with pytest.raises(CheckpointError, match="could not be written"):
            convert_weights(tmp_path / "a.pt", tmp_path / f"b.{form}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_the_command_says_what_it_read_and_wrote(tmp_path: Path) -> None:
    torch.save(lightning(net()), tmp_path / "a.ckpt")
    arguments = ["checkpoint", "convert", str(tmp_path / "a.ckpt"), str(tmp_path / "b.pt")]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0
    assert shown.output.split("\n")[:2] == [
        (
            f"{tmp_path / 'a.ckpt'}: a Lightning checkpoint; "
            "every name begins with 'model.'; --key model drops this prefix"
        ),
        f"{tmp_path / 'b.pt'}: pt, 9 tensors, 176 bytes",
    ]
    refused = CliRunner().invoke(app, arguments)
    assert (refused.exit_code, "exists already" in refused.output) == (2, True)
    assert CliRunner().invoke(app, [*arguments, "--force", "--key", "model"]).exit_code == 0
    assert set(torch.load(tmp_path / "b.pt")) == set(net().state_dict())
