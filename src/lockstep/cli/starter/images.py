"""Pictures in folders: images/CLASS/*.png (or .jpg, ...). Replace those there by your own."""

from pathlib import Path

from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep as ls
from lockstep.recipes.images import Pictures, folder

IMAGES = Path(__file__).parent / "images"


class Net(nn.Module):
    """A small convolutional net: float [N, 3, H, W] to scores [N, classes]. A model of torchvision or timm fits too."""

    def __init__(self, num_classes: int, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        )  # fmt: skip
        self.scores = nn.Linear(8 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of the classes."""
        scores: Tensor = self.scores(self.features(images).flatten(1))
        return scores


def datasets(image_size: int = 24) -> tuple[Pictures, Pictures]:
    """Return (train, test): a fifth of each class is for the test."""
    return folder(IMAGES, image_size=image_size)


def top2(output: Tensor, target: Tensor) -> ls.Mean:
    """Return the sum of a metric over samples, and their number: here how often the class is one of the best two."""
    return ls.Mean((output.topk(2).indices == target[:, None]).sum(), len(target))


def new() -> Dataset[tuple[Tensor, int]]:
    """Return the data for `lockstep predict --data mine:new`; here the pictures of the test."""
    return datasets()[1]
