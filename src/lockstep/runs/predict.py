"""Predictions of a saved model for a data set, in the order of the data, with the same bits on any number of workers.

Rank 0 collects the predictions of each batch and writes them in parts, each of which is complete under its name. A run
that was stopped continues after the last part, on any number of workers. `predictions.py` makes one file of the parts.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from lockstep.checkpoint.atomic_write import atomic_write
from lockstep.comm import current_world
from lockstep.data import ShardedBatch, Slice
from lockstep.engine.batches import gather_results
from lockstep.engine.evaluation import CalledModel, SliceCalls
from lockstep.engine.networks import evaluation_mode
from lockstep.errors import ConfigError
from lockstep.processes.reproducibility import seed_generators, set_deterministic
from lockstep.runs.build import choose_set, make_loader, make_named, split_sets
from lockstep.runs.config import Config
from lockstep.runs.evaluate import load_weights_of
from lockstep.runs.importing import call_object, import_object
from lockstep.runs.predictions import PredictRequest, part_name
from lockstep.shards import derive_seed

_PART_SECONDS = 10.0
_PART_BYTES = 256 << 20
"""How much a part holds, about."""
_PURPOSE = "lockstep predict"
_PAIR = 2

Columns = dict[str, Tensor]
"""What is written of some samples, by column; each tensor has the samples along dimension 0."""


def predict_saved(request: PredictRequest, device: torch.device, tell: Callable[[int, int | None], None]) -> int:
    """Write the predictions in parts (collective: every worker calls); return the number of samples.

    Rank 0 calls `tell` after each part, with how many samples are on the disk, and how many there are, if known.
    """
    config, world = request.saved.config, current_world()
    set_deterministic(config.deterministic)
    seed_generators(derive_seed("build", config.seed))
    dataset = make_dataset(config, request.data)
    try:
        loader = make_loader(config, dataset)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--data is {request.data!r}, whose data set cannot be used: {error} (LS814)") from error
    seed_generators(derive_seed("model", config.seed))
    model = make_named(config, "model").to(device)
    load_weights_of(request.saved.checkpoint, model, request.weights)
    output_of = _Outputs(request, model, device)
    names = file_names(dataset) if world.rank == 0 else None
    writer = _PartWriter(request, loader.num_samples, None if names is None else np.array(names), tell)
    first_step = -(-request.start // config.batch_size)  # the last batch may be smaller
    batches = loader.epoch(0, first_step)

    def predict() -> tuple[int, list[tuple[int, Columns]]] | None:
        if world.rank == 0:
            writer.write_if_due()  # with what the step before has added: an error in it is raised with this step's
        batch = next(batches, None)
        if batch is None:
            return None
        return batch.num_samples, [(part.shard, output_of(batch, part)) for part in batch.slices]

    def finish() -> None:
        if world.rank == 0:
            writer.write()

    num_samples = request.start
    with torch.no_grad(), evaluation_mode(model), output_of.calls.changing_nothing():
        while True:
            found = gather_results(world, predict, _PURPOSE)
            if found[0] is None:
                break
            num_samples += found[0][0]
            if world.rank == 0:
                writer.add([columns for _, mine in filter(None, found) for columns in mine])
    gather_results(world, finish, _PURPOSE)
    return num_samples


def make_dataset(config: Config, data: str | None) -> Any:
    """Return the data set of this name; for an import path, and of None, the preferred one of what there is."""
    path = data if data is not None and ":" in data else None
    key, source, arguments = ("data", config.data, config.data_args) if path is None else ("--data", path, {})
    train, others = split_sets(key, source, call_object(key, import_object(key, source), **arguments))
    return choose_set(train, others, data)


def file_names(dataset: Any) -> list[str] | None:
    """Return the name of the file of each sample; None for data that do not say which they are.

    A folder of pictures does, ours and torchvision's, and a data set with `files`, or a part of one of these.
    """
    if isinstance(dataset, Subset):
        whole = file_names(dataset.dataset)
        return None if whole is None else [whole[index] for index in dataset.indices]
    found = getattr(dataset, "files", None)
    if found is None and isinstance(samples := getattr(dataset, "samples", None), list):  # of torchvision's folders
        found = [each[0] if isinstance(each, tuple) and each else None for each in samples]
    is_list = isinstance(found, list | tuple) and all(isinstance(each, str | Path) for each in found)
    return list(map(str, found)) if is_list and found and len(found) == len(dataset) else None


@final
class _Outputs:
    def __init__(self, request: PredictRequest, model: nn.Module, device: torch.device) -> None:
        self._request = request
        config = request.saved.config
        dtype = getattr(torch, config.precision)
        autocast = partial(torch.autocast, device.type, dtype, enabled=dtype is not torch.float32)
        called = CalledModel(model=model, kept=model, device=device, seed=config.seed, autocast=autocast)
        self.calls = SliceCalls(called, partial(_predict, has_targets=request.has_targets))
        path = request.output_function
        self._transform = None if path is None else import_object("--output-function", path)

    def __call__(self, batch: ShardedBatch, part: Slice) -> Columns:
        output, target = self.calls(batch, part)
        if self._transform is not None:
            output = call_object("--output-function", self._transform, output)
        columns = _name_columns(output)
        has_classes = any(name.split("_")[-1] == "accuracy" for name in self._request.saved.metrics)
        if has_classes and self._transform is None and _is_scores(output):
            columns = {"class": output.argmax(1), **columns}
        if isinstance(target, Tensor) and target.ndim == 1 and len(target) == part.num_samples:
            columns = {"target": target, **columns}
        for name, values in columns.items():
            if values.ndim == 0 or len(values) != part.num_samples:
                raise ConfigError(
                    f"The output {name} has shape {list(values.shape)} for {part.num_samples} samples, expected one "
                    "row for each sample, along dimension 0. Use --output-function to turn it into such. (LS814)"
                )
        return {name: _as_plain(values) for name, values in columns.items()}


def _predict(model: nn.Module, data: Any, *, has_targets: bool) -> tuple[Any, Any]:
    if has_targets and isinstance(data, tuple | list):
        if len(data) == _PAIR:
            return model(data[0]), data[1]
        if len(data) == 1:  # of a TensorDataset of inputs
            return model(data[0]), None
    return model(data), None


def _name_columns(output: Any, name: str = "output") -> Columns:
    if isinstance(output, Tensor):
        return {name: output.squeeze(1) if output.ndim == _PAIR and output.shape[1] == 1 else output}
    found: Columns = {}
    if isinstance(output, Mapping):
        for key, value in output.items():
            found |= _name_columns(value, str(key))
    elif isinstance(output, tuple | list):
        for number, value in enumerate(output):
            found |= _name_columns(value, f"{name}_{number}")
    elif output is not None:
        raise ConfigError(
            f"The model's output holds a {type(output).__name__}, expected tensors, or a dictionary or tuple of "
            "tensors. Use --output-function to turn it into such. (LS814)"
        )
    return found


def _is_scores(output: Any) -> bool:
    return isinstance(output, Tensor) and output.ndim == _PAIR and output.is_floating_point() and output.shape[1] > 1


def _as_plain(values: Tensor) -> Tensor:
    values = values.detach().cpu()
    return values.float() if values.dtype == torch.bfloat16 else values


def _in_words(shapes: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())


@final
class _PartWriter:
    """Collects the predictions of batches on rank 0, and writes them as parts."""

    def __init__(
        self,
        request: PredictRequest,
        num_samples: int | None,
        files: np.ndarray[Any, Any] | None,
        tell: Callable[[int, int | None], None],
    ) -> None:
        self._folder = request.parts
        self._written = request.start
        self._num_samples = num_samples
        self._files = files
        self._tell = tell
        self._added: Sequence[tuple[int, Columns]] = ()
        self._batches: list[dict[str, np.ndarray[Any, Any]]] = []
        self._shapes: dict[str, list[int]] = {}
        self._num_bytes = 0
        self._last = time.monotonic()

    def add(self, slices: Sequence[tuple[int, Columns]]) -> None:
        """Take in the predictions of a batch; errors come with the next call, where the other workers are told."""
        self._added = slices

    def _join_slices(self) -> None:
        ordered = [columns for _, columns in sorted(self._added, key=itemgetter(0))]
        self._added = ()
        if not ordered:
            return
        for columns in ordered:
            shapes = {name: list(values.shape[1:]) for name, values in columns.items()}
            self._shapes = self._shapes or shapes
            if shapes != self._shapes:
                raise ConfigError(
                    f"The outputs of some samples have the shapes {_in_words(self._shapes)}, those of others "
                    f"{_in_words(shapes)}, and a file needs the same for all. Let --output-function return "
                    "such. (LS814)"
                )
        batch = {name: torch.cat([columns[name] for columns in ordered]).numpy() for name in ordered[0]}
        self._batches.append(batch)
        self._num_bytes += sum(values.nbytes for values in batch.values())

    def write_if_due(self) -> None:
        self._join_slices()
        if time.monotonic() - self._last >= _PART_SECONDS or self._num_bytes >= _PART_BYTES:
            self.write()

    def write(self) -> None:
        self._join_slices()
        if not self._batches:
            return
        columns = {name: np.concatenate([batch[name] for batch in self._batches]) for name in self._batches[0]}
        stop = self._written + len(next(iter(columns.values())))
        if self._files is not None:
            columns = {"path": self._files[self._written : stop], **columns}
        try:
            with (
                atomic_write(self._folder / part_name(self._written, stop)) as descriptor,
                os.fdopen(os.dup(descriptor), "wb") as file,
            ):
                np.savez(file, allow_pickle=False, **columns)
        except OSError as error:
            raise ConfigError(f"The predictions cannot be written to {self._folder}: {error}. (LS814)") from error
        self._written, self._batches, self._num_bytes = stop, [], 0
        self._last = time.monotonic()
        self._tell(stop, self._num_samples)
