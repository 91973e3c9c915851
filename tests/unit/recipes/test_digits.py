"""The digits: what ships, how it is split, what is refused, and that the network learns."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from lockstep.errors import DataFileError
from lockstep.recipes import digits

SHIPPED = Path(digits.__file__).with_name("digits.npz")


def shipped() -> dict[str, np.ndarray]:
    with np.load(SHIPPED, allow_pickle=False) as arrays:
        return dict(arrays)


def test_parts_have_documented_shapes_and_types():
    train, test = digits.datasets()
    assert (len(train), len(test)) == (1437, 360)
    for images, targets in (train.tensors, test.tensors):
        assert images.shape[1:] == (1, 8, 8)
        assert images.dtype == torch.float32
        assert targets.dtype == torch.int64


def test_images_are_normalised():
    images = digits.datasets()[0].tensors[0]
    assert abs(images.mean()) < 0.02
    assert abs(images.std() - 1) < 0.02


def test_parts_share_nothing_and_lose_nothing():
    parts = [part.tensors[0].flatten(1) for part in digits.datasets()]
    together = torch.cat(parts).mul(6).add(4.9).round().to(torch.uint8).numpy()
    pixels = shipped()["images"].reshape(-1, 64)
    assert sorted(map(bytes, together)) == sorted(map(bytes, pixels))


def test_test_part_has_equally_many_of_each_digit():
    targets = digits.datasets()[1].tensors[1]
    assert torch.bincount(targets).tolist() == [36] * 10


def test_split_ignores_global_random_state():
    torch.manual_seed(1)
    first = digits.datasets()[1].tensors
    torch.manual_seed(2)
    second = digits.datasets()[1].tensors
    assert all(map(torch.equal, first, second))


def test_images_keep_their_labels():
    pixels = shipped()["images"]
    labels = {image.tobytes(): label for image, label in zip(pixels, shipped()["labels"], strict=True)}
    for images, targets in (part.tensors for part in digits.datasets()):
        restored = images.squeeze(1).mul(6).add(4.9).round().to(torch.uint8).numpy()
        assert [labels[image.tobytes()] for image in restored] == targets.tolist()


def test_missing_file_is_named(tmp_path):
    with pytest.raises(DataFileError, match=r"digits\.npz is missing\. Install"):
        digits.read(tmp_path / "digits.npz")


@pytest.mark.parametrize("place", [40, 20_000, 44_000])
def test_damaged_file_is_refused(tmp_path, place):
    file = tmp_path / "digits.npz"
    content = bytearray(SHIPPED.read_bytes())
    content[place] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(DataFileError):
        digits.read(file)


def single_array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros((1797, 8, 8), np.uint8))
    return file.getvalue()


def archive_of_texts() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("images", "no array")
        archive.writestr("labels", "no array")
    return file.getvalue()


TRUNCATED = [SHIPPED.read_bytes()[:kept] for kept in (0, 1, 100, 20_000, -1)]
OTHERS = [b"not an archive", b"\x80\x04N.", b"\x93NUMPY", single_array(), archive_of_texts()]


@pytest.mark.parametrize("content", [*TRUNCATED, *OTHERS], ids=len)
def test_other_file_is_refused(tmp_path, content):
    file = tmp_path / "digits.npz"
    file.write_bytes(content)
    with pytest.raises(DataFileError, match=r"digits\.npz (cannot be read as two arrays|holds)"):
        digits.read(file)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("images", lambda x: x[:-1], r"images as uint8 \[1796, 8, 8\]; expected uint8 \[1797, 8, 8\]"),
        ("images", lambda x: x.astype(np.float32), r"images as float32"),
        ("images", lambda x: x * 2, "32 in images; expected at most 16"),
        ("labels", lambda x: x[:, None], r"labels as uint8 \[1797, 1\]"),
        ("labels", lambda x: x.astype(np.int64), "labels as int64"),
        ("labels", lambda x: x + 1, "10 in labels; expected at most 9"),
        ("labels", lambda x: x * 0, "only 0 images of one digit"),
    ],
)
def test_wrong_array_is_refused(tmp_path, name, change, message):
    file = tmp_path / "digits.npz"
    arrays = shipped()
    arrays[name] = change(arrays[name])
    np.savez(file, images=arrays["images"], labels=arrays["labels"])
    with pytest.raises(DataFileError, match=message):
        digits.read(file)


def test_licence_ships_beside_data():
    text = SHIPPED.with_name("digits.LICENSE.txt").read_text(encoding="utf-8")
    assert "10.24432/C50P49" in text
    assert "creativecommons.org/licenses/by/4.0" in text


def test_network_trains_on_single_sample():
    assert digits.Net()(torch.zeros(1, 1, 8, 8)).shape == (1, 10)


def train_briefly(seed: int) -> digits.Net:
    torch.manual_seed(seed)
    images, targets = digits.datasets()[0].tensors
    model = digits.Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    for batch in torch.randperm(len(images)).split(128):
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), targets[batch]).backward()
        optimizer.step()
    return model.eval()


def test_one_epoch_learns_most_digits():
    model = train_briefly(seed=0)
    images, targets = digits.datasets()[1].tensors
    with torch.no_grad():
        assert (model(images).argmax(1) == targets).float().mean() > 0.8


@pytest.mark.usefixtures("deterministic")
def test_training_twice_gives_the_same_bits():
    first, second = (train_briefly(seed=3).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
