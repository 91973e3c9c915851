"""The image folder: its split, its pictures, and every way in which a folder or a file can be wrong."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.errors import DataFileError
from lockstep.recipes import images

MEAN = torch.tensor([0.485, 0.456, 0.406])
STD = torch.tensor([0.229, 0.224, 0.225])


def save(file: Path, size: tuple[int, int] = (12, 9), colour: tuple[int, int, int] = (200, 100, 50)) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(file)
    return file


def make(root: Path, **counts: int) -> Path:
    for name, count in counts.items():
        for number in range(count):
            save(root / name / f"{number}.png")
    return root


def names(part: images.Pictures) -> set[str]:
    return {"/".join(Path(picture.file).parts[-2:]) for picture in part.pictures}


def colours(image: torch.Tensor) -> torch.Tensor:
    """Undo the normalisation: int [3, S, S] from 0 to 255."""
    return ((image * STD.view(3, 1, 1) + MEAN.view(3, 1, 1)) * 255).round().int()


def only(file: Path, **arguments) -> torch.Tensor:
    """The image that is made of a file, in a class of its own beside another picture."""
    save(file.parent.parent / "other" / "0.png")
    part = images.folder(file.parent.parent, file.parent.parent, augment=False, **arguments)[1]
    return next(part[index][0] for index, one in enumerate(part.pictures) if one.file == str(file))


def test_classes_are_sorted_folder_names(tmp_path):
    train, test = images.folder(make(tmp_path, dog=3, Cat=3, ant=3))
    assert train.classes == test.classes == ("Cat", "ant", "dog")


def test_target_is_place_of_folder_in_classes(tmp_path):
    for part in images.folder(make(tmp_path, a=3, b=3), image_size=4):
        for index, picture in enumerate(part.pictures):
            assert part.classes[part[index][1]] == Path(picture.file).parent.name


def test_each_picture_is_in_one_part(tmp_path):
    train, test = images.folder(make(tmp_path, a=10, b=7))
    assert not names(train) & names(test)
    assert names(train) | names(test) == {f"a/{i}.png" for i in range(10)} | {f"b/{i}.png" for i in range(7)}


@pytest.mark.parametrize(("count", "fraction", "num_test"), [(10, 0.2, 2), (2, 0.01, 1), (2, 0.99, 1), (5, 0.5, 2)])
def test_class_is_split_by_fraction_but_never_emptied(tmp_path, count, fraction, num_test):
    train, test = images.folder(make(tmp_path, a=count), test_fraction=fraction)
    assert (len(train), len(test)) == (count - num_test, num_test)


def test_single_picture_is_for_training(tmp_path):
    train, test = images.folder(make(tmp_path, a=1, b=2))
    assert "a/0.png" in names(train)
    assert len(test) == 1


def test_split_depends_on_file_names_alone(tmp_path):
    # Known values: a change here changes the test set of everyone's runs.
    torch.manual_seed(7)
    train, test = images.folder(make(tmp_path / "x", a=10))
    other = images.folder(make(tmp_path / "y", zebra=10, a=10), image_size=8, augment=False)[1]
    assert names(test) == {"a/0.png", "a/6.png"}
    assert {name for name in names(other) if name.startswith("a/")} == names(test)
    assert [picture.file for picture in train.pictures] == sorted(picture.file for picture in train.pictures)


def test_test_root_is_used_whole(tmp_path):
    train, test = images.folder(make(tmp_path / "train", a=3, b=2), make(tmp_path / "test", a=1, b=4))
    assert (len(train), len(test)) == (5, 5)
    assert all("test" in Path(picture.file).parts for picture in test.pictures)


def test_relative_root_counts_from_current_directory(tmp_path, monkeypatch):
    make(tmp_path / "pictures", a=2)
    monkeypatch.chdir(tmp_path)
    train, _ = images.folder("pictures", image_size=4)
    monkeypatch.chdir("/")
    assert train[0][0].shape == (3, 4, 4)


def test_hidden_and_other_files_are_left_out(tmp_path):
    make(tmp_path, a=2)
    save(tmp_path / ".hidden" / "0.png")
    save(tmp_path / "a" / ".1.png")
    save(tmp_path / "top.png")
    (tmp_path / "a" / "notes.txt").write_text("no picture")
    train, test = images.folder(tmp_path)
    assert train.classes == ("a",)
    assert names(train) | names(test) == {"a/0.png", "a/1.png"}


def test_usual_extensions_are_accepted(tmp_path):
    files = {"1.JPG", "2.jpeg", "3.png", "4.bmp", "5.gif", "6.webp", "7.tiff", "8.ppm"}
    for name in files:
        save(tmp_path / "a" / name)
    train, test = images.folder(tmp_path, image_size=2)
    assert names(train) | names(test) == {f"a/{name}" for name in files}
    for part in (train, test):
        assert all(part[index][0].shape == (3, 2, 2) for index in range(len(part)))


@pytest.mark.parametrize("augment", [True, False])
def test_image_is_normalised_float(tmp_path, augment):
    train, _ = images.folder(make(tmp_path, a=2), image_size=5, augment=augment)
    image, target = train[0]
    assert image.shape == (3, 5, 5)
    assert image.dtype == torch.float32
    assert image.is_contiguous()
    assert type(target) is int
    assert colours(image)[:, 2, 2].tolist() == [200, 100, 50]


def test_test_image_is_centre_of_picture(tmp_path):
    # 64 x 32: the crop is the middle 28 x 28, so neither of the coloured borders is seen.
    pixels = np.full((32, 64, 3), 255, np.uint8)
    pixels[2:30, 18:46] = 0
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "0.png")
    assert colours(only(tmp_path / "a" / "0.png", image_size=28)).max() == 0


def test_test_images_never_vary(tmp_path):
    (tmp_path / "a").mkdir()
    Image.linear_gradient("L").rotate(45).save(tmp_path / "a" / "0.png")
    first = only(tmp_path / "a" / "0.png", image_size=8)
    assert all(torch.equal(only(tmp_path / "a" / "0.png", image_size=8), first) for _ in range(10))


@pytest.fixture
def gradient(tmp_path) -> images.Pictures:
    """Two pictures whose red grows to the right and green downwards."""
    y, x = np.mgrid[0:64, 0:64].astype(np.uint8) * 4
    for name in ("0.png", "1.png"):
        (tmp_path / "a").mkdir(exist_ok=True)
        Image.fromarray(np.stack([x, y, x * 0], axis=2)).save(tmp_path / "a" / name)
    return images.folder(tmp_path, image_size=16)[0]


def test_augmentation_follows_torch_generator(gradient):
    torch.manual_seed(3)
    first = gradient[0][0]
    assert not torch.equal(gradient[0][0], first)
    torch.manual_seed(3)
    assert torch.equal(gradient[0][0], first)


def test_augmentation_flips_half_of_the_time(gradient):
    torch.manual_seed(0)
    rightward = [bool(image[0, 8, -1] > image[0, 8, 0]) for image, _ in (gradient[0] for _ in range(100))]
    assert 30 < sum(rightward) < 70
    assert all(image[1, -1, 8] > image[1, 0, 8] for image, _ in (gradient[0] for _ in range(20)))


def test_augmentation_crops_different_areas(gradient):
    torch.manual_seed(0)
    spans = [int(colours(gradient[0][0])[1, :, 0].diff().sum()) for _ in range(100)]
    assert min(spans) < 100
    assert max(spans) > 200


@pytest.mark.parametrize("size", [(1, 1), (300, 1), (1, 300), (2, 3)])
def test_picture_of_any_shape_can_be_cropped(tmp_path, size):
    for name in ("0.png", "1.png"):
        save(tmp_path / "a" / name, size)
    torch.manual_seed(0)
    for part in images.folder(tmp_path, image_size=7):
        for _ in range(100):
            assert colours(part[0][0])[:, 3, 3].tolist() == [200, 100, 50]


def test_camera_orientation_is_applied(tmp_path):
    pixels = np.zeros((20, 20, 3), np.uint8)
    pixels[:10] = 255  # White above, until the camera says that it was held upside down.
    exif = Image.Exif()
    exif[0x0112] = 3
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "0.png", exif=exif)
    image = colours(only(tmp_path / "a" / "0.png", image_size=8))
    assert image[0, 0, 0] == 0
    assert image[0, 7, 0] == 255


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_other_colour_modes_become_rgb(tmp_path, mode):
    file = tmp_path / "a" / ("0.tif" if mode == "CMYK" else "0.png")
    file.parent.mkdir()
    Image.new("RGB", (4, 4), (255, 255, 255)).convert(mode).save(file)
    assert colours(only(file, image_size=4)).min() == 255


def test_transparent_palette_gives_no_warning(tmp_path):
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "0.png"
    Image.linear_gradient("L").quantize(4).save(file, transparency=bytes([1, 100, 200, 255]))
    assert only(file, image_size=4).shape == (3, 4, 4)


def with_an_empty_class(root: Path) -> Path:
    (root / "empty").mkdir()
    return make(root, a=2)


@pytest.mark.parametrize(
    ("roots", "said"),
    [
        (lambda at: [at / "gone"], "There is no folder .*/gone"),
        (lambda at: [make(at / "x", a=1), at / "gone"], "There is no folder .*/gone"),
        (lambda at: [save(at / "0.png")], r"0\.png is not a folder"),
        (lambda at: [save(at / "0.png").parent], "has no sub-folders"),
        (lambda at: [with_an_empty_class(at)], "/empty holds no pictures"),
        (lambda at: [make(at / "train", a=2).parent], "/train contains the folder a"),  # one level too high
        (lambda at: [make(at / "x", a=1, b=1), make(at / "y", b=1, c=1)], r"same classes, but only one has a, c\."),
        (lambda at: [make(at, a=1, b=1)], "No class in .* has a second picture"),  # nothing to test on
    ],
)
def test_folders_without_classes_of_pictures_are_refused(tmp_path, roots, said):
    with pytest.raises(DataFileError, match=said):
        images.folder(*roots(tmp_path))


@pytest.mark.parametrize("arguments", [{"test_fraction": 0.0}, {"test_fraction": 1.0}, {"image_size": 0}])
def test_argument_out_of_range_is_refused(tmp_path, arguments):
    with pytest.raises(ValueError, match="test_fraction is"):
        images.folder(make(tmp_path, a=2), **arguments)


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "webp", "tiff"])
def test_truncated_picture_is_named(tmp_path, suffix):
    file = save(tmp_path / "a" / f"0.{suffix}", (50, 50))
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])
    with pytest.raises(DataFileError, match=rf"0\.{suffix} (cannot be read as|is not) a picture"):
        only(file)


def test_file_that_is_no_picture_is_named(tmp_path):
    file = save(tmp_path / "a" / "0.png")
    file.write_text("hello")
    with pytest.raises(DataFileError, match=r"0\.png is not a picture\."):
        only(file)


def test_picture_removed_later_is_named(tmp_path):
    train, _ = images.folder(make(tmp_path, a=2))
    Path(train.pictures[0].file).unlink()
    with pytest.raises(DataFileError, match=r"\.png was removed"):
        train[0]


def test_dangling_link_is_not_passed_over(tmp_path):
    make(tmp_path, a=1)
    (tmp_path / "a" / "link.png").symlink_to(tmp_path / "nowhere.png")
    train, test = images.folder(tmp_path)
    with pytest.raises(DataFileError, match=r"link\.png was removed"):
        _ = [part[index] for part in (train, test) for index in range(len(part))]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_deep_colours_are_refused(tmp_path, dtype):
    # Pillow clips 16-bit greys at 255 without a word: nearly every such picture would be white.
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "0.tiff"
    Image.fromarray(np.full((4, 4), 30000, dtype)).save(file)
    with pytest.raises(DataFileError, match=r"0\.tiff has colours of more than 8 bits"):
        only(file)
