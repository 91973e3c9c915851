"""Model parallel inside data parallel: every worker has the network on two devices, and a part of the data.

    python examples/model_parallel.py

With two or more GPUs there is one worker per pair: the convolutions are on the first GPU, the last layer on the second.
Otherwise two workers run on the CPU, and both devices of each are "cpu".

worker 0:  images -> features on GPU 0 -> scores on GPU 1 -> loss     gradients of the same layers are averaged
worker 1:  images -> features on GPU 2 -> scores on GPU 3 -> loss     between workers

Each worker sees only its own GPUs, as cuda:0 and cuda:1.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lockstep as ls
from lockstep.recipes.digits import Net, datasets


class TwoDevices(nn.Module):
    """The digits network, split over two devices."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        whole = Net()
        self.first, self.second = first, second
        self.features, self.scores = whole.features.to(first), whole.scores.to(second)

    def forward(self, images: Tensor) -> Tensor:
        """Score images; the scores are on the second device."""
        features = self.features(images.to(self.first))
        scores: Tensor = self.scores(features.to(self.second))
        return scores


def find_devices(run: ls.Run) -> tuple[torch.device, torch.device]:
    """Return this worker's two devices, or the CPU twice."""
    if run.device.type == "cpu":
        return run.device, run.device
    return torch.device("cuda:0"), torch.device("cuda:1")


def main(run: ls.Run, epochs: int) -> Tensor:
    """Train in one worker; return the parameters."""
    first, second = find_devices(run)
    train, _ = datasets()
    # No device_ids: the module is on several devices, and its forward moves the inputs.
    model = ls.DistributedDataParallel(TwoDevices(first, second))
    torch.manual_seed(run.rank)  # other masks of dropout on each worker
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    sampler = ls.DistributedSampler(train)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, device=second)  # sum of losses, samples
        for images, labels in DataLoader(train, batch_size=64, sampler=sampler):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels.to(second))
            loss.backward()
            optimizer.step()
            total += torch.stack([loss.detach() * len(labels), torch.tensor(len(labels), device=second)])
        dist.all_reduce(total)  # one all-reduce per epoch, and no item() in a step
        if run.rank == 0:
            print(f"epoch {epoch + 1}/{epochs}  {first} and {second}  loss {total[0] / total[1]:.4f}", flush=True)
    return nn.utils.parameters_to_vector([parameter.detach().cpu() for parameter in model.parameters()])


num_pairs = torch.cuda.device_count() // 2
pairs = [[2 * pair, 2 * pair + 1] for pair in range(num_pairs)]
results = ls.launch(main, 5, devices=pairs or "cpu:2")
is_same = all(torch.equal(parameters, results[0]) for parameters in results)
print(f"{len(results)} workers, {len(results[0]):,} parameters: {'the same' if is_same else 'NOT THE SAME'} on all")
