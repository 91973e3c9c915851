"""The models that benchmarks train."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


def mlp() -> nn.Module:
    """Little computation: communication dominates."""
    layers = [nn.Linear(784, 1536), nn.ReLU(), nn.Linear(1536, 1536), nn.ReLU(), nn.Linear(1536, 1536), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1536, 10))


class Transformer(nn.Module):
    """Six layers, like a small language model."""

    WORDS, LENGTH, WIDTH = 512, 32, 384

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(self.WORDS, self.WIDTH)
        self.places = nn.Parameter(torch.zeros(self.LENGTH, self.WIDTH))
        layer = nn.TransformerEncoderLayer(self.WIDTH, 6, 4 * self.WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=6)
        self.head = nn.Linear(self.WIDTH, self.WORDS)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(self.words(words) + self.places))
        return scores


def conv_net() -> nn.Module:
    """With BatchNorm, whose buffers are broadcast too: computation dominates."""
    layers: list[nn.Module] = []
    for inputs, outputs, has_pool in (
        *((3, 64, True), (64, 128, True), (128, 256, False), (256, 256, True)),
        *((256, 512, False), (512, 512, True)),
    ):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] * has_pool
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512 * 4, 256), nn.ReLU(), nn.Linear(256, 10))


def many_tiny() -> nn.Module:
    """400 parameters of 16 to 256 numbers: bound by overhead."""
    linears = [nn.Linear(16, 16) for _ in range(200)]
    for linear in linears:
        nn.init.orthogonal_(linear.weight)  # else gradients vanish in 200 layers, and denormals are slow
    return nn.Sequential(*(layer for linear in linears for layer in (linear, nn.Tanh())))


def images(num_samples: int, *shape: int, num_classes: int = 10) -> Batch:
    return torch.randn(num_samples, *shape), torch.randint(0, num_classes, (num_samples,))


def text() -> Batch:
    words = torch.randint(0, Transformer.WORDS, (2, Transformer.LENGTH + 1))
    return words[:, :-1], words[:, 1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is trained."""

    title: str
    build: Callable[[], nn.Module]
    make_batch: Callable[[], Batch]
    optimizers: tuple[str, ...]
    """Which of those that were asked for it is timed with."""
    steps: int
    """How many steps a turn has."""


MODELS = {
    "mlp": Model(title="MLP", build=mlp, make_batch=lambda: images(32, 784), optimizers=("sgd", "adamw"), steps=6),
    "transformer": Model(title="transformer", build=Transformer, make_batch=text, optimizers=("sgd", "adamw"), steps=2),
    "conv": Model(
        title="conv net", build=conv_net, make_batch=lambda: images(4, 3, 32, 32), optimizers=("sgd",), steps=3
    ),
    "tiny": Model(title="tiny", build=many_tiny, make_batch=lambda: images(8, 16), optimizers=("sgd",), steps=15),
}
