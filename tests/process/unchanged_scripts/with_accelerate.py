"""Accelerate's own loop: accumulation, clipping, a scheduler, metrics gathered over ranks. Writes to FILE what it got.

usage: with_accelerate.py FILE [plugin]
"""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(96, 6)
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    if sys.argv[2:] == ["plugin"]:
        from lockstep.plugins.accelerate import use_lockstep

        use_lockstep(accelerator)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses, right = [], 0
    for _ in range(2):
        for batch, labels in loader:
            with accelerator.accumulate(model):
                output = model(batch)
                loss = nn.functional.cross_entropy(output, labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            gathered, truth = accelerator.gather_for_metrics((output.detach().argmax(1), labels))
            right += int((gathered == truth).sum())
            losses.append(accelerator.gather(loss.detach()).tolist())
    wrapper = f"{type(model).__module__}.{type(model).__name__}"
    if accelerator.is_main_process:
        state = accelerator.unwrap_model(model).state_dict()
        torch.save({"losses": [*losses, right], "state": state, "wrapper": wrapper}, sys.argv[1])
    accelerator.end_training()


if __name__ == "__main__":
    main()
