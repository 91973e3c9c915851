"""Lightning's Fabric with a loop of one's own and accumulation. Writes to FILE what it got.

usage: with_fabric.py FILE [plugin]
"""

import sys

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    strategy = "ddp"
    if sys.argv[2:] == ["plugin"]:
        from lockstep.plugins.fabric import LockstepFabricStrategy

        strategy = LockstepFabricStrategy()
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    inputs = torch.randn(64, 6)
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8, shuffle=True))
    losses = []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for step, (batch, labels) in enumerate(loader):
            with fabric.no_backward_sync(model, enabled=step % 2 == 0):
                loss = nn.functional.cross_entropy(model(batch), labels)
                fabric.backward(loss)
            if step % 2 == 1:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(fabric.all_reduce(loss.detach()).item())
    wrapper = type(model._forward_module)
    if fabric.is_global_zero:
        state = model.state_dict()
        torch.save(
            {"losses": losses, "state": state, "wrapper": f"{wrapper.__module__}.{wrapper.__name__}"}, sys.argv[1]
        )


if __name__ == "__main__":
    main()
