"""Hand-written digits of 8x8 pixels, included in the package, and a small network that classifies them.

Trains in seconds on one CPU core, and uses layers that are difficult for data-parallel training:
BatchNorm, whose buffers are state outside the optimizer, and dropout, which is random.

The data is the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (1998),
https://doi.org/10.24432/C50P49, CC BY 4.0; see digits.LICENSE.txt beside this file.
"""

import io
import tokenize
import zipfile
import zlib
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.errors import DataFileError

NUM_IMAGES = 1797
NUM_CLASSES = 10
NUM_TEST_IMAGES_PER_CLASS = 36

_MAX_PIXEL = 16
# Of the training part, rounded: normalised images have about zero mean and unit variance.
_PIXEL_MEAN = 4.9
_PIXEL_STD = 6.0
_REMEDY = "Install Lockstep again."

# What NumPy and zipfile raise for damaged files; RuntimeError is for one that looks encrypted.
_DAMAGE = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
    tokenize.TokenError,
)

_Bytes = npt.NDArray[np.uint8]


@final
class Net(nn.Module):
    """A convolutional network with BatchNorm and dropout: float32 [N, 1, 8, 8] images to [N, 10] scores.

    Args:
        width: Channels of the first convolution; the others have twice as many.
        dropout: Probability with which a feature is dropped in training.
    """

    def __init__(self, width: int = 32, dropout: float = 0.5) -> None:
        super().__init__()
        # Strides, because several kinds of pooling have no deterministic backward on CUDA. BatchNorm only where an
        # image has several pixels, so that a shard with a single sample can be normalised.
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(dropout),
        )
        self.scores = nn.Linear(2 * width * 2 * 2, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Score the ten digits for every image."""
        scores: Tensor = self.scores(self.features(images))
        return scores


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """Return (train, test): 1437 and 360 pairs of a float32 [1, 8, 8] image and its int64 digit.

    Images have about zero mean and unit variance. The split is fixed, and no generator draws it: the test part
    has 36 images of each digit, evenly spaced in file order. The same 13 people wrote both parts, so the
    accuracy for other writers may be lower.

    Raises:
        DataFileError: The data file is missing, truncated or not the one that ships with Lockstep.
    """
    pixels, digits = read(files(__package__) / "digits.npz")
    images = (torch.from_numpy(pixels).float().unsqueeze(1) - _PIXEL_MEAN) / _PIXEL_STD
    targets = torch.from_numpy(digits).long()
    is_test = torch.zeros(NUM_IMAGES, dtype=torch.bool)
    for digit in range(NUM_CLASSES):
        places = torch.nonzero(targets == digit).flatten()
        # The middles of 36 equal parts of the class.
        middles = (2 * torch.arange(NUM_TEST_IMAGES_PER_CLASS) + 1) * len(places)
        is_test[places[middles // (2 * NUM_TEST_IMAGES_PER_CLASS)]] = True
    return TensorDataset(images[~is_test], targets[~is_test]), TensorDataset(images[is_test], targets[is_test])


def read(file: Traversable) -> tuple[_Bytes, _Bytes]:
    """Read and check a file like digits.npz: uint8 [1797, 8, 8] pixels up to 16, uint8 [1797] digits up to 9.

    Raises:
        DataFileError: It is missing, truncated, or its arrays are not these.
    """
    try:
        with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as arrays:
            # For a member that is not an array, NumPy returns bytes.
            pixels, digits = np.asarray(arrays["images"]), np.asarray(arrays["labels"])
    except FileNotFoundError as error:
        raise DataFileError(f"{file} is missing. {_REMEDY} (LS451)") from error
    except _DAMAGE as error:
        raise DataFileError(f"{file} cannot be read as two arrays ({error!r}). {_REMEDY} (LS451)") from error
    _check(file, "images", pixels, shape=(NUM_IMAGES, 8, 8), highest=_MAX_PIXEL)
    _check(file, "labels", digits, shape=(NUM_IMAGES,), highest=NUM_CLASSES - 1)
    rarest = int(np.bincount(digits, minlength=NUM_CLASSES).min())
    if rarest <= NUM_TEST_IMAGES_PER_CLASS:
        raise DataFileError(
            f"{file} holds only {rarest} images of one digit; expected more than {NUM_TEST_IMAGES_PER_CLASS}. "
            f"{_REMEDY} (LS451)"
        )
    return pixels, digits


def _check(file: Traversable, name: str, array: _Bytes, *, shape: tuple[int, ...], highest: int) -> None:
    """Raise DataFileError unless the array is uint8 of that shape with values up to `highest`."""
    if array.dtype != np.uint8 or array.shape != shape:
        raise DataFileError(
            f"{file} holds {name} as {array.dtype} {list(array.shape)}; expected uint8 {list(shape)}. {_REMEDY} (LS451)"
        )
    if array.max() > highest:
        raise DataFileError(f"{file} holds {array.max()} in {name}; expected at most {highest}. {_REMEDY} (LS451)")
