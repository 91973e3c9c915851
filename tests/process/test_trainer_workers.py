"""The trainer's promise: the same weights, bit for bit, on any number of workers, over any transport."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import pytest
import torch
import torch.distributed as dist
from tests.process.ranks import call_on_ranks
from tests.process.training_cases import (
    CASES,
    NUM_EPOCHS,
    NUM_SHARDS,
    Case,
    image_net,
    images,
    make_rank_0_slow,
    mean_loss,
)
from torch import Tensor, nn

import lockstep as ls
from lockstep.checkpoint.file import state_digest
from lockstep.comm import current_world

Answer = dict[str, Any]
PAUSE = 3
"""Steps after which a run is saved, in the middle of its first epoch."""
WORKERS = (3, 1, 2, 5)
"""Three first: from where they stop, the others go on."""
FEW = ("convolution", "sparse_embedding")
"""What is trained with a worker per shard."""


def train_case(case: Case, *, save_to: Path | None = None) -> Answer:
    trainer, loader, metric = case
    losses, digests, counts, scales = [], [], [], []
    for epoch in range(trainer.cursor.epoch, NUM_EPOCHS):
        for batch in loader.epoch(epoch, trainer.cursor.step):
            losses.append(trainer.step(batch).loss.hex())
            digests.append(trainer.digest())
            counts.append([len(shards) for shards in batch.ranges])
            scales.append(1.0 if trainer.scaler is None else trainer.scaler.get_scale())
            if save_to is not None and trainer.global_step == PAUSE:
                trainer.save(save_to)
    test = trainer.evaluate(loader, metric)["metric"]
    test_bits = (test.total.hex(), test.weight)
    return {"losses": losses, "digests": digests, "scales": scales, "test": test_bits, "counts": counts}


def go_on(case: Case, path: Path) -> Answer:
    case.trainer.load(path)
    return train_case(case)


def train_all(run: ls.Run, folder: Path) -> dict[str, dict[str, Answer]]:
    """Train every case over shared memory and over Gloo, and from where three workers stopped; few on many workers."""
    cases = {name: make for name, make in CASES.items() if run.world_size < NUM_SHARDS or name in FEW}
    paths = {name: folder / f"{name}.ckpt" for name in cases}
    saves = run.world_size == WORKERS[0]
    found = {
        "shm": {name: train_case(make(None), save_to=paths[name] if saves else None) for name, make in cases.items()}
    }
    if run.world_size == WORKERS[0]:
        world = current_world(dist.new_group(backend="gloo"))
        found["gloo"] = {name: train_case(make(world)) for name, make in cases.items()}
    else:
        found["gone on"] = {name: go_on(make(None), paths[name]) for name, make in cases.items()}
    return found


@final
class Runs:
    """What the workers answered, by their number; run when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[int, list[dict[str, dict[str, Answer]]]] = {}

    def __getitem__(self, workers: int) -> list[dict[str, dict[str, Answer]]]:
        if workers not in self._found:
            if workers != WORKERS[0]:
                self[WORKERS[0]]
            self._found[workers] = call_on_ranks(workers, train_all, self._folder)
        return self._found[workers]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize("workers", WORKERS)
def test_weights_losses_and_metrics_have_the_same_bits_on_any_number_of_workers(runs: Runs, workers: int) -> None:
    alone = runs[1][0]["shm"]
    for answer in runs[workers]:
        for transport in answer.keys() & {"shm", "gloo"}:
            for name in answer[transport]:
                for what in ("digests", "losses", "scales", "test"):
                    assert answer[transport][name][what] == alone[name][what], (transport, name, what)


@pytest.mark.parametrize("workers", WORKERS[1:])
def test_a_run_goes_on_in_the_middle_of_an_epoch_on_any_number_of_workers(runs: Runs, workers: int) -> None:
    undisturbed = runs[1][0]["shm"]
    for answer in runs[workers]:
        for name, found in answer["gone on"].items():
            assert found["digests"] == undisturbed[name]["digests"][PAUSE:], name
            assert found["test"] == undisturbed[name]["test"], name


def test_the_runs_do_something(runs: Runs) -> None:
    # Or the tests above could not fail: weights change, some steps overflow, shards move, and all is counted.
    alone = runs[1][0]["shm"]
    assert all(len(set(answer["digests"])) > PAUSE + 1 for answer in alone.values())
    first, *others = alone["scaled"]["scales"]
    assert first < 2.0**20  # an overflow
    assert max(others) > first  # and three updates in a row since
    assert alone["transformer"]["test"][1] == 43.0
    moved = runs[2][0]["shm"]["sparse_embedding"]["counts"]
    assert moved[0] == [2, 3]
    assert moved[-1] == [1, 4]


def test_a_model_that_is_left_different_on_a_rank_becomes_rank_0s() -> None:
    def build(run: ls.Run) -> tuple[str, str]:
        torch.manual_seed(run.rank)
        model = nn.Linear(3, 2)
        trainer = ls.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=mean_loss, num_shards=2)
        return trainer.digest(), state_digest(model.state_dict())

    first, second = call_on_ranks(2, build)
    assert first == second


# -- What goes wrong, on one rank or on all ---------------------------------------------------------------------------


class Mistakes:
    """A run of 2 workers and 4 shards in which something goes wrong at will."""

    def __init__(self, **options: Any) -> None:
        self.spoil: Any = lambda loss, batch: loss
        model = image_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.trainer = ls.Trainer(model, optimizer, loss=self.loss, num_shards=4, **options)
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(24, 1, 6, 6, generator=generator)
        self.data = torch.utils.data.TensorDataset(inputs, torch.arange(24) % 2)
        self.loader = ls.ShardedLoader(self.data, batch_size=8, num_shards=4)
        self.batches = list(self.loader.epoch(0))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = self.spoil(mean_loss(model, batch), batch)
        return loss

    def try_step(self, number: int) -> str:
        before = self.trainer.digest()
        try:
            result = self.trainer.step(self.batches[number])
        except Exception as error:  # noqa: BLE001 - what it is, is what is asked
            return f"{type(error).__name__}: {error}"
        changed = "changed" if self.trainer.digest() != before else "unchanged"
        return f"{changed}{' skipped' if result.is_skipped else ''}"


def make_mistakes(run: ls.Run) -> Answer:
    found: Answer = {}
    on_1 = run.rank == 1

    def infinite(loss: Tensor, _batch: Any) -> Tensor:
        return loss * float("inf") if on_1 else loss

    def fail(loss: Tensor, _batch: Any) -> Tensor:
        if on_1:
            raise KeyError("no such image")
        return loss

    stop = Mistakes()
    stop.spoil = infinite
    found["infinite"] = stop.try_step(0)
    stop.spoil = fail
    found["exception"] = stop.try_step(0)
    stop.spoil = lambda loss, _batch: loss.detach() if on_1 else loss
    found["no graph"] = stop.try_step(0)
    stop.spoil = lambda loss, _batch: loss
    found["other step"] = stop.try_step(1 if on_1 else 0)
    found["goes on"] = stop.try_step(0)
    with torch.no_grad():
        stop.trainer.model[0].bias.requires_grad_(not on_1)
    found["frozen"] = stop.try_step(1)
    stop.trainer.model[0].bias.requires_grad_(True)
    found["unfrozen"] = stop.try_step(1)

    skip = Mistakes(nonfinite="skip")
    skip.spoil = infinite
    found["skipped"] = skip.try_step(0)
    found["place"] = (skip.trainer.cursor.step, skip.trainer.global_step)
    skip.spoil = lambda loss, _batch: loss
    found["after skipping"] = skip.try_step(1)
    found["digests"] = stop.trainer.digest(), skip.trainer.digest()
    from torchmetrics.classification import MulticlassAccuracy  # here, for it takes every worker a second to import

    theirs = stop.trainer.evaluate(stop.loader, MulticlassAccuracy(num_classes=2, average="micro"))
    ours = stop.trainer.evaluate(stop.loader, lambda model, batch: ls.accuracy(model(batch[0]), batch[1]))
    found["accuracy"] = float(theirs), ours["metric"].value
    found["penalty"] = penalize()
    found |= disagree(stop, on_1=on_1)
    return found


def penalize() -> str:
    """Train with a loss that differentiates, and a model that keeps a number from the second step on."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.Tanh(), nn.Linear(4, 2))

    def loss(model: nn.Module, batch: Any, place: ls.StepPlace) -> Tensor:
        inputs = batch[0].clone().requires_grad_(True)
        outputs = model(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        if place.step > 0:
            model.slope = slope.detach().norm()
        return nn.functional.cross_entropy(outputs, batch[1]) + slope.pow(2).mean()

    trainer = ls.Trainer(net, torch.optim.SGD(net.parameters(), lr=0.1), loss=loss, num_shards=2)
    for batch in ls.ShardedLoader(images(), batch_size=8, num_shards=2).epoch(0):
        trainer.step(batch)
    return trainer.digest()


def attempt(call: Callable[[], Any]) -> str:
    try:
        return str(call())
    except Exception as error:  # noqa: BLE001 - what it is, is what is asked
        return f"{type(error).__name__}: {error}"


def disagree(run: Mistakes, *, on_1: bool) -> Answer:
    """Do on rank 1 what is not done on rank 0."""
    found: Answer = {}
    group, bias = run.trainer.optimizer.param_groups[0], run.trainer.model[0].bias
    group["lr"] = 0.2 if on_1 else 0.1
    found["options"] = run.try_step(2)
    group["lr"] = 0.1
    before = bias.detach().clone()
    with torch.no_grad():
        bias.add_(int(on_1))
    found["values"] = run.try_step(2)
    with torch.no_grad():
        bias.copy_(before)
    found["agreed"] = run.try_step(2)

    def fail(_model: nn.Module, _batch: Any) -> tuple[float, float]:
        if on_1:
            raise KeyError("no such metric")
        return 1.0, 1.0

    found["metric"] = attempt(lambda: run.trainer.evaluate(run.loader, fail))
    found["arguments"] = attempt(lambda: Mistakes(max_grad_norm=2.0 if on_1 else 1.0))
    found["wrong argument"] = attempt(lambda: Mistakes(max_grad_norm=-1.0 if on_1 else 1.0))
    found["balanced"] = evaluate_in_the_midst_of_balancing()
    alone = (lambda: run.trainer.evaluate(run.loader, fail)) if not on_1 else (lambda: run.trainer.step(run.batches[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the batch is an old one
        found["alone"] = attempt(alone)
    return found


def evaluate_in_the_midst_of_balancing() -> tuple[float, int]:
    """Evaluate after the step that decides that shards move, and before the step in which they do."""
    model = image_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = ls.Trainer(model, optimizer, loss=mean_loss, num_shards=4, balance="speed")
    make_rank_0_slow(trainer)
    loader = ls.ShardedLoader(images(), batch_size=4, num_shards=4)
    splits = []
    for batch in loader.epoch(0):
        trainer.step(batch)
        splits.append(len(batch.ranges[0]))
    mean = trainer.evaluate(loader, lambda _model, batch: (float(len(batch[1])), float(len(batch[1]))))["metric"]
    return mean.weight, len(set(splits))


@pytest.fixture(scope="module")
def mistakes() -> list[Answer]:
    return call_on_ranks(2, make_mistakes)


def test_a_loss_that_is_not_finite_stops_all_workers_and_is_named(mistakes: list[Answer]) -> None:
    first, second = (answer["infinite"] for answer in mistakes)
    assert first == second
    assert first.startswith("LossError: The loss of shard 2, run by rank 1, is inf at epoch 0, step 0")
    assert "No parameter was changed" in first


@pytest.mark.parametrize(
    ("what", "error"), [("exception", "KeyError: 'no such image'"), ("no graph", "LossError: The")]
)
def test_an_error_on_one_worker_is_one_on_all(mistakes: list[Answer], what: str, error: str) -> None:
    first, second = (answer[what] for answer in mistakes)
    assert second.startswith(error)
    assert first.startswith(
        "ReductionError: Rank 1 raised an error in this step. No parameter was changed on any rank."
    )
    assert error in first


def test_workers_on_different_batches_are_told(mistakes: list[Answer]) -> None:
    first, second = (answer["other step"] for answer in mistakes)
    assert first == second
    assert "rank 1's is epoch 0, step 1, and rank 0's epoch 0, step 0" in first


def test_a_model_that_changes_on_one_worker_is_named(mistakes: list[Answer]) -> None:
    assert "ReductionError" in mistakes[0]["frozen"]
    assert "0.bias is no longer trained" in mistakes[1]["frozen"]


def test_a_loss_that_differentiates_is_no_backward_inside_a_backward(mistakes: list[Answer]) -> None:
    # Rank 0 computed its only shard again, to see whether what the model keeps matters, before it looked whether the
    # backward of that shard had run another one: LS522 in step 2, where a loss calls `torch.autograd.grad`.
    (alone,) = call_on_ranks(1, lambda _run: penalize())
    assert [answer["penalty"] for answer in mistakes] == [alone] * 2


def test_training_goes_on_after_errors(mistakes: list[Answer]) -> None:
    for answer in mistakes:
        assert answer["goes on"] == answer["unfrozen"] == answer["after skipping"] == "changed"
    assert mistakes[0]["digests"] == mistakes[1]["digests"]


def test_optimizers_that_differ_are_an_error_on_all(mistakes: list[Answer]) -> None:
    # Each worker would have had other weights from then on.
    for answer in mistakes:
        assert "The optimizers of ranks 1 and 0 differ at epoch 0, step 2 " in answer["options"]
        assert "lr is 0.2 and 0.1. Set options" in answer["options"]


def test_weights_that_differ_are_an_error_on_all(mistakes: list[Answer]) -> None:
    # As where rank 0 alone loads a model, after the trainer was made.
    for answer in mistakes:
        assert "ParameterMismatchError: Parameter 0.bias has other values on rank 1 than on rank 0" in answer["values"]
        assert answer["agreed"] == "changed"


def test_arguments_that_differ_or_are_wrong_on_one_rank_are_an_error_on_all(mistakes: list[Answer]) -> None:
    for answer in mistakes:
        assert (
            "Ranks 1 and 0 make their trainers with different arguments: max_grad_norm is 2.0 and 1.0"
            in (answer["arguments"])
        )
    first, second = (answer["wrong argument"] for answer in mistakes)
    assert second.startswith("ValueError: max_grad_norm is -1.0, expected a number above zero")
    assert first.startswith("PeerFailedError: Rank 1 has failed in constructing a Trainer: ValueError: max_grad_norm")


def test_a_metric_that_fails_on_one_rank_is_an_error_on_all(mistakes: list[Answer]) -> None:
    first, second = (answer["metric"] for answer in mistakes)
    assert second == "KeyError: 'no such metric'"
    assert first == "PeerFailedError: Rank 1 has failed in Trainer.evaluate: KeyError: 'no such metric' (LS213)"


def test_an_evaluation_on_one_rank_alone_is_told_as_that(mistakes: list[Answer]) -> None:
    for answer in mistakes:
        assert answer["alone"].startswith("CollectiveMismatchError")
        assert "for Trainer.evaluate" in answer["alone"]


def test_evaluation_counts_all_while_shards_move(mistakes: list[Answer]) -> None:
    # A shard's sums on two workers were taken for one another: 236 of 320 samples.
    assert [answer["balanced"] for answer in mistakes] == [(43.0, 2)] * 2


def test_an_object_of_torchmetrics_counts_every_sample_once(mistakes: list[Answer]) -> None:
    for theirs, ours in (answer["accuracy"] for answer in mistakes):
        assert theirs == pytest.approx(ours, abs=1e-6)


def test_a_step_is_skipped_on_all_workers_alike(mistakes: list[Answer]) -> None:
    for answer in mistakes:
        # Unchanged: BatchNorm's statistics as well, which the forwards of that step have written.
        assert answer["skipped"] == "unchanged skipped"
        assert answer["place"] == (1, 1)


def test_what_cannot_have_the_same_bits_is_said_before_the_first_step() -> None:
    def build(run: ls.Run) -> list[str]:
        import warnings

        said = []
        torch.set_num_threads(1 + run.rank)
        for num_shards in (4, 2):
            model = nn.SyncBatchNorm.convert_sync_batchnorm(image_net())
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    ls.Trainer(model, torch.optim.SGD(model.parameters()), loss=mean_loss, num_shards=num_shards)
                except ValueError as error:
                    said.append(str(error))
                said += [str(warning.message) for warning in caught]
        return said

    for said in call_on_ranks(2, build):
        assert "1 is SyncBatchNorm" in said[0]
        assert "4 shards on 2 workers" in said[0]
        assert "as many shards as workers" in said[1]
        assert "Ranks 0 and 1 differ" in said[2]
        assert "threads is 1 and 2" in said[2]


def train_halves(run: ls.Run | None = None) -> list[str]:
    """Train shards that two workers share equally, so that each holds one partial; over Gloo where there are two."""
    world = None if run is None else current_world(dist.new_group(backend="gloo"))
    digests = []
    for num_shards in (2, 4):
        torch.manual_seed(0)
        net = image_net()
        trainer = ls.Trainer(
            net, torch.optim.SGD(net.parameters(), lr=0.1), loss=mean_loss, num_shards=num_shards, world=world
        )
        loader = ls.ShardedLoader(images(), batch_size=16, num_shards=num_shards, world=world)
        for batch in loader.epoch(0):
            trainer.step(batch)
            digests.append(trainer.digest())
    return digests


def test_two_workers_with_one_partial_each_add_as_one_does_over_gloo() -> None:
    # There the addition is left to the group's own all-reduce; every other case here has an odd number of shards.
    (alone,) = call_on_ranks(1, train_halves)
    assert call_on_ranks(2, train_halves) == [alone] * 2
