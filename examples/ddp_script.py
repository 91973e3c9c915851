"""A script in torch's own style: change the import of `DistributedDataParallel` and it runs on Lockstep.

torchrun --nproc-per-node 2 examples/ddp_script.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import lockstep as ls
from lockstep.recipes.digits import Net, datasets


def main(epochs: int = 5) -> None:
    """Train on this rank's part of the digits, and evaluate each test image once."""
    ls.init_process_group()
    device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    train, test = datasets()
    model = ls.DistributedDataParallel(Net().to(device))
    torch.manual_seed(dist.get_rank())  # other masks of dropout on each rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    sampler = ls.DistributedSampler(train)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(train, batch_size=64, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images.to(device)), labels.to(device)).backward()
            optimizer.step()

    model.eval()
    counts = torch.zeros(2, device=device)
    with torch.no_grad():
        # pad=False: torch's sampler would count some images twice when the ranks do not divide the test set.
        for images, labels in DataLoader(test, batch_size=64, sampler=ls.DistributedSampler(test, pad=False)):
            right = model(images.to(device)).argmax(1) == labels.to(device)
            counts += torch.stack([right.sum(), torch.tensor(len(labels), device=device)])
    dist.all_reduce(counts)
    if dist.get_rank() == 0:
        print(f"test accuracy {counts[0] / counts[1]:.2%} ({int(counts[0])} of {int(counts[1])})")
    ls.destroy_process_group()


if __name__ == "__main__":
    main()
