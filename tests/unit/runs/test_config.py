import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML

from lockstep.errors import ConfigError
from lockstep.runs.config import (
    TORCHS_NAMES,
    Config,
    find_torchs_name,
    parse_config,
    placement_overrides,
    read_config,
)
from lockstep.runs.importing import call_object, import_object

MINIMAL = "model: some.module:Net\ndata: some.module:data\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def message(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(write(tmp_path, text), overrides)
    return str(caught.value)


def test_a_minimal_config_has_defaults(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, MINIMAL))
    assert config.loss == "torch.nn.functional:cross_entropy"
    assert config.deterministic
    assert config.device_ids == "auto"


def test_overrides_are_yaml_and_reach_into_arguments(tmp_path: Path) -> None:
    overrides = ["epochs=3", "optimizer_args.lr=1e-3", "device_ids=[0, 2]", "deterministic=false", "run_dir=runs/x=y"]
    config = read_config(write(tmp_path, MINIMAL + "optimizer_args: {lr: 1, eps: 1.0e-8}\n"), overrides)
    assert config.epochs == 3
    # YAML 1.1 reads 1e-3 as text, and an optimizer then fails far from the cause.
    assert config.optimizer_args == {"lr": 0.001, "eps": 1e-8}
    assert config.device_ids == [0, 2]
    assert config.deterministic is False
    assert config.run_dir == "runs/x=y"


def test_the_resolved_config_reads_back_the_same(tmp_path: Path) -> None:
    # YAML reads one number as a number and two as text; the first was refused.
    assert read_config(write(tmp_path, MINIMAL), ["device_ids=0"]).device_ids == [0]
    assert read_config(write(tmp_path, MINIMAL), ["device_ids=0,1"]).device_ids == "0,1"
    config = read_config(write(tmp_path, MINIMAL), ["optimizer_args.betas=[0.9, 0.99]", "device_ids=auto:3"])
    again = read_config(write(tmp_path, config.to_yaml()))
    assert again == config
    assert set(YAML(typ="safe").load(config.to_yaml())) == set(Config.model_fields)


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        ("a: [1", (), "line 1"),
        ("text", (), "holds text"),
        ("", (), "holds nothing"),
        ("- a", (), "holds a list"),
        (MINIMAL + "model: again:Net\n", (), "duplicate key"),
        ("data: a:b\n", (), "'model' is missing"),
        (MINIMAL, ("weights=uniform",), "weights is 'uniform', expected balanced, or an import path"),
        (MINIMAL, ("weights=[1, 4]",), "Weights of the classes in the loss: loss_args: {weight: [1, 4]}."),
        (MINIMAL, ("bach_size=8",), "Did you mean 'batch_size'?"),
        (MINIMAL, ("zzz=8",), "Known keys: model,"),
        (MINIMAL, ("epochs=many",), "epochs is 'many', expected a whole number."),
        (MINIMAL, ("epochs=1.5",), "epochs is 1.5, expected a whole number."),
        (MINIMAL, ("epochs=true",), "expected a whole number"),
        (MINIMAL, ("epochs=0",), "expected at least 1"),
        (MINIMAL, ("seed=-1",), "expected at least 0"),
        (MINIMAL, ("max_grad_norm=0",), "expected more than 0"),
        (MINIMAL, ("deterministic=maybe",), "expected true or false"),
        (MINIMAL, ("optimizer_args=3",), "expected keys and values"),
        (MINIMAL, ("param_groups={head.*: 0.1}",), "gives 'head.*' 0.1, expected options of the optimizer"),
        (MINIMAL, ("optimizer_args=3", "optimizer_args.lr=1"), "reaches into 'optimizer_args'"),
        (MINIMAL, ("scheduler_interval=week",), "expected 'epoch' or 'step'"),
        (MINIMAL, ("device_ids=1.5",), "a list of GPU numbers"),
        (MINIMAL, ("device_ids=[a]",), "a list of GPU numbers"),
        (MINIMAL, ("model=some.module.Net",), "package.module:name"),
        (MINIMAL, ("model=mine.parts.Net",), "Did you mean 'mine.parts:Net'?"),
        (MINIMAL, ("optimizer=torch.optim.AdamW",), "Did you mean 'torch.optim:AdamW'?"),
        (MINIMAL, ("optimizer=adamv",), "or a name of torch's such as Adam. Did you mean 'Adam'?"),
        (MINIMAL, ("loss=crossentropyy",), "Did you mean 'cross_entropy'?"),
        (MINIMAL, ("scheduler=steplrs",), "Did you mean 'StepLR'?"),
        (MINIMAL, ("num_workers=3",), "Did you mean 'workers', the processes that train, or 'loader_workers'"),
        (MINIMAL, ("accumulate_grad_batches=3",), "multiply batch_size by it"),
        (MINIMAL, ("lr=0.1",), "there is no key 'lr'. Did you mean 'optimizer_args.lr'?"),
        (MINIMAL, ("early_stopping=val_loss",), "For example: {metric: val_loss, patience: 3}."),
        (MINIMAL, ("model=3",), "model is 3, expected text"),
        (MINIMAL, ("run_dir=2024-13-45",), "is not YAML"),
        (MINIMAL, ("epochs",), "expected key=value"),
        (MINIMAL, ("batch_size=2",), "smaller than num_shards (4)"),
        (MINIMAL, ("batch_size=1", "workers=2"), "smaller than the 2 workers"),
        (MINIMAL, ("workers=0",), "workers is 0, expected at least 1"),
        (MINIMAL, ("respawn=-1",), "respawn is -1, expected at least 0"),
        (MINIMAL, ("respawn=often",), "respawn is 'often', expected a whole number"),
        (MINIMAL, ("evict_after=0",), "evict_after is 0, expected more than 0"),
        (MINIMAL, ("respawn_minutes=0",), "respawn_minutes is 0, expected more than 0"),
        (MINIMAL, ("spares=1", "on_worker_loss=stop"), "spares is 1, but on_worker_loss is 'stop'"),
    ],
)
def test_bad_input_is_one_clear_message(tmp_path: Path, text: str, overrides: tuple[str, ...], said: str) -> None:
    assert said in message(tmp_path, text, *overrides)


def test_one_message_lists_all_mistakes(tmp_path: Path) -> None:
    told = message(tmp_path, MINIMAL + "epochs: x\nbatchsize: 3\ndevice_ids: 1.5\n")
    assert "3 mistakes" in told
    assert told.count("device_ids is") == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config file .*gone\.yaml"):
        read_config(tmp_path / "gone.yaml")


def test_more_workers_than_shards_is_refused() -> None:
    config = parse_config({"model": "a:b", "data": "a:b"}, "config")
    config.check_workers(4)
    with pytest.raises(ConfigError, match="5 workers cannot share"):
        config.check_workers(5)


@pytest.mark.parametrize(
    ("overrides", "num_workers", "is_said", "num_shards"),
    [
        ([], 2, False, 4),
        ([], 3, False, 6),
        ([], 3, True, 4),  # 1, 2, 3 and 4 workers can be compared
        ([], 6, False, 6),
        ([], 6, True, 6),
        (["num_shards=4"], 6, False, 4),
        (["batch_size=8", "accumulate=2"], 3, False, 4),  # 6 shards would be 12 parts
    ],
)
def test_a_new_run_has_as_many_shards_as_its_workers_share(
    overrides: list[str], num_workers: int, is_said: bool, num_shards: int, tmp_path: Path
) -> None:
    config = read_config(write(tmp_path, MINIMAL), overrides).with_shards(num_workers, is_said=is_said)
    assert config.num_shards == num_shards


@pytest.mark.parametrize(
    ("key", "given", "path"),
    [
        ("optimizer", "adam", "torch.optim:Adam"),
        ("optimizer", "adam_w", "torch.optim:AdamW"),
        ("loss", "cross_entropy", "torch.nn.functional:cross_entropy"),
        ("loss", "CrossEntropyLoss", "torch.nn:CrossEntropyLoss"),
        ("loss", "mse", "torch.nn:MSELoss"),
        ("loss", "bce_with_logits", "torch.nn:BCEWithLogitsLoss"),
        ("scheduler", "one_cycle", "torch.optim.lr_scheduler:OneCycleLR"),
        ("scheduler", "Cosine", "cosine"),  # our own name comes first
        ("scheduler", "linear_lr", "torch.optim.lr_scheduler:LinearLR"),
        ("optimizer", "mine:adam", "mine:adam"),
    ],
)
def test_a_name_of_torchs_stands_for_its_import_path(key: str, given: str, path: str, tmp_path: Path) -> None:
    assert getattr(read_config(write(tmp_path, MINIMAL), [f"{key}={given}"]), key) == path


def test_the_names_of_torchs_are_those_that_torch_has() -> None:
    for key, modules in TORCHS_NAMES.items():
        for module, names in modules.items():
            assert [name for name in names.split() if not hasattr(importlib.import_module(module), name)] == []
            assert all(find_torchs_name(key, name) == f"{module}:{name}" for name in names.split())
    optimizers = {
        each.__name__
        for each in vars(torch.optim).values()
        if isinstance(each, type) and issubclass(each, torch.optim.Optimizer)
    }
    assert optimizers - {"Optimizer"} <= set(TORCHS_NAMES["optimizer"]["torch.optim"].split())


@pytest.mark.parametrize(
    ("given", "workers", "devices", "expected"),
    [
        ("cpu:4", 2, None, ("cpu", 2)),
        ("auto:3@20GiB", 2, None, ("auto@20GiB", 2)),
        ("[0, 1]", 2, None, ([0, 1], 2)),
        ("auto", None, "cpu:3", ("cpu:3", None)),
        ("auto", 3, "cpu", ("cpu", 3)),
        ("auto", None, "[0, 2]", ([0, 2], None)),
    ],
)
def test_options_name_workers_and_devices_as_the_config_does(
    given: str, workers: int | None, devices: str | None, expected: tuple[Any, Any], tmp_path: Path
) -> None:
    path = write(tmp_path, f"{MINIMAL}devices: cpu:7\n")  # as the options call it
    assert read_config(path).device_ids == "cpu:7"
    before = read_config(path, [f"devices={given}"]).model_dump()
    config = read_config(path, [f"device_ids={given}", *placement_overrides(before, workers, devices)])
    assert (config.device_ids, config.workers) == expected


def test_a_run_does_not_start_with_fewer_workers_than_it_may_have_left(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, MINIMAL), ["min_workers=2"])
    config.check_workers(2)
    with pytest.raises(ConfigError, match="min_workers is 2, but the run starts with 1 worker"):
        config.check_workers(1)


def test_respawn_is_a_number_or_true(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    assert [read_config(path, [f"respawn={given}"]).respawn for given in ("true", "false", "7")] == [3, 0, 7]


def test_aliases_that_stand_for_gigabytes_are_refused_by_their_size(tmp_path: Path) -> None:
    # Ten lines filled the memory.
    levels = [f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)]
    bomb = MINIMAL + "model_args:\n  a0: &a0 [lol]\n" + "".join(levels)
    assert "run.yaml stands for 2" in message(tmp_path, bomb)
    assert "a config has at most 100,000" in message(tmp_path, bomb)
    assert "contains itself" in message(tmp_path, MINIMAL + "model_args: {a: &a [*a]}\n")
    assert "nested too deeply" in message(tmp_path, MINIMAL + f"model_args: {{a: {'[' * 5000}{']' * 5000}}}\n")
    assert "longer than 1 MiB" in message(tmp_path, MINIMAL + "#" * (1 << 20))
    repeated = read_config(write(tmp_path, MINIMAL + "model_args: {a: &a [1, 2], b: *a}\n"))
    assert repeated.model_args == {"a": [1, 2], "b": [1, 2]}


# -- What is imported by its path --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "good_module.py").write_text(
        "class Net:\n    def make(self): pass\nclass AdamW: pass\nclass Adam: pass\n"
    )
    (tmp_path / "needy_module.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "broken_module.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_dotted_name_is_found() -> None:
    assert import_object("model", "good_module:Net.make").__name__ == "make"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("good_module", "package.module:name"),
        ("good_module:Nett", "'good_module' has no 'Nett'. Did you mean 'Net'?"),
        ("good_module:Adamw", "Did you mean 'AdamW'?"),
        ("good_module:Net.mak", "'good_module.Net' has no 'mak'. Did you mean 'make'?"),
        ("nowhere_module:Net", "there is no module 'nowhere_module'"),
        ("good_module.inner:Net", "there is no module 'good_module.inner'"),
        ("needy_module:Net", "needs a module 'not_installed_anywhere' that is not installed"),
        ("broken_module:Net", "fails to import: SyntaxError"),
    ],
)
def test_the_part_that_is_wrong_is_named(path: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        import_object("model", path)
    assert said in str(caught.value)


def test_a_call_that_fails_names_the_key_and_the_arguments() -> None:
    with pytest.raises(ConfigError, match=r"model could not be constructed: TypeError: .*model_args: size=3"):
        call_object("model", import_object("model", "good_module:Net"), size=3)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigError, match="names a int"):
        call_object("model", 3)


def test_the_arguments_that_a_function_takes_are_listed() -> None:
    def optimizer(lr: float, momentum: float = 0.0) -> None:
        """Takes two arguments."""
        raise ValueError(f"{lr} and {momentum} do not fit")

    with pytest.raises(ConfigError, match=r"learning_rate=1[.] It takes lr, momentum[.] Run with"):
        call_object("optimizer", optimizer, learning_rate=1)
    with pytest.raises(ConfigError, match=r"lr=1[.] Run with"):  # its arguments are not what is wrong
        call_object("optimizer", optimizer, lr=1)
