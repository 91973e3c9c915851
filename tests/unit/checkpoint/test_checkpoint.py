from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support.manifests import manifest
from torch import Tensor, nn

from lockstep.checkpoint.file import load_checkpoint, read_manifest, save_checkpoint, state_digest
from lockstep.checkpoint.manifest import Checkpoint, Manifest, decode_state, encode_state
from lockstep.errors import CheckpointError


def checkpoint(model: nn.Module) -> Checkpoint:
    return Checkpoint(model=model.state_dict(), optimizer={"optimizer/0": torch.ones(2)}, manifest=manifest())


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model[0].weight.data = model[0].weight.data.bfloat16()
    save_checkpoint(tmp_path / "a.ckpt", checkpoint(model))
    read = load_checkpoint(tmp_path / "a.ckpt")
    assert replace(read.manifest, checksums={}) == manifest()
    assert state_digest(read.model) == state_digest(model.state_dict())
    assert list(read.optimizer) == ["optimizer/0"]


def test_shared_parameters_are_written_under_both_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    save_checkpoint(tmp_path / "a.ckpt", checkpoint(model))
    read = load_checkpoint(tmp_path / "a.ckpt").model
    assert torch.equal(read["0.weight"], read["1.weight"])


def test_other_readers_find_the_weights_under_the_models_names(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    save_checkpoint(tmp_path / "a.ckpt", checkpoint(model))
    tensors = load_file(tmp_path / "a.ckpt")
    weights = {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer/")}
    nn.Linear(3, 2).load_state_dict(weights)


def test_a_failed_save_leaves_the_file_before_it_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save_checkpoint(path, checkpoint(nn.Linear(3, 2)))
    before = path.read_bytes()
    (tmp_path / "b.ckpt").mkdir()  # renaming a file onto a directory fails, after everything is written
    with pytest.raises(CheckpointError, match="could not be written"):
        save_checkpoint(tmp_path / "b.ckpt", checkpoint(nn.Linear(3, 2)))
    assert path.read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.ckpt", "b.ckpt"]


def test_a_model_tensor_may_not_take_the_optimizers_names(tmp_path: Path) -> None:
    clash = Checkpoint(model={"optimizer/w": torch.ones(1)}, optimizer={}, manifest=manifest())
    with pytest.raises(CheckpointError, match="are reserved for the optimizer"):
        save_checkpoint(tmp_path / "a.ckpt", clash)


def test_state_survives_json() -> None:
    state = {
        "state": {0: {"step": torch.tensor(3.0), "moments": (torch.ones(2), None)}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "fused": None, "params": [0, 1]}],
        "milestones": Counter({10: 1, (1, ("a", 2.5)): 2}),
        "blocks": {(0, 1): {(): None}, (0, ("b", True)): 2, None: 3},
        "$odd": True,
    }
    tensors: dict[str, Tensor] = {}
    encoded = manifest(optimizer=encode_state(state, "optimizer", tensors)).to_json()
    decoded = decode_state(Manifest.from_json(encoded).optimizer, tensors)
    assert set(tensors) == {"optimizer/state/0/step", "optimizer/state/0/moments/0"}
    assert torch.equal(decoded["state"][0]["moments"][0], torch.ones(2))
    assert decoded["param_groups"] == state["param_groups"]
    assert decoded["milestones"] == state["milestones"]
    assert decoded["blocks"] == state["blocks"]
    assert decoded["$odd"] is True


@pytest.mark.parametrize("step", [1, 2, 11, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_state_that_is_a_view_with_gaps_is_saved(step: int, dtype: torch.dtype, tmp_path: Path) -> None:
    # One element of such a view counts as contiguous, and has no bytes for torch: Prodigy with slice_p has them.
    view = torch.arange(40).to(dtype)[3::step]
    state = {"sliced": view, "column": torch.ones(3, 4).t()[1:2], "empty": view[:0], "wide": torch.ones(1).expand(4)}
    save_checkpoint(tmp_path / "a.ckpt", Checkpoint(model=state, optimizer={}, manifest=manifest()))
    found = load_checkpoint(tmp_path / "a.ckpt").model
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in state.items())


def test_names_that_would_meet_are_kept_apart() -> None:
    state = {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}}
    tensors: dict[str, Tensor] = {}
    decoded = decode_state(encode_state(state, "optimizer", tensors), tensors)
    assert (decoded["a/b"].item(), decoded["a"]["b"].item()) == (1.0, 0.0)


def test_a_dtype_that_cannot_be_stored_is_explained(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="complex128, which the safetensors format cannot hold"):
        save_checkpoint(tmp_path / "a.ckpt", checkpoint(nn.Linear(2, 2, dtype=torch.complex128)))
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_without_plain_values_is_named(tmp_path: Path) -> None:
    for tensor in (torch.eye(2).to_sparse(), torch.empty(2, device="meta")):
        with pytest.raises(CheckpointError, match=r"tensor 'w' is .* can hold only dense tensors"):
            save_checkpoint(tmp_path / "a.ckpt", Checkpoint(model={"w": tensor}, optimizer={}, manifest=manifest()))


def test_others_may_read_a_checkpoint_as_they_may_any_file(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.ckpt", checkpoint(nn.Linear(2, 2)))
    (tmp_path / "usual").touch()
    assert (tmp_path / "a.ckpt").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_the_manifest_is_read_alone(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.ckpt", checkpoint(nn.Linear(2, 2)))
    assert replace(read_manifest(tmp_path / "a.ckpt"), checksums={}) == manifest()


def test_a_dictionary_keeps_its_order() -> None:
    # What a user saved with the run came back sorted by its keys, and a queue of names was another one then.
    state = {"z": 1, "a": {"second": 2, "first": 1}}
    read = Manifest.from_json(manifest(extra=encode_state(state, "optimizer/extra", {})).to_json()).extra
    assert list(read) == ["z", "a"]
    assert list(read["a"]) == ["second", "first"]


def test_state_that_cannot_be_stored_is_named() -> None:
    with pytest.raises(CheckpointError, match="'optimizer/hook' contains a function"):
        encode_state({"hook": test_state_survives_json}, "optimizer", {})
    for key in (b"a", (1, frozenset({2}))):
        with pytest.raises(CheckpointError, match=r"'optimizer' has a (bytes|frozenset) as a key"):
            encode_state({key: 1}, "optimizer", {})


def test_digest_sees_bits_names_dtypes_and_shapes_but_not_order_or_layout() -> None:
    one = {"a": torch.zeros(2, 3), "b": torch.ones(1)}
    assert state_digest(one) == state_digest({"b": torch.ones(1), "a": torch.zeros(3, 2).t()})
    others: list[dict[str, Tensor]] = [
        {"a": -torch.zeros(2, 3), "b": torch.ones(1)},
        {"a": torch.zeros(3, 2), "b": torch.ones(1)},
        {"a": torch.zeros(2, 3, dtype=torch.float64), "b": torch.ones(1)},
        {"a": torch.zeros(2, 3), "c": torch.ones(1)},
    ]
    assert len({state_digest(tensors) for tensors in [one, *others]}) == 5
