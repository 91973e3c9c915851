"""The trainer with one worker, against plain PyTorch."""

import copy
import gc
import inspect
import itertools
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from lockstep.comm import World
from lockstep.data import ShardedBatch, ShardedLoader
from lockstep.data.loader import LoaderOptions
from lockstep.engine import Trainer
from lockstep.engine.averaging import EMA
from lockstep.errors import CheckpointError, LossError
from lockstep.means import Mean

FEATURES = 6


def data(length: int = 22) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(length, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(FEATURES, 5, dtype=torch.float64),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(5, 1, dtype=torch.float64),
    )


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def trainer(net: nn.Module, num_shards: int = 4, **options: Any) -> Trainer:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return Trainer(net, optimizer, loss=options.pop("loss", mean_loss), num_shards=num_shards, **options)


def loader(num_shards: int = 4, length: int = 22) -> ShardedLoader:
    return ShardedLoader(data(length), batch_size=8, num_shards=num_shards, seed=3)


def whole(batch: ShardedBatch) -> list[Tensor]:
    """Return the batch as one process would have it."""
    return [torch.cat([part.data[side] for part in batch.slices]) for side in (0, 1)]


def assert_same(ours: nn.Module, plain: nn.Module) -> None:
    for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_steps_are_those_of_one_process_on_the_whole_batch(max_grad_norm: float | None) -> None:
    # 22 samples in batches of 8: the last batch has 6, which 4 shards share unevenly as 2, 2, 1, 1.
    ours, plain = model(), model()
    training = trainer(ours, max_grad_norm=max_grad_norm)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for batch in [*loader().epoch(0), *loader().epoch(1)]:
        result = training.step(batch)
        optimizer.zero_grad()
        loss = mean_loss(plain, whole(batch))
        loss.backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(plain.parameters(), max_grad_norm)
        optimizer.step()
        assert result.loss == pytest.approx(loss.item(), rel=1e-12)
        assert result.weight == batch.num_samples
    assert_same(ours, plain)


# With the second a shard of eight may have no sample that counts, and its mean would be of nothing.
@pytest.mark.parametrize(("threshold", "num_shards"), [(0.0, 4), (0.8, 8)])
def test_a_loss_may_bring_its_own_weight(threshold: float, num_shards: int) -> None:
    def chosen(model: nn.Module, batch: Any) -> Mean:
        counts = batch[0][:, 0] > threshold
        losses = (model(batch[0]) - batch[1]).square().squeeze(1)
        return Mean(losses[counts].sum(), counts.sum())

    ours, plain = model(), model()
    batch = next(iter(loader(num_shards).epoch(0)))
    assert num_shards == 4 or any(not (part.data[0][:, 0] > threshold).any() for part in batch.slices)
    result = trainer(ours, num_shards, loss=chosen).step(batch)
    total, weight = chosen(plain, whole(batch))
    (total / weight).backward()
    torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9).step()
    assert result.weight == weight.item()
    assert_same(ours, plain)


def test_random_state_is_derived_so_a_run_repeats_itself_whatever_is_drawn_between() -> None:
    def run(noise: int) -> str:
        training = trainer(model(dropout=0.5), seed=9)
        for batch in loader().epoch(0):
            torch.rand(noise)
            training.step(batch)
        return training.digest()

    assert run(0) == run(5)


def test_shards_do_not_share_their_dropout() -> None:
    masks: list[Tensor] = []

    def remember(model: nn.Module, batch: Any) -> Tensor:
        masks.append(torch.rand(4))
        return mean_loss(model, batch)

    trainer(model(), loss=remember).step(next(iter(loader().epoch(0))))
    assert len({tuple(mask.tolist()) for mask in masks}) == 4


def test_batchnorm_keeps_the_statistics_of_shard_0() -> None:
    norm: Any = nn.Sequential(
        nn.BatchNorm1d(FEATURES, dtype=torch.float64), nn.Linear(FEATURES, 1, dtype=torch.float64)
    )
    alone = nn.BatchNorm1d(FEATURES, dtype=torch.float64)
    batch = next(iter(loader().epoch(0)))
    trainer(norm).step(batch)
    alone(batch.slices[0].data[0])
    assert torch.equal(norm[0].running_mean, alone.running_mean)
    assert int(norm[0].num_batches_tracked) == 1


def test_a_part_in_evaluation_mode_stays_in_it() -> None:
    norm: Any = nn.Sequential(
        nn.BatchNorm1d(FEATURES, dtype=torch.float64), nn.Linear(FEATURES, 1, dtype=torch.float64)
    )
    norm[0].eval()
    before = norm[0].running_mean.clone()
    training = trainer(norm)
    training.step(next(iter(loader().epoch(0))))
    training.evaluate(loader(), lambda model, batch: (mean_loss(model, batch), 1))
    assert (norm.training, norm[0].training, norm[1].training) == (True, False, True)
    assert torch.equal(norm[0].running_mean, before)


def test_what_the_optimizer_does_not_train_does_not_pile_up() -> None:
    def run(*, frozen: bool) -> str:
        net: Any = model()
        if frozen:
            net[0].requires_grad_(False)
        optimizer = torch.optim.SGD(net[3].parameters(), lr=0.05)
        training = Trainer(net, optimizer, loss=mean_loss, num_shards=4, max_grad_norm=0.1)
        for batch in loader().epoch(0):
            training.step(batch)
        return training.digest()

    assert run(frozen=False) == run(frozen=True)


def test_an_optimizer_of_strange_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="4 parameters that are not the model's"):
        Trainer(model(), torch.optim.SGD(model().parameters()), loss=mean_loss, num_shards=1)


def test_half_precision_does_not_overflow_with_large_weights() -> None:
    net = nn.Linear(FEATURES, 1).half()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    training = Trainer(net, optimizer, loss=lambda m, b: m(b[0].half()).float().square().mean().half(), num_shards=1)
    data_set = TensorDataset(torch.ones(66_001, FEATURES), torch.ones(66_001, 1))
    training.step(next(ShardedLoader(data_set, batch_size=66_001, num_shards=1).epoch(0)))
    assert all(parameter.isfinite().all() for parameter in net.parameters())


class Averaging(nn.Module):
    """Keeps an average of what it saw: in place, or with a new tensor each time."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(FEATURES, 1, dtype=torch.float64)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(FEATURES, dtype=torch.float64))
        self.in_place = in_place

    def forward(self, inputs: Tensor) -> Tensor:
        new = 0.9 * self.seen + 0.1 * inputs.mean(0)
        if self.in_place:
            self.seen.copy_(new)
        else:
            self.seen = new
        output: Tensor = self.layer(inputs)
        return output


def test_a_buffer_that_is_put_in_anew_is_treated_like_one_that_is_written() -> None:
    def run(*, in_place: bool) -> str:
        training = trainer(Averaging(in_place=in_place))
        for batch in loader().epoch(0):
            training.step(batch)
        return training.digest()

    assert run(in_place=True) == run(in_place=False)


# Taking a state gives an optimizer's `defaults` an option that Adafactor's groups do not have, nor those of most that
# are not torch's: none of these could be loaded.
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor])
def test_state_goes_into_another_trainer_and_on(kind: Any) -> None:
    def make() -> Trainer:
        net = model()
        optimizer = kind(net.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return Trainer(net, optimizer, loss=mean_loss, num_shards=4, scheduler=schedule)

    undisturbed, first, second = make(), make(), make()
    batches = list(loader().epoch(0))
    for batch in batches:
        undisturbed.step(batch)
    first.step(batches[0])
    for _ in range(2):
        second.load_state_dict(first.state_dict())
    assert (second.cursor.epoch, second.cursor.step, second.global_step) == (0, 1, 1)
    for batch in loader().epoch(second.cursor.epoch, second.cursor.step):
        second.step(batch)
    assert second.digest() == undisturbed.digest()
    assert second.state_dict().keys() == undisturbed.state_dict().keys()
    assert (second.cursor.epoch, second.cursor.step) == (1, 0)


def test_state_of_another_run_is_refused() -> None:
    state = trainer(model()).state_dict()
    with pytest.raises(CheckpointError, match="num_shards 4, and this run has 2"):
        trainer(model(), num_shards=2).load_state_dict(state)
    with pytest.raises(CheckpointError, match="does not fit"):
        trainer(nn.Linear(FEATURES, 1)).load_state_dict(state)


def test_evaluation_counts_each_sample_once_and_changes_nothing() -> None:
    net = model(dropout=0.5)
    training = trainer(net)
    digest = training.digest()

    def count(model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, float]]:
        assert not model.training
        return {"samples": (torch.tensor(float(len(batch[0]))), 1.0), "inputs": (batch[0].sum(), float(len(batch[0])))}

    found = training.evaluate(loader(), count)
    assert found["samples"].total == 22
    assert found["inputs"].weight == 22
    assert found["inputs"].total == pytest.approx(float(data().tensors[0].sum()))
    assert net.training
    assert training.digest() == digest


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.ones(2, requires_grad=True), "a tensor of shape"),
        (torch.ones(()), "depends on the model's parameters"),
        (0.5, "a float"),
    ],
)
def test_what_is_no_loss_is_refused(value: Any, said: str) -> None:
    with pytest.raises(LossError, match=said):
        trainer(model(), loss=lambda _model, _batch: value).step(next(iter(loader().epoch(0))))


def test_weights_that_add_up_to_nothing_are_refused() -> None:
    training = trainer(model(), loss=lambda model, batch: Mean(mean_loss(model, batch), 0))
    with pytest.raises(LossError, match=r"summed weight of the losses is 0\.0"):
        training.step(next(iter(loader().epoch(0))))


def test_a_batch_of_another_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="cut into 2 shards and the trainer has 4"):
        trainer(model()).step(next(iter(loader(num_shards=2).epoch(0))))


def test_models_that_cannot_be_trained_are_refused() -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    with pytest.raises(ValueError, match="nothing to train"):
        Trainer(nn.ReLU(), optimizer, loss=mean_loss, num_shards=1)
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
        Trainer(3, optimizer, loss=mean_loss, num_shards=1)
    with pytest.raises(TypeError, match="wrapped already"):
        Trainer(nn.DataParallel(model()), optimizer, loss=mean_loss, num_shards=1)
    with pytest.raises(ValueError, match="nonfinite is 'ignore', expected 'stop' or 'skip'"):
        trainer(model(), nonfinite="ignore")
    with pytest.raises(ValueError, match="balance is 'fast', expected 'even' or 'speed'"):
        trainer(model(), balance="fast")


def test_a_batch_of_another_loader_is_refused() -> None:
    training = trainer(model())
    training.step(next(loader().epoch(0)))
    with pytest.raises(ValueError, match=r"is of a loader of 21 samples .* trains on one of 22 samples"):
        training.step(next(loader(length=21).epoch(0)))


def test_a_restored_run_begins_where_it_stood() -> None:
    # The loop of a fresh run would train on the first batches of the epoch a second time.
    first, second = trainer(model()), trainer(model())
    first.step(next(loader().epoch(0)))
    second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=r"continues at epoch 0, step 1.*loader\.epoch\(trainer\.cursor\.epoch"):
        second.step(next(loader().epoch(0)))
    with pytest.raises(ValueError, match=r"restored run was trained on a loader of 22 samples.* one of 21.*as it was"):
        second.step(next(loader(length=21).epoch(0, second.cursor.step)))
    second.step(next(loader().epoch(0, second.cursor.step)))


def test_other_conditions_than_those_of_the_state_are_warned_of() -> None:
    state = trainer(model()).state_dict()
    state["fingerprint"]["threads"] += 1
    with pytest.warns(UserWarning, match="other settings than it was saved with: threads is"):
        trainer(model()).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda net: net.append(nn.Linear(1, 1)), "4.weight is new or newly trained; 4.bias is new"),
        (lambda net: net[0].bias.requires_grad_(False), "0.bias is no longer trained"),
        (lambda net: net.float(), r"0.weight \(5x6, torch.float64.* is 0.weight \(5x6, torch.float32"),
        (lambda net: net.__setitem__(0, nn.Linear(FEATURES, 5, dtype=torch.float64)), "another of the same name"),
    ],
)
def test_a_model_that_changes_between_steps_is_refused(change: Any, said: str) -> None:
    net = model()
    training = trainer(net)
    training.step(next(loader().epoch(0)))
    change(net)
    with pytest.raises(ValueError, match=said):
        training.step(next(loader().epoch(0, 1)))


def test_a_step_that_is_not_finite_can_be_left_out() -> None:
    norm: Any = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 1)).double()
    spoilt = [1.0, float("nan"), 1.0]
    training = trainer(norm, num_shards=1, loss=lambda m, b: mean_loss(m, b) * spoilt[0], nonfinite="skip")
    batches = list(loader(num_shards=1).epoch(0))
    for batch, factor in zip(batches, (1.0, float("nan"), 1.0), strict=True):
        before, spoilt[0] = training.digest(), factor
        with warnings.catch_warnings(record=True, action="always") as caught:
            result = training.step(batch)
        assert result.is_skipped == (factor != 1.0) == (training.digest() == before) == bool(caught)
    assert (training.cursor.epoch, training.cursor.step, training.global_step) == (1, 0, 3)


def test_the_gradient_is_held_in_few_copies() -> None:
    # 8 shards: three partials and the gradient that is being computed, and no more.
    net = nn.Linear(500, 2, bias=False)
    data_set = TensorDataset(torch.ones(8, 500), torch.ones(8, 2))
    most = 0

    def count(model: nn.Module, batch: Any) -> Tensor:
        nonlocal most
        loss = mean_loss(model, batch)
        gc.collect()
        held = [each for each in gc.get_objects() if type(each) is Tensor and each.shape == net.weight.shape]
        most = max(most, len(held))
        return loss

    trainer(net, num_shards=8, loss=count).step(next(ShardedLoader(data_set, batch_size=8, num_shards=8).epoch(0)))
    assert most == 3  # while the eighth is to come


def checkpointed_net(*, is_reentrant: Any) -> nn.Module:
    class Net(nn.Module):
        """Uses one layer in two segments, each of which may be a backward of its own."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(FEATURES, FEATURES)
            self.last = nn.Linear(FEATURES, 1)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = inputs.float().requires_grad_(True)
            for _ in range(2):
                hidden = checkpoint(self.segment, hidden, use_reentrant=is_reentrant())
            output: Tensor = self.last(hidden)
            return output.double()

        def segment(self, hidden: Tensor) -> Tensor:
            return torch.tanh(self.first(hidden))

    return Net()


def test_reentrant_checkpoints_add_in_the_order_of_the_tree() -> None:
    # Each shard's gradient of a layer comes in two parts, and (a + b1) + b2 is not a + (b1 + b2).
    net = checkpointed_net(is_reentrant=lambda: True)
    training = trainer(net, num_shards=2)
    first, second, _ = loader(num_shards=2).epoch(0)
    training.step(first)
    copied = copy.deepcopy(net)
    expected = [torch.zeros_like(parameter) for parameter in net.parameters()]
    for part in second.slices:
        copied.zero_grad()
        (mean_loss(copied, part.data) * (part.num_samples / second.num_samples)).backward()
        for total, parameter in zip(expected, copied.parameters(), strict=True):
            total.add_(parameter.grad)
    training.step(second)
    for parameter, total in zip(net.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, total)


def test_a_backward_inside_a_backward_that_begins_late_is_refused_once() -> None:
    # On every number of workers: of one shard each nothing is lent, and all could go on.
    for num_shards in (4, 1):
        is_reentrant = [False]
        training = trainer(checkpointed_net(is_reentrant=lambda flag=is_reentrant: flag[0]), num_shards)
        batches = list(loader(num_shards).epoch(0))
        training.step(batches[0])
        before = training.digest()
        is_reentrant[0] = True
        with pytest.raises(LossError, match="has run another backward inside"):
            training.step(batches[1])
        assert training.digest() == before
        training.step(batches[1])
        is_reentrant[0] = False
        training.step(batches[2])


def test_a_backward_inside_that_adds_twice_to_a_sum_is_refused_also_before_the_last_shard() -> None:
    calls = itertools.count()
    # Of each step of four shards, the second one, from the second step on: its gradients are added in place.
    training = trainer(checkpointed_net(is_reentrant=lambda: next(calls) // 2 == 5), num_shards=4)
    batches = list(loader(num_shards=4).epoch(0))
    training.step(batches[0])
    with pytest.raises(LossError, match="has run another backward inside"):
        training.step(batches[1])


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_loss_that_is_a_parameter_or_has_hooks_is_trained_as_any_other(num_shards: int) -> None:
    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.tensor(1.0))

    seen: list[float] = []

    def hooked(model: nn.Module, _batch: Any) -> Tensor:
        loss: Any = model.value * 2
        loss.register_hook(lambda gradient: seen.append(float(gradient)))
        return loss

    for loss, gradient in ((lambda model, _batch: model.value, 1.0), (hooked, 2.0)):
        model = Scalar()
        training = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, num_shards=num_shards)
        for batch in itertools.islice(loader(num_shards).epoch(0), 2):
            training.step(batch)
            assert model.value.grad is not None
            assert model.value.grad.item() == pytest.approx(gradient)
            assert not model.value._backward_hooks, "each step would leave another hook on the parameter"
        assert model.value.item() == pytest.approx(1 - 0.2 * gradient)
        training.close()
    assert seen == pytest.approx([1 / num_shards] * 2 * num_shards)


def test_a_step_after_one_that_failed_in_its_backward_knows_nothing_of_it() -> None:
    # What was lent to the backward that failed was once given out again in the next step.
    class Failing(torch.autograd.Function):
        calls = 0

        @staticmethod
        def forward(_context: Any, values: Tensor) -> Tensor:
            return values.clone()

        @staticmethod
        def backward(_context: Any, *gradients: Tensor) -> Tensor:
            Failing.calls += 1
            if Failing.calls == 4:  # the second shard of the second step
                raise RuntimeError("out of memory")
            return gradients[0]

    def run(*, fails: bool) -> tuple[str, Any]:
        net: Any = nn.ModuleDict({"always": model(), "once": nn.Linear(FEATURES, 1, dtype=torch.float64)})
        uses_once = True

        def loss(_model: nn.Module, batch: Any) -> Tensor:
            outputs = net["always"](batch[0]) + (net["once"](batch[0]) if uses_once else 0)
            squared: Tensor = (outputs - batch[1]).square().mean()
            return Failing.apply(squared) if fails else squared  # type: ignore[no-untyped-call]

        training = trainer(net, 2, loss=loss)
        first, second, third = loader(2).epoch(0)
        training.step(first)
        if fails:
            with pytest.raises(RuntimeError, match="out of memory"):
                training.step(second)
        uses_once = False
        training.step(third)
        return training.digest(), net["once"].weight.grad

    assert run(fails=True) == run(fails=False)
    assert run(fails=False)[1] is None


@pytest.mark.parametrize("num_shards", [1, 2])
def test_gradients_in_one_memory_are_divided_once(num_shards: int) -> None:
    class Positions(nn.Module):
        """Adds two parameters through views: autograd gives both one tensor's memory as gradient."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.position = nn.Parameter(torch.randn(FEATURES, dtype=torch.float64))
            self.kind = nn.Parameter(torch.randn(FEATURES, dtype=torch.float64))

        def forward(self, inputs: Tensor) -> Tensor:
            return (inputs * (self.position.unsqueeze(0) + self.kind.unsqueeze(0))).sum(1, keepdim=True)

    def weighted(model: nn.Module, batch: Any) -> Mean:
        weight = 3.0 * len(batch[0])
        return Mean(mean_loss(model, batch) * weight, weight)

    ours, plain = Positions(), Positions()
    batch = next(loader(num_shards).epoch(0))
    trainer(ours, num_shards, loss=weighted).step(batch)
    mean_loss(plain, whole(batch)).backward()
    for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-12)


class Counting(nn.Module):
    """Keeps count of its forwards in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1, dtype=torch.float64)
        self.count = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.count += 1
        output: Tensor = self.layer(inputs) / self.count
        return output


def test_gradients_of_another_dtype_than_their_parameters_are_refused() -> None:
    # They were trained on by one worker, and an error on two.
    net = nn.Linear(FEATURES, 1, dtype=torch.bfloat16)
    net.weight.grad_dtype = torch.float32
    with pytest.raises(ValueError, match=r"weight is of torch\.bfloat16 and its grad_dtype is torch\.float32"):
        trainer(net)


def test_a_forward_that_writes_a_parameter_is_refused() -> None:
    net = nn.Embedding(4, FEATURES, max_norm=0.1, dtype=torch.float64)
    training = trainer(net, loss=lambda model, batch: model((batch[0][:, 0] > 0).long()).square().mean())
    with pytest.raises(LossError, match=r"Parameter weight was written on rank 0"):
        training.step(next(loader().epoch(0)))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch.jit does not support it")
def test_a_model_with_a_scripted_part_is_trained_as_it_is_without(tmp_path: Path) -> None:
    # The registries of scripted modules are no dictionaries, and their class answers no question for `forward`.
    def train(*, scripted: bool) -> list[Tensor]:
        torch.manual_seed(0)
        part = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES))
        head = nn.Linear(FEATURES, 1)
        model = nn.Sequential(torch.jit.script(part) if scripted else part, head).double()
        average = EMA(decay=0.5)
        training = trainer(model, num_shards=2, callbacks=[average])
        batches = loader(num_shards=2)
        for batch in batches.epoch(0):
            training.step(batch)
        path = training.save(tmp_path / f"{scripted}.ckpt")
        weights = [*model.state_dict().values(), *average.tensors.values()]
        digest = training.digest()
        training.load(path)
        assert training.digest() == digest
        training.evaluate(batches, lambda model, batch: (mean_loss(model, batch), 1))
        return [each.clone() for each in weights]

    for one, other in zip(train(scripted=False), train(scripted=True), strict=True):
        assert torch.equal(one, other)


def test_a_loader_of_the_trainer_has_its_shards_seed_and_workers_and_every_option_of_a_loader() -> None:
    alone = World(rank=0, world_size=1, group=None)
    training = trainer(model(), num_shards=3, seed=7, world=alone)
    made = training.loader(data(), batch_size=8, drop_last=True)
    assert made.source == ShardedLoader(data(), batch_size=8, num_shards=3, seed=7, drop_last=True).source
    assert next(made.epoch(0)).world is alone
    options = set(inspect.signature(ShardedLoader).parameters) - {"dataset", "batch_size"}
    assert set(LoaderOptions.__annotations__) == options - {"num_shards", "seed", "world"}
