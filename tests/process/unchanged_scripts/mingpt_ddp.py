"""What PyTorch's minGPT-ddp example does: a small GPT on characters, weight decay by group, clipping. Writes FILE.

usage: mingpt_ddp.py FILE
"""

import math
import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler, random_split

TEXT = "We hold these truths to be self-evident, that all programs are created equal. " * 4


@dataclass
class GptConfig:
    vocabulary: int
    block_size: int = 16
    layers: int = 2
    heads: int = 2
    width: int = 16
    dropout: float = 0.1


class CharDataset(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, block_size: int) -> None:
        self.number_of = {char: index for index, char in enumerate(sorted(set(TEXT)))}
        self.block_size = block_size

    def __len__(self) -> int:
        return len(TEXT) - self.block_size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        numbers = torch.tensor([self.number_of[char] for char in TEXT[index : index + self.block_size + 1]])
        return numbers[:-1], numbers[1:]


class Block(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = nn.MultiheadAttention(config.width, config.heads, config.dropout, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
            nn.Dropout(config.dropout),
        )
        self.register_buffer("mask", torch.ones(config.block_size, config.block_size, dtype=torch.bool).triu(1))

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.before_attention(hidden)
        hidden = hidden + self.attention(normed, normed, normed, attn_mask=self.mask, need_weights=False)[0]
        return hidden + self.mlp(self.before_mlp(hidden))


class Gpt(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Parameter(torch.zeros(1, config.block_size, config.width))
        self.blocks = nn.Sequential(*[Block(config) for _ in range(config.layers)])
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("weight") and parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers))

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.blocks(self.tokens(tokens) + self.positions))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))


def main(path: str) -> None:
    torch.manual_seed(1234)
    data = CharDataset(16)
    train, test = random_split(data, [len(data) - 40, 40])
    model = Gpt(GptConfig(vocabulary=len(data.number_of)))
    optimizer = make_optimizer(model)
    model = torch.nn.parallel.DistributedDataParallel(model)
    losses = []
    for epoch in range(1):
        for is_training, part in ((True, train), (False, test)):
            model.train(is_training)
            sampler = DistributedSampler(part)
            sampler.set_epoch(epoch)
            for tokens, targets in DataLoader(part, batch_size=20, sampler=sampler, shuffle=False):
                with torch.set_grad_enabled(is_training), torch.autocast("cpu", torch.bfloat16, enabled=False):
                    _, loss = model(tokens, targets)
                losses.append(loss.item())
                if is_training:
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
    if int(os.environ["RANK"]) == 0:
        raw = model.module if hasattr(model, "module") else model
        found = {
            "losses": losses,
            "state": raw.state_dict(),
            "wrapper": f"{type(model).__module__}.{type(model).__name__}",
        }
        torch.save(found, path)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(sys.argv[1])  # torch's wrapper has to be gone before its group, or it may wait for ever for a thread of Gloo
    dist.destroy_process_group()
