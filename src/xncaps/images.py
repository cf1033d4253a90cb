"""Image files of any size and mode, as uint8 arrays of the size and channels a network takes."""

import warnings
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from xncaps.errors import InputError, RunError, message

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
GRAY_MODES = ("1", "L", "LA", "La", "I", "F", "I;16", "I;16B", "I;16L", "I;16N")
COLOUR_MODES = ("RGB", "RGBA", "RGBa", "RGBX", "P", "PA", "CMYK", "YCbCr")

Pixels = NDArray[np.uint8]


def read_image(path: Path) -> Image.Image:
    """An image file, decoded and turned upright; anything wrong with it is one line."""
    try:
        with warnings.catch_warnings():
            # An image of more pixels than Pillow thinks sane is not decoded.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                upright = ImageOps.exif_transpose(image)
                upright.load()
                return upright
    except MemoryError:
        reason = "too large"
    except Exception as error:  # decoders raise whatever they meet
        if isinstance(error, UnidentifiedImageError):
            reason = "it is none, or damaged"
        elif isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        else:
            reason = str(error) or type(error).__name__
    raise RunError(f"{path}: cannot be read as an image: {' '.join(reason.split()).rstrip('.')}.")


def is_gray(image: Image.Image) -> bool:
    """Whether the image's mode has no colour."""
    return image.mode in GRAY_MODES


def to_pixels(image: Image.Image, channels: int) -> Pixels:
    """The image as ``(height, width, channels)``, with 1 or 3 channels.

    Transparent parts become white; if only one channel is wanted and what can be seen is light,
    they become black, so that it stays visible.
    """
    if 0 in image.size:
        raise InputError(message("image", "size", "be of at least one pixel", image.size))
    if image.mode not in (*GRAY_MODES, *COLOUR_MODES):  # Pillow knows a way to RGB, if to any
        image = image.convert("RGB")
    if image.mode.startswith("I") or image.mode == "F":
        image = _eight_bits(image)
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        image = _on_ground(image.convert("RGBA"), channels)
    return np.asarray(image.convert("L" if channels == 1 else "RGB")).reshape(
        image.height, image.width, channels
    )


def _eight_bits(image: Image.Image) -> Image.Image:
    """16-bit, 32-bit and float grey values, brought to 0 .. 255 by the range they are meant for."""
    values = np.nan_to_num(np.asarray(image).astype(np.float64))
    top = values.max(initial=0)
    if image.mode.startswith("I;16"):
        values = values / 257
    elif image.mode == "F" and top <= 1:
        values = values * 255
    elif top > 255:
        values = values / (257 if top <= 65535 else top / 255)
    return Image.fromarray(np.clip(np.rint(values), 0, 255).astype(np.uint8))


def _on_ground(image: Image.Image, channels: int) -> Image.Image:
    alpha = np.asarray(image.getchannel("A")).astype(np.float64)
    light = np.asarray(image.convert("L")).astype(np.float64)
    seen = alpha.sum()
    is_light = seen > 0 and (light * alpha).sum() / seen > 127
    ground = "black" if channels == 1 and is_light else "white"
    under = Image.new("RGBA", image.size, ground)
    return Image.alpha_composite(under, image).convert("RGB")


def fit(pixels: Pixels, size: int) -> Tensor:
    """The pixels as a uint8 tensor ``(channels, size, size)``.

    An image that is not square gets bands in the mean colour of its border.
    """
    height, width, channels = pixels.shape
    side = max(height, width)
    inner = [max(round(length * size / side), 1) for length in (height, width)]
    colour = np.rint(border(pixels).mean(axis=0)).astype(np.uint8)
    if inner != [height, width]:
        image = Image.fromarray(pixels.squeeze(2) if channels == 1 else pixels)
        pixels = np.asarray(image.resize((inner[1], inner[0]), Image.Resampling.BILINEAR))
    square = np.empty((size, size, channels), np.uint8)
    square[:] = colour
    top, left = (size - inner[0]) // 2, (size - inner[1]) // 2
    square[top : top + inner[0], left : left + inner[1]] = pixels.reshape(*inner, channels)
    return torch.from_numpy(square).permute(2, 0, 1)


def squares(images: Tensor) -> Tensor:
    """Images ``(n, channels, height, width)`` that are not square, with the bands ``fit`` gives."""
    height, width = images.shape[2:]
    if height == width:
        return images
    arrays = images.permute(0, 2, 3, 1).numpy()
    return torch.stack([fit(array, max(height, width)) for array in arrays])


def border(pixels: Pixels) -> Pixels:
    """The outermost pixels, ``(n, channels)``."""
    rows = [pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]
    return np.concatenate(rows, axis=0)


def ground_of(images: Tensor) -> str:
    """What grey images are drawn on: ``dark`` or ``light`` if nearly all agree, else ``mixed``."""
    sides = [images[..., 0, :], images[..., -1, :], images[..., :, 0], images[..., :, -1]]
    middle = torch.cat([side.flatten(1) for side in sides], dim=1).median(dim=1).values
    for name, share in (("dark", middle < 64), ("light", middle > 191)):
        if share.float().mean() >= 0.95:
            return name
    return "mixed"


def match_ground(pixels: Pixels, ground: str) -> tuple[Pixels, bool]:
    """Turn a grey image into its negative if it is drawn on the other ground; says whether it was.

    A digit in black on white paper is then one a network knows from white on black.
    """
    middle = float(np.median(border(pixels)))
    turn = (ground == "dark" and middle > 127) or (ground == "light" and middle < 128)
    return (255 - pixels, True) if turn and pixels.shape[2] == 1 else (pixels, False)
