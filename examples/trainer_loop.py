"""A training loop of your own with `ls.Trainer`, on one worker and on two.

    python examples/trainer_loop.py

The digests are equal: the weights have the same bits on any number of workers.
"""

from typing import Any

import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.recipes.digits import Net, datasets


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of a slice of the batch."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def count_right(model: nn.Module, batch: Any) -> ls.Mean:
    """Return the number of correct predictions in a slice, and the number of samples."""
    images, labels = batch
    return ls.Mean((model(images).argmax(1) == labels).sum(), len(labels))


def main(run: ls.Run, epochs: int) -> tuple[float, str]:
    """Train in one worker; every worker returns the same values."""
    train, test = datasets()
    model = Net().to(run.device)
    trainer = ls.Trainer(model, torch.optim.AdamW(model.parameters(), lr=0.002), loss=loss_fn, num_shards=4, seed=0)
    loader = trainer.loader(train, batch_size=128)  # batch_size is that of all workers
    for epoch in range(epochs):
        for batch in loader.epoch(epoch):
            trainer.step(batch)
    accuracy = trainer.evaluate(trainer.loader(test, batch_size=128, shuffle=False), count_right)
    return accuracy["metric"].value, trainer.digest()


for workers in (1, 2):
    results = ls.launch(main, 5, devices=f"cpu:{workers}")
    print(f"workers={workers}: accuracy {results[0][0]:.2%}, digest {results[0][1]}")
