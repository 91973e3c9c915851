"""What a trainer is given by mistake: each is one message, before anything is changed."""

import copy
import gc
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep as ls
from lockstep.data import ShardedLoader
from lockstep.engine import Trainer
from lockstep.engine.batches import check_sync_batchnorm
from lockstep.engine.comparison import WorkerComparison
from lockstep.errors import CheckpointError, LossError


def data(length: int = 24, seed: int = 1) -> TensorDataset:
    inputs = torch.randn(length, 3, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def loader(length: int = 24, seed: int = 1) -> ShardedLoader:
    return ShardedLoader(data(length, seed), batch_size=8, num_shards=2)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def make(model: nn.Module | None = None, make_optimizer: Any = sgd, **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(3, 1) if model is None else model
    return Trainer(model, make_optimizer(model), **{"loss": loss, "num_shards": 2, **options})


def step_lr(model: nn.Module) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(sgd(model), 2)


# -- Arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_shards": 0}, "num_shards is 0, expected at least 1"),
        ({"num_shards": 2.0}, r"num_shards is 2\.0, expected a whole number"),
        ({"seed": None}, "seed is None, expected a whole number"),
        ({"seed": "a"}, "seed is 'a', expected a whole number"),
        ({"max_grad_norm": 0}, "max_grad_norm is 0, expected a number above zero"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm is nan, expected a number above zero"),
        ({"max_grad_norm": "1"}, "max_grad_norm is '1', expected a number above zero"),
        ({"loss": None}, r"The loss is a NoneType, expected a function loss\(model, batch\)"),
        (
            {"loss": nn.CrossEntropyLoss()},
            r"torch's CrossEntropyLoss, which takes \(output, target\), .* Write: def loss",
        ),
        ({"loss": nn.functional.mse_loss}, "The loss is torch's mse_loss"),
        ({"make_optimizer": lambda _: None}, "The optimizer is a NoneType"),
        (
            {"make_optimizer": lambda model: torch.optim.LBFGS(model.parameters())},
            "a LBFGS, whose step wants a closure",
        ),
        ({"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(sgd(nn.Linear(1, 1)))}, "whose step wants arguments"),
        ({"scheduler": step_lr(nn.Linear(1, 1))}, "StepLR was made for another optimizer"),
        ({"scheduler": 3}, "not a learning-rate scheduler"),
    ],
)
def test_arguments_that_would_train_something_else_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        make(**options)


def test_a_part_that_is_wrapped_is_refused() -> None:
    # Its communication hook would compress, or its buckets reduce a second time.
    with pytest.raises(TypeError, match="The part 1 of the model is wrapped already, in DataParallel"):
        make(nn.Sequential(nn.Linear(3, 3), ls.DataParallel(nn.Linear(3, 1))))


def test_parameters_that_the_optimizer_gets_later_are_looked_at() -> None:
    # Their gradients would be those of one rank.
    training = make()
    training.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match="1 parameters that are not the model's"):
        training.step(next(loader().epoch(0)))


# -- Batches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(1, 2), torch.ones(2), None])
def test_what_is_no_batch_of_a_loader_is_refused(batch: Any) -> None:
    with pytest.raises(TypeError, match="expected what a ShardedLoader yields"):
        make().step(batch)
    with pytest.raises(TypeError, match="a DataLoader, expected a ShardedLoader"):
        make().evaluate(DataLoader(data()), lambda _model, _batch: (1, 1))


def test_batches_of_two_data_sets_of_one_length_in_turn_are_refused() -> None:
    training = make()
    for epoch in range(2):  # one after the other is fine
        for batch in loader(seed=epoch).epoch(epoch):
            training.step(batch)
    training.step(next(loader().epoch(2)))
    with pytest.raises(ValueError, match="is of other data than the one before it"):
        training.step(next(loader(seed=2).epoch(2, 1)))
    training.step(next(loader().epoch(2, 1)))


def test_an_epoch_that_is_repeated_is_warned_of_once() -> None:
    training, batches = make(), loader()
    list(map(training.step, batches.epoch(0)))
    with pytest.warns(
        UserWarning, match=r"epoch 0, step 0 .* taken already.*for epoch in range\(num_epochs\)"
    ) as caught:
        list(map(training.step, batches.epoch(0)))
    assert len(caught) == 1


def test_a_batch_that_leaves_a_worker_out_of_a_sync_batchnorm_is_refused() -> None:
    *_, last = loader(length=9).epoch(0)
    model = nn.Sequential(ls.SyncBatchNorm(3), nn.Linear(3, 1))
    with pytest.raises(ValueError, match=r"step 1 .* has 1 samples for 2 shards, and 0 is SyncBatchNorm"):
        check_sync_batchnorm(last, model)
    check_sync_batchnorm(last, nn.Linear(3, 1))


def test_threads_that_change_are_warned_of() -> None:
    training, threads = make(), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        with pytest.warns(UserWarning, match=f"changed: threads from {threads} to {threads + 1}. From this step on"):
            training.step(next(loader().epoch(0)))
    finally:
        torch.set_num_threads(threads)


# -- Losses and gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (None, "has as its weight a NoneType, expected one number"),
        ("3", "has as its weight a str, expected one number"),
        (torch.ones(2), r"has as its weight a tensor of shape \[2\]"),
        (float("inf"), "has weight inf, expected zero or more, and finite"),
        (-1, "shard 0 has weight -1"),
    ],
)
def test_what_is_no_weight_is_refused(weight: Any, said: str) -> None:
    with pytest.raises(LossError, match=said):
        make(loss=lambda model, batch: (loss(model, batch), weight)).step(next(loader().epoch(0)))


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda: (torch.ones((), requires_grad=True), 1, 2), "a tuple of 3, expected the mean loss"),
        (lambda: torch.ones((), requires_grad=True), "No parameter of the optimizer has a gradient at epoch 0, step 0"),
    ],
)
def test_a_loss_that_says_nothing_of_the_model_is_refused(returned: Callable[[], Any], said: str) -> None:
    with pytest.raises(LossError, match=said):
        make(loss=lambda _model, _batch: returned()).step(next(loader().epoch(0)))


def sqrt_of_zero(model: nn.Module, batch: Any) -> Tensor:
    """Has a finite value, 0, and a gradient that is not."""
    return (model(batch[0]) * 0).square().sum(1).sqrt().mean()


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", enabled=False)])
def test_a_gradient_that_is_not_finite_is_not_applied(max_grad_norm: float | None, scaler: Any) -> None:
    # A disabled scaler looks at no gradient, and once kept the norm from being looked at too.
    for nonfinite in ("stop", "skip"):
        training = make(loss=sqrt_of_zero, nonfinite=nonfinite, max_grad_norm=max_grad_norm, scaler=scaler)
        before = training.digest()
        with (
            pytest.warns(UserWarning, match="not finite in weight")
            if nonfinite == "skip"
            else pytest.raises(LossError, match="not finite in weight at epoch 0, step 0")
        ):
            assert training.step(next(loader().epoch(0))).is_skipped
        assert training.digest() == before


def test_finite_gradients_whose_sum_overflows_are_applied() -> None:
    def steep(model: nn.Module, batch: Any) -> Tensor:
        outputs = model(batch[0])
        return (outputs - outputs.detach()).mean(0).sum() * 3e38

    training = make(nn.Linear(3, 4), loss=steep)
    before = training.digest()
    assert not training.step(next(loader().epoch(0))).is_skipped
    assert training.digest() != before


# -- Saving and loading ------------------------------------------------------------------------------------------------


def epochs_of(training: Trainer, count: int, after_epoch: Any = None) -> list[bool]:
    told = []
    for epoch in range(training.cursor.epoch, count):
        told += [training.step(batch).should_stop for batch in loader().epoch(epoch, training.cursor.step)]
        if after_epoch is not None:
            after_epoch()
    return told


def test_a_request_to_stop_is_not_told_of_after_the_last_step_of_an_epoch() -> None:
    # What a loop does there, stepping a scheduler, was left out by runs that went on from a save before it.
    training = make()
    training.request_stop()
    assert epochs_of(training, 2) == [True, True, False] * 2


def test_saving_before_a_schedule_is_stepped_is_warned_of(tmp_path: Path) -> None:
    training = make()
    schedule = torch.optim.lr_scheduler.StepLR(training.optimizer, 1)
    epochs_of(training, 1)
    with pytest.warns(UserWarning, match=r"end of epoch 0, for which the scheduler was not stepped yet.*Step it first"):
        training.save(tmp_path / "early.ckpt", scheduler=schedule)
    schedule.step()
    training.save(tmp_path / "right.ckpt", scheduler=schedule)
    training.step(next(loader().epoch(1)))
    training.save(tmp_path / "inside.ckpt", scheduler=schedule)


def test_options_that_a_file_replaces_are_named(tmp_path: Path) -> None:
    make().save(tmp_path / "a.ckpt")
    other = make(make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    with pytest.warns(UserWarning, match=r"options of the checkpoint: lr was to be 0.5 and is 0.1\. To change"):
        other.load(tmp_path / "a.ckpt")
    assert other.optimizer.param_groups[0]["lr"] == 0.1
    other.load(tmp_path / "a.ckpt")  # nothing is other than it was made now


def scheduled_by(make_scheduler: Any) -> Trainer:
    model = nn.Linear(3, 1)
    optimizer = sgd(model)
    return Trainer(model, optimizer, loss=loss, num_shards=2, scheduler=make_scheduler(optimizer))


@pytest.mark.parametrize(
    ("make_scheduler", "said"),
    [
        (lambda optimizer, steps: ls.make_schedule(optimizer, "cosine", num_steps=steps), "num_steps was to be 20 and"),
        (torch.optim.lr_scheduler.CosineAnnealingLR, "T_max was to be 20"),
        (lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, steps), "total_steps was to be"),
        (lambda optimizer, steps: ls.make_schedule(optimizer, "constant", num_steps=steps, warmup=0.5), ""),
        (lambda optimizer, steps: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / steps), ""),
    ],
)
def test_a_schedule_of_another_length_that_a_file_replaces_is_named(
    make_scheduler: Any, said: str, tmp_path: Path
) -> None:
    # A cosine that was made for twice as many steps went on with a rate of zero when the old one was over.
    begun = scheduled_by(lambda optimizer: make_scheduler(optimizer, 10))
    epochs_of(begun, 1)
    begun.save(tmp_path / "a.ckpt")
    scheduled_by(lambda optimizer: make_scheduler(optimizer, 10)).load(tmp_path / "a.ckpt")
    longer = scheduled_by(lambda optimizer: make_scheduler(optimizer, 20))
    with pytest.warns(UserWarning, match=f"scheduler continues .*{said}") if said else nullcontext():
        longer.load(tmp_path / "a.ckpt")


# -- Evaluation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1.0, "The metric returned a float, expected a pair"),
        ((1, 2, 3), r"The metric returned \(a int, a int, a int\), expected a pair"),
        ((torch.ones(3), 1), r"returned \(a tensor of shape \[3\], a int\)"),
        ({"right": None}, "The metric right returned a NoneType"),
        ((1, -1), r"The weight of the metric metric is -1\.0"),
    ],
)
def test_what_is_no_metric_is_refused(value: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        make().evaluate(loader(), lambda _model, _batch: value)


def test_shards_do_not_move_while_evaluating() -> None:
    # A shard's sums of two workers were taken for one another: samples were lost.
    batches = loader()
    first = next(batches.epoch(0))
    first.assignment._now = ()
    assert [batch.ranges for batch in batches.fixed_assignment_epoch()] == [(range(2),)] * 3


# -- States ------------------------------------------------------------------------------------------------------------


def scaled() -> Trainer:
    return make(scaler=torch.amp.GradScaler("cpu"))


def scheduled() -> Trainer:
    model = nn.Linear(3, 1)
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return Trainer(model, optimizer, loss=loss, num_shards=2, scheduler=schedule)


def adam() -> Trainer:
    return make(make_optimizer=lambda model: torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize(
    ("saved", "loaded", "said"),
    [
        (scheduled, make, "saved with scheduler StepLR, and this run has None"),
        (make, scheduled, "saved with scheduler None, and this run has StepLR"),
        (scaled, make, "The state has a scaler, and this trainer has none"),
        (make, scaled, "This trainer has a scaler, and the state has none"),
        (make, adam, "saved with optimizer SGD, and this run has AdamW"),
    ],
)
def test_a_state_of_other_parts_is_refused(
    saved: Callable[[], Trainer], loaded: Callable[[], Trainer], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        loaded().load_state_dict(saved().state_dict())


@pytest.mark.parametrize("state", [{}, nn.Linear(3, 1).state_dict(), None])
def test_what_is_no_state_of_a_trainer_is_refused(state: Any) -> None:
    with pytest.raises(CheckpointError, match=r"no model, optimizer.* not what trainer\.state_dict\(\) returns"):
        make().load_state_dict(state)


class Counting(nn.Linear):
    """Has a buffer that is not saved, and writes to it if asked to."""

    def __init__(self, step: float) -> None:
        super().__init__(3, 1)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.by = step

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.add_(self.by)
        return super().forward(inputs)


def test_a_buffer_that_steps_change_and_no_state_holds_is_warned_of() -> None:
    for step in (0.0, 1.0):
        training = make(Counting(step))
        training.step(next(loader().epoch(0)))
        with warnings.catch_warnings(record=True, action="always") as caught:
            training.state_dict()
        assert ["seen, which is not part of the model's state" in str(each.message) for each in caught] == [True] * int(
            step
        )


# -- The fingerprint ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("double_precision")
def test_the_fingerprint_tells_of_switches() -> None:
    training = make(nn.Linear(3, 1, dtype=torch.float32))
    now = training.fingerprint()
    assert "default dtype float64" in str(now)
    torch.set_default_dtype(torch.float32)
    assert now.differences(training.fingerprint()) == ["default dtype is 'float64' and 'float32'"]
    old = {name: value for name, value in now.to_dict().items() if name != "switches"}
    assert type(now).from_dict(old).differences(now) == []  # of a version that did not tell of them


def test_tiny_numbers_that_become_zero_are_in_the_fingerprint() -> None:
    training = make()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        assert training.fingerprint().switches["flush denormal"] is True
    finally:
        torch.set_flush_denormal(False)
    assert training.fingerprint().switches["flush denormal"] is False


def test_a_world_of_one_compares_nothing() -> None:
    trainer = make()
    comparison = trainer.internals.engine.part(WorkerComparison)
    assert trainer.world.world_size == 1
    assert (comparison.options_number(), comparison.values_number()) == (0, 0)


# -- Calls that are the trainer's --------------------------------------------------------------------------------------


def test_a_loop_that_still_steps_the_optimizer_is_refused() -> None:
    # The gradients of the step are there yet: the update would be made a second time.
    trainer = make()
    batch = next(loader().epoch(0))
    trainer.step(batch)
    before = trainer.digest()
    with pytest.raises(ValueError, match=r"optimizer\.step\(\) was called outside of Trainer\.step"):
        trainer.optimizer.step()
    assert trainer.digest() == before


def test_an_optimizer_is_its_owners_again_when_no_trainer_is_left_and_may_have_another() -> None:
    first = make()
    second = Trainer(first.model, first.optimizer, loss=loss, num_shards=2)
    second.step(next(loader().epoch(0)))
    optimizer = first.optimizer
    del first, second
    gc.collect()
    optimizer.step()


def test_a_loss_function_that_calls_backward_is_told_to_leave_it() -> None:
    def impatient(model: nn.Module, batch: Any) -> Tensor:
        value = loss(model, batch)
        value.backward()
        return value

    with pytest.raises(LossError, match="Return the loss and leave backward"):
        make(loss=impatient).step(next(loader().epoch(0)))


def test_a_scheduler_that_the_loop_steps_too_is_warned_of_once() -> None:
    model = nn.Linear(3, 1)
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    trainer = Trainer(model, optimizer, loss=loss, num_shards=2, scheduler=scheduler)
    batches = loader().epoch(0)
    trainer.step(next(batches))
    trainer.step(next(batches))
    scheduler.step()
    with pytest.warns(UserWarning, match="Leave scheduler.step\\(\\) out of the loop"):
        trainer.step(next(batches))


@pytest.mark.parametrize("is_torchs", [True, False])
def test_a_schedule_that_counts_epochs_is_warned_of_when_it_is_over_in_the_first(is_torchs: bool) -> None:
    # A cosine with T_max=epochs went up and down many times in each epoch, and one of ours left the rate at zero.
    model = nn.Linear(3, 1)
    optimizer = sgd(model)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR
    schedule = cosine(optimizer, 2) if is_torchs else ls.make_schedule(optimizer, "cosine", num_steps=2)
    trainer = Trainer(model, optimizer, loss=loss, num_shards=2, scheduler=schedule)
    batches = loader().epoch(0)
    trainer.step(next(batches))
    trainer.step(next(batches))
    with pytest.warns(UserWarning, match="over after 2 steps, in the first epoch.*epochs times len"):
        trainer.step(next(batches))


def test_what_a_data_loader_allows_and_ours_does_not_says_what_to_write() -> None:
    with pytest.raises(TypeError, match=r"for batch in loader\.epoch\(epoch\)"):
        iter(loader())
    with pytest.raises(TypeError, match=r"trainer\.step\(batch\)"):
        tuple(next(loader().epoch(0)))


# -- What an error leaves behind ---------------------------------------------------------------------------------------


def test_the_parameter_whose_gradient_is_not_finite_is_named_when_clipping() -> None:
    # The norm of all gradients is NaN then, and clipping by it made the first parameter's gradient NaN too.
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    last: Any = model[1]
    last.bias.register_hook(lambda gradient: gradient + float("nan"))
    with pytest.raises(LossError, match=r"not finite in 1\.bias at epoch 0, step 0"):
        make(model, max_grad_norm=1.0).step(next(loader().epoch(0)))


def test_a_state_that_does_not_fit_leaves_all_as_it_was() -> None:
    model = nn.Linear(3, 1)
    optimizer = sgd(model)
    schedule, scaler = torch.optim.lr_scheduler.StepLR(optimizer, 2), torch.amp.GradScaler("cpu")
    training = Trainer(model, optimizer, loss=loss, num_shards=2, scheduler=schedule, scaler=scaler)
    training.step(next(loader().epoch(0)))
    before = copy.deepcopy(training.state_dict())
    state = copy.deepcopy(before)
    state["scaler"]["scale"] = 7.0
    state["model"]["weight"].zero_()
    state["optimizer"]["state"][0]["momentum_buffer"].zero_()
    state["scheduler"] = {"last_epoch": 5, "gamma": 0.3, "_is_refused": True}

    def refuse(state_dict: dict[str, Any]) -> None:
        vars(schedule).update(state_dict)
        if "_is_refused" in state_dict:
            raise KeyError("not mine")

    schedule.load_state_dict = refuse  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="which are as they were"):
        training.load_state_dict(state)
    after = training.state_dict()
    assert after["scaler"] == before["scaler"]
    assert torch.equal(after["model"]["weight"], before["model"]["weight"])
    momentum = [each["optimizer"]["state"][0]["momentum_buffer"] for each in (after, before)]
    assert torch.equal(*momentum)
    assert (schedule.last_epoch, schedule.gamma) == (1, 0.1)


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (lambda classes: classes + 2, "count classes from 0"),
        (lambda classes: classes.float(), r"target\.long\(\)"),
        (lambda classes: classes[:, None], r"target\.squeeze\(1\)"),
        (lambda classes: nn.functional.one_hot(classes, 3), r"target\.argmax\(1\)"),
        (lambda classes: torch.ones(3)[0 * classes - 100], "leave them out, as in class_weights"),
    ],
)
def test_a_mistake_in_classes_gets_a_hint_and_keeps_torchs_error(change: Callable[[Tensor], Tensor], hint: str) -> None:
    def classify(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), change(batch[1]))

    classes = TensorDataset(torch.randn(24, 3), torch.arange(24) % 3)
    trainer = make(nn.Linear(3, 3), loss=classify)
    with pytest.raises((RuntimeError, IndexError)) as raised:
        trainer.step(next(ShardedLoader(classes, batch_size=8, num_shards=2).epoch(0)))
    notes = " ".join(raised.value.__notes__)
    assert re.search(hint, notes)
    assert "epoch 0, step 0" in notes
    trainer.close()
