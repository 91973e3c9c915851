"""Files that torch, safetensors and others wrote, read into models."""

import json
import math
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from tests.unit.checkpoint.test_checkpoint import checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint import save as save_sharded

from lockstep.checkpoint.file import save_checkpoint, state_digest
from lockstep.checkpoint.interop.names import LoadedWeights, fit_names, plain_names
from lockstep.checkpoint.interop.weights import load_weights
from lockstep.errors import CheckpointError

NAMES = 9


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def assert_same(path: Path, source: nn.Module, **options: Any) -> LoadedWeights:
    other = net(seed=1)
    loaded = load_weights(path, other, **options)
    assert loaded.fits
    assert state_digest(other.state_dict()) == state_digest(source.state_dict())
    return loaded


def test_a_plain_state_dict(tmp_path: Path) -> None:
    torch.save(net().state_dict(), tmp_path / "a.pt")
    assert assert_same(tmp_path / "a.pt", net()).recognised == "a state_dict"


def test_an_archive_that_was_compressed_again(tmp_path: Path) -> None:
    # Mapped, its tensors would be the compressed bytes.
    torch.save(net().state_dict(), tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as old,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert_same(tmp_path / "b.pt", net())


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model", "net", "whatever"])
def test_a_wrapped_one_beside_what_else_a_training_saves(tmp_path: Path, key: str) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    content = {"epoch": 3, "best": torch.tensor(0.9), key: model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(content, tmp_path / "a.pt")
    assert assert_same(tmp_path / "a.pt", model).recognised == f"a state_dict wrapped in {key!r}"


def test_one_of_torchs_data_parallel(tmp_path: Path) -> None:
    torch.save({"model": nn.DataParallel(net()).state_dict()}, tmp_path / "a.pt")
    loaded = assert_same(tmp_path / "a.pt", net())
    assert loaded.recognised == (
        f"a DataParallel or DistributedDataParallel state_dict wrapped in 'model'; 'module.' dropped from {NAMES} names"
    )


@pytest.mark.usefixtures("alone_in_a_group")
def test_one_of_torchs_distributed_data_parallel_wrapped_twice(tmp_path: Path) -> None:
    torch.save(nn.parallel.DistributedDataParallel(nn.DataParallel(net())).state_dict(), tmp_path / "a.pt")
    assert "'module.module.' dropped" in assert_same(tmp_path / "a.pt", net()).recognised


def test_one_of_torch_compile_into_a_wrapped_model(tmp_path: Path) -> None:
    compiled: Any = torch.compile(net(), backend="eager")
    torch.save(compiled.state_dict(), tmp_path / "a.pt")
    assert "'_orig_mod.' dropped" in assert_same(tmp_path / "a.pt", net()).recognised
    wrapped = nn.DataParallel(net(seed=1))
    assert load_weights(tmp_path / "a.pt", wrapped).fits
    assert state_digest(wrapped.module.state_dict()) == state_digest(net().state_dict())


def lightning(model: nn.Module) -> dict[str, Any]:
    """Return what Lightning 2.6.6's Trainer.save_checkpoint wrote for a module that holds `model` as self.model."""
    return {
        "epoch": 1,
        "global_step": 2,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": OrderedDict((f"model.{name}", value) for name, value in model.state_dict().items()),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(1.0)}},
        "optimizer_states": [
            {"state": {0: {"step": torch.tensor(2.0)}}, "param_groups": [{"lr": 0.001, "params": [0]}]}
        ],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": 4},
    }


def test_a_lightning_checkpoint(tmp_path: Path) -> None:
    torch.save(lightning(net()), tmp_path / "a.ckpt")
    loaded = assert_same(tmp_path / "a.ckpt", net())
    assert loaded.recognised == f"a Lightning checkpoint; 'model.' dropped from {NAMES} names"


def test_a_lightning_checkpoint_with_weights_beside_the_model(tmp_path: Path) -> None:
    content = lightning(net())
    content["state_dict"]["loss.weight"] = torch.ones(2)
    torch.save(content, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"The file has 9 of the model's 9 names under 'model': pass key='model'"):
        load_weights(tmp_path / "a.ckpt", net(seed=1))
    assert_same(tmp_path / "a.ckpt", net(), key="model")


@pytest.mark.parametrize("content", ["flat", "nested", "application"])
def test_a_folder_of_torch_distributed_checkpoint(tmp_path: Path, content: str) -> None:
    state = net().state_dict()
    whole = {"model": state, "optimizer": {"state": {"0.weight": {"step": torch.ones(1)}}, "lr": 0.1}, "note": object}
    contents: dict[str, dict[str, Any]] = {"flat": state, "nested": whole, "application": {"app": whole}}
    with pytest.warns(UserWarning, match="single process"):
        save_sharded(contents[content], checkpoint_id=tmp_path / "a", no_dist=True)
    assert_same(tmp_path / "a", net())


def test_safetensors(tmp_path: Path) -> None:
    save_file(net().state_dict(), tmp_path / "a.safetensors")
    assert_same(tmp_path / "a.safetensors", net())


class Tied(nn.Module):
    """A model whose three names are two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.third = nn.Linear(3, 3, bias=False)
        self.third.weight = self.second.weight


def test_a_tensor_under_two_names_of_which_safetensors_keeps_one(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    save_model(model, str(tmp_path / "a.safetensors"))
    assert load_weights(tmp_path / "a.safetensors", other).fits
    assert torch.equal(other.third.weight, model.third.weight)
    save_file({name: model.state_dict()[name] for name in ("first.weight", "third.weight")}, tmp_path / "b.safetensors")
    other = Tied()
    assert load_weights(tmp_path / "b.safetensors", other).fits
    assert torch.equal(other.second.weight, model.second.weight)


def test_two_tensors_for_what_is_one_in_the_model_are_refused(tmp_path: Path) -> None:
    torch.save({f"{name}.weight": torch.randn(3, 3) for name in ("first", "second", "third")}, tmp_path / "a.pt")
    with pytest.raises(
        CheckpointError, match=r"one tensor in the model and differ in the file: second.weight and third"
    ):
        load_weights(tmp_path / "a.pt", Tied())


def test_one_tensor_under_two_names_may_hold_a_nan(tmp_path: Path) -> None:
    model = Tied()
    torch.nn.init.constant_(model.second.weight, math.nan)
    torch.save(model.state_dict(), tmp_path / "a.pt")
    assert load_weights(tmp_path / "a.pt", Tied()).fits


@pytest.mark.parametrize("form", ["model.safetensors", "pytorch_model.bin"])
def test_a_folder_of_hugging_face(tmp_path: Path, form: str) -> None:
    write = save_file if form.endswith("safetensors") else torch.save
    write(net().state_dict(), tmp_path / form)
    (tmp_path / "config.json").write_text("{}")
    assert form in assert_same(tmp_path, net()).recognised


@pytest.mark.parametrize("form", ["model.safetensors", "pytorch_model.bin"])
def test_shards_of_hugging_face(tmp_path: Path, form: str) -> None:
    index = write_shards(tmp_path, form)
    assert assert_same(tmp_path, net()).recognised == f"2 shards of {form}"
    (tmp_path / index["weight_map"]["0.weight"]).unlink()
    with pytest.raises(CheckpointError, match="names the shard"):
        load_weights(tmp_path, net())


def write_shards(folder: Path, form: str) -> dict[str, Any]:
    state = net().state_dict()
    stem, _, suffix = form.partition(".")
    index: dict[str, Any] = {"metadata": {"total_size": 1}, "weight_map": {}}
    for number, names in enumerate([list(state)[:4], list(state)[4:]], start=1):
        shard = f"{stem}-{number:05d}-of-00002.{suffix}"
        tensors = {name: state[name] for name in names}
        save_file(tensors, folder / shard) if suffix == "safetensors" else torch.save(tensors, folder / shard)
        index["weight_map"].update(dict.fromkeys(names, shard))
    (folder / f"{form}.index.json").write_text(json.dumps(index))
    return index


def test_an_index_that_leaves_its_folder_is_refused(tmp_path: Path) -> None:
    torch.save(net().state_dict(), tmp_path / "secret.bin")
    (tmp_path / "model").mkdir()
    index = {"weight_map": {"0.weight": "../secret.bin"}}
    (tmp_path / "model" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside its folder"):
        load_weights(tmp_path / "model", net())


def test_an_index_and_shards_of_two_versions_are_refused(tmp_path: Path) -> None:
    index = write_shards(tmp_path, "model.safetensors")
    index["weight_map"]["9.weight"] = index["weight_map"]["0.weight"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"1 tensors that are not in its shards, for example 9.weight"):
        load_weights(tmp_path, net())


def test_a_run_directorys_newest_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "step-00000009.ckpt", checkpoint(net(seed=2)))
    save_checkpoint(tmp_path / "step-00000010.ckpt", checkpoint(net()))
    assert "step-00000010.ckpt" in assert_same(tmp_path, net()).recognised


def test_several_sets_of_weights_need_a_key(tmp_path: Path) -> None:
    torch.save({"ema": net().state_dict(), "raw": net(seed=2).state_dict()}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="several sets of weights: 'ema', 'raw'"):
        load_weights(tmp_path / "a.pt", net())
    assert_same(tmp_path / "a.pt", net(), key="ema")
    with pytest.raises(CheckpointError, match="several sets of weights"):
        load_weights(tmp_path / "a.pt", net(), key="gone")


def test_other_weights_in_the_file_are_reported(tmp_path: Path) -> None:
    torch.save({"state_dict": net().state_dict(), "ema": net(seed=2).state_dict()}, tmp_path / "a.pt")
    assert "other weights in the file, left out: 'ema'" in assert_same(tmp_path / "a.pt", net()).recognised
    with pytest.raises(CheckpointError, match="nothing under the key 'emma'"):
        load_weights(tmp_path / "a.pt", net(), key="emma")


def test_all_that_does_not_fit_is_in_one_message_and_nothing_is_written(tmp_path: Path) -> None:
    state = net().state_dict()
    state["9.wide"] = state.pop("0.weight")
    state["2.weight"] = torch.zeros(5, 4)
    torch.save(state, tmp_path / "a.pt")
    model = net(seed=1)
    before = state_digest(model.state_dict())
    with pytest.raises(CheckpointError) as caught:
        load_weights(tmp_path / "a.pt", model)
    assert str(caught.value).split("\n  ")[1:4] == [
        "1 missing in the file: 0.weight",
        "1 not in the model: 9.wide",
        "1 of another shape: size mismatch for 2.weight: [5, 4] in the file, [2, 4] in the model",
    ]
    assert state_digest(model.state_dict()) == before


def test_a_long_list_is_shortened_and_near_names_are_shown(tmp_path: Path) -> None:
    torch.save({f"layers.{number}.weights": torch.ones(1) for number in range(30)}, tmp_path / "a.pt")
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(30))
    with pytest.raises(CheckpointError, match=r"layers.0.weights \(similar to layers.0.weight\)") as caught:
        load_weights(tmp_path / "a.pt", model)
    assert str(caught.value).count("and 22 more") == 2


def test_what_fits_is_loaded_where_that_is_asked_for(tmp_path: Path) -> None:
    state = net().state_dict()
    state["9.new"] = state.pop("0.weight")
    state["2.weight"] = torch.zeros(5, 4)
    torch.save(state, tmp_path / "a.pt")
    model, fresh = net(seed=1), net(seed=1)
    loaded = load_weights(tmp_path / "a.pt", model, strict=False)
    assert (loaded.missing, loaded.unexpected) == (("0.weight",), ("9.new",))
    assert loaded.misshaped == {"2.weight": ((5, 4), (2, 4))}
    assert torch.equal(model[0].bias, state["0.bias"])
    assert torch.equal(model[2].weight, fresh[2].weight)


def test_where_nothing_fits_it_is_refused_either_way(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1), "b": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="2 not in the model: a, b"):
        load_weights(tmp_path / "a.pt", net(), strict=False)


def test_values_are_converted_to_the_models_dtype_in_its_own_tensors(tmp_path: Path) -> None:
    torch.save(net().state_dict(), tmp_path / "a.pt")
    model = net(seed=1).bfloat16()
    places = [tensor.data_ptr() for tensor in model.state_dict().values()]
    load_weights(tmp_path / "a.pt", model)
    assert torch.equal(model[0].weight, net()[0].weight.bfloat16())
    assert [tensor.data_ptr() for tensor in model.state_dict().values()] == places


def test_tensors_saved_from_a_gpu_that_is_not_here_are_read_to_the_cpu(tmp_path: Path) -> None:
    # The pickle names the device in plain text, so a file from a GPU can be made without one.
    torch.save(net().state_dict(), tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name).replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:5"))
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(tmp_path / "b.pt")
    assert_same(tmp_path / "b.pt", net())


class Counting(nn.Linear):
    """A layer with state that is no tensor."""

    calls = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "history": [(1, 2), {"when": "now"}]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state == {**self.get_extra_state(), "calls": state["calls"]}
        self.calls = state["calls"]


def test_extra_state_that_is_no_tensor(tmp_path: Path) -> None:
    model, other = nn.Sequential(Counting(2, 2)), nn.Sequential(Counting(2, 2))
    model[0].calls = 7  # type: ignore[assignment]
    torch.save(nn.DataParallel(model).state_dict(), tmp_path / "a.pt")
    assert load_weights(tmp_path / "a.pt", other).fits
    assert other[0].calls == 7
    save_file({name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}, tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"1 missing in the file: 0._extra_state"):
        load_weights(tmp_path / "b", other)


def test_modules_still_read_what_their_earlier_versions_wrote(tmp_path: Path) -> None:
    # BatchNorm counts its batches since torch 0.4.1, and weight_norm has other names since 2.0.
    with pytest.warns(FutureWarning):
        old = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(2, 2)), nn.BatchNorm1d(2))
    state = OrderedDict(
        (f"module.{name}", value) for name, value in old.state_dict().items() if "num_batches" not in name
    )
    torch.save(state, tmp_path / "a.pt")
    new = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.BatchNorm1d(2))
    assert load_weights(tmp_path / "a.pt", new).fits
    assert torch.equal(new[0].weight, old[0].weight)


def test_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    torch.save(net().state_dict(), tmp_path / "a.pt")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4))
    with pytest.raises(ValueError, match="meta device"):
        load_weights(tmp_path / "a.pt", model)


def test_tensors_besides_the_weights_are_reported(tmp_path: Path) -> None:
    torch.save({"net": net().state_dict(), "mean": torch.ones(3), "loss": torch.tensor(1.0)}, tmp_path / "a.pt")
    assert assert_same(tmp_path / "a.pt", net()).recognised.endswith("left out: 'mean'")


class Versioned(nn.Linear):
    """A layer that asks by which version of itself its state was written."""

    _version = 3
    seen: Any = None

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.seen = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@pytest.mark.parametrize("wrap", [nn.DataParallel, nn.Sequential])
def test_modules_learn_which_version_wrote_their_state(tmp_path: Path, wrap: Any) -> None:
    torch.save(wrap(nn.Sequential(Versioned(2, 2))).state_dict(), tmp_path / "a.pt")
    model = nn.Sequential(Versioned(2, 2))
    load_weights(tmp_path / "a.pt", model)
    assert model[0].seen == 3


def test_a_scalar_that_was_written_as_a_vector_of_one(tmp_path: Path) -> None:
    # As torch before 0.4 did, and torch still reads it.
    model = nn.Module()
    model.register_buffer("scale", torch.tensor(0.0))
    torch.save({"scale": torch.ones(1)}, tmp_path / "a.pt")
    assert load_weights(tmp_path / "a.pt", model).fits
    assert model.scale == 1


def test_the_other_order_of_arguments_is_told() -> None:
    given: Any = net(seed=1)
    with pytest.raises(TypeError, match=r"Write ls.load_weights\(path, model\)"):
        load_weights(given, Path("a.pt"))


# -- What wrappers put before names ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "expected", "changed"),
    [
        (["module.a.w", "module.b"], ["a.w", "b"], {"module.a.w": "a.w", "module.b": "b"}),
        (["module.module.w", "module.module.b"], ["w", "b"], {"module.module.w": "w", "module.module.b": "b"}),
        (["model.w", "model.b"], ["w", "b"], {"model.w": "w", "model.b": "b"}),
        (["_orig_mod.w"], ["w"], {"_orig_mod.w": "w"}),
        (["module._orig_mod.w"], ["w"], {"module._orig_mod.w": "w"}),
        (["_orig_mod.module.w"], ["w"], {"_orig_mod.module.w": "w"}),
        (["a._orig_mod.w", "b"], ["a.w", "b"], {"a._orig_mod.w": "a.w", "b": "b"}),
        (["a.w", "b"], ["module.a.w", "module.b"], {"a.w": "module.a.w", "b": "module.b"}),
        (["a.w"], ["_orig_mod.a.w"], {"a.w": "_orig_mod.a.w"}),
        (["model.w"], ["module._orig_mod.w"], {"model.w": "module._orig_mod.w"}),
        # A head that the file has not, and one that the model has not.
        (["model.w", "model.b"], ["w", "b", "head.w"], {"model.w": "w", "model.b": "b"}),
        (
            ["model.w", "model.b", "model.head.w"],
            ["w", "b"],
            {"model.w": "w", "model.b": "b", "model.head.w": "head.w"},
        ),
    ],
)
def test_what_wrappers_put_before_names_is_dropped(
    names: list[str], expected: list[str], changed: dict[str, str]
) -> None:
    assert fit_names(names, expected).names == changed


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        # Replacing the text "module." would damage each of these.
        (["encoder.module.w", "decoder.w"], ["encoder.module.w", "decoder.w"]),
        (["my_module.w"], ["my_module.w"]),
        (["module.w", "head.w"], ["module.w", "head.w"]),
        (["module.w", "module.b"], ["module.w", "module.b"]),
        (["module_list.0.w"], ["module_list.0.w"]),
        (["model.w"], ["model.w"]),
        (["_orig_mod.w"], ["_orig_mod.w"]),
        # Nothing says that these belong together: they are told as they are.
        (["stem.w"], ["trunk.w", "head.w"]),
        (["module.w", "x"], ["w", "b"]),
    ],
)
def test_names_that_are_the_models_own_stay(names: list[str], expected: list[str]) -> None:
    renaming = fit_names(names, expected)
    assert dict(renaming.names) == {name: name for name in names}
    assert renaming.notes == ()


def test_one_level_is_dropped_where_the_model_has_a_child_of_that_name() -> None:
    names = ["module.module.w", "module.head.w"]
    assert set(fit_names(names, ["module.w", "head.w"]).names.values()) == {"module.w", "head.w"}


def test_a_wrapper_is_dropped_though_other_names_differ() -> None:
    renaming = fit_names(["module.w", "module.old"], ["w", "new"])
    assert set(renaming.names.values()) == {"w", "old"}
    assert renaming.notes == ("'module.' dropped from 2 names",)
    assert renaming.is_wrapped


def test_a_wrapper_stays_where_the_model_has_such_a_child_and_other_names_differ() -> None:
    renaming = fit_names(["module.w", "module.old"], ["module.w", "head.w"])
    assert set(renaming.names.values()) == {"module.w", "module.old"}


def test_names_that_would_become_one_stay_two() -> None:
    names = ["a._orig_mod.w", "a.w"]
    assert dict(plain_names(names).names) == {name: name for name in names}


def test_without_a_model_only_wrappers_are_dropped() -> None:
    assert set(plain_names(["module.model.w", "module.model.b"]).names.values()) == {"model.w", "model.b"}
    assert set(plain_names(["module.w", "head.w"]).names.values()) == {"module.w", "head.w"}


def test_paths_of_modules_follow_their_names() -> None:
    renaming = fit_names(["module._orig_mod.0.w"], ["0.w"])
    assert [renaming.rename_module(path) for path in ("", "module", "module._orig_mod", "module._orig_mod.0")] == [
        *("", "", "", "0"),
    ]


def test_no_names_are_no_error() -> None:
    assert dict(fit_names([], ["w"]).names) == {}
    assert dict(plain_names([]).names) == {}
