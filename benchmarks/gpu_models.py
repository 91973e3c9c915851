"""The models that are trained on a GPU: large ones that fill it and one that is all overhead."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpu_device import DEVICE, IS_CUDA
from torch import Tensor, nn
from torch.nn import functional
from training_models import many_tiny

LEARNING_RATE = 1e-5
"""So small that the model, which sees one batch again and again, does not become another one while it is timed."""


class Bottleneck(nn.Module):
    """A block of ResNet-50: 1x1, 3x3 and 1x1, with BatchNorm after each."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        layers: list[nn.Module] = []
        for one, other, size, step in ((inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)):
            layers += [nn.Conv2d(one, other, size, step, size // 2, bias=False), nn.BatchNorm2d(other), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(self.layers(images) + self.shortcut(images))


def residual_net(blocks: tuple[int, ...], width: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = width
    for number, depth in enumerate(blocks):
        for block in range(depth):
            layers.append(Bottleneck(inputs, width << number, 2 if block == 0 and number else 1))
            inputs = 4 * (width << number)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, words: Tensor) -> Tensor:
        parts = self.queries_keys_values(self.norms[0](words)).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        words = words + self.projection(mixed.transpose(1, 2).flatten(-2))
        added: Tensor = self.feed_forward(self.norms[1](words))
        return words + added


class LanguageModel(nn.Module):
    """Of GPT-2's shape, with one matrix for the embedding and the head."""

    def __init__(self, num_words: int, length: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.norm(self.blocks(self.words(words) + self.places))
        return functional.linear(hidden, self.words.weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is trained."""

    title: str
    build: Callable[[], nn.Module]
    """Makes the model, on the CPU."""
    make_batch: Callable[[], tuple[Tensor, Tensor]]
    """Makes inputs and targets of a whole batch, on the CPU."""
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    dtype: torch.dtype | None
    """Of autocast; None without."""
    steps: int
    """How many steps a turn has."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss, as the trainer asks for it."""
        with torch.autocast(DEVICE.type, self.dtype, enabled=self.dtype is not None):
            scores = model(batch[0])
            return functional.cross_entropy(scores.flatten(0, -2), batch[1].flatten())


def images(num_samples: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(num_samples, 3, size, size), torch.randint(0, 1000, (num_samples,))


def texts(num_samples: int, length: int, num_words: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(0, num_words, (num_samples, length + 1))
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def vectors(num_samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(num_samples, 16), torch.randint(0, 16, (num_samples,))


def cases(*, is_small: bool) -> dict[str, Case]:
    """Return the models by name; small ones for a dry run."""
    momentum = partial(torch.optim.SGD, lr=LEARNING_RATE, momentum=0.9, fused=True)
    adam = partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True)
    if is_small:
        resnet, image_batch = partial(residual_net, (1, 1, 1, 1), 4), partial(images, 8, 32)
        gpt, text_batch = partial(LanguageModel, 64, 16, 32, 2, 2), partial(texts, 8, 16, 64)
    else:
        resnet, image_batch = partial(residual_net, (3, 4, 6, 3), 64), partial(images, 64, 224)
        gpt, text_batch = partial(LanguageModel, 50304, 1024, 768, 12, 12), partial(texts, 8, 1024, 50304)
    return {
        "resnet": Case(
            title="ResNet-50-like",
            build=resnet,
            make_batch=image_batch,
            make_optimizer=momentum,
            dtype=None,
            steps=1 if is_small else 6,
        ),
        "gpt": Case(
            title="GPT-2-small-like, bf16",
            build=gpt,
            make_batch=text_batch,
            make_optimizer=adam,
            dtype=torch.bfloat16,
            steps=1 if is_small else 8,
        ),
        "tiny": Case(
            title="400 tiny parameters",
            build=many_tiny,
            make_batch=partial(vectors, 8),
            make_optimizer=momentum,
            dtype=None,
            steps=1 if is_small else 20,
        ),
    }


def pinned(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return a batch in memory from which a GPU copies without a wait."""
    return (batch[0].pin_memory(), batch[1].pin_memory()) if IS_CUDA else batch
