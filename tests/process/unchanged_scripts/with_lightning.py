"""Lightning's Trainer: one model with automatic optimization, one with manual optimization. Writes to FILE what it got.

usage: with_lightning.py FILE [plugin]
"""

import sys
import warnings

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore", message=".*does not have many workers")


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 3))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], _index: int) -> None:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("validation", loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Adversaries(lightning.LightningModule):
    """Two optimizers that take turns, each with half of the parameters unused."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], _index: int) -> None:
        for optimizer, sign in zip(self.optimizers(), (1.0, -1.0), strict=True):
            loss = sign * nn.functional.cross_entropy(self.second(self.first(batch[0]).tanh()), batch[1])
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.item())

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.first, self.second)]


def main() -> None:
    found = {}
    strategies = ["ddp", "ddp_find_unused_parameters_true"]
    if sys.argv[2:] == ["plugin"]:
        from lockstep.plugins.lightning import LockstepStrategy

        strategies = [LockstepStrategy(), "lockstep"]
    for strategy, model_type in zip(strategies, (Classifier, Adversaries), strict=True):
        lightning.seed_everything(0, verbose=False)
        inputs = torch.randn(64, 6)
        data = TensorDataset(inputs, inputs[:, :3].argmax(1))
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = model_type()
        wrappers = []
        trainer.callbacks.append(_SeeWrapper(wrappers))
        validation = [DataLoader(data, batch_size=8)] if model_type is Classifier else []
        trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True), *validation)
        found[model_type.__name__] = {
            "losses": [*model.losses, *map(float, trainer.callback_metrics.values())],
            "state": model.state_dict(),
            "wrapper": wrappers[0],
        }
    if trainer.is_global_zero:
        torch.save(found, sys.argv[1])


class _SeeWrapper(lightning.Callback):
    def __init__(self, wrappers: list[str]) -> None:
        self.wrappers = wrappers

    def on_train_start(self, trainer: lightning.Trainer, _module: lightning.LightningModule) -> None:
        wrapper = type(trainer.strategy.model)
        self.wrappers.append(f"{wrapper.__module__}.{wrapper.__name__}")


if __name__ == "__main__":
    main()
