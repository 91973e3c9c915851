"""The digest of a training on one card with 1, 2 and 3 workers, after every step and for every kind of model.

One worker trains over NCCL; several share the card over Gloo (--nccl: over NCCL too, where it takes
several ranks on one card). What is compared is the trainer's promise that the number of workers changes no bit. Kinds
that are compiled run apart, for a compiler that fails must not take the others with it.
"""

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from gpu_device import DEVICE, IS_CUDA, name
from gpu_workers import Outcome, describe, hand_in, is_worker, join, run_workers
from tables import log, print_row
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import TensorDataset

import lockstep as ls

NUM_SHARDS = 6
BATCH = 12
NUM_SAMPLES = 48
UNEVEN_SAMPLES = 46
"""The last step's slices are not all of one length; compiled models, which specialize on shapes, get even ones."""
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs")
EAGER = "eager"
LIMIT_SECONDS = {False: 75.0, True: 150.0}
"""How long a world may take, not compiled and compiled."""
NUM_JOBS = 9
"""Worlds that train at the same time."""

Loss = Callable[[nn.Module, Any], Any]


class Attention(nn.Module):
    """A layer of attention over texts, in the kernels that are asked for."""

    def __init__(self, backend: SDPBackend) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 128)
        self.queries_keys_values = nn.Linear(128, 3 * 128)
        self.head = nn.Linear(128, 3)
        self.backend = backend

    def forward(self, words: Tensor) -> Tensor:
        parts = self.queries_keys_values(self.words(words)).unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(self.backend):
            mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        scores: Tensor = self.head(mixed.transpose(1, 2).flatten(-2).mean(1))
        return scores


class Encoder(nn.Module):
    """A small transformer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 3)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(self.words(words)).mean(1))
        return scores


class Bags(nn.Module):
    """Embeddings, with an index that is left out and with bags; words that come often are added up often."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 32, padding_idx=0)
        self.bags = nn.EmbeddingBag(64, 32, mode="sum")
        self.head = nn.Linear(64, 3)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.cat((self.words(words).sum(1), self.bags(words)), 1))
        return scores


def conv_net() -> nn.Module:
    layers = (
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
    )
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(32, 3))


def loss_in(dtype: torch.dtype | None) -> Loss:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(DEVICE.type, dtype, enabled=dtype is not None):
            return functional.cross_entropy(model(batch[0]), batch[1])

    return loss


def images(num_samples: int) -> TensorDataset:
    inputs = torch.randn(num_samples, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.mean((1, 2, 3)).gt(0).long())


def texts(num_samples: int) -> TensorDataset:
    words = torch.randint(0, 64, (num_samples, 32), generator=torch.Generator().manual_seed(2))
    return TensorDataset(words, words.sum(1) % 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What is trained."""

    build: Callable[[], nn.Module]
    data: Callable[[int], TensorDataset]
    dtype: torch.dtype | None = None
    has_scaler: bool = False
    max_grad_norm: float | None = None
    deterministic: bool = True


KINDS = {
    "conv net": Kind(build=conv_net, data=images, max_grad_norm=1.0),
    "transformer, bf16": Kind(build=Encoder, data=texts, dtype=torch.bfloat16),
    "GradScaler, fp16": Kind(build=conv_net, data=images, dtype=torch.float16, has_scaler=True),
    "flash attention, bf16": Kind(
        build=lambda: Attention(SDPBackend.FLASH_ATTENTION), data=texts, dtype=torch.bfloat16
    ),
    "efficient attention": Kind(
        build=lambda: Attention(SDPBackend.EFFICIENT_ATTENTION if IS_CUDA else SDPBackend.MATH), data=texts
    ),
    "embeddings": Kind(build=Bags, data=texts),
}


# -- In the workers ----------------------------------------------------------------------------------------------------


def train(kind: Kind, compile_mode: str) -> list[str]:
    """Return the digest after every step (collective)."""
    torch.manual_seed(0)
    model = kind.build().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trained: Any = model
    if compile_mode != EAGER:
        trained = torch.compile(model, mode=compile_mode) if IS_CUDA else torch.compile(model, backend="aot_eager")
    trainer = ls.Trainer(
        trained,
        optimizer,
        loss=loss_in(kind.dtype),
        num_shards=NUM_SHARDS,
        max_grad_norm=kind.max_grad_norm,
        deterministic=kind.deterministic,
        scaler=torch.amp.GradScaler(DEVICE.type, init_scale=2.0**18, growth_interval=2) if kind.has_scaler else None,
    )
    data = kind.data(UNEVEN_SAMPLES if compile_mode == EAGER else NUM_SAMPLES)
    loader = ls.ShardedLoader(data, batch_size=BATCH, num_shards=NUM_SHARDS, pin_memory=IS_CUDA)
    digests = []
    for batch in loader.epoch(0):
        trainer.step(batch)
        digests.append(trainer.digest())
    return digests


def train_all(compile_mode: str) -> None:
    """Train every kind; hand in what is there after each, so that a kind that fails leaves the ones before it."""
    found: dict[str, list[str]] = {}
    names = KINDS if compile_mode == EAGER else ("transformer, bf16", "conv net")
    for title in names:
        print(f"{title} ...", flush=True)
        found[title] = train(KINDS[title], compile_mode)
        hand_in(found)
    dist.barrier()


# -- In the process that starts them -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One world and one way to compile."""

    mode: str
    backend: str
    world_size: int

    def title(self) -> str:
        return f"{self.world_size} over {self.backend}"


def play(job: Job) -> tuple[Job, list[Outcome]]:
    log(f"{job.mode}, {job.title()} ...")
    arguments = ["--mode", job.mode, "--backend", job.backend]
    return job, run_workers(__file__, arguments, world_size=job.world_size, limit=LIMIT_SECONDS[job.mode != EAGER])


def compare(mode: str, found: dict[Job, list[Outcome]]) -> list[str]:
    """Print a table of one way to compile; return what is not equal or not there."""
    worlds = [job for job in found if job.mode == mode]
    titles = [title for title in KINDS if any(title in (out.result or {}) for job in worlds for out in found[job])]
    print(f"\n{mode}\n")
    print_row("model", "digest, shortened", *(job.title() for job in worlds))
    print_row(*["---"] * (2 + len(worlds)))
    problems = [
        f"{mode}, {job.title()}: {describe(outcome)}: {outcome.last_line()}"
        for job in worlds
        for outcome in found[job]
        if outcome.code != 0
    ]
    for title in titles:
        digests = {job: [(outcome.result or {}).get(title) for outcome in found[job]] for job in worlds}
        reference = next(each for of_job in digests.values() for each in of_job if each)
        cells = []
        for job, of_job in digests.items():
            if not all(of_job):
                cells.append("-")
            elif all(each == reference for each in of_job):
                cells.append("equal")
            else:
                step = min(first_difference(each or [], reference) for each in of_job)
                cells.append(f"OTHER from step {step} on")
                problems.append(f"{mode}, {title}, {job.title()}: other bits from step {step} on")
        print_row(title, reference[-1][:12], *cells)
    return problems


def first_difference(found: list[str], reference: list[str]) -> int:
    pairs = zip(found, reference, strict=True)
    return next((step for step, (one, other) in enumerate(pairs) if one != other), len(reference))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", type=lambda text: text.split(","), default=[EAGER, *COMPILE_MODES])
    parser.add_argument("--nccl", action="store_true", help="several workers over NCCL too")
    parser.add_argument("--jobs", type=int, default=NUM_JOBS, help=f"worlds at a time; default {NUM_JOBS}")
    parser.add_argument("--small", action="store_true", help="a dry run on the CPU: two worlds")
    parser.add_argument("--mode", default="", help=argparse.SUPPRESS)  # of a worker
    parser.add_argument("--backend", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if is_worker():
        join(options.backend)
        train_all(options.mode)
        return
    worlds = [("nccl", 1), ("gloo", 2)] if options.small else [("nccl", 1), ("gloo", 2), ("gloo", 3)]
    worlds += [("nccl", 2), ("nccl", 3)] if options.nccl else []
    print(f"{name()}, {NUM_SHARDS} shards")
    jobs = [Job(mode=mode, backend=each, world_size=size) for mode in options.modes for each, size in worlds]
    with ThreadPoolExecutor(options.jobs) as pool:
        found = dict(pool.map(play, jobs))
    problems = [problem for mode in options.modes for problem in compare(mode, found)]
    for job, outcomes in found.items():
        for outcome in outcomes:
            if outcome.code != 0:
                print(f"\n--- {job.mode}, {job.title()}: {describe(outcome)}\n{outcome.output}")
    print()
    sys.stdout.flush()
    sys.exit("\n".join(problems) or 0)


if __name__ == "__main__":
    main()
