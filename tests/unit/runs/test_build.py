import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.file import load_checkpoint
from lockstep.checkpoint.manifest import Checkpoint
from lockstep.checkpoint.step_files import find_checkpoints
from lockstep.data import Stream
from lockstep.errors import CheckpointError, ConfigError, DataFileError
from lockstep.events import Recorders
from lockstep.report.metrics_file import MetricsFile, read_metrics
from lockstep.runs.build import RunParts, build_parts, build_scheduler
from lockstep.runs.config import parse_config
from lockstep.runs.fit import fit
from lockstep.runs.saving import RunSaver, restore_run

MODULE = """
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset
from lockstep.errors import DataFileError

class Net(nn.Linear):
    def __init__(self, outputs=1):
        super().__init__(6, outputs)

def not_a_model():
    return 3

def synced():
    return nn.Sequential(nn.SyncBatchNorm(6), Net())

def weights(train, length=None):
    return [float(index == 2) for index in range(length or len(train))]

def few_weights(train):
    return weights(train, 3)

def no_weights(train):
    return train.weights

def frozen():
    return Net().requires_grad_(False)

def data(length=20, fail=None):
    if fail == "os":
        raise OSError("disk gone")
    if fail == "file":
        raise DataFileError("images.bin is truncated.")
    inputs = torch.zeros(length, 6)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True)), None

def spoilt():
    inputs = torch.zeros(16, 6)
    inputs[3] = float("nan")
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).nan_to_num()), None

def flat():
    inputs = torch.zeros(16, 6)
    return TensorDataset(inputs, inputs.sum(1)), None

def triples():
    return TensorDataset(*(torch.zeros(8, 6) for _ in range(3))), None

class Stream(IterableDataset):
    def __iter__(self):
        return iter([])

def three():
    return [data()[0]] * 3

def split():
    return torch.utils.data.random_split(data()[0], [12, 8])

def named_targets():
    class Named(torch.utils.data.Dataset):
        def __len__(self):
            return 10
        def __getitem__(self, index):
            return torch.ones(6), {"first": torch.tensor([float(index)]), "second": torch.zeros(1)}
    return Named(), Named()

def own_loss(output, target, scale=1):
    return (scale * target["first"] + 0 * output).mean()

class Extra(Net):
    def get_extra_state(self):
        return {"seen": torch.ones(2), "name": "kept"}
    def set_extra_state(self, state):
        self.restored = state

def stream():
    return Stream(), None

def no_optimizer(parameters):
    return 5

def no_scheduler(optimizer):
    return 5

a_number = 3
"""
VALUES: dict[str, Any] = {"model": "own_things:Net", "data": "own_things:data", "loss": "torch.nn:MSELoss"}


@pytest.fixture(autouse=True)
def _own_things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_things.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def build(**changes: Any) -> RunParts:
    return build_parts(parse_config(VALUES | changes, "config"), torch.device("cpu"))


@pytest.mark.parametrize("loss", ["torch.nn:MSELoss", "torch.nn.functional:mse_loss"])
def test_outputs_and_targets_that_would_be_compared_crosswise_are_refused(loss: str) -> None:
    assert build(loss=loss, batch_size=8, num_shards=2).trainer is not None
    parts = build(loss=loss, batch_size=8, num_shards=2, data="own_things:flat")
    with pytest.raises(ConfigError, match=r"outputs of shape \[4, 1\] and data yields targets of shape \[4\]"):
        parts.trainer.step(next(parts.train.epoch(0)))
    parts.trainer.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "own_things:not_a_model"}, "made a value of type int, not a torch.nn.Module"),
        ({"model": "own_things:frozen"}, "no parameter that requires a gradient"),
        ({"model": "own_things:Nett"}, "Did you mean 'Net'?"),
        ({"model": "gone.deep:Net"}, "there is no module 'gone'"),
        ({"model_args": {"outputz": 3}}, "unexpected keyword argument 'outputz'"),
        ({"data_args": {"fail": "os"}}, "data could not be constructed: OSError: disk gone"),
        ({"data_args": {"length": 0}}, "whose train set cannot be used: The data set is empty"),
        ({"data": "own_things:stream"}, "The stream has no records"),
        ({"data": "own_things:not_a_model"}, "int is not one"),
        ({"loss": "own_things:a_number"}, "expected a function or a class"),
        ({"optimizer": "own_things:no_optimizer"}, "not a torch.optim.Optimizer"),
        ({"optimizer_args": {"lr": "fast"}}, "optimizer could not be constructed"),
        ({"loss": "own_things:own_loss", "loss_args": {"scael": 2}}, "its parameters are (output, target, scale=1)"),
        ({"data": "own_things:three"}, "returned 3 data sets"),
        ({"optimizer": "torch.optim:LBFGS"}, "whose step wants a closure"),
        ({"scheduler": "torch.optim.lr_scheduler:ReduceLROnPlateau"}, "in a config scheduler: plateau"),
        ({"scheduler": "own_things:no_scheduler"}, "not a learning-rate scheduler"),
        ({"scheduler": "cosine", "scheduler_args": {"T_max": 5}}, "only 'final' in scheduler_args, not T_max"),
        ({"metric": "own_things:a_number"}, "expected a function"),
        ({"weights": "own_things:few_weights"}, "weights has 3 numbers, and the data set has 20 samples"),
        ({"weights": "own_things:no_weights"}, "called with the training set and raised AttributeError"),
        ({"weights": "own_things:a_number"}, "expected a function of the training set"),
        ({"weights": "balanced"}, "TensorDataset holds the shape [20, 1] of torch.float32"),
        ({"model": "own_things:synced"}, "0 is SyncBatchNorm"),
    ],
)
def test_what_a_config_names_is_checked(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(**changes)
    assert said in str(caught.value)


def test_a_data_file_error_keeps_its_message() -> None:
    with pytest.raises(DataFileError, match=r"^images\.bin is truncated\.$"):
        build(data_args={"fail": "file"})


def test_samples_that_are_no_pairs_are_explained() -> None:
    parts = build(data="own_things:triples")
    with pytest.raises(ConfigError, match=r"expected pairs \(input, target\)"):
        parts.trainer.step(next(iter(parts.train.epoch(0))))


def test_the_test_loss_counts_samples_whatever_the_targets_are() -> None:
    parts = build(data="own_things:named_targets", loss="own_things:own_loss", batch_size=8)
    assert parts.test is not None
    mean = parts.trainer.evaluate(parts.test, parts.metric)["loss"]
    assert (mean.value, mean.weight) == (4.5, 10)


def test_the_last_batch_is_left_out_of_the_training_data_alone() -> None:
    parts = build(data="own_things:split", batch_size=8, drop_last=True)
    assert parts.test is not None
    assert len(parts.train) == 1
    assert sum(batch.num_samples for batch in parts.test.fixed_assignment_epoch()) == 8


def test_a_warm_up_in_steps_needs_no_length_of_a_stream() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    streamed = Stream([[1, 2], [3]], read=iter)
    scheduler = build_scheduler(parse_config(VALUES | {"warmup": 3}, "a test"), optimizer, streamed)
    assert scheduler is not None
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0]
    with pytest.raises(ConfigError, match=r"warmup, a part of the run, needs the number of steps"):
        build_scheduler(parse_config(VALUES | {"warmup": 0.1}, "a test"), optimizer, streamed)


def test_weights_are_of_the_training_data_alone() -> None:
    parts = build(data="own_things:split", batch_size=4, weights="own_things:weights")
    assert parts.test is not None
    drawn = {index for batch in parts.train.epoch(0) for part in batch.slices for index in part.indices}
    assert drawn == {2}
    assert sum(batch.num_samples for batch in parts.test.epoch(0)) == 8
    parts = build(data="own_things:split", batch_size=4, weights="own_things:weights", overfit=2)
    assert len({index for batch in parts.train.epoch(0) for part in batch.slices for index in part.indices}) == 8


def test_a_list_of_two_data_sets_is_train_and_test() -> None:
    # random_split returns a list; taken as a data set itself it would be one of two samples.
    parts = build(data="own_things:split")
    assert parts.test is not None
    assert (parts.train.num_samples, parts.test.num_samples) == (12, 8)


def test_a_skipped_step_is_no_part_of_the_epochs_mean(tmp_path: Path) -> None:
    # One sample is not finite; the epoch's other step counts, and the metrics file takes both.
    config = parse_config(VALUES | {"data": "own_things:spoilt", "nonfinite": "skip", "batch_size": 8}, "config")
    config = config.model_copy(update={"epochs": 1})
    recorder = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.warns(UserWarning, match="skipped on every worker"):
        fit(config, device=torch.device("cpu"), run_dir=tmp_path, recorder=recorder)
    *steps, epoch = read_metrics(tmp_path / "metrics.jsonl")
    losses = [row["loss"] for row in steps]
    assert losses.count(None) == 1
    assert epoch["train_loss"] == next(loss for loss in losses if loss is not None)


def test_extra_state_of_a_model_is_kept(tmp_path: Path) -> None:
    config = parse_config(VALUES | {"model": "own_things:Extra"}, "config")
    saver = RunSaver(config, tmp_path, Recorders([]), build(model="own_things:Extra"))
    with saver.writing:
        saver.save({})
    parts = build(model="own_things:Extra")
    restore_run(parts, load_checkpoint(find_checkpoints(tmp_path)[0]), config)
    restored: Any = parts.trainer.model
    assert restored.restored["name"] == "kept"
    assert torch.equal(restored.restored["seen"], torch.ones(2))


def test_models_do_not_depend_on_what_the_data_drew() -> None:
    assert build().trainer.digest() == build(data_args={"length": 30}).trainer.digest()
    assert build().trainer.digest() != build(seed=1).trainer.digest()


def save_epochs(
    folder: Path, *losses: float, after_epoch: Callable[[int], None] = lambda _: None, **values: Any
) -> None:
    """Train an epoch for each loss, and save the run with it."""
    parts = build()
    saver = RunSaver(parse_config(VALUES | values, "config"), folder, Recorders([]), parts)
    with saver.writing:
        for epoch, loss in enumerate(losses):
            for batch in parts.train.epoch(epoch):
                parts.trainer.step(batch)
            saver.save({"loss": loss})
            after_epoch(epoch)


def saved(tmp_path: Path) -> Checkpoint:
    save_epochs(tmp_path, 0.5)
    return load_checkpoint(find_checkpoints(tmp_path)[0])


def test_a_run_continues_from_its_checkpoint(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path)
    parts = build(epochs=50)
    restore_run(parts, checkpoint, parse_config(VALUES | {"epochs": 50}, "config"))
    assert parts.trainer.digest() == checkpoint.manifest.digest
    assert (parts.trainer.cursor.epoch, parts.trainer.cursor.step, parts.trainer.global_step) == (1, 0, 1)


@pytest.mark.parametrize("changes", [{"seed": 1}, {"batch_size": 16}, {"optimizer_args": {"lr": 0.1}}])
def test_a_run_does_not_continue_with_another_config(tmp_path: Path, changes: dict[str, Any]) -> None:
    checkpoint = saved(tmp_path)
    [key] = changes
    with pytest.raises(CheckpointError, match=f"started with another config.*: {key}(.lr)? was"):
        restore_run(build(**changes), checkpoint, parse_config(VALUES | changes, "config"))


def test_old_checkpoints_and_leftovers_of_killed_saves_are_removed(tmp_path: Path) -> None:
    (tmp_path / f".step-00000001.ckpt.{'a' * 32}.tmp").touch()
    save_epochs(tmp_path, 0.5, 0.5, 0.5, 0.5, keep=2)
    files = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert files == {"own_things.py", "step-00000003.ckpt", "step-00000004.ckpt"}


def test_the_best_checkpoint_is_kept_and_pointed_to(tmp_path: Path) -> None:
    save_epochs(tmp_path, 0.5, 0.25, math.nan, 0.25, keep=1, keep_best="-loss")
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-00000004.ckpt", "step-00000002.ckpt"]
    assert (tmp_path / "best.ckpt").readlink() == Path("step-00000002.ckpt")
    assert load_checkpoint(tmp_path / "best.ckpt").manifest.metrics == {"loss": 0.25}


def test_a_damaged_checkpoint_does_not_replace_an_intact_one(tmp_path: Path) -> None:
    def damage(epoch: int) -> None:
        if epoch == 1:
            os.truncate(tmp_path / "step-00000002.ckpt", 1000)

    save_epochs(tmp_path, 0.5, 0.5, 0.5, after_epoch=damage, keep=2, async_save=False)
    assert [path.name for path in find_checkpoints(tmp_path)] == [f"step-0000000{step}.ckpt" for step in (3, 2, 1)]


def test_what_was_allowed_to_change_changes(tmp_path: Path) -> None:
    # The optimizer's state, which is loaded, holds the rate that it was made with.
    changes = {"optimizer_args": {"lr": 0.5}, "batch_size": 10}
    parts = build(**changes)
    restore_run(parts, saved(tmp_path), parse_config(VALUES | changes, "config"), ["optimizer_args.lr", "batch_size"])
    assert [group["lr"] for group in parts.trainer.optimizer.param_groups] == [0.5]
    parts.trainer.step(next(parts.train.epoch(parts.trainer.cursor.epoch)))


def test_an_argument_that_is_no_option_of_the_optimizer_cannot_change(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path)
    old = {**checkpoint.manifest.config, "optimizer_args": {"scale": 1}}  # type: ignore[dict-item]
    checkpoint = replace(checkpoint, manifest=replace(checkpoint.manifest, config=old))
    with pytest.raises(CheckpointError, match=r"optimizer_args.scale cannot be changed when a run is resumed"):
        restore_run(build(), checkpoint, parse_config(VALUES, "config"), ["all"])


def test_data_that_have_grown_need_allow(tmp_path: Path) -> None:
    # The config is what it was: a folder of images has got some more.
    checkpoint, config = saved(tmp_path), parse_config(VALUES, "config")
    grown = build(data_args={"length": 30})
    with pytest.raises(CheckpointError, match=r"trained on 20 samples .*but the data are now 30 samples.*--allow data"):
        restore_run(grown, checkpoint, config)
    restore_run(grown, checkpoint, config, ["data"])
    middle = replace(checkpoint, manifest=replace(checkpoint.manifest, step=1))
    with pytest.raises(CheckpointError, match="in the middle of an epoch, where this cannot change"):
        restore_run(build(data_args={"length": 30}), middle, config, ["all"])
