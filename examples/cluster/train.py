"""One training script for every environment: started by hand, by torchrun, by Slurm, by Kubernetes or by mpirun.

    python examples/cluster/train.py                                          one machine: starts its own workers
    torchrun --nproc-per-node 2 examples/cluster/train.py                     torchrun starts the workers
    sbatch examples/cluster/train.sbatch                                      Slurm starts the workers
    kubectl apply -f examples/cluster/pytorchjob.yaml                         Kubernetes starts the workers

`ls.launch` detects the environment. The digest at the end is the same in every environment, on any number of workers.
docs/cluster.md describes each.
"""

import argparse
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


def main(run: ls.Run, epochs: int) -> None:
    """Train in one worker."""
    train, test = datasets()
    model = Net().to(run.device)
    trainer = ls.Trainer(model, torch.optim.AdamW(model.parameters(), lr=0.002), loss=loss_fn, num_shards=8, seed=0)
    loader = trainer.loader(train, batch_size=128)  # batch_size is that of all workers
    for epoch in range(epochs):
        for batch in loader.epoch(epoch):
            trainer.step(batch)
    accuracy = trainer.evaluate(trainer.loader(test, batch_size=128, shuffle=False), count_right)
    if run.rank == 0:
        print(f"{run.world_size} workers: accuracy {accuracy['metric'].value:.2%}", flush=True)
        print(f"digest {trainer.digest()}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    ls.launch(main, parser.parse_args().epochs)
