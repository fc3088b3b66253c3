"""Image files to pixels, the same way in training, at inference and towards a server."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, UnidentifiedImageError

IMAGE_ERRORS = (OSError, UnidentifiedImageError, Image.DecompressionBombError, SyntaxError, ValueError)
"""What Pillow raises on a missing, broken or dangerous image file."""


def read_image(path: Path) -> Image.Image:
    """Open an image by content as RGB; transparent parts become white, of an animation the first frame is taken.

    Raises:
        OSError: there is no such file, or it is no whole image (see `IMAGE_ERRORS` for all that may come).
    """
    with Image.open(path) as image:
        image.load()
        if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
            return image.convert("RGB")
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
