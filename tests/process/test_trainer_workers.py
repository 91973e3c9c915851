"""The trainer's promise: the same weights, bit for bit, on any number of workers, over any transport."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any, final

import pytest
import torch
import torch.distributed as dist
from tests.process.ranks import RankPool, call_on_ranks
from tests.process.scenarios import Claims, Scenario, error_of, everyone, found_in, name_of, scenarios_in, wrong_in
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
from tests.process.wrapped import all_warnings
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


def errors_are_errors_on_all_workers_and_training_goes_on(rank: int) -> Claims:
    on_1 = rank == 1

    def fail(loss: Tensor, _batch: Any) -> Tensor:
        if on_1:
            raise KeyError("no such image")
        return loss

    run = Mistakes()
    run.spoil = lambda loss, _batch: loss * float("inf") if on_1 else loss
    found = run.try_step(0)
    for said in (
        "LossError: The loss of shard 2, run by rank 1, is inf at epoch 0, step 0",
        "No parameter was changed",
    ):
        yield "a loss that is not finite", found_in(found, said), said
    for error, spoil in (
        ("KeyError: 'no such image'", fail),
        ("LossError: The", lambda loss, _batch: loss.detach() if on_1 else loss),  # no graph
    ):
        run.spoil = spoil
        found = run.try_step(0)
        told = "ReductionError: Rank 1 raised an error in this step. No parameter was changed on any rank."
        for said in [error] if on_1 else [told, error]:
            yield "an error on one worker", found_in(found, said), said
    run.spoil = lambda loss, _batch: loss
    said = "rank 1's is epoch 0, step 1, and rank 0's epoch 0, step 0"
    yield "different batches", found_in(run.try_step(int(on_1)), said), said
    yield "goes on", run.try_step(0), "changed"
    with torch.no_grad():
        run.trainer.model[0].bias.requires_grad_(not on_1)
    said = "0.bias is no longer trained" if on_1 else "ReductionError"
    yield "a model that changes on one worker", found_in(run.try_step(1), said), said
    run.trainer.model[0].bias.requires_grad_(True)
    yield "unfrozen", run.try_step(1), "changed"

    skip = Mistakes(nonfinite="skip")
    skip.spoil = lambda loss, _batch: loss * float("inf") if on_1 else loss
    # Unchanged: BatchNorm's statistics as well, which the forwards of that step have written.
    yield "skipped", skip.try_step(0), "unchanged skipped"
    yield "its place", (skip.trainer.cursor.step, skip.trainer.global_step), (1, 1)
    skip.spoil = lambda loss, _batch: loss
    yield "after skipping", skip.try_step(1), "changed"
    yield "digests", *everyone((run.trainer.digest(), skip.trainer.digest()))


def an_object_of_torchmetrics_counts_every_sample_once(_rank: int) -> Claims:
    from torchmetrics.classification import MulticlassAccuracy  # here, for it takes every worker a second to import

    run = Mistakes()
    theirs = run.trainer.evaluate(run.loader, MulticlassAccuracy(num_classes=2, average="micro"))
    ours = run.trainer.evaluate(run.loader, lambda model, batch: ls.accuracy(model(batch[0]), batch[1]))
    yield "accuracy", float(theirs), pytest.approx(ours["metric"].value, abs=1e-6)


def ranks_that_disagree_are_told(rank: int) -> Claims:
    on_1 = rank == 1
    run = Mistakes()
    run.try_step(0)
    # Each worker would have had other weights from then on.
    group, bias = run.trainer.optimizer.param_groups[0], run.trainer.model[0].bias
    group["lr"] = 0.2 if on_1 else 0.1
    found = run.try_step(1)
    for said in ("The optimizers of ranks 1 and 0 differ at epoch 0, step 1 ", "lr is 0.2 and 0.1. Set options"):
        yield "options", found_in(found, said), said
    group["lr"] = 0.1
    # As where rank 0 alone loads a model, after the trainer was made.
    before = bias.detach().clone()
    with torch.no_grad():
        bias.add_(int(on_1))
    said = "ParameterMismatchError: Parameter 0.bias has other values on rank 1 than on rank 0"
    yield "values", found_in(run.try_step(1), said), said
    with torch.no_grad():
        bias.copy_(before)
    yield "agreed", run.try_step(1), "changed"

    said = "Ranks 1 and 0 make their trainers with different arguments: max_grad_norm is 2.0 and 1.0"
    yield "arguments", found_in(error_of(lambda: Mistakes(max_grad_norm=2.0 if on_1 else 1.0)), said), said
    said = "ValueError: max_grad_norm is -1.0, expected a number above zero"
    if not on_1:
        said = "PeerFailedError: Rank 1 has failed in constructing a Trainer: ValueError: max_grad_norm"
    yield "argument", found_in(error_of(lambda: Mistakes(max_grad_norm=-1.0 if on_1 else 1.0)), said), said

    def fail(_model: nn.Module, _batch: Any) -> tuple[float, float]:
        if on_1:
            raise KeyError("no such metric")
        return 1.0, 1.0

    message = error_of(lambda: run.trainer.evaluate(run.loader, fail))
    said = "KeyError: 'no such metric'"
    yield "metric", message, said if on_1 else f"PeerFailedError: Rank 1 has failed in Trainer.evaluate: {said} (LS213)"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the batch is an old one
        found = error_of(lambda: run.trainer.step(run.batches[0]) if on_1 else run.trainer.evaluate(run.loader, fail))
    for said in ("CollectiveMismatchError", "for Trainer.evaluate"):
        yield "an evaluation on one rank alone", found_in(found, said), said


def evaluation_counts_all_while_shards_move(_rank: int) -> Claims:
    """Evaluate after the step that decides that shards move, and before the step in which they do."""
    # A shard's sums on two workers were taken for one another: 236 of 320 samples.
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
    yield "samples", mean.weight, 43.0
    yield "splits", len(set(splits)), 2


def a_model_that_is_left_different_on_a_rank_becomes_rank_0s(rank: int) -> Claims:
    torch.manual_seed(rank)
    model = nn.Linear(3, 2)
    trainer = ls.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=mean_loss, num_shards=2)
    yield "digests", *everyone((trainer.digest(), state_digest(model.state_dict())))


def what_cannot_have_the_same_bits_is_said_before_the_first_step(rank: int) -> Claims:
    said = []
    torch.set_num_threads(1 + rank)
    for num_shards in (4, 2):
        model = nn.SyncBatchNorm.convert_sync_batchnorm(image_net())
        optimizer = torch.optim.SGD(model.parameters())
        with all_warnings() as warned:
            said.append(error_of(partial(ls.Trainer, model, optimizer, loss=mean_loss, num_shards=num_shards)))
        said += warned
    torch.set_num_threads(1)
    refused, *others = said
    for part in ("1 is SyncBatchNorm", "4 shards on 2 workers"):
        yield "refused", found_in(refused, part), part
    for part in ("as many shards as workers", "Ranks 0 and 1 differ", "threads is 1 and 2"):
        yield "warned of", found_in("\n".join(others), part), part
    yield "is accepted", "no error" in others, True


@pytest.mark.parametrize("scenario", scenarios_in(globals()), ids=name_of)
def test_scenario(pair: RankPool, scenario: Scenario) -> None:
    assert wrong_in(pair, scenario) == []


def penalize(_run: ls.Run) -> str:
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


def test_a_loss_that_differentiates_is_no_backward_inside_a_backward() -> None:
    # Rank 0 computed its only shard again, to see whether what the model keeps matters, before it looked whether the
    # backward of that shard had run another one: LS522 in step 2, where a loss calls `torch.autograd.grad`.
    (alone,) = call_on_ranks(1, penalize)
    assert call_on_ranks(2, penalize) == [alone] * 2


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
