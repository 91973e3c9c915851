"""A folder of pictures as a data set, with one sub-folder per class. The sub-folder's name is the class name.

    data: lockstep.recipes.images:folder
    data_args: {root: pictures, image_size: 96}

Test pictures are chosen by their file names alone, so that the split is the same in a resumed run, on another machine
and with another number of workers. Augmentation uses torch's global generator, which the loader seeds per sample.
"""

import hashlib
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.errors import DataFileError

EXTENSIONS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
"""Suffixes of pictures, in lower case; other files are ignored."""

_MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)  # Of ImageNet, as pretrained models expect.
_STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
_CENTRE = 224 / 256  # The part of the shorter side that a centre crop keeps.
_AREA = (0.08, 1.0)  # The part of the picture that a random crop keeps: smallest, largest.
_LOG_RATIO = (math.log(3 / 4), math.log(4 / 3))  # Its width to its height.
_NUM_TRIES = 10
# What Pillow's decoders raise for damaged files.
_DAMAGE = (
    OSError,
    EOFError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    struct.error,
    Image.DecompressionBombError,
)

_Box = tuple[float, float, float, float]  # Left, top, right, bottom, in pixels.
_Classes = Mapping[str, list[Path]]  # Sorted files of each class, the classes sorted too.


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture file and its class."""

    file: str
    """Absolute path."""
    target: int
    """Index of its class."""


@final
class Pictures(Dataset[tuple[Tensor, int]]):
    """Pairs of a float32 [3, S, S] image, normalised as for ImageNet, and the index of its class.

    Args:
        classes: Names of the classes, in the order of their indices.
        pictures: The files.
        image_size: S.
        augment: Crop and flip at random; if False, crop the centre.

    Raises:
        DataFileError: In `__getitem__`: the file is missing, damaged, or its colours do not have 8 bits.
    """

    def __init__(
        self, classes: tuple[str, ...], pictures: tuple[Picture, ...], *, image_size: int, augment: bool
    ) -> None:
        self.classes = classes
        self.pictures = pictures
        self._image_size = image_size
        self._augment = augment

    def __len__(self) -> int:
        return len(self.pictures)

    @property
    def files(self) -> list[str]:
        """The file of each picture; `lockstep predict` writes them beside the predictions."""
        return [picture.file for picture in self.pictures]

    @property
    def targets(self) -> list[int]:
        """The class of each picture; `weights: balanced` draws by them."""
        return [picture.target for picture in self.pictures]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = self.pictures[index]
        image = _read(picture.file)
        box = _random_box(*image.size) if self._augment else _centre_box(*image.size)
        image = image.resize((self._image_size, self._image_size), Image.Resampling.BILINEAR, box=box)
        if self._augment and _draw(0, 1) < 1 / 2:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        colours = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float() / 255
        return (colours - _MEAN) / _STD, picture.target


def folder(
    root: str | os.PathLike[str],
    test_root: str | os.PathLike[str] | None = None,
    test_fraction: float = 0.2,
    image_size: int = 224,
    augment: bool = True,
) -> tuple[Pictures, Pictures]:
    """Return (train, test) of the pictures in the sub-folders of a folder.

    Args:
        root: The folder; a relative path is relative to the current directory. Names that begin with a dot are
            ignored.
        test_root: A folder like `root` with the same classes, for the test set; None to use a part of each class.
        test_fraction: The part of each class: at least one picture, never all; none of a class with only one picture.
        image_size: Height and width of the images.
        augment: Whether to crop and flip the training images at random.

    Raises:
        ValueError: `test_fraction` is not between 0 and 1, or `image_size` not positive.
        DataFileError: A folder is missing, is not a folder, has no classes, or has a class without pictures or with
            folders in it; the classes of `test_root` differ; or no class has a second picture for the test set.
    """
    if not 0 < test_fraction < 1 or image_size < 1:
        raise ValueError(
            f"test_fraction is {test_fraction} and image_size {image_size}; "
            "expected a number between 0 and 1, and at least 1. (LS452)"
        )
    train = _list_classes(Path(root).absolute())
    if test_root is None:
        parts = {name: _split(files, test_fraction) for name, files in train.items()}
        train, test = ({name: part[i] for name, part in parts.items()} for i in range(2))
        if not any(test.values()):
            raise DataFileError(
                f"No class in {root} has a second picture for the test set. Add pictures, or set test_root. (LS452)"
            )
    else:
        test = _list_classes(Path(test_root).absolute())
        different = sorted(train.keys() ^ test.keys())
        if different:
            raise DataFileError(
                f"{test_root} and {root} must have the same classes, but only one has {', '.join(different)}. "
                "Rename or remove those folders. (LS452)"
            )
    return (
        Pictures(tuple(train), _number(train), image_size=image_size, augment=augment),
        Pictures(tuple(train), _number(test), image_size=image_size, augment=False),
    )


def _list_classes(root: Path) -> dict[str, list[Path]]:
    """Return the files of each class, or raise DataFileError."""
    try:
        entries = _list_visible(root)
        classes = {entry.name: _list_visible(entry) for entry in entries if entry.is_dir()}
    except FileNotFoundError as error:
        raise DataFileError(
            f"There is no folder {error.filename}. Check the path; "
            "relative paths start at the current directory. (LS452)"
        ) from error
    except NotADirectoryError as error:
        raise DataFileError(
            f"{root} is not a folder. Expected a folder with a sub-folder for each class. (LS452)"
        ) from error
    except OSError as error:
        raise DataFileError(
            f"The folder {error.filename} cannot be read: {error.strerror}. Make it readable. (LS452)"
        ) from error
    if not classes:
        raise DataFileError(f"{root} has no sub-folders. Put the pictures of each class into a sub-folder. (LS452)")
    for name, files in classes.items():
        # Sub-folders usually mean that `root` is one level too high and contains "train" and "test".
        folders = [file.name for file in files if not _is_picture(file) and file.is_dir()]
        if folders:
            raise DataFileError(
                f"{root / name} contains the folder {folders[0]}; expected pictures only. Set root and test_root "
                "to the folders whose sub-folders are the classes. (LS452)"
            )
        classes[name] = [file for file in files if _is_picture(file)]
        if not classes[name]:
            raise DataFileError(
                f"{root / name} holds no pictures ({', '.join(sorted(EXTENSIONS))}). "
                "Add some, or remove the folder. (LS452)"
            )
    return classes


def _is_picture(file: Path) -> bool:
    return file.suffix.lower() in EXTENSIONS


def _list_visible(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))


def _split(files: list[Path], test_fraction: float) -> tuple[list[Path], list[Path]]:
    """Return (train, test), where test has the files whose names have the lowest hashes."""
    num_test = min(max(1, round(len(files) * test_fraction)), len(files) - 1)
    shuffled = sorted(files, key=lambda file: hashlib.sha256(os.fsencode(file.name)).digest())
    return sorted(shuffled[num_test:]), sorted(shuffled[:num_test])


def _number(classes: _Classes) -> tuple[Picture, ...]:
    return tuple(Picture(str(file), target) for target, files in enumerate(classes.values()) for file in files)


def _read(file: str) -> Image.Image:
    """Return a picture in RGB, rotated as its EXIF data say, or raise DataFileError."""
    try:
        with Image.open(file) as image:
            if image.mode.startswith(("I", "F")):
                # Pillow would clip these to 8 bits, and a 16-bit picture would become white.
                raise DataFileError(f"{file} has colours of more than 8 bits. Convert it to 8 bits. (LS452)")
            upright = ImageOps.exif_transpose(image)
            # A palette with transparency has to become RGBA first.
            return (upright.convert("RGBA") if "transparency" in upright.info else upright).convert("RGB")
    except FileNotFoundError as error:
        raise DataFileError(
            f"{file} was removed after the run started. Restore it, or start a new run. (LS452)"
        ) from error
    except UnidentifiedImageError as error:
        raise DataFileError(f"{file} is not a picture. Replace or remove it. (LS452)") from error
    except _DAMAGE as error:
        raise DataFileError(f"{file} cannot be read as a picture: {error}. Replace or remove it. (LS452)") from error


def _centre_box(width: int, height: int) -> _Box:
    side = min(width, height) * _CENTRE
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _random_box(width: int, height: int) -> _Box:
    """Draw a box of random area and aspect ratio; the centre box if none fits into a very long picture."""
    for _ in range(_NUM_TRIES):
        area = width * height * _draw(*_AREA)
        ratio = math.exp(_draw(*_LOG_RATIO))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left = round(_draw(0, width - box_width))
            top = round(_draw(0, height - box_height))
            return left, top, left + box_width, top + box_height
    return _centre_box(width, height)


def _draw(low: float, high: float) -> float:
    return low + (high - low) * torch.rand((), dtype=torch.float64, device="cpu").item()
