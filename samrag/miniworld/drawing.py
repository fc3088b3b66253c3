"""Emblems as pictures. A shape fills a whole cell of a 4 x 4 grid, so that a coarse vision tower can see it."""

from __future__ import annotations

from PIL import Image, ImageDraw

from samrag.miniworld.world import Emblem

CELL_PX = 32
GRID = 4
_RGB = {
    "black": (20, 20, 20),
    "blue": (40, 80, 220),
    "green": (30, 150, 60),
    "purple": (140, 50, 170),
    "red": (215, 40, 40),
    "white": (245, 245, 245),
    "yellow": (245, 205, 40),
}


def draw(emblem: Emblem) -> Image.Image:
    """Draw an emblem, RGB, 128 x 128 px."""
    image = Image.new("RGB", (GRID * CELL_PX, GRID * CELL_PX), _RGB[emblem.background])
    pen = ImageDraw.Draw(image)
    for cell in emblem.cells:
        left, top = cell % GRID * CELL_PX, cell // GRID * CELL_PX
        _draw_shape(pen, emblem.shape, left, top, _RGB[emblem.colour])
    return image


def _draw_shape(pen: ImageDraw.ImageDraw, shape: str, left: int, top: int, colour: tuple[int, int, int]) -> None:
    size, third = CELL_PX - 1, CELL_PX // 3
    if shape == "discs":
        pen.ellipse((left + 2, top + 2, left + size - 2, top + size - 2), fill=colour)
    elif shape == "triangles":
        pen.polygon(
            [(left + size // 2, top + 1), (left + 1, top + size - 1), (left + size - 1, top + size - 1)], fill=colour
        )
    elif shape == "bars":
        pen.rectangle((left + 1, top + third, left + size - 1, top + 2 * third), fill=colour)
    else:
        pen.rectangle((left + 1, top + third, left + size - 1, top + 2 * third), fill=colour)
        pen.rectangle((left + third, top + 1, left + 2 * third, top + size - 1), fill=colour)
