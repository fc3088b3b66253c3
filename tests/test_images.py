"""Pixels of every sort of file: what is scaled, turned or laid on white, and what is refused."""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from samrag import images
from samrag.images import IMAGE_ERRORS, num_frames, read_image


def pixels(path: Path) -> list[tuple[int, int, int]]:
    return [tuple(int(v) for v in pixel) for row in np.asarray(read_image(path)) for pixel in row]


def half_red(mode: str = "RGB") -> Image.Image:
    """16 x 8: red on the left, blue on the right."""
    image = Image.new("RGB", (16, 8), "blue")
    image.paste("red", (0, 0, 8, 8))
    return image.convert(mode)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bit_grey_is_scaled_and_not_clipped(tmp_path: Path, suffix: str) -> None:
    values = np.array([[0, 255, 257, 32896, 65535]], np.uint16)
    Image.fromarray(values).save(tmp_path / f"grey.{suffix}")
    assert [p[0] for p in pixels(tmp_path / f"grey.{suffix}")] == [0, 1, 1, 128, 255]
    assert read_image(tmp_path / f"grey.{suffix}").mode == "RGB"


def test_values_without_a_fixed_brightness_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0.0, 0.5]], np.float32)).save(tmp_path / "float.tif")
    with pytest.raises(ValueError, match="no fixed brightness; save it with 8 or 16 bits"):
        read_image(tmp_path / "float.tif")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_noted_orientation_is_applied(tmp_path: Path, orientation: int) -> None:
    upright = half_red()
    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }  # fmt: skip
    stored = upright.transpose(turns[orientation]) if orientation in turns else upright
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    stored.save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(np.asarray(read_image(tmp_path / "a.png")), np.asarray(upright))


def test_an_unreadable_orientation_leaves_the_image_as_it_is(tmp_path: Path) -> None:
    half_red().save(tmp_path / "a.jpg", exif=b"Exif\0\0II*\0rubbish", quality=95)
    assert read_image(tmp_path / "a.jpg").size == (16, 8)


def test_cmyk_becomes_rgb(tmp_path: Path) -> None:
    half_red("CMYK").save(tmp_path / "print.tif")
    assert pixels(tmp_path / "print.tif")[0] == (255, 0, 0)
    half_red("CMYK").save(tmp_path / "print.jpg", quality=100, subsampling=0)
    red, blue = pixels(tmp_path / "print.jpg")[0], pixels(tmp_path / "print.jpg")[-1]
    assert red[0] > 240 and red[2] < 15 and blue[2] > 240 and blue[0] < 15


def palette_with_clear_index() -> Image.Image:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putdata([0, 1])
    return image


@pytest.mark.parametrize(
    ("name", "clear"), [("a.png", 1), ("a.png", bytes([255, 0])), ("a.gif", 1)], ids=["index", "alphas", "gif"]
)
def test_clear_palette_entries_become_white(tmp_path: Path, name: str, clear: int | bytes) -> None:
    palette_with_clear_index().save(tmp_path / name, transparency=clear)
    assert pixels(tmp_path / name) == [(255, 0, 0), (255, 255, 255)]


def test_half_clear_pixels_are_mixed_with_white(tmp_path: Path) -> None:
    Image.new("RGBA", (1, 1), (0, 0, 0, 127)).save(tmp_path / "a.png")
    assert pixels(tmp_path / "a.png")[0][0] in (127, 128)


def test_a_clear_grey_of_sixteen_bits_becomes_white(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 1000]], np.uint16)).save(tmp_path / "a.png", transparency=0)
    assert [p[0] for p in pixels(tmp_path / "a.png")] == [255, 4]


def test_of_an_animation_the_first_frame_is_read_and_the_frames_are_counted(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "lime", "blue")]
    for name in ("a.gif", "a.png", "a.tif"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
        assert num_frames(tmp_path / name) == 3
        assert pixels(tmp_path / name)[0] == (255, 0, 0)
    half_red().save(tmp_path / "still.png")
    assert num_frames(tmp_path / "still.png") == 1


def png_of_size(width: int, height: int) -> bytes:
    """A small file that says that it is large."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [9_000, 60_000])
def test_a_decompression_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, side: int) -> None:
    (tmp_path / "bomb.png").write_bytes(png_of_size(side, side))
    with pytest.raises(IMAGE_ERRORS, match="pixels"):
        read_image(tmp_path / "bomb.png")


def test_the_cap_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half_red().save(tmp_path / "a.png")
    monkeypatch.setattr(images, "MAX_IMAGE_PIXELS", 128)
    assert read_image(tmp_path / "a.png").size == (16, 8)
    monkeypatch.setattr(images, "MAX_IMAGE_PIXELS", 127)
    with pytest.raises(ValueError, match="16 x 8 pixels are more than 127; scale it down"):
        read_image(tmp_path / "a.png")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16"])
def test_every_mode_that_a_file_can_have_comes_as_rgb(tmp_path: Path, mode: str) -> None:
    Image.new("RGB", (5, 3), "white").convert("L" if mode == "I;16" else mode).convert(mode).save(tmp_path / "a.tif")
    assert read_image(tmp_path / "a.tif").mode == "RGB"


@pytest.mark.parametrize("content", [b"", b"GIF89a", b"\x89PNG\r\n\x1a\n and no more", b"<html>404</html>"])
def test_what_is_no_image_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(IMAGE_ERRORS):
        read_image(tmp_path / "a.png")


def test_a_photograph_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.effect_noise((64, 64), 90).save(out, "JPEG")
    (tmp_path / "a.jpg").write_bytes(out.getvalue()[:-200])
    with pytest.raises(OSError, match="truncated"):
        read_image(tmp_path / "a.jpg")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes are of Unix")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    for read in (read_image, num_frames):
        with pytest.raises(OSError, match="no regular file"):
            read(tmp_path / "pipe.png")
