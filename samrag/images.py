"""Image files to pixels, the same way in preparation, in training, at inference and towards a server.

This is the one place where pixels are read, so what a file means is decided here: the orientation that a camera noted
is applied, CMYK and palettes become RGB, transparent parts white, 16-bit grey is scaled and not clipped. Left out:
colour profiles, and pages or frames after the first.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

IMAGE_ERRORS = (OSError, UnidentifiedImageError, Image.DecompressionBombError, SyntaxError, ValueError)
"""What comes of a missing, broken or dangerous image file: Pillow's errors, and a `ValueError` in our words."""

MAX_IMAGE_PIXELS = 80_000_000
"""Larger images are refused before they are unpacked; below the size at which Pillow warns."""

_STORED_TURNED = range(2, 9)
"""Values of the EXIF orientation that ask for a turn or a flip."""


def read_image(path: Path) -> Image.Image:
    """Open an image by content as upright RGB; of an animation the first frame is taken (see `num_frames`).

    Raises:
        OSError: there is no such file, or it is no whole image (see `IMAGE_ERRORS` for all that may come).
        ValueError: it has more than `MAX_IMAGE_PIXELS`, or values without a fixed brightness (32 bits a pixel).
    """
    _check_regular(path)
    with Image.open(path) as image:
        if image.width * image.height > MAX_IMAGE_PIXELS:
            raise ValueError(f"{image.width} x {image.height} pixels are more than {MAX_IMAGE_PIXELS:,}; scale it down")
        image.load()
        return _on_white(_upright(_eight_bits(image)))


def num_frames(path: Path) -> int:
    """How many pictures a file holds one after the other: more than 1 for animations and files of several pages.

    The second picture of a camera's JPEG (a preview, or the other eye) is not counted.

    Raises:
        OSError: there is no such file, or it is no image (see `IMAGE_ERRORS`).
    """
    _check_regular(path)
    with Image.open(path) as image:
        return 1 if image.format == "MPO" else int(getattr(image, "n_frames", 1))


def _check_regular(path: Path) -> None:
    """A pipe or a device would be waited for."""
    if Path(path).exists() and not Path(path).is_file():
        raise OSError(f"{path} is no regular file")


def _eight_bits(image: Image.Image) -> Image.Image:
    """16-bit grey scaled to 8 bits, so that full white stays white; all other images as they are."""
    if image.mode in ("I", "F"):
        if image.format != "PNG":  # a PNG is never deeper than 16 bits, whatever Pillow calls it
            raise ValueError("its pixels have 32 bits and no fixed brightness; save it with 8 or 16 bits a channel")
    elif not image.mode.startswith("I;16"):
        return image
    values = np.asarray(image).astype(np.uint32)
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        values[values == clear] = 65535
    grey = Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))
    grey.info = {name: value for name, value in image.info.items() if name == "exif"}
    return grey


def _upright(image: Image.Image) -> Image.Image:
    """The image turned as its EXIF orientation says; without a readable one it is upright already."""
    try:
        turned = image.getexif().get(ExifTags.Base.Orientation) in _STORED_TURNED
    except (OSError, SyntaxError, ValueError, TypeError, KeyError, struct.error):
        return image
    return ImageOps.exif_transpose(image) if turned else image


def _on_white(image: Image.Image) -> Image.Image:
    """The image as RGB, its transparent parts white."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
