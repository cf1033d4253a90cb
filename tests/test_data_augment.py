"""Augmentation, batches and preprocessing against plain loops and closed forms."""

import math

import numpy as np
import pytest
import torch

from xncaps.data import Augment, Batches, Dataset, Preprocess
from xncaps.errors import InputError, InputTypeError

SIZES = [(6, 6), (5, 8), (7, 3), (1, 4)]


def random_images(count, channels, height, width):
    generator = torch.Generator().manual_seed(height * width)
    shape = (count, channels, height, width)
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def always(monkeypatch):
    """Every random number is this one."""

    def fix(value):
        monkeypatch.setattr(torch, "rand", lambda *shape, generator: torch.full(shape, value))

    return fix


def applied(augment, images):
    return augment(images, augment.draw(len(images), tuple(images.shape[2:]), seeded()))


# --- what happens to an image ---


def test_nothing_by_default():
    images = random_images(4, 3, 6, 5)
    assert Augment().draw(4, (6, 5), seeded()) == {}
    assert applied(Augment(), images) is images
    assert Augment().blank(images, {}) is images


def bilinear(image, y, x):
    """The value between four pixels; outside the image, that of its edge."""
    height, width = len(image), len(image[0])
    y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
    top, left = int(y), int(x)
    down, right = min(top + 1, height - 1), min(left + 1, width - 1)
    above = image[top][left] * (1 - x + left) + image[top][right] * (x - left)
    below = image[down][left] * (1 - x + left) + image[down][right] * (x - left)
    return above * (1 - y + top) + below * (y - top)


def moved(image, degrees, factor, shift):
    """Each pixel is that of the image at its place turned, scaled about the middle, and shifted."""
    height, width = len(image), len(image[0])
    cos, sin = math.cos(math.radians(degrees)) / factor, math.sin(math.radians(degrees)) / factor
    middle_y, middle_x = (height - 1) / 2, (width - 1) / 2
    return [
        [
            bilinear(
                image,
                sin * (x - middle_x) + cos * (y - middle_y) + middle_y + shift,
                cos * (x - middle_x) - sin * (y - middle_y) + middle_x + shift,
            )
            for x in range(width)
        ]
        for y in range(height)
    ]


@pytest.mark.parametrize("drawn", [0.0, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("shift", "rotate", "scale"),
    [(2, 0, 0), (1.5, 0, 0), (0, 90, 0), (0, 30, 0), (0, 0, 0.5), (3, 25, 0.2), (0.3, 180, 0.9)],
)
@pytest.mark.parametrize("flip", [True, False])
def test_moves_equal_plain_loops(always, shift, rotate, scale, flip, size, drawn):
    """A mirrored image is moved as the others are."""
    images = random_images(2, 2, *size)
    always(drawn)
    u = 2 * drawn - 1
    out = applied(Augment(shift=shift, rotate=rotate, scale=scale, flip=flip), images)
    if flip and drawn < 0.5:
        images = images.flip(3)
    assert (out.dtype, out.shape) == (torch.float32, images.shape)
    for number in range(2):
        for channel in range(2):
            pixels = images[number, channel].tolist()
            expected = moved(pixels, u * rotate, 1 + u * scale, u * shift)
            expected = torch.tensor(expected, dtype=torch.float32)
            torch.testing.assert_close(out[number, channel], expected, rtol=0, atol=5e-3)


def spline(knots, place):
    """A uniform cubic B-spline by its recursion, from four knots to one value."""

    def basis(i, degree, t):
        if degree == 0:
            return 1.0 if i <= t < i + 1 else 0.0
        rising = (t - i) / degree * basis(i, degree - 1, t)
        return rising + (i + degree + 1 - t) / degree * basis(i + 1, degree - 1, t)

    return sum(knot * basis(i, 3, place + 3) for i, knot in enumerate(knots))


@pytest.mark.parametrize("size", [*SIZES, (28, 28)])
def test_bending_equals_plain_loops(size):
    """Each pixel is read from where the spline surface over its place says."""
    height, width = size
    images = random_images(2, 1, height, width)
    augment = Augment(bend=1.5)
    drawn = augment.draw(2, size, seeded())
    out = augment(images, drawn)
    spans = drawn["bend"].shape[2] - 3
    # From the field's own unit, half an image, to pixels; x comes first.
    bends = drawn["bend"] * torch.tensor([width, height]).view(2, 1, 1) / 2
    assert bends.abs().max() <= 1.5
    for number in range(2):
        pixels = images[number, 0].tolist()
        knots_x, knots_y = bends[number].tolist()
        for y in range(height):
            for x in range(width):
                down, across = (y + 0.5) / height * spans, (x + 0.5) / width * spans
                move_x, move_y = (
                    spline([spline(row, across) for row in knots], down)
                    for knots in (knots_x, knots_y)
                )
                expected = bilinear(pixels, y + move_y, x + move_x)
                assert out[number, 0, y, x].item() == pytest.approx(expected, abs=5e-3)


def test_bends_that_are_all_the_same_shift(always):
    images = random_images(3, 1, 8, 8)
    always(1.0)
    torch.testing.assert_close(
        applied(Augment(bend=3), images), applied(Augment(shift=3), images), rtol=0, atol=5e-3
    )


@pytest.mark.parametrize(("rotate", "drawn", "turns"), [(90, 1.0, 1), (90, 0.0, -1), (180, 1.0, 2)])
def test_right_angles_are_rot90(always, rotate, drawn, turns):
    images = random_images(3, 1, 9, 9)
    always(drawn)
    expected = torch.rot90(images, turns, (2, 3)).float()
    torch.testing.assert_close(applied(Augment(rotate=rotate), images), expected, rtol=0, atol=2e-3)


def test_whole_pixels_move_exactly(always):
    images = random_images(3, 1, 8, 8)
    always(1.0)
    out = applied(Augment(shift=3), images).round()
    rows = torch.arange(8).add(3).clamp(max=7)
    assert torch.equal(out, images[:, :, rows][..., rows].float())


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("crop", [0, 1, 4, 11])
@pytest.mark.parametrize("size", SIZES)
def test_crops_and_flips_equal_numpy_pad(size, crop, flip):
    images = random_images(40, 2, *size)
    augment = Augment(crop=crop, flip=flip)
    drawn = augment.draw(40, size, seeded())
    out = augment(images, drawn)
    assert out.dtype == torch.uint8
    if not (crop or flip):
        assert drawn == {}
        return
    height, width = size
    for number, (down, right) in enumerate(drawn["crop"].tolist()):
        padded = np.pad(images[number].numpy(), ((0, 0), (crop, crop), (crop, crop)), "reflect")
        top, left = crop + down, crop + right
        expected = padded[:, top : top + height, left : left + width]
        if drawn["flip"][number]:
            expected = expected[:, :, ::-1]
        assert out[number].tolist() == expected.tolist()
    assert drawn["flip"].any() == flip


@pytest.mark.parametrize("cutout", [1, 2, 5, 40])
@pytest.mark.parametrize("size", SIZES)
def test_cutout_blanks_one_square(size, cutout):
    height, width = size
    augment = Augment(cutout=cutout)
    drawn = augment.draw(50, size, seeded())
    out = augment.blank(torch.ones(50, 2, *size), drawn)
    for image, (y, x) in zip(out.tolist(), drawn["cutout"].tolist(), strict=True):
        top, left = y - cutout // 2, x - cutout // 2
        expected = [
            [
                float(not (0 <= row - top < cutout and 0 <= column - left < cutout))
                for column in range(width)
            ]
            for row in range(height)
        ]
        assert image == [expected] * 2
    images = random_images(50, 2, *size)
    assert augment(images, drawn) is images


def test_what_is_drawn_keeps_its_bounds_and_reaches_them():
    count, size = 20000, (20, 10)
    drawn = Augment(1.5, 30, 0.25, True, 2, 3).draw(count, size, seeded())
    assert drawn["flip"].float().mean().item() == pytest.approx(0.5, abs=0.02)
    for axis in range(2):
        shares = (drawn["crop"][:, axis] + 2).bincount() / count
        assert shares.tolist() == pytest.approx([0.2] * 5, abs=0.02)
        centers = drawn["cutout"][:, axis].bincount() / count
        assert centers.tolist() == pytest.approx([1 / size[axis]] * size[axis], abs=0.02)
    matrix = drawn["matrix"].double()
    sin, cos = matrix[:, 1, 0] * 2, matrix[:, 0, 0]  # the image is twice as high as wide
    assert torch.allclose(matrix[:, 0, 1], -sin * 2)
    assert torch.allclose(matrix[:, 1, 1], cos)
    bounds = {
        30: torch.atan2(sin, cos).rad2deg(),
        0.25: 1 / torch.hypot(sin, cos) - 1,
        1.5: matrix[:, 0, 2] * 10 / 2,
        1.5001: matrix[:, 1, 2] * 20 / 2,
    }
    for most, values in bounds.items():
        assert most * 0.999 < values.max() <= most * 1.0001
        assert -most * 1.0001 <= values.min() < -most * 0.999
        assert abs(values.mean()) < most * 0.02
    both = torch.stack([*bounds.values(), *drawn["crop"].T, *drawn["cutout"].T, drawn["flip"]])
    assert (torch.corrcoef(both.double()) - torch.eye(9)).abs().max() < 0.04


def test_half_of_the_moved_images_are_mirrored():
    matrix = Augment(rotate=30, flip=True).draw(20000, (20, 10), seeded())["matrix"]
    mirrored = torch.linalg.det(matrix[:, :, :2]) < 0
    assert mirrored.float().mean().item() == pytest.approx(0.5, abs=0.02)


WHOLE = "be a whole number of pixels, 0 or more"
NUMBER = "be a number from 0 to"


@pytest.mark.parametrize(
    ("name", "value", "requirement", "got"),
    [
        ("shift", -1, f"{NUMBER} 10000", "-1"),
        ("shift", float("nan"), f"{NUMBER} 10000", "nan"),
        ("shift", float("inf"), f"{NUMBER} 10000", "inf"),
        ("shift", "2", f"{NUMBER} 10000", "'2'"),
        ("shift", None, f"{NUMBER} 10000", "None"),
        ("shift", True, f"{NUMBER} 10000", "True"),
        ("rotate", 180.5, f"{NUMBER} 180", "180.5"),
        ("bend", -0.5, f"{NUMBER} 10000", "-0.5"),
        ("scale", 1, f"{NUMBER} 0.99", "1"),
        ("scale", [0.1], f"{NUMBER} 0.99", "[0.1]"),
        ("flip", 1, "be true or false", "1"),
        ("flip", "yes", "be true or false", "'yes'"),
        ("alternate", 1, "be true or false", "1"),
        ("alternate", True, "go with flip", "flip false"),
        ("crop", 1.0, WHOLE, "1.0"),
        ("crop", -1, WHOLE, "-1"),
        ("crop", 2**31, WHOLE, "2147483648"),
        ("cutout", False, WHOLE, "False"),
    ],
)
def test_values_that_are_refused(name, value, requirement, got):
    with pytest.raises(InputError) as caught:
        Augment(**{name: value})
    assert str(caught.value) == f"Augment: {name} must {requirement}; got {got}."


# --- batches ---

PIXELS = Preprocess((0.4, 0.5), (0.2, 0.3))
EVERYTHING = Augment(shift=2, rotate=20, scale=0.2, flip=True, crop=2, cutout=3, bend=1)
ALTERNATE = Augment(flip=True, crop=1, alternate=True)


def numbered(count):
    """Images that all differ; labels are their numbers."""
    return Dataset(random_images(count, 2, 9, 8), torch.arange(count), ("any",))


def test_a_batch_depends_on_seed_and_step_alone():
    batches = Batches(numbered(25), 10, PIXELS, EVERYTHING, seed=4)
    steps = [batches(step) for step in range(8)]
    state = torch.get_rng_state()
    for step in (7, 0, 3, 3, 1, 6):
        fresh = Batches(numbered(25), 10, PIXELS, EVERYTHING, seed=4)
        for again in (batches(step), fresh(step)):
            assert torch.equal(again[0], steps[step][0])
            assert torch.equal(again[1], steps[step][1])
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(Batches(numbered(25), 10, PIXELS, EVERYTHING, seed=5)(0)[0], steps[0][0])
    assert len({images.numpy().tobytes() for images, _ in steps}) == 8


def test_an_image_is_moved_otherwise_in_each_epoch():
    batches = Batches(numbered(1), 1, PIXELS, EVERYTHING)
    assert len({batches(step)[0].numpy().tobytes() for step in range(5)}) == 5


@pytest.mark.parametrize("moves", [{}, {"crop": 1}, {"rotate": 1e-9}])
def test_alternate_mirrors_each_image_in_every_second_epoch(moves):
    data = numbered(40)
    batches = Batches(data, 40, PIXELS, Augment(flip=True, alternate=True, **moves), seed=3)
    plain = PIXELS(data.images)
    seen = []
    for epoch in range(4):
        images, labels = batches(epoch)
        mirrored = batches._plan(epoch)[1].get("flip")
        if "crop" not in moves:
            straight = (images - plain[labels]).abs().amax(dim=(1, 2, 3)) < 1e-3
            turned = (images - plain[labels].flip(3)).abs().amax(dim=(1, 2, 3)) < 1e-3
            assert torch.equal(straight, ~turned)
            mirrored = turned
        seen.append(dict(zip(labels.tolist(), mirrored.tolist(), strict=True)))
    for number in range(40):
        assert [epoch[number] for epoch in seen] in ([True, False] * 2, [False, True] * 2)
    assert 8 < sum(seen[0].values()) < 32
    other = Batches(data, 40, PIXELS, Augment(flip=True, alternate=True), seed=4)
    ways = dict(zip(other(0)[1].tolist(), other._plan(0)[1]["flip"].tolist(), strict=True))
    assert ways != seen[0]


@pytest.mark.parametrize("size", [None, 5, 16])
@pytest.mark.parametrize("augment", [None, EVERYTHING, ALTERNATE])
@pytest.mark.parametrize(("batch_size", "world"), [(10, 2), (10, 3), (7, 7), (3, 2), (100, 3)])
def test_parts_of_a_batch_join_to_the_batch(batch_size, world, augment, size):
    preprocess = Preprocess(PIXELS.mean, PIXELS.std, size)
    whole = Batches(numbered(25), batch_size, preprocess, augment)
    parts = [
        Batches(numbered(25), batch_size, preprocess, augment, rank=rank, world=world)
        for rank in range(world)
    ]
    for step in (0, 1, 5):
        images, labels = whole(step)
        results = [part(step) for part in parts]
        joined = torch.cat([images for images, _ in results])
        if augment is None:
            assert torch.equal(joined, images)
        torch.testing.assert_close(joined, images, rtol=0, atol=1e-4)
        assert torch.equal(torch.cat([labels for _, labels in results]), labels)
        assert all(len(labels) for _, labels in results)


@pytest.mark.parametrize(
    ("count", "size", "steps"), [(25, 10, 2), (20, 10, 2), (7, 100, 1), (5, 1, 5)]
)
def test_an_epoch_is_a_permutation_without_the_rest(count, size, steps):
    batches = Batches(numbered(count), size, PIXELS)
    size = min(size, count)
    assert (batches.steps, batches.batch_size) == (steps, size)
    orders = []
    for epoch in range(4):
        assert sorted(batches.order(epoch).tolist()) == list(range(count))
        labels = torch.cat([batches(epoch * steps + step)[1] for step in range(steps)]).tolist()
        assert labels == batches.order(epoch).tolist()[: steps * size]
        orders.append(tuple(labels))
    assert len(set(orders)) == 4


def test_batches_hold_the_images_their_labels_name():
    data = numbered(12)
    images, labels = Batches(data, 5, PIXELS)(3)
    mean, std = (np.array(values)[:, None, None] for values in (PIXELS.mean, PIXELS.std))
    expected = (data.images[labels].numpy() / 255.0 - mean) / std
    assert images.dtype == torch.float32
    assert np.allclose(images.numpy(), expected, atol=1e-5)


def test_cutout_is_the_mean_colour_after_normalising():
    bright = Dataset(torch.full((4, 2, 9, 8), 255, dtype=torch.uint8), torch.arange(4), ("any",))
    images, _ = Batches(bright, 4, PIXELS, Augment(cutout=1))(0)
    assert (images == 0).sum(dim=(1, 2, 3)).tolist() == [2] * 4


@pytest.mark.parametrize(
    ("kind", "size", "world", "told"),
    [
        (InputError, 0, 1, "be at least 1; got 0."),
        (InputTypeError, 2.0, 1, "be a whole number; got 2.0."),
        (InputError, 2, 3, "be at least the number of processes, 3; got 2."),
        (InputError, 100, 26, "be at least the number of processes, 26; got 25."),
    ],
)
def test_batch_sizes_that_are_refused(kind, size, world, told):
    with pytest.raises(kind) as caught:
        Batches(numbered(25), size, PIXELS, world=world)
    assert str(caught.value) == f"Batches: batch_size must {told}"


def test_a_channel_that_never_varies_stays_at_0():
    out = Preprocess((0.2, 0.5), (0.0, 0.5))(random_images(3, 2, 4, 4))
    assert (out[:, 0] == 0).all()
    assert out[:, 1].abs().max() <= 1


@pytest.mark.parametrize(("height", "width"), [(12, 12), (12, 5), (5, 12), (4, 40), (40, 4)])
@pytest.mark.parametrize("size", [1, 6, 12, 30])
def test_resizing_weighs_pixels_by_a_triangle(height, width, size):
    images = random_images(2, 1, height, width)
    sides = []
    for length in (height, width):
        scale = length / size
        distance = (np.arange(length) + 0.5)[None] - ((np.arange(size) + 0.5) * scale)[:, None]
        weights = np.maximum(0, 1 - np.abs(distance) / max(scale, 1))
        sides.append(weights / weights.sum(axis=1, keepdims=True))
    expected = sides[0] @ (images.numpy() / 255.0) @ sides[1].T
    out = Preprocess((0.0,), (1.0,), size)(images)
    assert out.shape == (2, 1, size, size)
    assert np.abs(out.numpy() - expected).max() < 1e-4
