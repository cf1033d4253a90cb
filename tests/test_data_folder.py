"""Image files of every kind and mode, and folders of them, good and bad."""

import io
import struct
import tracemalloc
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from checks import put, refused
from xncaps.data import load_data, load_folder
from xncaps.errors import InputError, RunError
from xncaps.images import fit, ground_of, is_gray, match_ground, read_image, to_pixels

RNG = np.random.default_rng(0)
COLOURS = RNG.integers(0, 256, (9, 7, 3), np.uint8)
GRAYS = RNG.integers(0, 256, (9, 7), np.uint8)
ENDS = "(.png, .jpg, .jpeg, .webp, .bmp)"
HINT = "Mend or remove it, or pass --skip-unreadable to leave such images out."


def gray_of(colours):
    """ITU-R 601-2 luma, as integers."""
    red, green, blue = (colours[..., n].astype(np.int64) for n in range(3))
    return (red * 19595 + green * 38470 + blue * 7471 + 2**15) >> 16


def over(values, alpha, ground):
    """Values with an alpha channel on a ground."""
    share = alpha.astype(np.float64)[..., None] / 255
    return np.atleast_3d(values) * share + ground * (1 - share)


def assert_pixels(image, channels, expected, tolerance=0):
    pixels = to_pixels(image, channels)
    assert (pixels.dtype, pixels.shape) == (np.uint8, (image.height, image.width, channels))
    assert np.abs(pixels.astype(np.float64) - np.atleast_3d(expected)).max() <= tolerance


def test_modes_without_transparency():
    black_white = GRAYS > 127
    assert_pixels(Image.fromarray(black_white), 1, black_white * 255)
    assert_pixels(Image.fromarray(black_white), 3, np.dstack([black_white * 255] * 3))
    assert_pixels(Image.fromarray(GRAYS), 1, GRAYS)
    assert_pixels(Image.fromarray(GRAYS), 3, np.dstack([GRAYS] * 3))
    assert_pixels(Image.fromarray(COLOURS), 3, COLOURS)
    assert_pixels(Image.fromarray(COLOURS), 1, gray_of(COLOURS))
    inks = RNG.integers(0, 256, (9, 7, 4), np.uint8)
    light = 255.0 - inks
    assert_pixels(Image.fromarray(inks, "CMYK"), 3, light[..., :3] * light[..., 3:] / 255, 1)


@pytest.mark.parametrize("transparency", [None, 1, bytes([0, 100])])
def test_palettes(tmp_path, transparency):
    table = RNG.integers(0, 256, (3, 3), np.uint8)
    numbers = np.arange(63, dtype=np.uint8).reshape(9, 7) % 3
    image = Image.fromarray(numbers, "L")
    image.putpalette(table.tobytes())
    options = {} if transparency is None else {"transparency": transparency}
    image.save(tmp_path / "a.png", **options)
    image = read_image(tmp_path / "a.png")
    assert image.mode == "P"
    alphas = {None: [255, 255, 255], 1: [255, 0, 255]}.get(transparency, [0, 100, 255])
    alpha = np.array(alphas)[numbers]
    assert_pixels(image, 3, over(table[numbers], alpha, 255), 1)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("values", "name"), [(200, "light"), (50, "dark")])
def test_what_is_transparent_is_white_or_black_under_light_grey(values, name, channels):
    alpha = RNG.integers(0, 256, (9, 7), np.uint8)
    ground = 0 if channels == 1 and name == "light" else 255
    plane = np.full((9, 7), values, np.uint8)
    for planes, mode in (([plane, alpha], "LA"), ([plane] * 3 + [alpha], "RGBA")):
        image = Image.fromarray(np.dstack(planes), mode)
        assert_pixels(image, channels, np.dstack([over(plane, alpha, ground)] * channels), 1)


def test_an_invisible_image_is_white():
    invisible = Image.new("RGBA", (3, 2), (255, 255, 255, 0))
    assert_pixels(invisible, 1, np.full((2, 3), 255))
    assert_pixels(invisible, 3, np.full((2, 3, 3), 255))


@pytest.mark.parametrize(
    ("mode", "values", "expected"),
    [
        ("I;16", [0, 257, 32896, 65278, 65535], [0, 1, 128, 254, 255]),
        ("I;16", [0, 7, 255], [0, 0, 1]),
        ("I", [-5, 0, 65535], [0, 0, 255]),
        ("I", [0, 50000, 200000], [0, 64, 255]),
        ("I", [-1, 200, 255], [0, 200, 255]),
        ("F", [0.0, 0.5, 1.0], [0, 128, 255]),
        ("F", [-1.0, 100.4, 255.0], [0, 100, 255]),
        ("F", [float("nan"), 0.2, 1.0], [0, 51, 255]),
        ("F", [0.0, 0.0], [0, 0]),
    ],
)
def test_deep_grey(mode, values, expected):
    kind = {"I;16": np.uint16, "I": np.int32, "F": np.float32}[mode]
    image = Image.fromarray(np.array([values], kind))
    assert (image.mode, is_gray(image)) == (mode, True)
    assert_pixels(image, 1, np.array([expected]))
    assert_pixels(image, 3, np.dstack([np.array([expected])] * 3))


UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: a.transpose(1, 0, 2)[:, ::-1],
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: a.transpose(1, 0, 2)[::-1],
}


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("end", ["png", "webp"])
def test_exif_orientation(tmp_path, orientation, end):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(COLOURS).save(tmp_path / f"a.{end}", exif=exif, lossless=True)
    expected = UPRIGHT[orientation](COLOURS)
    assert to_pixels(read_image(tmp_path / f"a.{end}"), 3).tolist() == expected.tolist()


@pytest.mark.parametrize(("height", "width"), [(1, 1), (5, 5), (1, 50), (50, 1), (300, 7), (6, 9)])
@pytest.mark.parametrize("channels", [1, 3])
def test_bands_in_the_mean_colour_of_the_border(height, width, channels):
    pixels = RNG.integers(0, 256, (height, width, channels), np.uint8)
    side = max(height, width)
    edge = [pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]
    expected = np.empty((side, side, channels), np.uint8)
    expected[:] = np.rint(np.concatenate(edge).mean(axis=0))
    top, left = (side - height) // 2, (side - width) // 2
    expected[top : top + height, left : left + width] = pixels
    tensor = fit(pixels, side)
    assert tensor.dtype == torch.uint8
    assert np.array_equal(tensor.permute(1, 2, 0), expected)
    assert fit(pixels, 28).shape == (channels, 28, 28)


@pytest.mark.parametrize("size", [1, 10, 13, 39, 64])
def test_resizing_weighs_pixels_by_a_triangle(size):
    pixels = RNG.integers(0, 256, (40, 40, 1), np.uint8)
    scale = 40 / size
    distance = (np.arange(40) + 0.5)[None] - ((np.arange(size) + 0.5) * scale)[:, None]
    weights = np.maximum(0, 1 - np.abs(distance) / max(scale, 1))
    weights /= weights.sum(axis=1, keepdims=True)
    expected = weights @ pixels[..., 0].astype(np.float64) @ weights.T
    assert np.abs(fit(pixels, size)[0].numpy() - expected).max() < 1.5


def test_a_long_strip_takes_no_square_of_its_length():
    strip = np.zeros((1, 6000, 1), np.uint8)
    tracemalloc.start()
    assert fit(strip, 28).shape == (1, 28, 28)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 6_000_000  # 36 MB as a square; of a panorama it would be gigabytes


def test_the_ground_of_drawings():
    dark = torch.zeros(40, 1, 8, 8, dtype=torch.uint8)
    dark[:, :, 2:6, 2:6] = 255
    mixed = torch.cat([dark[:20], 255 - dark[:20]])
    assert [ground_of(images) for images in (dark, 255 - dark, mixed)] == ["dark", "light", "mixed"]
    paper = 255 - dark[0].permute(1, 2, 0).numpy()
    assert match_ground(paper, "dark")[0].tolist() == (255 - paper).tolist()
    for ground, turned in (("dark", True), ("light", False), ("mixed", False)):
        assert match_ground(paper, ground)[1] is turned
        assert match_ground(255 - paper, ground)[1] is (ground == "light")


# --- folders ---


def encoded(image, form="PNG", **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def gray(value, size=(8, 8)):
    return encoded(Image.new("L", size, value))


def values(data):
    """The class and the first pixel of every image."""
    names = [data.classes[number] for number in data.labels]
    return sorted(zip(names, data.images[:, 0, 0, 0].tolist(), strict=True))


NAMES = ["a.png", "b.jpg", "c.jpeg", "d.webp", "e.bmp", "F.PNG", "G.JPG", "H.Jpeg", "I.WebP"]


def test_every_file_format_in_any_case(tmp_path):
    for number, name in enumerate(NAMES):
        form = name[2:].upper().replace("JPG", "JPEG")
        content = encoded(Image.new("RGB", (16, 16), (20 * number + 10, 100, 200)), form)
        put(tmp_path, {f"{part}/{c}/{name}": content for part in ("train", "test") for c in "xy"})
    train, test = load_folder(tmp_path)
    assert (train.shape, train.images.dtype) == ((3, 16, 16), torch.uint8)
    reds = train.images[train.labels == 0, 0].float().mean(dim=(1, 2)).sort().values.numpy()
    assert np.abs(reds - (20 * np.arange(9) + 10)).max() < 4
    assert train.fingerprint() == test.fingerprint()


def test_what_counts_as_an_image_and_what_does_not(tmp_path):
    one, other = "train/first class", "train/Größe 大"
    put(tmp_path, {f"{one}/a.png": gray(1), f"{one}/deep/er/b.png": gray(2)})
    put(tmp_path, {f"{other}/ü ñ.png": gray(3), "test/Größe 大/b.png": gray(5)})
    put(tmp_path, {"test/first class/a.png": gray(4)})
    for name in (".hidden.png", "._c.png", "notes.txt", "Thumbs.db", "e.png.bak", ".trash/d.png"):
        put(tmp_path, {f"{one}/{name}": gray(9)})
    put(tmp_path, {"train/f.png": gray(9), "train/.git/g.png": gray(9), "other/h.png": gray(9)})
    (tmp_path / "train/first class/folder.png").mkdir()
    (tmp_path / "test/first class/link.png").symlink_to(tmp_path / "train/first class/a.png")
    train, test = load_folder(str(tmp_path))
    assert train.classes == test.classes == ("Größe 大", "first class")
    assert values(train) == [("Größe 大", 3), ("first class", 1), ("first class", 2)]
    assert values(test) == [("Größe 大", 5), ("first class", 1), ("first class", 4)]


@pytest.mark.parametrize(
    ("sizes", "asked", "side"),
    [
        ([(20, 20)] * 4, None, 20),
        ([(1, 1)] * 4, None, 1),
        ([(128, 128)] * 4, None, 128),
        ([(129, 129)] * 4, None, 64),
        ([(20, 10)] * 4, None, 64),
        ([(20, 20), (20, 20), (20, 20), (21, 21)], None, 64),
        ([(1, 1), (1, 50), (300, 7), (20, 20)], None, 64),
        ([(1, 1), (1, 50), (300, 7), (20, 20)], 9, 9),
    ],
)
def test_the_side_and_the_channels(tmp_path, sizes, asked, side):
    names = ("a/1.png", "a/2.png", "b/1.png", "b/2.png")
    put(tmp_path, {name: gray(7, size) for name, size in zip(names, sizes, strict=True)})
    for data in load_folder(tmp_path, asked):
        assert data.shape == (1, side, side)
        assert data.images.unique().tolist() == [7]
    put(tmp_path, {"b/2.png": encoded(Image.new("RGB", sizes[3], (7, 7, 7)))})  # one has colour
    assert load_data(f"folder:{tmp_path}", image_size=asked).test.shape == (3, side, side)


@pytest.mark.parametrize("under", ["", "train/"])
def test_the_split_takes_a_share_of_each_class(tmp_path, under):
    sizes = {"a": 50, "b": 30, "c": 20}
    put(
        tmp_path,
        {f"{under}{c}/{n}.png": gray(n) for c, count in sizes.items() for n in range(count)},
    )
    train, test = load_folder(tmp_path)
    assert test.labels.bincount().tolist() == [10, 6, 4]
    whole = [(c, n) for c, count in sizes.items() for n in range(count)]
    assert sorted(values(train) + values(test)) == whole
    assert load_folder(tmp_path)[1].fingerprint() == test.fingerprint()
    assert load_folder(tmp_path, seed=1)[1].fingerprint() != test.fingerprint()
    assert len(load_folder(tmp_path, test_share=0.5)[1]) == 50


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2, 2), (60, 2), (40, 40, 2, 3)])
def test_every_class_is_learnt_and_tested(tmp_path, sizes):
    put(tmp_path, {f"{c}/{n}.png": gray(n) for c, count in enumerate(sizes) for n in range(count)})
    for data in load_folder(tmp_path):
        assert data.labels.bincount(minlength=len(sizes)).min() > 0


PNG = encoded(Image.fromarray(COLOURS))


def promising(width, height):
    """A small file whose header speaks of a large image."""
    head = b"IHDR" + struct.pack(">II", width, height) + PNG[24:29]
    return PNG[:12] + head + struct.pack(">I", zlib.crc32(head)) + PNG[33:]


BAD = {
    "cut": (PNG[:-30], "image file is truncated"),
    "text": (b"hello", "it is none, or damaged"),
    "empty": (b"", "it is none, or damaged"),
    "bomb": (promising(10000, 10000), "Image size (100000000 pixels) exceeds limit"),
    "large bomb": (promising(65536, 65536), "Image size (4294967296 pixels) exceeds limit"),
}


@pytest.mark.parametrize(("content", "reason"), BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("part", ["", "train/", "test/"])
def test_an_unreadable_image_is_named_or_skipped_on_request(tmp_path, content, reason, part):
    parts = ("",) if not part else ("train/", "test/")
    put(tmp_path, {f"{p}{c}/{n}.png": gray(n) for p in parts for c in "ab" for n in range(2)})
    bad = tmp_path / part / "a" / "1 bad.png"
    put(tmp_path, {bad: content})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        told = refused(RunError, load_folder, tmp_path)
        said = []
        data = load_data(f"folder:{tmp_path}", skip_unreadable=True, say=said.append, validation=0)
    assert caught == []  # one line, and nothing of Pillow's beside it
    assert told.startswith(f"{bad}: cannot be read as an image: {reason}")
    assert told.endswith(f". {HINT}")
    assert said == [f"left out: {told.removesuffix(f' {HINT}')}"]
    assert len(data.train) + len(data.test) == 4 * len(parts)
    assert bad.read_bytes() == content


def test_a_file_that_is_gone(tmp_path):
    assert refused(RunError, read_image, tmp_path / "gone.png") == (
        f"{tmp_path / 'gone.png'}: cannot be read as an image: No such file or directory."
    )


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP"])
def test_no_changed_byte_raises_anything_else(tmp_path, monkeypatch, form):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    content = encoded(Image.fromarray(COLOURS), form)
    path = tmp_path / "a"
    for place in range(0, len(content), len(content) // 60):
        for changed in (content[:place], content[:place] + b"\xee" + content[place + 1 :]):
            path.write_bytes(changed)
            try:
                assert to_pixels(read_image(path), 3).dtype == np.uint8
            except RunError as error:
                assert str(error).startswith(f"{path}: cannot be read as an image: ")  # noqa: PT017


ONE = "must have a sub-folder for each of two or more classes; got"
TWO = "readable image; a class needs 2, one to learn from and one to test on."
BOTH = ["train/a/1", "train/b/1"]
TREES = {
    "no class": ([], f": {ONE} none."),
    "one class": (["a/1", "a/2"], f": {ONE} one, 'a'."),
    "images alone": (["1", "2"], f": {ONE} none."),
    "one image": (["a/1", "a/2", "b/1"], f"/b: holds 1 {TWO}"),
    "no image": (["a/1", "a/2", "b/x.txt"], f"/b: holds no image {ENDS}."),
    "none to learn": (["train/a/1", "train/b/x.txt"], f"/train/b: holds no image {ENDS}."),
    "one class to learn": (["train/a/1", "test/a/1", "test/b/1"], f"/train: {ONE} one, 'a'."),
    "strange": ([*BOTH, "test/a/1", "test/c/1"], "/test/c: a class that {}/train does not have."),
    "none to test": ([*BOTH, "test/a/x.txt", "test/b/x.txt"], f"/test: holds no image {ENDS}."),
}


@pytest.mark.parametrize(("names", "problem"), TREES.values(), ids=TREES.keys())
def test_folders_that_lack_something(tmp_path, names, problem):
    put(tmp_path, {name if "." in name else f"{name}.png": gray(1) for name in names})
    assert refused(RunError, load_folder, tmp_path) == f"{tmp_path}{problem.format(tmp_path)}"


def test_train_may_be_the_name_of_a_class(tmp_path):
    put(tmp_path, {f"{c}/{n}.png": gray(n) for c in ("bus", "train") for n in range(4)})
    assert load_folder(tmp_path)[0].classes == ("bus", "train")


def test_one_class_is_enough_to_test_on(tmp_path):
    put(tmp_path, {f"{name}.png": gray(1) for name in [*BOTH, "test/b/1"]})
    assert load_folder(tmp_path)[1].labels.tolist() == [1]


@pytest.mark.parametrize("part", ["", "train/"])
def test_a_class_of_which_nothing_can_be_read(tmp_path, part):
    put(
        tmp_path,
        {f"{part}{c}/{n}.png": gray(n) if c != "b" else b"" for c in "abc" for n in (1, 2)},
    )
    if part:
        put(tmp_path, {f"test/{c}/1.png": gray(1) for c in "abc"})
    told = refused(RunError, load_folder, tmp_path, skip_unreadable=True)
    assert told.startswith(f"{tmp_path / part / 'b'}: holds ")


@pytest.mark.parametrize("name", ["gone", "file", "n" * 300])
def test_not_a_folder(tmp_path, name):
    put(tmp_path, {"file": b""})
    told = refused(InputError, load_folder, tmp_path / name)
    assert told == f"folder: PATH must be a folder; got {str(tmp_path / name)!r}."


@pytest.mark.parametrize("size", [0, -3])
def test_a_side_that_cannot_be(tmp_path, size):
    put(tmp_path, {f"{c}/{n}.png": gray(n) for c in "ab" for n in range(2)})
    with pytest.raises(InputError, match=f"image_size must be at least 1; got {size}"):
        load_folder(tmp_path, size)
