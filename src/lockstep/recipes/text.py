"""A character-level transformer that learns to write Python from the standard library's own sources.

The text is part of every Python installation, so nothing is downloaded. It differs between Python versions, so
all workers of a run, and all runs whose digests are compared, need the same one.
"""

import math
import sysconfig
from pathlib import Path
from typing import final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.errors import DataFileError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
VOCABULARY = "\t\n" + "".join(map(chr, range(ord(" "), ord("~") + 1))) + REPLACEMENT
"""The model's characters, in the order of their indices: ASCII, and one for all others."""

BLOCK_SIZE = 128
"""Default length of the model's input, in characters."""

_INDICES = {character: index for index, character in enumerate(VOCABULARY)}
_NUM_PARTS = 10  # The text is cut into so many equal parts, the last of which is the test set.


@final
class Transformer(nn.Module):
    """A causal transformer: int64 [B, T] characters to float [B, T, V] scores of each next character.

    Args:
        width: Size of the residual stream; a multiple of `num_heads`.
        num_layers: Number of blocks.
        num_heads: Attention heads of each block.
        block_size: The largest T.

    Raises:
        ValueError: `width` is not a multiple of `num_heads`; in forward, T is above `block_size`.
    """

    def __init__(self, width: int = 128, num_layers: int = 2, num_heads: int = 4, block_size: int = BLOCK_SIZE) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"width is {width}; expected a multiple of num_heads, which is {num_heads}. (LS453)")
        self.block_size = block_size
        self.characters = nn.Embedding(len(VOCABULARY), width)
        self.positions = nn.Parameter(torch.empty(block_size, width))
        self.blocks = nn.Sequential(*(_Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        # Not tied to the embedding: a tensor with two names needs special care in a checkpoint.
        self.scores = nn.Linear(width, len(VOCABULARY), bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # Smaller for layers that add to the residual stream, which would otherwise grow (as in GPT-2).
                num_added = 2 * num_layers if name.endswith("_out.weight") else 1
                nn.init.normal_(parameter, std=0.02 / math.sqrt(num_added))

    def forward(self, characters: Tensor) -> Tensor:
        """Score every next character."""
        length = characters.shape[1]
        if length > self.block_size:
            raise ValueError(f"The input has {length} characters; the model sees at most {self.block_size}. (LS453)")
        x: Tensor = self.characters(characters) + self.positions[:length]
        scores: Tensor = self.scores(self.norm(self.blocks(x)))
        return scores


@final
class _Block(nn.Module):
    """Attention, then an MLP of two layers, each with a residual connection: [B, T, width] to the same shape."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attention_in(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # Each [B, num_heads, T, width / num_heads].
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.mlp_out(F.relu(self.mlp_in(self.mlp_norm(x))))
        return result


@final
class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows of a text: pairs of int64 [T] characters and int64 [T] next characters.

    Every character but the first is a target in one window. A remainder shorter than a window is left out.

    Args:
        text: The text to split.
        block_size: T.
    """

    def __init__(self, text: str, block_size: int) -> None:
        self._characters = encode(text)
        self._block_size = block_size

    def __len__(self) -> int:
        return max(0, len(self._characters) - 1) // self._block_size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = range(len(self))[index] * self._block_size  # IndexError past the end.
        window = self._characters[start : start + self._block_size + 1]
        return window[:-1], window[1:]


def datasets(block_size: int = BLOCK_SIZE, max_chars: int = 1_000_000) -> tuple[Windows, Windows]:
    """Return (train, test): windows of the first nine tenths of the standard library's text, and of the last.

    Args:
        block_size: Characters of a window; at most the model's.
        max_chars: Number of characters to use, from the beginning of the text.

    Raises:
        ValueError: `block_size` is not positive, or `max_chars` leaves no window for the test set.
        DataFileError: There are no sources, one cannot be opened, or they are too short.
    """
    shortest = (block_size + 1) * _NUM_PARTS
    if block_size < 1 or max_chars < shortest:
        raise ValueError(
            f"block_size is {block_size} and max_chars {max_chars}; expected at least 1 and {shortest}. (LS453)"
        )
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = read_sources(folder, max_chars)
    if len(text) < shortest:
        raise DataFileError(
            f"The .py files in {folder} hold {len(text)} characters, fewer than the {shortest} that block_size "
            f"{block_size} needs. Lower block_size, or use a Python that has its library's sources. (LS453)"
        )
    num_test = len(text) // _NUM_PARTS
    return Windows(text[:-num_test], block_size), Windows(text[-num_test:], block_size)


def read_sources(folder: Path, max_chars: int) -> str:
    """Return the first `max_chars` characters of a folder's .py files, in the order of their names.

    Files that are not UTF-8 are left out, and so is `_sysconfigdata*.py`, which differs between builds of Python.

    Raises:
        DataFileError: There is no text, or a file cannot be opened.
    """
    text = ""
    for file in sorted(folder.glob("*.py")):
        if len(text) >= max_chars:
            break
        if file.name.startswith("_sysconfigdata"):
            continue
        try:
            text += file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        except OSError as error:
            raise DataFileError(f"{file} cannot be read: {error.strerror}. Make it readable. (LS453)") from error
    if not text:
        raise DataFileError(
            f"{folder} holds no .py files to learn from. Use a Python that has its library's sources. (LS453)"
        )
    return text[:max_chars]


def encode(text: str) -> Tensor:
    """Return the int64 [len(text)] indices of the characters; those not in VOCABULARY become REPLACEMENT."""
    unknown = _INDICES[REPLACEMENT]
    return torch.tensor([_INDICES.get(character, unknown) for character in text], dtype=torch.int64)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy per character, in nats, of [B, T, V] scores for int64 [B, T] characters."""
    # Flattened: over [B, V, T] the loss has no deterministic kernel on CUDA.
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@torch.no_grad()
def sample(
    model: Transformer, prompt: str = "def ", num_chars: int = 400, temperature: float = 0.8, seed: int = 0
) -> str:
    """Return the prompt and the text that the model generates after it.

    The model may be on any device. Its training mode and global generators are not changed.

    Args:
        model: The model.
        prompt: The beginning of the text; at least one character.
        num_chars: Number of characters to generate.
        temperature: Near 0 the most likely character, 1 the model's distribution.
        seed: Seed of the random numbers.

    Raises:
        ValueError: The prompt is empty, or the temperature is not positive.
    """
    if not prompt or temperature <= 0:
        raise ValueError(
            f"prompt is {prompt!r} and temperature {temperature}; expected some text and a temperature above 0. (LS453)"
        )
    # Drawn on the CPU, so that a seed gives the same random numbers on any device.
    generator = torch.Generator().manual_seed(seed)
    characters = encode(prompt)
    was_training = model.training
    model.eval()
    try:
        for _ in range(num_chars):
            seen = characters[-model.block_size :].to(model.positions.device)
            scores = model(seen.unsqueeze(0))[0, -1].cpu().double()
            drawn = torch.multinomial((scores / temperature).softmax(0), 1, generator=generator)
            characters = torch.cat([characters, drawn])
    finally:
        model.train(was_training)
    return prompt + "".join(VOCABULARY[number] for number in characters[len(prompt) :].tolist())
